-- Functions whose arguments or answers changed: what replaces them is written with the other functions.
drop function if exists _cancel_now(bigint, int, timestamptz, bigint);
drop function if exists _was_applied(bigint, int, smallint, smallint, int, text, int);
drop function if exists _claimed_before(bigint, int);
drop function if exists _ring(bigint, int, timestamptz, bigint, jsonb);
drop function if exists _sweep_due(int, timestamptz, bigint, int, jsonb);
