-- Functions whose arguments or answers changed: what replaces them is written with the other functions.
drop function if exists _cancel_now(bigint, int, timestamptz, bigint);
drop function if exists _ring(bigint, int, timestamptz, bigint, jsonb);
drop function if exists _sweep_due(int, timestamptz, bigint, int, jsonb);
