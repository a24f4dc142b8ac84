-- What was asked, where only what came of it was kept: a ledger that was lost comes back as it was asked for.

-- Microseconds from the submit, and again from each requeue, to the deadline; null for none, and in rows older than this column.
alter table job add column deadline_us bigint;
-- The id of the job it compensates, which may be removed before it.
alter table job add column compensates_id text collate "C";
-- When the rest that this event began was to end.
alter table event add column due_at timestamptz;
