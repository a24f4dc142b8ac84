-- Schedules of jobs. `spec` is JSON (engine/schedules.py). `next_at` says when something is to be done, null while paused. `firing` is the
-- instant whose job is being submitted.
CREATE TABLE trellis_schedule (
  name TEXT PRIMARY KEY NOT NULL CHECK (length(name) <= 100), version INTEGER NOT NULL,
  spec TEXT NOT NULL CHECK (length(spec) <= 65536), on_topic INTEGER NOT NULL CHECK (on_topic IN (0, 1)),
  paused INTEGER NOT NULL CHECK (paused IN (0, 1)), owner TEXT NOT NULL, since INTEGER NOT NULL, next_at INTEGER, firing INTEGER,
  last_at INTEGER, last_job TEXT, skipped TEXT, changed_by INTEGER NOT NULL, changed_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX trellis_schedule_next ON trellis_schedule (next_at) WHERE next_at IS NOT NULL;
