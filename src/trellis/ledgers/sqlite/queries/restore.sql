-- Restored jobs. Their events are inserted like any other, so the triggers check each of them.

-- name: add_job
INSERT INTO trellis_job (id, lifecycle, type, prio, max_attempts, deadline_at, ckey, compensates) VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- name: begin_restoring
INSERT INTO trellis_meta (key, value) VALUES ('restoring', 1);

-- name: end_restoring
DELETE FROM trellis_meta WHERE key = 'restoring';

-- name: begin_history
INSERT INTO trellis_restoring (job) VALUES (?);

-- name: end_history
DELETE FROM trellis_restoring WHERE job = ?;

-- name: add_event
INSERT INTO trellis_event (job, version, type, source, target, role, actor, epoch, generation, attempt, at, place, wait, cause, data,
  request)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: add_dead_letter
INSERT INTO trellis_dead_letter (job, version, reason, stage, last_error, attempts, last_owner, last_lease_expires_at, at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- A key that belongs to another job stays with that job.
-- name: add_key
INSERT INTO trellis_idempotency (scope, key, job, fingerprint, at) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING;

-- A job that has ended holds its key for its window alone. A key that another job holds stays with that job.
-- name: add_unique_key
INSERT INTO trellis_unique_job (job, type, scope, key, unfinished, until, first_at, holds)
SELECT :job, :type, :scope, :key, :unfinished, :until, :first_at, (j.place < 5 OR coalesce(:until > :now, 0)) AND NOT EXISTS (
  SELECT 1 FROM trellis_unique_job u WHERE u.type = :type AND u.scope = :scope AND u.key = :key AND u.holds = 1)
FROM trellis_job j WHERE j.id = :job;

-- The journals that come back name signals of the lost ledger as read: new ones have higher numbers.
-- name: begin_numbers_of_signals
INSERT INTO sqlite_sequence (name, seq) SELECT 'trellis_job_signal', 0
WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'trellis_job_signal');

-- name: raise_numbers_of_signals
UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'trellis_job_signal';

-- name: due_at
UPDATE trellis_job SET due_at = ? WHERE id = ?;

-- name: add_journal
INSERT INTO trellis_journal (job, entry, epoch, at, body) VALUES (?, ?, ?, ?, ?);

-- name: comes_back
UPDATE trellis_job SET epoch = :epoch, deaths = :deaths, until = min(until, :now) WHERE id = :job;

-- name: rest_is_over
UPDATE trellis_job SET place = :place, pos = seq, due_at = NULL WHERE id = :job;

-- name: limit_of_key
SELECT slots FROM trellis_concurrency_key WHERE id = ?;

-- name: set_limit_of_key
UPDATE trellis_concurrency_key SET slots = ? WHERE id = ?;
