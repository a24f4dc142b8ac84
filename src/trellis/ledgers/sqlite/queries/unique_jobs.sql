-- Unique keys of jobs.

-- The job that holds a key, with what decides whether it still does.
-- name: holder
SELECT u.job, s.job_id, u.unfinished, u.until, u.first_at, j.lifecycle, j.state, j.place
FROM trellis_unique_job u JOIN trellis_job j ON j.id = u.job JOIN trellis_submission s ON s.id = u.job
WHERE u.type = ? AND u.scope = ? AND u.key = ? AND u.holds = 1;

-- name: let_go
UPDATE trellis_unique_job SET holds = 0 WHERE job = ?;

-- name: take
INSERT INTO trellis_unique_job (job, type, scope, key, holds, unfinished, until, first_at, replaced) VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?);

-- name: key_of
SELECT type, scope, key, holds FROM trellis_unique_job WHERE job = ?;

-- name: take_back
UPDATE trellis_unique_job SET holds = 1 WHERE job = ?;
