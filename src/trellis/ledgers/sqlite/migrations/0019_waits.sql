-- Jobs that wait for other jobs, for signals or for a time: `suspended` in the lifecycle leased-job.
--   spawned     one row for each child that a job spawned and that has not ended
--   suspension  what a suspended job waits for, besides the time in `due_at`
--   job_signal  signals that were sent to jobs, oldest first
CREATE TABLE trellis_spawned (
  child INTEGER PRIMARY KEY, parent INTEGER NOT NULL, awaited INTEGER NOT NULL DEFAULT 0 CHECK (awaited IN (0, 1)),
  cancels INTEGER NOT NULL CHECK (cancels IN (0, 1)), orphaned INTEGER NOT NULL DEFAULT 0 CHECK (orphaned IN (0, 1))
) STRICT;
CREATE INDEX trellis_spawned_parent ON trellis_spawned (parent, awaited);
CREATE INDEX trellis_spawned_orphaned ON trellis_spawned (child) WHERE orphaned = 1;
CREATE TABLE trellis_suspension (
  job INTEGER PRIMARY KEY, mode INTEGER NOT NULL, signal TEXT, after INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE trellis_job_signal (
  no INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL, name TEXT NOT NULL, at INTEGER NOT NULL, actor INTEGER NOT NULL, key TEXT,
  body BLOB NOT NULL CHECK (length(body) <= 1048576)
) STRICT;
CREATE INDEX trellis_job_signal_job ON trellis_job_signal (job, name, no);
CREATE UNIQUE INDEX trellis_job_signal_key ON trellis_job_signal (job, key) WHERE key IS NOT NULL;
CREATE TRIGGER trellis_purge_removes_waits AFTER INSERT ON trellis_purge BEGIN
  DELETE FROM trellis_job_signal WHERE job = new.job;
END;
