-- The first ready jobs of every type are asked for by lifecycle, also where another lifecycle has a long queue of the same type.
drop index if exists ready_claim;
create index ready_claim on ready (type, lifecycle, prio, pos);

-- What is said about a job by others than its holder is counted before another one is kept. The number is the place of the word in
-- SIGNAL_TYPES.
create index signal_remark on signal (id) where type = 4;

-- Answers come in the order of the steps now, each with its own.
drop function if exists _was_applied(bigint, int, smallint, smallint, int, text);

-- Moves that meet go together.
drop function if exists move(int, text, smallint, text, int, float8, int, int, text, bytea, text, text, text);
