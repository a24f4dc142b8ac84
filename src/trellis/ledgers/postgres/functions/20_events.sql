-- Checks on every insert of an event, whoever makes it. Refused are an undeclared transition, a version gap, a source
-- that is not the previous target, and a decreasing (generation, attempt, rank) or epoch. The primary key refuses two
-- events for one version. Partitions of `event` cover 4,194,304 jobs each.

-- Whether an event is refused. The arguments that begin with b are of the event before it, null if there is none. This
-- function has no settings of its own, so that the planner puts it into the query.
create or replace function _is_refused(
  p_version int, p_lifecycle smallint, p_role smallint, p_from smallint, p_to smallint, p_epoch int, p_generation smallint, p_attempt int,
  b_lifecycle smallint, b_to smallint, b_epoch int, b_generation smallint, b_attempt int) returns boolean language sql immutable as $$
  select not trellis._declared(p_lifecycle, p_role, p_from, p_to)
      or case when p_version = 1 then p_from <> 0 or p_generation <> 0 or p_attempt <> 0
              else b_to is null or b_to <> p_from or b_lifecycle <> p_lifecycle or p_epoch < b_epoch
                   or (p_generation, p_attempt, trellis._rank(p_lifecycle, p_to))
                      < (b_generation, b_attempt, trellis._rank(b_lifecycle, b_to)) end
$$;

-- The event before each new one is read one by one, or, where many events of at most three neighbouring versions come together,
-- in one pass over the index. `turn` says by a setting that many may come; what is refused does not depend on it. The pass is
-- joined by hashing. `offset 0` leaves the planner only the nested loop for the reads one by one. A first event has no previous
-- one: the null spares the index three page reads for each new job. Submits say by another setting that there are only first events.
-- Where that holds, and none of them is refused, no earlier event is looked for: preparing that takes a fifth of a submit of one job,
-- and longer with each partition.
create or replace function _check_events() returns trigger language plpgsql
set search_path from current set enable_hashjoin = on set enable_nestloop = off set enable_mergejoin = off set enable_seqscan = off
set plan_cache_mode = force_generic_plan as $$
declare
  bad record;
  ids bigint[];
  low int;
  high int;
begin
  if current_setting('trellis.first_events', true) = 'on' then
    perform from new_events n
     where n.version <> 1 or _is_refused(1, n.lifecycle, n.role, n.from_state, n.to_state, n.epoch, n.generation, n.attempt,
                                         null::smallint, null::smallint, null::int, null::smallint, null::int) limit 1;
    if not found then return null; end if;
  elsif current_setting('trellis.many_events', true) = 'on' then
    select array_agg(n.id), min(n.version) - 1, max(n.version) - 1 into ids, low, high from new_events n where n.version > 1;
  end if;
  if cardinality(ids) >= 20 and high - low <= 2 then
    select n.* into bad from new_events n left join (
        select e.id, e.version, e.lifecycle, e.to_state, e.epoch, e.generation, e.attempt from event e
         where e.id = any(ids) and e.version between low and high) p on p.id = n.id and p.version = n.version - 1
     where _is_refused(n.version, n.lifecycle, n.role, n.from_state, n.to_state, n.epoch, n.generation, n.attempt,
                       p.lifecycle, p.to_state, p.epoch, p.generation, p.attempt) limit 1;
  else
    select n.* into bad from new_events n left join lateral (
        select e.lifecycle, e.to_state, e.epoch, e.generation, e.attempt from event e
         where e.id = n.id and e.version = nullif(n.version - 1, 0) offset 0) p on true
     where _is_refused(n.version, n.lifecycle, n.role, n.from_state, n.to_state, n.epoch, n.generation, n.attempt,
                       p.lifecycle, p.to_state, p.epoch, p.generation, p.attempt) limit 1;
  end if;
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

-- Makes missing summaries of the index on (batch, at): for each partition p_parts[i] from its range p_ranges[i] on, from the first one of
-- other partitions. Returns how many ranges of each have one now, and how many should. Stops after 10 ms, and at once where a vacuum runs,
-- which makes them itself. The last two ranges have none: they may still be filled. Takes no transaction id, so the feed does not wait for
-- it.
create or replace function summarize_events(p_parts bigint[], p_ranges bigint[]) returns table (part bigint, ranges bigint, whole bigint)
language plpgsql security definer set search_path from current set lock_timeout = '1ms' as $$
declare
  ends constant timestamptz := clock_timestamp() + interval '10 ms';
  pages int;
  brins regclass[];
begin
  -- A partition of an earlier version has two such indexes.
  for part, brins, pages, whole, ranges in
    select o.part, o.brins, o.pages, o.whole, least(greatest(coalesce(k.ranges, 0), 0), o.whole)
      from (select substr(c.relname, 7)::bigint as part, array_agg(i.indexrelid::regclass) as brins, min(p.pages) as pages,
                   greatest(pg_relation_size(c.oid) / current_setting('block_size')::int / min(p.pages) - 1, 0) as whole
              from pg_inherits h join pg_class c on c.oid = h.inhrelid join pg_index i on i.indrelid = c.oid
              join pg_class x on x.oid = i.indexrelid join pg_am a on a.oid = x.relam
              cross join lateral (
                select coalesce((select substr(n, 17)::int from unnest(x.reloptions) n where n like 'pages_per_range=%'), 128) as pages) p
             where h.inhparent = 'event'::regclass and a.amname = 'brin' group by c.oid, c.relname) o
      left join (select u.part, min(u.ranges) as ranges from unnest(p_parts, p_ranges) u(part, ranges) group by u.part) k on k.part = o.part
     order by o.part desc
  loop
    begin
      while ranges < whole and clock_timestamp() < ends loop
        perform brin_summarize_range(b.name, ranges * pages) from unnest(brins) b(name);
        ranges := ranges + 1;
      end loop;
    exception when lock_not_available then null;
    end;
    return next;
  end loop;
end $$;
