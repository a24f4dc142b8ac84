-- Waits of suspended jobs, and signals to jobs.

-- Children that have ended leave `spawned`. Returns the jobs that may wait for them.
-- name: end_children
DELETE FROM trellis_spawned WHERE child IN (SELECT value FROM json_each(?)) RETURNING child, parent, awaited;

-- name: orphan_children
UPDATE trellis_spawned SET orphaned = 1 WHERE parent = ? AND cancels = 1;

-- name: suspension
SELECT mode, signal, after FROM trellis_suspension WHERE job = ?;

-- name: put_suspension
INSERT INTO trellis_suspension (job, mode, signal, after) VALUES (?, ?, ?, ?);

-- name: empty_journal
DELETE FROM trellis_journal WHERE job = ? AND entry <> '@batch';

-- name: batch_entry
SELECT body FROM trellis_journal WHERE job = ? AND entry = '@batch';

-- name: put_entry
INSERT INTO trellis_journal (job, entry, epoch, at, body)
SELECT :job, :entry, j.epoch, :now, :body FROM trellis_job j WHERE j.id = :job ON CONFLICT DO NOTHING;

-- name: drop_signals
DELETE FROM trellis_job_signal WHERE job = :job
  AND no <= (SELECT r.value FROM json_each(:input, '$.signals') r WHERE r.key = trellis_job_signal.name);

-- name: drop_suspension
DELETE FROM trellis_suspension WHERE job = ? RETURNING job;

-- name: stop_awaiting
UPDATE trellis_spawned SET awaited = 0 WHERE parent = ? AND awaited = 1;

-- Children of a job that have not ended, by their ids. A child may have run again after it had ended.
-- name: link_children
INSERT INTO trellis_spawned (child, parent, cancels)
SELECT c.id, :parent, coalesce(json_extract(w.value, '$[1]'), 0)
FROM json_each(:children) AS w JOIN trellis_submission c ON c.job_id = json_extract(w.value, '$[0]')
JOIN trellis_job j ON j.id = c.id
WHERE j.place < 5 AND c.parent = (SELECT p.job_id FROM trellis_submission p WHERE p.id = :parent) ON CONFLICT DO NOTHING;

-- Jobs of a batch that have not ended, by their ids.
-- name: link_members
INSERT INTO trellis_spawned (child, parent, cancels)
SELECT c.id, :parent, json_extract(w.value, '$[1]')
FROM json_each(:children) AS w JOIN trellis_submission c ON c.job_id = json_extract(w.value, '$[0]')
JOIN trellis_job j ON j.id = c.id
WHERE j.place < 5 AND c.id <> :parent ON CONFLICT DO NOTHING;

-- name: await_children
UPDATE trellis_spawned SET awaited = 1 WHERE parent = :parent
  AND child IN (SELECT c.id FROM json_each(:children) AS w JOIN trellis_submission c ON c.job_id = json_extract(w.value, '$[0]'))
RETURNING child;

-- name: awaits_others
SELECT 1 FROM trellis_spawned WHERE parent = ? AND awaited = 1 LIMIT 1;

-- name: unlucky_children
SELECT 1 FROM json_each(?) AS w JOIN trellis_submission c ON c.job_id = json_extract(w.value, '$[0]') JOIN trellis_job j ON j.id = c.id
WHERE j.place = 6 LIMIT 1;

-- name: orphans
SELECT child FROM trellis_spawned WHERE orphaned = 1 ORDER BY child LIMIT ?;

-- name: keep_orphans
UPDATE trellis_spawned SET orphaned = 0 WHERE child IN (SELECT value FROM json_each(?));

-- name: later_signal
SELECT 1 FROM trellis_job_signal WHERE job = ? AND name = ? AND no > ? LIMIT 1;

-- name: signal_with_key
SELECT no FROM trellis_job_signal WHERE job = ? AND key = ?;

-- name: count_signals
SELECT count(*) FROM trellis_job_signal WHERE job = ?;

-- name: put_signal
INSERT INTO trellis_job_signal (job, name, at, actor, key, body) VALUES (?, ?, ?, ?, ?, ?) RETURNING no;
