-- Alerts: one row for each time that a condition began to hold. It is open until resolved_at is set; then it is kept for some days.
CREATE TABLE trellis_alert (
  id TEXT PRIMARY KEY CHECK (length(id) <= 100), name TEXT NOT NULL CHECK (length(name) <= 100),
  subject TEXT NOT NULL CHECK (length(subject) <= 300), value REAL NOT NULL, text TEXT NOT NULL CHECK (length(text) <= 1000),
  raised_at INTEGER NOT NULL, last_seen_at INTEGER NOT NULL, resolved_at INTEGER,
  seen_in INTEGER NOT NULL, resolved_in INTEGER   -- the numbers of the rounds that saw it last and that resolved it
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX trellis_alert_open ON trellis_alert (name, subject) WHERE resolved_at IS NULL;
CREATE INDEX trellis_alert_resolved ON trellis_alert (resolved_at) WHERE resolved_at IS NOT NULL;

-- For the alerts about queue jobs: those that wait behind the slot of their agent, and how each stage was left. The numbers are those of
-- the lifecycle queue-job (2), its state RETRY_BACKOFF (7), and the steps job_retry_scheduled (9), job_nlm_called (15) and
-- job_succeeded (4) out of ARTIFACT_WRITE (5). No other lifecycle has these steps, so the index stays small.
CREATE INDEX trellis_job_queue_parked ON trellis_job (type, pos) WHERE place = 3 AND lifecycle = 2;
CREATE INDEX trellis_event_stage ON trellis_event (type, seq)
WHERE (type = 9 AND target = 7) OR type = 15 OR (type = 4 AND source = 5);
