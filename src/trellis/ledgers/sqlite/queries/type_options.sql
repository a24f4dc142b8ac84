-- Declared options of job types.

-- name: declared
SELECT name, lifecycle, prio, max_attempts, max_deaths, deadline_s, concurrency_limit, keyed, compensation, unique_rule,
  rate_per_key, burst_per_key
FROM trellis_type_options WHERE lifecycle = ? AND name = ?;

-- name: every_declared
SELECT name, lifecycle, prio, max_attempts, max_deaths, deadline_s, concurrency_limit, keyed, compensation, unique_rule,
  rate_per_key, burst_per_key
FROM trellis_type_options WHERE :type IS NULL OR name = :type ORDER BY name, lifecycle LIMIT :limit;

-- name: declare
INSERT INTO trellis_type_options (name, lifecycle, prio, max_attempts, max_deaths, deadline_s, concurrency_limit, keyed, compensation, unique_rule,
  rate_per_key, burst_per_key, changed_by, changed_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (lifecycle, name) DO UPDATE SET prio = excluded.prio, max_attempts = excluded.max_attempts, max_deaths = excluded.max_deaths,
  deadline_s = excluded.deadline_s, concurrency_limit = excluded.concurrency_limit, keyed = excluded.keyed,
  compensation = excluded.compensation, unique_rule = excluded.unique_rule, rate_per_key = excluded.rate_per_key,
  burst_per_key = excluded.burst_per_key, changed_by = excluded.changed_by, changed_at = excluded.changed_at;
