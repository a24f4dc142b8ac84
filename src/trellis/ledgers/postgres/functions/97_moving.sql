-- For `trellis move`, which fills a new ledger with the rows of an SQLite ledger.

create or replace function _moment_at(p_microseconds bigint) returns timestamptz language sql immutable as $$
  select timestamptz '1970-01-01 00:00:00+00' + p_microseconds * interval '1 microsecond'
$$;
create or replace function _microseconds(p_at timestamptz) returns bigint language sql immutable as $$
  select (extract(epoch from p_at) * 1000000)::bigint
$$;

-- Acts that a migration recorded here before the move. Those that are moved come after them.
create or replace function _acts_before_move() returns bigint language sql stable set search_path from current as $$
  select coalesce((select (m.value::jsonb ->> 'acts_before')::bigint from meta m where m.name = 'move'), 0)
$$;

-- The trigger of every table while the ledger is filled: only the move writes. It is dropped when the ledger opens.
create or replace function _refuse_while_moving() returns trigger language plpgsql set search_path from current as $$
begin
  if current_setting('trellis.move', true) is distinct from (select m.value::jsonb ->> 'id' from meta m where m.name = 'move') then
    raise exception 'this ledger is not open yet: `trellis move` fills it; run that command again until it says that the instance is moved'
      using errcode = '25006';
  end if;
  return null;
end $$;
