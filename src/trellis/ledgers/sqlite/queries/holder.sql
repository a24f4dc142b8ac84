-- What the holder of a lease writes besides steps. Every statement carries the epoch.

-- name: renew
UPDATE trellis_job SET until = :now + length WHERE id = :job AND epoch = :epoch AND place = 4
RETURNING cancel_at IS NOT NULL;

-- One for each job: the unique index makes this one take the place of the one before.
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
