-- Rows and steps of single jobs, used by every verb that moves jobs.

-- name: standing
SELECT id, lifecycle, type, state, place, version, epoch, generation, attempt, prio, max_attempts, deaths, length, until,
  owner, due_at, deadline_at, cancel_at, ckey, slot, compensates
FROM trellis_job WHERE id = ?;

-- name: standings
SELECT id, lifecycle, type, state, place, version, epoch, generation, attempt, prio, max_attempts, deaths, length, until,
  owner, due_at, deadline_at, cancel_at, ckey, slot, compensates
FROM trellis_job WHERE id IN (SELECT value FROM json_each(?));

-- Jobs whose holders' next step depends on nothing but their epoch.
-- name: held_plainly
SELECT id, epoch, version, length, ckey FROM trellis_job
WHERE id IN (SELECT value FROM json_each(?)) AND place = 4 AND lifecycle = ? AND state = ? AND until > ?
  AND cancel_at IS NULL AND compensates IS NULL;

-- One statement for all jobs that make the same step. The other columns of each event come from its job's row.
-- name: insert_events
INSERT INTO trellis_event (job, version, type, source, target, role, actor, epoch, generation, attempt, at, place, wait,
  cause, data, request)
SELECT j.id, j.version + 1, ?, ?, ?, ?, ?, j.epoch + ?, j.generation + (? = 2),
  CASE ? WHEN 0 THEN j.attempt WHEN 1 THEN j.attempt + 1 ELSE 0 END, ?, ?, ?, ?, ?, ?
FROM json_each(?) AS wanted CROSS JOIN trellis_job j ON j.id = wanted.value;

-- name: insert_dead_letter
INSERT INTO trellis_dead_letter (job, version, reason, stage, last_error, attempts, last_owner, last_lease_expires_at, at)
SELECT j.id, j.version + 1, iif(j.compensates IS NULL, :reason, 'compensation_failed'), :stage, :error,
  max(1, j.attempt + 1 - iif(j.lifecycle IN (SELECT value FROM json_each(:begun_by_timer)), 0, j.max_attempts - s.max_attempts)),
  a.name, iif(a.id IS NULL, NULL, j.until), :at
FROM trellis_job j JOIN trellis_submission s ON s.id = j.id LEFT JOIN trellis_actor a ON a.id = j.owner WHERE j.id = :job;

-- name: name_artifact
INSERT INTO trellis_finalizing (job, artifact) VALUES (?, ?) ON CONFLICT (job) DO UPDATE SET artifact = excluded.artifact;

-- name: artifact_of
SELECT a.id, a.lifecycle, a.state FROM trellis_submission s JOIN trellis_job a ON a.id = s.id
WHERE s.job_id = ? AND s.parent = (SELECT o.job_id FROM trellis_submission o WHERE o.id = ?);

-- name: final_artifact_of
SELECT s.job_id FROM trellis_submission o JOIN trellis_submission s ON s.parent = o.job_id JOIN trellis_job a ON a.id = s.id
JOIN trellis_finalizer f ON NOT f.completes AND f.lifecycle = a.lifecycle
JOIN trellis_event e ON e.job = a.id AND e.source = f.source AND e.target = f.target AND e.type = f.type WHERE o.id = ? LIMIT 1;

-- name: spare_attempt
UPDATE trellis_job SET max_attempts = max_attempts + 1 WHERE id = ?;

-- As submitted: all attempts, and the same time until the deadline.
-- name: start_anew
UPDATE trellis_job SET max_attempts = s.max_attempts, deadline_at = :now + coalesce(s.deadline, deadline_at - s.created_at)
FROM trellis_submission s WHERE s.id = trellis_job.id AND trellis_job.id = :job;

-- name: put_result
INSERT INTO trellis_result (job, body, expires_at) VALUES (?, ?, ?)
ON CONFLICT (job) DO UPDATE SET body = excluded.body, expires_at = excluded.expires_at;

-- name: drop_result
DELETE FROM trellis_result WHERE job = ?;

-- name: job_id_of
SELECT job_id FROM trellis_submission WHERE id = ?;

-- name: find_key_of_job
SELECT id FROM trellis_submission WHERE job_id = ?;

-- Steps made by holders only. Steps that others made in the same epoch after the holder released the job do not count.
-- name: last_steps_of_epoch
SELECT version, source, target, type FROM trellis_event WHERE job = ? AND epoch = ? AND request IS NULL
  AND (source * 16 + target) * 256 + type IN (SELECT value FROM json_each(?))
ORDER BY version DESC LIMIT ? + 1;

-- The first event of an epoch, if this actor made it and it has no request id.
-- name: unasked_step_of_epoch
SELECT version, source, target, type FROM trellis_event e WHERE job = ? AND epoch = ? AND actor = ? AND request IS NULL
  AND NOT EXISTS (SELECT 1 FROM trellis_event b WHERE b.job = e.job AND b.version = e.version - 1 AND b.epoch = e.epoch)
ORDER BY version LIMIT 1;

-- name: step_at
SELECT version, source, target, type FROM trellis_event WHERE job = ? AND version = ? AND epoch = ?;

-- name: key_room
SELECT iif(k.stopped, 0, k.slots) - (SELECT count(*) FROM trellis_job j WHERE j.ckey = k.id AND j.slot IS NOT NULL)
FROM trellis_concurrency_key k WHERE k.id = ?;

-- name: key_limit
SELECT iif(stopped, 0, slots), due_at FROM trellis_concurrency_key WHERE id = ?;

-- name: taken_slots
SELECT slot FROM trellis_job WHERE ckey = ? AND slot IS NOT NULL ORDER BY slot;

-- name: parked_first
SELECT id, prio FROM trellis_job WHERE place = 3 AND ckey = ? ORDER BY prio, pos, id LIMIT ?;

-- name: ready_last
SELECT id, prio, slot FROM trellis_job WHERE ckey = ? AND slot IS NOT NULL AND place = 1 ORDER BY prio DESC, pos DESC, id DESC
LIMIT 1;

-- name: ready_last_to_overtake
SELECT id FROM trellis_job WHERE ckey = ? AND slot IS NOT NULL AND place = 1 ORDER BY type = ? DESC, prio DESC, pos DESC, id DESC
LIMIT 1;

-- name: give_slot
UPDATE trellis_job SET place = 1, slot = ? WHERE id = ?;

-- name: take_slot_back
UPDATE trellis_job SET place = 3, slot = NULL WHERE id = ?;
