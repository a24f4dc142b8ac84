-- Data stored beside events. `wanted` is a JSON array of job ids, or of pairs of a job id and a version.

-- name: beside
SELECT s.job_id, e.version, t.name, iif(e.place = 2, e.at + e.wait, NULL), e.request, s.created_at
FROM json_each(?) w CROSS JOIN trellis_submission s ON s.job_id = w.value ->> 0
CROSS JOIN trellis_event e ON e.job = s.id AND e.version = w.value ->> 1
CROSS JOIN trellis_job j ON j.id = s.id CROSS JOIN trellis_job_type t ON t.id = j.type;

-- Only columns that never change. A row older than migration 3 has no deadline, key limit or compensated job: every
-- other source for them may have changed since.
-- name: submissions
SELECT s.job_id, t.name, j.prio, s.max_attempts, s.max_deaths, s.payload, s.deadline, k.name, coalesce(s.key_limit, 1), s.trace, s.parent,
  s.compensates, u.scope, u.key, u.unfinished, u.until, u.first_at
FROM json_each(?) w CROSS JOIN trellis_submission s ON s.job_id = w.value CROSS JOIN trellis_job j ON j.id = s.id
JOIN trellis_job_type t ON t.id = j.type LEFT JOIN trellis_concurrency_key k ON k.id = j.ckey LEFT JOIN trellis_unique_job u ON u.job = j.id;

-- The keys of the original submit. A key that was bound later is not part of the request.
-- name: idempotency_keys
SELECT s.job_id, i.scope, i.key, i.fingerprint
FROM json_each(?) w CROSS JOIN trellis_submission s ON s.job_id = w.value CROSS JOIN trellis_idempotency i ON i.job = s.id
WHERE i.at = s.created_at ORDER BY i.scope, i.key;

-- name: dead_letters_at
SELECT s.job_id, t.name, j.lifecycle, e.target, d.reason, d.stage, d.last_error, d.attempts, d.last_owner,
  d.last_lease_expires_at, coalesce(s.correlation, s.job_id), d.at, d.version
FROM json_each(?) w CROSS JOIN trellis_submission s ON s.job_id = w.value ->> 0
CROSS JOIN trellis_dead_letter d ON d.job = s.id AND d.version = w.value ->> 1
JOIN trellis_event e ON e.job = d.job AND e.version = d.version JOIN trellis_job j ON j.id = d.job
JOIN trellis_job_type t ON t.id = j.type;
