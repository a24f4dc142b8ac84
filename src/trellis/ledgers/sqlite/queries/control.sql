-- Settings of types and keys, worker heartbeats, and subscribers of the feed.

-- name: control_of
SELECT paused, rate, burst, held_max FROM trellis_type_control WHERE name = ?;

-- name: pause
INSERT INTO trellis_type_control (name, paused, changed_by) VALUES (?, ?, ?)
ON CONFLICT (name) DO UPDATE SET paused = excluded.paused, changed_by = excluded.changed_by;

-- name: limit_rate
INSERT INTO trellis_type_control (name, rate, burst, tokens, filled_at, changed_by)
VALUES (:name, :rate, :burst, :burst, :now, :by)
ON CONFLICT (name) DO UPDATE SET rate = excluded.rate, burst = excluded.burst,
  tokens = iif(rate IS excluded.rate AND burst IS excluded.burst, tokens, excluded.tokens),
  filled_at = iif(rate IS excluded.rate AND burst IS excluded.burst, filled_at, excluded.filled_at), changed_by = excluded.changed_by;

-- name: limit_held
INSERT INTO trellis_type_control (name, held_max, changed_by) VALUES (?, ?, ?)
ON CONFLICT (name) DO UPDATE SET held_max = excluded.held_max, changed_by = excluded.changed_by;

-- An empty place means that the subscriber has read nothing yet. Retention does not wait for a place that begins with
-- !, until the subscriber reads on from there.
-- name: follow
INSERT INTO trellis_follower (name, epoch, actor, until, place) VALUES (:name, 1, :actor, :until, iif(:reads, coalesce(:first, ''), NULL))
ON CONFLICT (name) DO UPDATE SET epoch = epoch + 1, actor = excluded.actor, until = excluded.until,
  place = iif(:reads, coalesce(nullif(ltrim(place, '!'), ''), :first, ''), place)
WHERE trellis_follower.until <= :now OR trellis_follower.actor = :actor
RETURNING epoch, nullif(ltrim(place, '!'), '');

-- name: followed
UPDATE trellis_follower SET place = coalesce(:place, place), until = :until WHERE name = :name AND epoch = :epoch RETURNING epoch;

-- name: is_waited_for
SELECT place NOT LIKE '!%' FROM trellis_follower WHERE name = ? AND place IS NOT NULL;

-- name: leave_behind
UPDATE trellis_follower SET place = '!' || place WHERE name = ?;

-- name: home_issuer
SELECT value FROM trellis_meta WHERE key = 'home_issuer';

-- name: set_home_issuer
INSERT INTO trellis_meta (key, value) VALUES ('home_issuer', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: over_limit
SELECT max(0, (SELECT count(*) FROM trellis_job j WHERE j.ckey = k.id AND j.slot IS NOT NULL) - iif(k.stopped, 0, k.slots))
FROM trellis_concurrency_key k WHERE k.id = ?;

-- name: ready_of_key
SELECT id FROM trellis_job WHERE ckey = ? AND slot IS NOT NULL AND place = 1 ORDER BY prio DESC, pos DESC, id DESC LIMIT ?;

-- name: beat
INSERT INTO trellis_worker (name, actor, seen_at, info) VALUES (?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at, info = excluded.info;
