-- How long a silent holder keeps its lease (see lease_length_s in engine/jobs.py), and the ledger's clock. A test
-- database replaces the clock.
create or replace function trellis._length(p_lease_ms int, p_beat_ms int) returns interval language sql immutable as $$
  select least(p_lease_ms, 2 * p_beat_ms + 500) * interval '1 ms'
$$;
create or replace function trellis.now() returns timestamptz language sql volatile as $$ select clock_timestamp() $$;
