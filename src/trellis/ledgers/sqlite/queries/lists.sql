-- Lists of jobs and of dead letters. Each is one statement: a page or letters, around the query that finds the ids by an index.
-- `states` are lifecycle * 16 + state.

-- name: page
SELECT s.job_id, j.lifecycle, t.name, j.state, j.place, j.prio, j.generation, j.attempt, j.max_attempts, s.max_attempts, j.version,
  j.epoch, j.deaths, s.created_at, e.at, j.due_at, j.deadline_at, a.name, j.until, j.cancel_at,
  k.name, coalesce(s.correlation, s.job_id), s.trace, s.parent, o.job_id, NULL, NULL, j.id
FROM ({ids}) AS meant CROSS JOIN trellis_job j ON j.id = meant.id
JOIN trellis_submission s ON s.id = j.id JOIN trellis_job_type t ON t.id = j.type
JOIN trellis_event e ON e.seq = j.seq LEFT JOIN trellis_actor a ON a.id = j.owner
LEFT JOIN trellis_concurrency_key k ON k.id = j.ckey LEFT JOIN trellis_submission o ON o.id = j.compensates;

-- name: letters
SELECT s.job_id, t.name, j.lifecycle, j.state, d.reason, d.stage, d.last_error, d.attempts, d.last_owner,
  d.last_lease_expires_at, coalesce(s.correlation, s.job_id), d.at, d.version
FROM ({ids}) AS meant CROSS JOIN trellis_job j ON j.id = meant.id
CROSS JOIN trellis_dead_letter d ON d.job = j.id AND d.version = j.version
JOIN trellis_submission s ON s.id = j.id JOIN trellis_job_type t ON t.id = j.type;

-- name: all_jobs
SELECT id FROM trellis_job WHERE id < :before ORDER BY id DESC LIMIT :limit;

-- What a job must be, besides what its index was asked for. `buried`: it has a dead letter, of this reason if one is given.
-- part: fits
(:lifecycle IS NULL OR j.lifecycle = :lifecycle)
  AND (:type IS NULL OR j.type IN (SELECT id FROM trellis_job_type WHERE name = :type))
  AND (:states IS NULL OR j.lifecycle * 16 + j.state IN (SELECT value FROM json_each(:states)))
  AND (:place IS NULL OR min(j.place, 5) = :place)
  AND (:correlation IS NULL
    OR EXISTS (SELECT 1 FROM trellis_submission c WHERE c.id = j.id AND coalesce(c.correlation, c.job_id) = :correlation))
  AND (:key IS NULL OR j.ckey = (SELECT id FROM trellis_concurrency_key WHERE name = :key))
  AND (NOT :buried OR EXISTS (SELECT 1 FROM trellis_dead_letter d
    WHERE d.job = j.id AND d.version = j.version AND (:reason IS NULL OR d.reason = :reason)));

-- name: of_parent
SELECT p.id FROM trellis_submission p INDEXED BY trellis_submission_parent CROSS JOIN trellis_job j ON j.id = p.id
WHERE p.parent = :parent AND p.id < :before AND {fits} ORDER BY p.id DESC LIMIT :limit;

-- name: correlated
SELECT p.id FROM trellis_submission p INDEXED BY trellis_submission_correlation CROSS JOIN trellis_job j ON j.id = p.id
WHERE p.correlation = :correlation AND p.id < :before AND {fits}
UNION ALL SELECT p.id FROM trellis_submission p CROSS JOIN trellis_job j ON j.id = p.id
WHERE p.job_id = :correlation AND p.correlation IS NULL AND p.id < :before AND {fits}
ORDER BY 1 DESC LIMIT :limit;

-- name: of_key
SELECT j.id FROM trellis_job j INDEXED BY trellis_job_of_key
WHERE j.ckey IS NOT NULL AND j.ckey = (SELECT id FROM trellis_concurrency_key WHERE name = :key) AND j.id < :before AND {fits}
ORDER BY j.id DESC LIMIT :limit;

-- Jobs of a type, in a state or in a place. Of each type, state and place the newest job is looked up first: a page has jobs of those alone
-- whose newest are the newest. Those are walked as far as the page needs. Held jobs are few and have no part in the index.
-- name: in_states
WITH wanted(type, state, place) AS (
  SELECT t.id, s.id % 16, p.value FROM trellis_job_type t CROSS JOIN trellis_state s ON s.lifecycle = t.lifecycle
  CROSS JOIN json_each('[1,2,3,5,6]') p ON s.places >> p.value & 1
  WHERE (:type IS NULL OR t.name = :type) AND (:lifecycle IS NULL OR t.lifecycle = :lifecycle)
    AND (:states IS NULL OR s.id IN (SELECT value FROM json_each(:states))) AND (:place IS NULL OR min(p.value, 5) = :place)
    AND (NOT :buried OR :narrowed AND NOT {few})
), tops AS MATERIALIZED (
  SELECT w.type, w.state, w.place, (
    SELECT j.id FROM trellis_job j INDEXED BY trellis_job_listed
    WHERE j.place > 0 AND j.place <> 4 AND j.type = w.type AND j.state = w.state AND j.place = w.place AND j.id < :before
    ORDER BY j.id DESC LIMIT 1) AS top
  FROM wanted w WHERE top IS NOT NULL ORDER BY top DESC LIMIT iif(:buried, -1, :limit)
)
SELECT h.id FROM tops w CROSS JOIN trellis_job h ON h.id IN (
  SELECT j.id FROM trellis_job j INDEXED BY trellis_job_listed
  WHERE j.place > 0 AND j.place <> 4 AND j.type = w.type AND j.state = w.state AND j.place = w.place AND j.id < :before
    AND j.id >= (SELECT iif(count(*) = :limit AND NOT :buried, min(top), 0) FROM tops)
    AND (NOT :buried OR EXISTS (SELECT 1 FROM trellis_dead_letter d
      WHERE d.job = j.id AND d.version = j.version AND (:reason IS NULL OR d.reason = :reason)))
  ORDER BY j.id DESC LIMIT :limit)
UNION ALL SELECT j.id FROM trellis_job j INDEXED BY trellis_job_held
WHERE NOT :buried AND j.place = 4 AND (:place IS NULL OR :place = 4) AND j.id < :before AND {fits}
ORDER BY 1 DESC LIMIT :limit;

-- Whether there are so few dead letters that all can be read.
-- part: few
(SELECT count(*) <= 2000 FROM (
  SELECT 1 FROM trellis_dead_letter WHERE :reason IS NULL
  UNION ALL SELECT 1 FROM trellis_dead_letter INDEXED BY trellis_dead_letter_reason WHERE reason = :reason LIMIT 2001));

-- Jobs with dead letters: these are walked, by their reason if one is given. If they are many, and a type or state is wanted (`narrowed`),
-- the jobs are walked by that.
-- name: with_letters
SELECT id FROM (SELECT d.job AS id FROM trellis_dead_letter d INDEXED BY trellis_dead_letter_reason
  CROSS JOIN trellis_job j ON j.id = d.job AND j.version = d.version
  WHERE d.reason = :reason AND d.job < :before AND (NOT :narrowed OR {few}) AND {fits} ORDER BY d.job DESC LIMIT :limit)
UNION ALL SELECT id FROM (SELECT d.job AS id FROM trellis_dead_letter d CROSS JOIN trellis_job j ON j.id = d.job AND j.version = d.version
  WHERE :reason IS NULL AND d.job < :before AND (NOT :narrowed OR {few}) AND {fits} ORDER BY d.job DESC LIMIT :limit)
UNION ALL SELECT id FROM ({in_states})
ORDER BY 1 DESC LIMIT :limit;

-- The jobs in a state that is no end, oldest first.
-- name: oldest
WITH wanted(type, state, place) AS (
  SELECT t.id, s.id % 16, p.value FROM trellis_job_type t CROSS JOIN trellis_state s ON s.lifecycle = t.lifecycle
  CROSS JOIN json_each('[1,2,3]') p ON s.places >> p.value & 1
  WHERE (:type IS NULL OR t.name = :type) AND s.id IN (SELECT value FROM json_each(:states)) AND (:place IS NULL OR p.value = :place)
), tops AS MATERIALIZED (
  SELECT w.type, w.state, w.place, (
    SELECT j.id FROM trellis_job j INDEXED BY trellis_job_listed
    WHERE j.place > 0 AND j.place <> 4 AND j.type = w.type AND j.state = w.state AND j.place = w.place AND j.id > :after
    ORDER BY j.id LIMIT 1) AS top
  FROM wanted w WHERE top IS NOT NULL
)
SELECT h.id FROM tops w CROSS JOIN trellis_job h ON h.id IN (
  SELECT j.id FROM trellis_job j INDEXED BY trellis_job_listed
  WHERE j.place > 0 AND j.place <> 4 AND j.type = w.type AND j.state = w.state AND j.place = w.place AND j.id > :after AND {fits}
  ORDER BY j.id LIMIT :limit)
UNION ALL SELECT j.id FROM trellis_job j INDEXED BY trellis_job_held
WHERE j.place = 4 AND (:place IS NULL OR :place = 4) AND j.id > :after AND {fits}
ORDER BY 1 LIMIT :limit;
