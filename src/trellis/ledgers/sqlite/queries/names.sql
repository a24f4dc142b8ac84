-- Names stored once: types, actors, concurrency keys.

-- name: find_type
SELECT id FROM trellis_job_type WHERE lifecycle = ? AND name = ?;

-- name: add_type
INSERT INTO trellis_job_type (lifecycle, name) VALUES (?, ?) RETURNING id;

-- name: find_actor
SELECT id FROM trellis_actor WHERE name = ? AND node = ?;

-- name: add_actor
INSERT INTO trellis_actor (name, node) VALUES (?, ?) RETURNING id;

-- name: find_key
SELECT id FROM trellis_concurrency_key WHERE name = ?;

-- name: add_key
INSERT INTO trellis_concurrency_key (name, slots) VALUES (?, ?) RETURNING id;

-- name: key_limit
SELECT iif(stopped, 0, slots) FROM trellis_concurrency_key WHERE name = ?;

-- name: set_key_limit
INSERT INTO trellis_concurrency_key (name, slots, changed_by, stopped) VALUES (:name, max(:limit, 1), :actor, :limit = 0)
ON CONFLICT (name) DO UPDATE SET slots = iif(excluded.stopped, slots, excluded.slots), changed_by = excluded.changed_by,
  stopped = excluded.stopped RETURNING id;
