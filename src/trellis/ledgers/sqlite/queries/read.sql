-- Reads. Listings of jobs are newest first, events oldest first.

-- The columns that `rows.event` reads.
-- part: event_columns
s.job_id, j.lifecycle, coalesce(s.correlation, s.job_id), e.version, e.type, e.source, e.target, e.role, a.name,
  e.epoch, e.generation, e.attempt, e.at, e.cause, e.data, e.seq, a.node

-- name: job
SELECT s.job_id, j.lifecycle, t.name, j.state, j.place, j.prio, j.generation, j.attempt, j.max_attempts, s.max_attempts, j.version,
  j.epoch, j.deaths, s.created_at, e.at, j.due_at, j.deadline_at, a.name, j.until, j.cancel_at,
  k.name, coalesce(s.correlation, s.job_id), s.trace, s.parent, o.job_id, s.payload,
  (SELECT g.data FROM trellis_signal g WHERE g.job = j.id AND g.type = 'job_heartbeat' AND g.data IS NOT NULL
    ORDER BY g.id DESC LIMIT 1)
FROM trellis_submission s JOIN trellis_job j ON j.id = s.id JOIN trellis_job_type t ON t.id = j.type
JOIN trellis_event e ON e.seq = j.seq LEFT JOIN trellis_actor a ON a.id = j.owner
LEFT JOIN trellis_concurrency_key k ON k.id = j.ckey LEFT JOIN trellis_submission o ON o.id = j.compensates
WHERE s.job_id = ?;

-- name: asked_to_stop
SELECT a.name, w.at, w.cause FROM trellis_submission s JOIN trellis_job j ON j.id = s.id
JOIN trellis_wish w ON w.job = j.id AND w.epoch = j.epoch JOIN trellis_actor a ON a.id = w.actor WHERE s.job_id = ?;

-- name: ended_though_asked_to_stop
SELECT e.data FROM trellis_submission s JOIN trellis_job j ON j.id = s.id JOIN trellis_event e ON e.job = j.id
WHERE s.job_id = ? AND e.generation = j.generation AND instr(e.data, CAST('"cancel_requested"' AS BLOB)) > 0
ORDER BY e.version DESC LIMIT 1;

-- name: key_of
SELECT id FROM trellis_submission WHERE job_id = ?;

-- Checks whether the children up to a number are unchanged, then reads those above it: two reads of one transaction.
-- name: children_below
SELECT count(*), coalesce(sum(id), 0) FROM trellis_submission INDEXED BY trellis_submission_parent WHERE parent = ? AND id <= ?;

-- name: children_above
SELECT id, job_id FROM trellis_submission INDEXED BY trellis_submission_parent WHERE parent = ? AND id > ? ORDER BY id LIMIT ?;

-- name: events
SELECT {event_columns}
FROM trellis_event e JOIN trellis_job j ON j.id = e.job JOIN trellis_submission s ON s.id = e.job
JOIN trellis_actor a ON a.id = e.actor WHERE e.job = ? ORDER BY e.version;

-- name: events_of
SELECT {event_columns}
FROM json_each(:jobs) AS wanted CROSS JOIN trellis_submission s ON s.job_id = wanted.value
JOIN trellis_job j ON j.id = s.id JOIN trellis_event e ON e.job = s.id
  AND e.version > coalesce((SELECT max(x.version) FROM trellis_event x WHERE x.job = s.id) - :last, 0)
JOIN trellis_actor a ON a.id = e.actor ORDER BY e.job, e.version;

-- name: payloads
SELECT s.job_id, s.payload FROM json_each(?) AS wanted CROSS JOIN trellis_submission s ON s.job_id = wanted.value;

-- name: feed
SELECT {event_columns}
FROM trellis_event e JOIN trellis_job j ON j.id = e.job JOIN trellis_submission s ON s.id = e.job
JOIN trellis_actor a ON a.id = e.actor
WHERE e.seq > :after AND e.seq <= :end AND (:lifecycles IS NULL OR (:lifecycles >> j.lifecycle) & 1)
  AND (:types IS NULL OR e.type IN (SELECT value FROM json_each(:types)))
ORDER BY e.seq LIMIT :limit;

-- name: feed_end
SELECT coalesce(max(seq), 0) FROM trellis_event;

-- name: events_by_type
SELECT {event_columns}
FROM trellis_event e INDEXED BY trellis_event_type_at
JOIN trellis_job j ON j.id = e.job JOIN trellis_submission s ON s.id = e.job JOIN trellis_actor a ON a.id = e.actor
WHERE e.type = :type AND e.at >= :since ORDER BY e.at, e.seq LIMIT :limit;

-- name: count_events
SELECT e.type, count(*) FROM trellis_event e INDEXED BY trellis_event_type_at
WHERE e.type IN (SELECT value FROM json_each(:types)) AND e.at >= :since GROUP BY e.type;

-- The same of one lifecycle, for types that several lifecycles share.
-- name: count_events_of_lifecycle
SELECT e.type, count(*) FROM trellis_event e INDEXED BY trellis_event_type_at CROSS JOIN trellis_job j ON j.id = e.job
WHERE e.type IN (SELECT value FROM json_each(:types)) AND e.at >= :since AND j.lifecycle = :lifecycle GROUP BY e.type;

-- The same of queue jobs that failed or became DEAD. The index's condition must stand here word for word.
-- name: count_failed_queue_jobs
SELECT e.type, count(*) FROM trellis_event e INDEXED BY trellis_event_queue_failed
WHERE ((type = 5 AND target = 8) OR (type = 7 AND target = 9))
  AND e.type IN (SELECT value FROM json_each(:types)) AND e.at >= :since GROUP BY e.type;

-- name: sample_failed_queue_jobs
SELECT e.type, e.at, s.created_at, e.role, e.source, e.cause, e.data
FROM trellis_event e INDEXED BY trellis_event_queue_failed CROSS JOIN trellis_submission s ON s.id = e.job
WHERE ((type = 5 AND target = 8) OR (type = 7 AND target = 9))
  AND e.type = :type AND e.at >= :since ORDER BY e.at DESC, e.seq DESC LIMIT :limit;

-- The newest events of one type and lifecycle, in the order of the index, read backwards.
-- name: sample_events
SELECT e.type, e.at, s.created_at, e.role, e.source, e.cause, e.data
FROM trellis_event e INDEXED BY trellis_event_type_at CROSS JOIN trellis_job j ON j.id = e.job
CROSS JOIN trellis_submission s ON s.id = e.job
WHERE e.type = :type AND e.at >= :since AND j.lifecycle = :lifecycle ORDER BY e.at DESC, e.seq DESC LIMIT :limit;

-- name: events_by_correlation
SELECT {event_columns}
FROM (
  SELECT id FROM trellis_submission WHERE correlation = :correlation
  UNION ALL SELECT id FROM trellis_submission WHERE job_id = :correlation AND correlation IS NULL
) AS meant CROSS JOIN trellis_event e ON e.job = meant.id
JOIN trellis_job j ON j.id = e.job JOIN trellis_submission s ON s.id = e.job JOIN trellis_actor a ON a.id = e.actor
WHERE e.at >= :since AND (:type IS NULL OR e.type = :type) ORDER BY e.seq LIMIT :limit;

-- name: signals
SELECT type, at, data FROM (SELECT id, type, at, data FROM trellis_signal WHERE job = ? ORDER BY id DESC LIMIT ?) ORDER BY id;

-- name: result
SELECT r.body FROM trellis_result r WHERE r.job = ? AND (r.expires_at IS NULL OR r.expires_at > ?);

-- name: job_signals
SELECT no, name, body FROM trellis_job_signal WHERE job = ? AND name = ? AND no > ? ORDER BY no LIMIT ?;

-- name: outcomes
SELECT s.job_id, t.name, j.lifecycle, j.state, j.place >= 5, j.place = 5,
  CASE WHEN j.place = 5 AND ? THEN (SELECT r.body FROM trellis_result r WHERE r.job = j.id AND (r.expires_at IS NULL OR r.expires_at > ?)) END,
  CASE WHEN j.place = 6 THEN coalesce(
    (SELECT d.last_error FROM trellis_dead_letter d WHERE d.job = j.id AND d.version = j.version),
    (SELECT e.cause FROM trellis_event e WHERE e.seq = j.seq)) END
FROM json_each(?) AS w JOIN trellis_submission s ON s.job_id = w.value JOIN trellis_job j ON j.id = s.id
JOIN trellis_job_type t ON t.id = j.type;

-- name: journal
SELECT entry, body FROM trellis_journal WHERE job = ?;

-- name: journal_entries
SELECT s.job_id, o.entry, o.body FROM json_each(?) AS wanted
CROSS JOIN trellis_submission s ON s.job_id = json_extract(wanted.value, '$[0]')
JOIN trellis_journal o ON o.job = s.id AND o.entry = json_extract(wanted.value, '$[1]');

-- name: dead_letter
SELECT s.job_id, t.name, j.lifecycle, j.state, d.reason, d.stage, d.last_error, d.attempts, d.last_owner,
  d.last_lease_expires_at, coalesce(s.correlation, s.job_id), d.at, d.version
FROM trellis_submission s JOIN trellis_job j ON j.id = s.id
JOIN trellis_dead_letter d ON d.job = j.id AND d.version = j.version JOIN trellis_job_type t ON t.id = j.type
WHERE s.job_id = ?;

-- name: dead_letters_of
SELECT s.job_id, t.name, j.lifecycle, e.target, d.reason, d.stage, d.last_error, d.attempts, d.last_owner,
  d.last_lease_expires_at, coalesce(s.correlation, s.job_id), d.at, d.version
FROM trellis_dead_letter d JOIN trellis_event e ON e.job = d.job AND e.version = d.version
JOIN trellis_job j ON j.id = d.job JOIN trellis_submission s ON s.id = d.job JOIN trellis_job_type t ON t.id = j.type
WHERE d.job = ? ORDER BY d.version;

-- name: dead_letter_counts
SELECT t.name, t.lifecycle, count(*)
FROM (SELECT job, version FROM trellis_dead_letter ORDER BY job DESC, version DESC LIMIT :limit) d
JOIN trellis_job j ON j.id = d.job AND j.version = d.version JOIN trellis_job_type t ON t.id = j.type
GROUP BY t.id ORDER BY t.name, t.lifecycle;

-- name: swept_at
SELECT value FROM trellis_meta WHERE key = 'sweep_tick';

-- At most :most jobs of each lifecycle that rests, of those that are parked, and of those that are held.
-- name: depths
SELECT type, place, count(*) FROM (
  SELECT r.type, r.place FROM json_each(:lifecycles) w CROSS JOIN trellis_job r ON r.id IN (
    SELECT j.id FROM trellis_job j INDEXED BY trellis_job_standing WHERE j.place = 2 AND j.lifecycle = w.value LIMIT :most)
  UNION ALL SELECT type, place FROM (
    SELECT type, place FROM trellis_job INDEXED BY trellis_job_parked_type WHERE place = 3 LIMIT :most)
  UNION ALL SELECT type, place FROM (SELECT type, place FROM trellis_job INDEXED BY trellis_job_held WHERE place = 4 LIMIT :most)
) GROUP BY type, place;

-- And at most :most ready jobs of each type, with the time of the first.
-- name: types
SELECT t.id, t.lifecycle, t.name, coalesce(c.paused, 0), c.rate, o.rate_per_key,
  (SELECT e.at FROM trellis_event e WHERE e.seq <= (SELECT min(first) FROM (
    SELECT (SELECT j.pos FROM trellis_job j INDEXED BY trellis_job_ready
      WHERE j.place = 1 AND j.type = t.id AND j.prio = p.value ORDER BY j.pos LIMIT 1) AS first
    FROM json_each('[0,1,2]') p)) ORDER BY e.seq DESC LIMIT 1),
  (SELECT count(*) FROM (SELECT 1 FROM trellis_job j INDEXED BY trellis_job_ready WHERE j.place = 1 AND j.type = t.id LIMIT :most))
FROM trellis_job_type t LEFT JOIN trellis_type_control c ON c.name = t.name
LEFT JOIN trellis_type_options o ON o.lifecycle = t.lifecycle AND o.name = t.name
WHERE t.lifecycle IN (SELECT value FROM json_each(:lifecycles)) ORDER BY t.name, t.lifecycle;

-- name: workers
SELECT w.name, w.seen_at, (SELECT count(*) FROM trellis_job j INDEXED BY trellis_job_held WHERE j.place = 4 AND j.owner = w.actor),
  w.info
FROM trellis_worker w ORDER BY w.name;

-- name: followers
SELECT f.name, a.name, f.until, coalesce(f.place NOT LIKE '!%', 0),
  iif(f.place IS NULL, NULL, (SELECT e.at FROM trellis_event e WHERE e.seq > CAST(ltrim(f.place, '!') AS INTEGER) ORDER BY e.seq LIMIT 1))
FROM trellis_follower f JOIN trellis_actor a ON a.id = f.actor ORDER BY f.name LIMIT 1000;

-- name: keys_over
SELECT k.name, count(*), k.slots FROM trellis_job j INDEXED BY trellis_job_held JOIN trellis_concurrency_key k ON k.id = j.ckey
WHERE j.place = 4 GROUP BY k.id HAVING count(*) > k.slots + sum(j.slot >= k.slots) ORDER BY k.name LIMIT 1000;

-- Mismatches in both directions: jobs that completed with an artifact and do not have exactly one, and finalized
-- artifacts whose job exists and has not completed. `completed` and `final` are lifecycle * 16 + state.
-- name: unpaired
SELECT job_id, complete, artifacts FROM (
  SELECT s.job_id, 1 AS complete, (
    SELECT count(*) FROM trellis_submission c INDEXED BY trellis_submission_parent CROSS JOIN trellis_job a ON a.id = c.id
    WHERE c.parent = s.job_id AND a.lifecycle * 16 + a.state IN (SELECT value FROM json_each(:final))) AS artifacts
  FROM trellis_job j JOIN trellis_submission s ON s.id = j.id
  WHERE j.lifecycle * 16 + j.state IN (SELECT value FROM json_each(:completed))
  UNION ALL
  SELECT s.job_id, 0, count(*)
  FROM trellis_submission c INDEXED BY trellis_submission_parent CROSS JOIN trellis_job a ON a.id = c.id
  CROSS JOIN trellis_submission s ON s.job_id = c.parent CROSS JOIN trellis_job j ON j.id = s.id
  WHERE c.parent IS NOT NULL AND a.lifecycle * 16 + a.state IN (SELECT value FROM json_each(:final))
    AND j.lifecycle * 16 + j.state NOT IN (SELECT value FROM json_each(:completed))
  GROUP BY s.id
) WHERE complete = 0 OR artifacts <> 1 LIMIT 1000;

-- name: job_keys
SELECT id, job_id FROM trellis_submission WHERE id > ? ORDER BY id LIMIT ?;

-- name: any_ready
SELECT 1 WHERE EXISTS (SELECT 1 FROM trellis_job j INDEXED BY trellis_job_ready WHERE j.place = 1 AND j.type IN (
  SELECT t.id FROM trellis_job_type t WHERE t.name IN (SELECT value FROM json_each(?))));

-- The next jobs for a role that takes jobs by id: the first of each type and priority, through the index that claims
-- use. If they are still too many, the longest lists are cut. A large payload is left out; otherwise one call could
-- return thousands of them.
-- name: heads
SELECT s.job_id, j.lifecycle, t.name, j.state, j.place, j.prio, j.generation, j.attempt, j.max_attempts, s.max_attempts, j.version,
  j.epoch, j.deaths, s.created_at, e.at, j.due_at, j.deadline_at, NULL, j.until, j.cancel_at,
  k.name, coalesce(s.correlation, s.job_id), s.trace, s.parent, o.job_id,
  CASE WHEN length(s.payload) <= 8192 THEN s.payload END, NULL, j.id
FROM (
  SELECT h.id, row_number() OVER (PARTITION BY h.type, h.prio ORDER BY h.pos) AS nth
  FROM trellis_job_type w CROSS JOIN json_each('[0,1,2]') p CROSS JOIN trellis_job h ON h.id IN (
    SELECT r.id FROM trellis_job r INDEXED BY trellis_job_ready
    WHERE r.place = 1 AND r.type = w.id AND r.prio = p.value ORDER BY r.pos LIMIT :each)
  WHERE w.lifecycle = :lifecycle AND NOT EXISTS (SELECT 1 FROM trellis_type_control c WHERE c.name = w.name AND c.paused)
  ORDER BY nth, h.pos LIMIT :limit
) AS first CROSS JOIN trellis_job j ON j.id = first.id
JOIN trellis_submission s ON s.id = j.id JOIN trellis_job_type t ON t.id = j.type
JOIN trellis_event e ON e.seq = j.seq
LEFT JOIN trellis_concurrency_key k ON k.id = j.ckey LEFT JOIN trellis_submission o ON o.id = j.compensates
ORDER BY j.pos, j.id;

-- name: holds
SELECT j.id, j.epoch, s.job_id, j.lifecycle, t.name, j.state, j.attempt, j.max_attempts, j.version, a.name, j.until, j.cancel_at,
  coalesce(s.correlation, s.job_id)
FROM json_each(?) w CROSS JOIN trellis_submission s ON s.job_id = w.value CROSS JOIN trellis_job j ON j.id = s.id
JOIN trellis_job_type t ON t.id = j.type LEFT JOIN trellis_actor a ON a.id = j.owner
WHERE j.place = 4;

-- name: expiring
SELECT j.id, j.epoch, s.job_id, j.lifecycle, t.name, j.state, j.attempt, j.max_attempts, j.version, a.name, j.until, j.cancel_at,
  coalesce(s.correlation, s.job_id)
FROM trellis_job j INDEXED BY trellis_job_held JOIN trellis_submission s ON s.id = j.id JOIN trellis_job_type t ON t.id = j.type
LEFT JOIN trellis_actor a ON a.id = j.owner
WHERE j.place = 4 AND j.lifecycle = ? AND j.until <= ? ORDER BY j.until LIMIT ?;
