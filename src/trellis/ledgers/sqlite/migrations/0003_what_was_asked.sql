-- What was asked, where only what came of it was kept: a ledger that was lost comes back as it was asked for.

-- Microseconds from the submit, and again from each requeue, to the deadline; NULL for none, and in rows older than this column.
ALTER TABLE trellis_submission ADD COLUMN deadline INTEGER;
-- The limit the job would have set for its concurrency key, had it been the first.
ALTER TABLE trellis_submission ADD COLUMN key_limit INTEGER;
-- The id of the job it compensates, which may be removed before it.
ALTER TABLE trellis_submission ADD COLUMN compensates TEXT;
