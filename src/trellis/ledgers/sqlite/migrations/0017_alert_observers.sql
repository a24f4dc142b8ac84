-- Who saw an alert last; when an evaluator could not read its condition last; and the channels (job types, separated by spaces) through
-- which its beginning was reported and its end was not yet.
ALTER TABLE trellis_alert ADD COLUMN seen_by TEXT NOT NULL DEFAULT '' CHECK (length(seen_by) <= 500);
ALTER TABLE trellis_alert ADD COLUMN unread_at INTEGER NOT NULL DEFAULT 0;
ALTER TABLE trellis_alert ADD COLUMN report_types TEXT NOT NULL DEFAULT '' CHECK (length(report_types) <= 1000);
CREATE INDEX trellis_alert_unreported ON trellis_alert (resolved_at) WHERE resolved_at IS NOT NULL AND report_types <> '';
