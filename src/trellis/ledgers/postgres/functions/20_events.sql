-- Checks on every insert of an event, whoever makes it. Refused are an undeclared transition, a version gap, a source
-- that is not the previous target, and a decreasing (generation, attempt, rank) or epoch. The primary key refuses two
-- events for one version. A first event has no previous one: the null spares the index three page reads for each new job.
-- Partitions of `event` cover 4,194,304 jobs each.

create or replace function _check_events() returns trigger language plpgsql
set search_path from current
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
declare bad record;
begin
  select n.* into bad from new_events n left join event p on p.id = n.id and p.version = nullif(n.version - 1, 0)
   where not _declared(n.lifecycle, n.role, n.from_state, n.to_state)
      or case when n.version = 1 then n.from_state <> 0 or n.generation <> 0 or n.attempt <> 0
              else p.id is null or p.to_state <> n.from_state or p.lifecycle <> n.lifecycle or n.epoch < p.epoch
                   or (n.generation, n.attempt, _rank(n.lifecycle, n.to_state))
                      < (p.generation, p.attempt, _rank(p.lifecycle, p.to_state)) end
   limit 1;
  if found then
    raise exception 'event refused: job % version %: lifecycle % role % cannot go from % to %',
      bad.id, bad.version, bad.lifecycle, bad.role, bad.from_state, bad.to_state using errcode = 'TR001';
  end if;
  return null;
end $$;

create or replace trigger check_events after insert on event referencing new table as new_events
  for each statement execute function _check_events();

create or replace function _refuse_change() returns trigger language plpgsql as $$
begin
  raise exception 'events are never changed' using errcode = 'TR001';
end $$;
create or replace trigger refuse_update before update or truncate on event for each statement execute function _refuse_change();

-- The partition of a job's events.
create or replace function _partition_of(p_id bigint) returns bigint language sql immutable as $$ select p_id / 4194304 $$;

create or replace function _make_partition(p_n bigint) returns void language plpgsql set search_path from current as $$
declare
  size constant bigint := 4194304;
  part text := format('event_%s', p_n);
begin
  if to_regclass(part) is null then
    execute format('create table %I partition of event for values from (%s) to (%s)', part, p_n * size, (p_n + 1) * size);
    -- One index for both: a search by either column is the same, and every insert visits one index less.
    execute format('create index on %I using brin (batch, at) with (pages_per_range = 16, autosummarize = on)', part);
    execute format('create index on %I (request) where request is not null', part);
  end if;
end $$;

-- Creates the partitions that the next jobs need, and the look-up index (type, at) of earlier, complete ones.
create or replace function _ensure_partitions() returns void language plpgsql set search_path from current as $$
declare
  next bigint;
  part text;
begin
  if not _try_work_lock('partitions') then return; end if;
  next := _partition_of(coalesce(pg_sequence_last_value(pg_get_serial_sequence('job', 'id')), 0));
  perform _make_partition(next), _make_partition(next + 1);
  for part in select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
               where i.inhparent = 'event'::regclass and substr(c.relname, 7)::bigint < next loop
    if to_regclass(part || '_type_at') is null then
      execute format('create index %I on %I (type, at)', part || '_type_at', part);
    end if;
  end loop;
end $$;
