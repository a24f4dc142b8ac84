-- The index of listed jobs with a condition that costs no time. A list of more than two values is a table that SQLite builds anew for each
-- event: it took nearly half of what a drained job costs.
DROP INDEX trellis_job_listed;
CREATE INDEX trellis_job_listed ON trellis_job (type, state, place) WHERE place > 0 AND place <> 4;
