-- Rate limits of concurrency keys. Places: 1 ready, 3 parked.

-- name: any_rate
SELECT EXISTS (SELECT 1 FROM trellis_type_options INDEXED BY trellis_type_options_rated WHERE rate_per_key IS NOT NULL);

-- The first parked job of each type of a key, and what its type declares: the length of a token and how many there are; how far
-- the claims have used them, and how many ready jobs need one.
-- name: heads
WITH RECURSIVE kinds (type) AS (
  SELECT (SELECT min(type) FROM trellis_job INDEXED BY trellis_job_parked_type WHERE place = 3 AND ckey = :key)
  UNION ALL SELECT (SELECT min(j.type) FROM trellis_job j INDEXED BY trellis_job_parked_type
    WHERE j.place = 3 AND j.ckey = :key AND j.type > kinds.type) FROM kinds WHERE kinds.type IS NOT NULL)
SELECT h.prio, h.pos, h.id, h.type, o.token_us, o.burst_per_key, coalesce(k.used_until, 0), iif(o.token_us IS NULL, 0, (
  SELECT count(*) FROM trellis_job r WHERE r.ckey = :key AND r.slot IS NOT NULL AND r.place = 1 AND r.type = h.type))
FROM kinds CROSS JOIN trellis_job h ON h.id = (SELECT j.id FROM trellis_job j INDEXED BY trellis_job_parked_type
  WHERE j.place = 3 AND j.ckey = :key AND j.type = kinds.type ORDER BY j.prio, j.pos, j.id LIMIT 1)
CROSS JOIN trellis_job_type t ON t.id = h.type LEFT JOIN trellis_type_options o ON o.lifecycle = t.lifecycle AND o.name = t.name
LEFT JOIN trellis_key_rate k ON k.key = :key AND k.type = h.type;

-- name: parked_of_type
SELECT id, prio FROM trellis_job INDEXED BY trellis_job_parked_type WHERE place = 3 AND ckey = ? AND type = ?
ORDER BY prio, pos, id LIMIT ?;

-- The last ready job of a key whose slot and token a parked job of a type can take: any if that type has no rate.
-- name: ready_last_for
SELECT id, prio, slot FROM trellis_job WHERE ckey = :key AND slot IS NOT NULL AND place = 1 AND (type = :type OR NOT :rated)
ORDER BY prio DESC, pos DESC, id DESC LIMIT 1;

-- name: jobs_with_rate
SELECT j.id, j.ckey, j.type, o.token_us, o.burst_per_key * o.token_us, coalesce(k.used_until, 0)
FROM json_each(?) AS wanted JOIN trellis_job j ON j.id = wanted.value JOIN trellis_job_type t ON t.id = j.type
JOIN trellis_type_options o ON o.lifecycle = t.lifecycle AND o.name = t.name
LEFT JOIN trellis_key_rate k ON k.key = j.ckey AND k.type = j.type
WHERE j.ckey IS NOT NULL AND o.token_us IS NOT NULL ORDER BY wanted.key;

-- name: was_due
SELECT 1 FROM trellis_concurrency_key WHERE id = ? AND due_at <= ?;

-- name: due_keys
SELECT id FROM trellis_concurrency_key WHERE due_at <= ? ORDER BY due_at LIMIT ?;

-- name: look_at
UPDATE trellis_concurrency_key SET due_at = :due WHERE id = :key AND due_at IS NOT :due;

-- When the rate of a type changes, its used tokens stay used, its ready jobs go back to their keys, and every key that waits, or for
-- which jobs of the type wait, is looked at again: without a rate, an urgent job may pass jobs of other types.
-- name: scale_used
UPDATE trellis_key_rate SET used_until = :now + CAST((used_until - :now) * :factor AS INTEGER) WHERE type = :type AND used_until > :now;

-- name: look_again
UPDATE trellis_concurrency_key SET due_at = :now WHERE due_at IS NOT NULL OR id IN (
  SELECT ckey FROM trellis_job INDEXED BY trellis_job_ready WHERE place = 1 AND type = :type AND ckey IS NOT NULL)
  OR EXISTS (SELECT 1 FROM trellis_job j INDEXED BY trellis_job_parked_type
             WHERE j.place = 3 AND j.ckey = trellis_concurrency_key.id AND j.type = :type);

-- name: park_ready
UPDATE trellis_job SET place = 3, slot = NULL WHERE place = 1 AND type = ? AND ckey IS NOT NULL;
