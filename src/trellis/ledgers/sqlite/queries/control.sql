-- What operators and workers say about themselves and about types and keys.

-- name: pause
INSERT INTO trellis_type_control (name, paused, changed_by) VALUES (?, ?, ?)
ON CONFLICT (name) DO UPDATE SET paused = excluded.paused, changed_by = excluded.changed_by;

-- name: limit_rate
INSERT INTO trellis_type_control (name, rate, burst, tokens, filled_at, changed_by)
VALUES (:name, :rate, :burst, :burst, :now, :by)
ON CONFLICT (name) DO UPDATE SET rate = excluded.rate, burst = excluded.burst, tokens = excluded.tokens,
  filled_at = excluded.filled_at, changed_by = excluded.changed_by;

-- name: over_limit
SELECT max(0, (SELECT count(*) FROM trellis_job j WHERE j.ckey = k.id AND j.slot IS NOT NULL) - k.slots)
FROM trellis_concurrency_key k WHERE k.id = ?;

-- name: ready_of_key
SELECT id FROM trellis_job WHERE ckey = ? AND slot IS NOT NULL AND place = 1 ORDER BY prio DESC, pos DESC, id DESC LIMIT ?;

-- name: beat
INSERT INTO trellis_worker (name, actor, seen_at, info) VALUES (?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at, info = excluded.info;
