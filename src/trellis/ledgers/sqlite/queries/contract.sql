-- The lifecycles as the triggers read them. Rows are added or updated, never removed.

-- name: read_hash
SELECT value FROM trellis_meta WHERE key = 'contract';

-- name: write_hash
INSERT INTO trellis_meta (key, value) VALUES ('contract', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: begin_loading
INSERT INTO trellis_meta (key, value) VALUES ('contract_loading', 1);

-- name: end_loading
DELETE FROM trellis_meta WHERE key = 'contract_loading';

-- name: stored_states
SELECT id, name FROM trellis_state;

-- name: stored_event_types
SELECT id, name FROM trellis_event_type;

-- name: put_lifecycle
INSERT INTO trellis_lifecycle (id, name, version, swept_by) VALUES (?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET version = max(version, excluded.version), swept_by = excluded.swept_by;

-- name: put_role
INSERT INTO trellis_role (id, name) VALUES (?, ?) ON CONFLICT (id) DO NOTHING;

-- name: put_event_type
INSERT INTO trellis_event_type (id, name) VALUES (?, ?) ON CONFLICT (id) DO NOTHING;

-- name: put_state
INSERT INTO trellis_state (id, lifecycle, name, phase, rank, places, dead_letter) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET phase = excluded.phase, rank = excluded.rank, places = excluded.places,
  dead_letter = excluded.dead_letter;

-- name: put_finalizer
INSERT INTO trellis_finalizer (step, lifecycle, source, target, type, completes) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (step) DO UPDATE SET lifecycle = excluded.lifecycle, completes = excluded.completes;

-- name: put_arrow
INSERT INTO trellis_arrow (id, roles, opens, rise, places, dead_letter, grants) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET roles = roles | excluded.roles, opens = excluded.opens, rise = excluded.rise,
  places = excluded.places, dead_letter = excluded.dead_letter, grants = excluded.grants;
