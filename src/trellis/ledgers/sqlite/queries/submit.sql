-- New jobs.

-- name: existing
SELECT s.job_id, s.id FROM trellis_submission s WHERE s.job_id IN (SELECT value FROM json_each(?));

-- name: existing_one
SELECT s.job_id, s.id FROM trellis_submission s WHERE s.job_id = ?;

-- name: same_request
SELECT j.lifecycle, t.name, s.payload FROM trellis_job j JOIN trellis_submission s ON s.id = j.id
JOIN trellis_job_type t ON t.id = j.type WHERE j.id = ?;

-- name: find_key
SELECT i.job, i.fingerprint, s.job_id FROM trellis_idempotency i JOIN trellis_submission s ON s.id = i.job
WHERE i.scope = ? AND i.key = ?;

-- name: insert_key
INSERT INTO trellis_idempotency (scope, key, job, fingerprint, at) VALUES (?, ?, ?, ?, ?);

-- name: last_job
SELECT max(coalesce((SELECT max(id) FROM trellis_job), 0),
  coalesce((SELECT value FROM trellis_meta WHERE key = 'last_purged'), 0));

-- For new jobs that differ only in id and payload: the number of the first, and what their type declares. No row if one of their ids exists.
-- name: new
SELECT 1 + ({last_job}), o.name, o.lifecycle, o.prio, o.max_attempts, o.max_deaths, o.deadline_s, o.concurrency_limit, o.keyed, o.compensation,
  o.unique_rule, o.rate_per_key, o.burst_per_key
FROM (SELECT 1) LEFT JOIN trellis_type_options o ON o.lifecycle = ? AND o.name = ? WHERE NOT EXISTS ({known});

-- Many jobs come as arrays of the library, which are read faster than JSON.
-- name: existing_of_array
SELECT 1 FROM carray(?) AS new CROSS JOIN trellis_submission s ON s.job_id = new.value;

-- name: insert_alike_jobs
INSERT INTO trellis_job (id, lifecycle, type, prio, max_attempts, deadline_at) SELECT value, ?, ?, ?, ?, ? FROM carray(?);

-- Each value is an id, all of one length, and then the payload.
-- name: insert_alike_submissions
INSERT INTO trellis_submission (id, job_id, created_at, max_attempts, max_deaths, correlation, trace, parent, payload, deadline)
SELECT ? + rowid, CAST(substr(value, 1, ?) AS TEXT), ?, ?, ?, ?, ?, ?, substr(value, ?), ? FROM carray(?);

-- name: insert_jobs
INSERT INTO trellis_job (id, lifecycle, type, prio, max_attempts, deadline_at, ckey, compensates)
SELECT value, ?, ?, ?, ?, ?, ?, ? FROM json_each(?);

-- name: insert_job
INSERT INTO trellis_job (id, lifecycle, type, prio, max_attempts, deadline_at) VALUES (?, ?, ?, ?, ?, ?);

-- name: insert_first_event
INSERT INTO trellis_event (job, version, type, source, target, role, actor, epoch, generation, attempt, at, place, wait)
VALUES (?, 1, ?, ?, ?, ?, ?, 0, 0, 0, ?, ?, ?);

-- name: insert_first_events
INSERT INTO trellis_event (job, version, type, source, target, role, actor, epoch, generation, attempt, at, place, wait)
SELECT value, 1, ?, ?, ?, ?, ?, 0, 0, 0, ?, ?, ? FROM carray(?);

-- name: insert_submission
INSERT INTO trellis_submission (id, job_id, created_at, max_attempts, max_deaths, correlation, trace, parent, payload, deadline,
  key_limit, compensates)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- How many jobs of a concurrency key wait: for their slot, for a time, or for a role.
-- name: waiting
SELECT count(*) FROM trellis_concurrency_key k JOIN trellis_job j ON j.ckey = k.id WHERE k.name = ? AND j.place < 4;
