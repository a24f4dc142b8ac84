-- A lease holder's writes besides steps; every statement carries the epoch. And remarks by others about a job.

-- name: renew
UPDATE trellis_job SET until = :now + length WHERE id = :job AND epoch = :epoch AND place = 4
RETURNING cancel_at IS NOT NULL;

-- One row per job: the unique index makes the new row replace the previous one.
-- name: note_renewal
INSERT OR REPLACE INTO trellis_signal (job, type, at) VALUES (:job, 'job_lease_renewed', :now);

-- name: version_held
SELECT version FROM trellis_job WHERE id = ? AND epoch = ? AND place = 4;

-- name: put_checkpoint
INSERT INTO trellis_checkpoint (job, epoch, at, body) VALUES (?, ?, ?, ?)
ON CONFLICT (job) DO UPDATE SET epoch = excluded.epoch, at = excluded.at, body = excluded.body;

-- name: journal_entry
SELECT body FROM trellis_journal WHERE job = ? AND entry = ?;

-- name: put_journal
INSERT INTO trellis_journal (job, entry, epoch, at, body) VALUES (?, ?, ?, ?, ?);

-- name: put_signal
INSERT OR REPLACE INTO trellis_signal (job, type, at, data) VALUES (?, ?, ?, ?);

-- Counted through an index of remarks alone: a job can have any number of heartbeats.
-- name: put_remark
INSERT INTO trellis_signal (job, type, at, data)
SELECT s.id, :type, :now, :data FROM trellis_submission s WHERE s.job_id = :job_id
  AND (SELECT count(*) FROM trellis_signal g INDEXED BY trellis_signal_remark
    WHERE g.job = s.id AND g.type = 'job_result_refused') < :most
RETURNING id;
