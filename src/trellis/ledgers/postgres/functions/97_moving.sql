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

-- Keeps all writers but the move away, or lets them in.
create or replace function _guard_move(p_on boolean) returns void language plpgsql set search_path from current as $$
declare part text;
begin
  for part in select c.relname from pg_class c
               where c.relnamespace = 'trellis'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition order by c.relname loop
    if p_on then
      execute format('create or replace trigger moving before insert or update or delete on %I for each statement execute function '
                     '_refuse_while_moving()', part);
    else
      execute format('drop trigger if exists moving on %I', part);
    end if;
  end loop;
end $$;

-- Removes what a move that was undone has written. Actors stay: they are names.
create or replace function _clear_moved() returns void language plpgsql set search_path from current as $$
declare part text;
begin
  foreach part in array array['event', 'feed', 'batch', 'ready', 'resting', 'parked', 'lease', 'ended', 'deadline', 'slot', 'dead_letter',
                              'idempotency', 'unique_job', 'result', 'checkpoint', 'journal', 'signal', 'job_signal', 'spawned', 'suspension', 'wake',
                              'renewal', 'wish', 'job', 'type_options',
                              'concurrency_key', 'key_rate', 'worker', 'follower', 'request_key', 'alert', 'schedule', 'audit_head', 'job_type'] loop
    execute format('delete from %I', part);
  end loop;
  delete from act c where c.no > _acts_before_move();
  delete from meta m where m.name = 'home_issuer' or m.name like 'alert\_%';
  update sweeper s set tick = null;
  update feed_end f set pos = 0;
end $$;
