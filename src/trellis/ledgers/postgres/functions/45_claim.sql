-- Claim. Rows of `ready` are never updated, so a ctid locked here stays good for the delete. The low-water marks let a
-- claimer start behind the rows it took before, which matters while an old snapshot keeps those rows from being removed.

create or replace function _pick(
  p_lifecycle smallint, p_types int[], p_prios smallint[], p_lows bigint[], p_want int, p_now timestamptz) returns tid[]
language plpgsql set search_path from current as $$
declare
  picked tid[] := '{}';
  found_tids tid[];
  kinds job_type[] := array(select k from job_type k where k.id = any(p_types) order by array_position(p_types, k.id));
  budget int[];
  i int;
  p int;
  room int;
begin
  for i in 1 .. cardinality(p_types) loop
    if kinds[i].paused then budget[i] := 0;
    elsif kinds[i].rate_per_s is not null then budget[i] := _refill(kinds[i].id, p_now);
    end if;
  end loop;
  for p in 1 .. cardinality(p_prios) loop
    for i in 1 .. cardinality(p_types) loop
      room := least(p_want - cardinality(picked), coalesce(budget[i], p_want));
      continue when room <= 0;
      found_tids := array(select r.ctid from ready r
                     where r.type = p_types[i] and r.prio = p_prios[p] and r.pos >= p_lows[(p - 1) * cardinality(p_types) + i]
                       and r.lifecycle = p_lifecycle
                     order by r.pos limit room for update skip locked);
      if cardinality(found_tids) > 0 then
        picked := picked || found_tids;
        if budget[i] is not null then
          budget[i] := budget[i] - cardinality(found_tids);
          update job_type t set tokens = t.tokens - cardinality(found_tids) where t.id = p_types[i];
        end if;
      end if;
    end loop;
  end loop;
  return picked;
end $$;

-- The whole tokens of a rate-limited type, refilled to now; its row stays locked until the claim commits.
create or replace function _refill(p_type int, p_now timestamptz) returns int language plpgsql set search_path from current as $$
declare whole int;
begin
  update job_type t
     set tokens = least(t.burst, t.tokens + coalesce(extract(epoch from p_now - t.refilled_at) * t.rate_per_s, t.burst)),
         refilled_at = p_now
   where t.id = p_type returning floor(t.tokens)::int into whole;
  return whole;
end $$;

-- What few jobs have, as JSON, so that most rows stay narrow.
create or replace function _extra(j job, p_now timestamptz) returns text language sql stable set search_path from current as $$
  select json_build_object(
    'trace', j.trace, 'parent_id', j.parent_id, 'compensates', (select o.job_id from job o where o.id = j.compensates),
    'deadline_s', extract(epoch from j.deadline_at - p_now),
    'checkpoint', (select encode(c.body, 'base64') from checkpoint c where c.id = j.id))::text
$$;

create or replace function _claimed(p_ids bigint[], p_now timestamptz)
returns table (
  kind smallint, id bigint, epoch int, state smallint, type int, attempt int, generation smallint, max_attempts int,
  deaths smallint, prio smallint, pos bigint, job_id text, payload bytea, correlation_id text, created_at timestamptz, extra text,
  ids bigint[], versions int[])
language sql stable set search_path from current as $$
  select 0::smallint, d.id, d.epoch, d.state, d.type, d.attempt, d.generation, d.max_attempts, d.deaths, d.prio, null::bigint, j.job_id,
         j.payload, j.correlation_id, j.created_at, _extra(j, p_now), null::bigint[], null::int[]
    from lease d join job j on j.id = d.id where d.id = any(p_ids) order by d.id
$$;

create or replace function _claim(
  p_actor int, p_role smallint, p_now timestamptz, p_batch bigint, l lifecycle, p_claim text, p_types int[], p_lease_ms int[],
  p_beat_ms int[], p_prios smallint[], p_lows bigint[], p_start int, p_prefetch int)
returns table (
  kind smallint, id bigint, epoch int, state smallint, type int, attempt int, generation smallint, max_attempts int,
  deaths smallint, prio smallint, pos bigint, job_id text, payload bytea, correlation_id text, created_at timestamptz, extra text,
  ids bigint[], versions int[])
language plpgsql set search_path from current as $$
#variable_conflict use_column
declare
  claim_no bigint;
  picked tid[];
begin
  if l.claim_roles & (1 << p_role::int) = 0 then
    raise exception 'role % may not claim here', p_role using errcode = 'TR002';
  end if;
  select c.no into claim_no from claim c where c.claim_id = p_claim;
  if claim_no is null then
    picked := _pick(l.lifecycle, p_types, p_prios, p_lows, p_start + p_prefetch, p_now);
    if cardinality(picked) = 0 then return; end if;
    insert into claim (claim_id, at) values (p_claim, p_now) on conflict do nothing returning no into claim_no;
    if claim_no is not null then
      p_batch := coalesce(p_batch, _open_batch());
    else
      select c.no into claim_no from claim c where c.claim_id = p_claim;
      picked := null;
    end if;
  end if;
  if picked is null then
    return query select * from _claimed(array(select d.id from lease d where d.claim = claim_no and d.owner = p_actor), p_now);
    return;
  end if;
  return query
  with taken as (
    delete from ready r where r.ctid = any(picked)
    returning r.id, r.ckey, r.type, r.version, r.epoch + 1 as epoch, r.generation, r.attempt, r.max_attempts, r.deaths, r.state,
              r.prio, r.flags, r.pos
  ), ranked as (
    select t.*, coalesce(l.claim_to[t.state], t.state) as claimed_state, l.claim_to[t.state] is not null as moves,
           array_position(p_types, t.type) as k,
           l.claim_to[t.state] is not null and coalesce(l.start_roles[l.claim_to[t.state]] & (1 << p_role::int) <> 0, false) as may_start,
           (p_prefetch = 0 or row_number() over (order by t.prio, t.pos) <= p_start) as starts
      from taken t
  ), rows as (
    select r.*, r.starts and r.may_start as goes,
           r.version + (r.moves)::int + (r.starts and r.may_start)::int as new_version
      from ranked r
  ), d as (
    insert into lease (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle,
                       prio, flags, lease_ms, beat_ms, claim)
    select r.id, r.ckey, p_now + _length(p_lease_ms[r.k], p_beat_ms[r.k]), r.type, r.new_version, r.epoch,
           p_actor, r.generation, r.attempt, r.max_attempts, r.deaths,
           case when r.goes then l.start_to[r.claimed_state] else r.claimed_state end, l.lifecycle, r.prio, r.flags,
           p_lease_ms[r.k], p_beat_ms[r.k], claim_no
      from rows r
  ), e as (
    insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role)
    select r.id, p_batch, p_now, r.version + 1, p_actor, r.epoch, l.claim_event[r.state], l.lifecycle, r.state, r.claimed_state,
           r.generation, r.attempt, p_role from rows r where r.moves
    union all
    select r.id, p_batch, p_now, r.version + 2, p_actor, r.epoch, l.start_event[r.claimed_state], l.lifecycle, r.claimed_state,
           l.start_to[r.claimed_state], r.generation, r.attempt, p_role from rows r where r.goes
  )
  select 0::smallint, r.id, r.epoch, case when r.goes then l.start_to[r.claimed_state] else r.claimed_state end, r.type, r.attempt,
         r.generation, r.max_attempts, r.deaths, r.prio, r.pos, j.job_id, j.payload, j.correlation_id, j.created_at,
         case when r.epoch > 1 or r.flags <> 0 or j.trace is not null or j.parent_id is not null or j.deadline_at is not null
              then _extra(j, p_now) end, null::bigint[], null::int[]
    from rows r join job j on j.id = r.id order by r.prio, r.pos;
end $$;
