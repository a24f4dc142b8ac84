-- What is known beside events. `wanted` is a JSON array of job ids, or of pairs of a job id and a version.

-- name: beside
SELECT s.job_id, e.version, t.name, iif(e.place = 2, e.at + e.wait, NULL), e.request
FROM json_each(?) w CROSS JOIN trellis_submission s ON s.job_id = w.value ->> 0
CROSS JOIN trellis_event e ON e.job = s.id AND e.version = w.value ->> 1
CROSS JOIN trellis_job j ON j.id = s.id CROSS JOIN trellis_job_type t ON t.id = j.type;

-- name: submissions
SELECT s.job_id, t.name, j.prio, s.max_attempts, s.max_deaths, s.payload, coalesce(s.deadline, j.deadline_at - s.created_at), k.name,
  coalesce(s.key_limit, k.slots, 1), s.trace, s.parent, coalesce(s.compensates, o.job_id)
FROM json_each(?) w CROSS JOIN trellis_submission s ON s.job_id = w.value CROSS JOIN trellis_job j ON j.id = s.id
JOIN trellis_job_type t ON t.id = j.type LEFT JOIN trellis_concurrency_key k ON k.id = j.ckey
LEFT JOIN trellis_submission o ON o.id = j.compensates;

-- name: idempotency_keys
SELECT s.job_id, i.scope, i.key, i.fingerprint
FROM json_each(?) w CROSS JOIN trellis_submission s ON s.job_id = w.value CROSS JOIN trellis_idempotency i ON i.job = s.id
ORDER BY i.scope, i.key;

-- name: dead_letters_at
SELECT s.job_id, t.name, j.lifecycle, e.target, d.reason, d.stage, d.last_error, d.attempts, d.last_owner,
  d.last_lease_expires_at, coalesce(s.correlation, s.job_id), d.at, d.version
FROM json_each(?) w CROSS JOIN trellis_submission s ON s.job_id = w.value ->> 0
CROSS JOIN trellis_dead_letter d ON d.job = s.id AND d.version = w.value ->> 1
JOIN trellis_event e ON e.job = d.job AND e.version = d.version JOIN trellis_job j ON j.id = d.job
JOIN trellis_job_type t ON t.id = j.type;
