-- Changes of many jobs (engine/job_changes.py). A page first reads the ids of jobs that may be meant, through an index and
-- never more than a bound, then compares those jobs with the whole selection.

-- name: of_correlation
SELECT id FROM trellis_submission INDEXED BY trellis_submission_correlation WHERE correlation = :correlation AND id > :after
UNION SELECT id FROM trellis_submission WHERE job_id = :correlation AND correlation IS NULL AND id > :after
ORDER BY id LIMIT :most;

-- name: of_parent
SELECT id FROM trellis_submission INDEXED BY trellis_submission_parent WHERE parent = :parent AND id > :after ORDER BY id LIMIT :most;

-- Jobs of one concurrency key that have not ended. Those that are held have a slot.
-- name: of_key
SELECT id FROM trellis_job INDEXED BY trellis_job_waiting
WHERE ckey = (SELECT id FROM trellis_concurrency_key WHERE name = :key) AND place < 4 AND id > :after
UNION SELECT id FROM trellis_job INDEXED BY trellis_job_slot
WHERE ckey = (SELECT id FROM trellis_concurrency_key WHERE name = :key) AND slot IS NOT NULL AND id > :after
ORDER BY id LIMIT :most;

-- All jobs in these states, of these types where an index has the type. The caller asks for one more than it takes: if that
-- many come, they are too many to be read again for every page. `places` is a bit mask.
-- name: in_places
SELECT id FROM (
  SELECT j.id FROM json_each(:types) t CROSS JOIN trellis_job j INDEXED BY trellis_job_ready
    ON j.place = 1 AND j.type = t.value WHERE :places >> 1 & 1
  UNION ALL SELECT j.id FROM json_each(:states) w CROSS JOIN trellis_job j INDEXED BY trellis_job_standing
    ON j.place = 2 AND j.lifecycle = w.value / 16 AND j.state = w.value % 16 WHERE :places >> 2 & 1
  UNION ALL SELECT id FROM trellis_job INDEXED BY trellis_job_parked WHERE place = 3 AND :places >> 3 & 1
  UNION ALL SELECT id FROM trellis_job INDEXED BY trellis_job_held WHERE place = 4 AND :places >> 4 & 1
  UNION ALL SELECT j.id FROM json_each(:types) t CROSS JOIN json_each(:states) w CROSS JOIN trellis_job j INDEXED BY trellis_job_listed
    ON j.place > 0 AND j.place <> 4 AND j.type = t.value AND j.state = w.value % 16 AND j.place = 6
    WHERE :places >> 6 & 1 AND j.lifecycle = w.value / 16
) LIMIT :most;

-- The next jobs of the whole ledger, in the order of their ids.
-- name: next_jobs
SELECT id FROM trellis_job WHERE id > :after ORDER BY id LIMIT :most;

-- name: types
SELECT id FROM trellis_job_type WHERE (:type IS NULL OR name = :type)
  AND lifecycle IN (SELECT DISTINCT value / 16 FROM json_each(:states));

-- name: selected
SELECT s.job_id, j.version, j.lifecycle, j.state, t.name, j.prio, s.created_at, j.id
FROM json_each(:ids) w CROSS JOIN trellis_job j ON j.id = w.value
JOIN trellis_submission s ON s.id = j.id JOIN trellis_job_type t ON t.id = j.type
LEFT JOIN trellis_concurrency_key k ON k.id = j.ckey
WHERE j.lifecycle * 16 + j.state IN (SELECT value FROM json_each(:states))
  AND (NOT :delayed OR j.place = 2)
  AND (:type IS NULL OR t.name = :type)
  AND (:correlation IS NULL OR coalesce(s.correlation, s.job_id) = :correlation)
  AND (:key IS NULL OR k.name = :key)
  AND (:parent IS NULL OR s.parent = :parent)
  AND (:priority IS NULL OR j.prio = :priority)
  AND (:other_priority IS NULL OR j.prio <> :other_priority)
  AND (:submitted_before IS NULL OR s.created_at < :submitted_before)
  AND (:submitted_after IS NULL OR s.created_at > :submitted_after)
  AND (NOT :not_asked OR j.cancel_at IS NULL)
  AND (:reason IS NULL OR EXISTS (
    SELECT 1 FROM trellis_dead_letter d WHERE d.job = j.id AND d.version = j.version AND d.reason = :reason))
  AND (:owner IS NULL OR EXISTS (
    SELECT 1 FROM trellis_event e JOIN trellis_actor a ON a.id = e.actor WHERE e.job = j.id AND e.version = 1
      AND (a.name = :owner OR substr(a.name, 1, length(:party)) = :party OR e.role = :reconciler)))
ORDER BY j.id LIMIT :limit;

-- name: set_priority
UPDATE trellis_job SET prio = ? WHERE id = ?;
