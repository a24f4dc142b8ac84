-- Schedules of jobs. A change names the version that it read.

-- name: all
SELECT name, version, spec, paused, owner, since, next_at, firing, last_at, last_job, skipped
FROM trellis_schedule WHERE :name IS NULL OR name = :name ORDER BY name LIMIT :limit;

-- name: due
SELECT name, version, spec, paused, owner, since, next_at, firing, last_at, last_job, skipped
FROM trellis_schedule WHERE next_at <= :now AND (:topics OR on_topic = 0) ORDER BY next_at, name LIMIT :limit;

-- name: next_at
SELECT min(next_at) FROM trellis_schedule WHERE next_at > :now AND (:topics OR on_topic = 0);

-- name: count
SELECT count(*) FROM trellis_schedule;

-- name: put
INSERT INTO trellis_schedule (name, version, spec, on_topic, paused, owner, since, next_at, firing, last_at, last_job, skipped,
  changed_by, changed_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET version = excluded.version, spec = excluded.spec, on_topic = excluded.on_topic,
  paused = excluded.paused, owner = excluded.owner, since = excluded.since, next_at = excluded.next_at, firing = excluded.firing,
  changed_by = excluded.changed_by, changed_at = excluded.changed_at;

-- name: advance
UPDATE trellis_schedule SET version = version + 1, since = :since, next_at = :next_at, firing = :firing, last_at = :last_at,
  last_job = :last_job, skipped = :skipped
WHERE name = :name AND version = :version RETURNING version;

-- name: remove
DELETE FROM trellis_schedule WHERE name = ? RETURNING spec;
