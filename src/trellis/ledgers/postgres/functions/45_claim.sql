-- Claim. Rows of `ready` are never updated, so a ctid locked here stays valid for the delete. The low-water marks let a
-- claimer start behind the rows it took before, which matters while an old snapshot prevents their removal. A claim
-- that finds too little behind its marks searches again from the beginning: a job that got its key's slot keeps its
-- older position, and a job may commit late. So a claim returns fewer jobs than asked only when there are no more, or
-- when the key of a job that it found has no token any more.

-- The only job that must run alone and may be handed out now: the first one, while no other is held. The lock lasts
-- until the claim commits, so that two claimers cannot both find that none is held.
create or replace function _next_alone(p_lifecycle smallint, p_types int[]) returns bigint language plpgsql set search_path from current as $$
declare first bigint;
begin
  select r.id into first from ready r join job j on j.id = r.id
   where r.deaths > 0 and r.lifecycle = p_lifecycle and r.type = any(p_types)
     and _runs_alone(r.deaths, j.max_deaths, r.attempt, r.max_attempts) order by r.prio, r.pos limit 1;
  if first is null or not _try_work_lock('alone') then return null; end if;
  if exists (select from lease d join job j on j.id = d.id where d.deaths > 0 and d.lifecycle = p_lifecycle
                and _runs_alone(d.deaths, j.max_deaths, d.attempt, d.max_attempts)) then return null; end if;
  return first;
end $$;

-- The first ready rows of some queues, at most p_room, locked. A queue is a pair of a priority and a type: those of the first priority
-- come first, in the order of p_types. p_lows has the mark of each. With p_only, that job and no other.
create or replace function _search(
  p_lifecycle smallint, p_types int[], p_prios smallint[], p_lows bigint[], p_room int, p_isolates boolean, p_alone bigint, p_only bigint)
returns tid[]
language plpgsql set search_path from current as $$
declare width int := cardinality(p_types);
begin
  return array(
    select h.place from generate_series(1, cardinality(p_lows)) q(n) cross join lateral (
        select r.ctid as place from ready r
         where r.type = p_types[(q.n - 1) % width + 1] and r.prio = p_prios[(q.n - 1) / width + 1] and r.pos >= p_lows[q.n]
           and r.lifecycle = p_lifecycle and (p_only is null or r.id = p_only)
           and (r.deaths = 0 or not p_isolates or r.id = p_alone or not _runs_alone(
                  r.deaths, (select j.max_deaths from job j where j.id = r.id), r.attempt, r.max_attempts))
         order by r.pos limit p_room for update skip locked) h
     limit p_room);
end $$;

-- One search for all queues, unless a type has a budget: then each queue is searched by itself, because what one takes is missing to the
-- next of its type.
create or replace function _pick(
  p_lifecycle smallint, p_types int[], p_prios smallint[], p_lows bigint[], p_want int, p_now timestamptz, p_isolates boolean,
  p_only text)
returns tid[]
language plpgsql set search_path from current as $$
declare
  picked tid[];
  found_tids tid[];
  kinds job_type[];
  budget int[];
  has_budget boolean;
  has_deaths boolean;
  alone bigint;
  open_types int[] := p_types;
  only_id bigint;
  only_pos bigint;
  i int;
  p int;
  room int;
  taken int[];
  rated boolean;
begin
  if p_want = 0 then return '{}'; end if;
  select exists (select from type_options o where o.rate_per_key is not null),
         p_isolates and exists (select from ready r where r.deaths > 0),
         exists (select from job_type k where k.id = any(p_types) and (k.paused or k.rate_per_s is not null or k.held_max is not null))
    into rated, has_deaths, has_budget;
  if rated then perform _promote_due(p_want, p_now); end if;
  if has_budget then
    kinds := array(select k from job_type k where k.id = any(p_types) order by array_position(p_types, k.id));
    for i in 1 .. cardinality(p_types) loop
      if kinds[i].paused then budget[i] := 0;
      elsif kinds[i].rate_per_s is not null then budget[i] := _refill(kinds[i].id, p_now);
      end if;
      if kinds[i].held_max is not null and coalesce(budget[i], 1) > 0 then
        -- The row stays locked until the claim commits, so that two claimers cannot both count the same free room.
        perform from job_type t where t.id = kinds[i].id for update;
        budget[i] := least(budget[i], greatest(0, kinds[i].held_max - (select count(*)::int from lease d where d.type = kinds[i].id)));
      end if;
    end loop;
    open_types := array(select p_types[n] from generate_subscripts(p_types, 1) n where coalesce(budget[n], 1) > 0);
  end if;
  if p_only is not null then
    select j.id into only_id from job j where j.job_id = p_only and j.lifecycle = p_lifecycle and j.type = any(open_types);
    perform _overtake(only_id);
    select r.pos into only_pos from ready r where r.id = only_id;
    if not found then return '{}'; end if;
    -- The search begins at the job itself, and ends with it.
    p_lows := array_fill(only_pos, array[cardinality(p_lows)]);
    p_want := least(p_want, 1);
  end if;
  if has_deaths then alone := _next_alone(p_lifecycle, open_types); end if;
  loop
    if has_budget then
      picked := '{}';
      taken := array_fill(0, array[cardinality(p_types)]);
      for p in 1 .. cardinality(p_prios) loop
        for i in 1 .. cardinality(p_types) loop
          room := least(p_want - cardinality(picked), coalesce(budget[i] - taken[i], p_want));
          continue when room <= 0;
          found_tids := _search(p_lifecycle, p_types[i:i], p_prios[p:p], array[p_lows[(p - 1) * cardinality(p_types) + i]], room,
                                p_isolates, alone, only_id);
          picked := picked || found_tids;
          taken[i] := taken[i] + cardinality(found_tids);
        end loop;
      end loop;
    else
      picked := _search(p_lifecycle, p_types, p_prios, p_lows, p_want, p_isolates, alone, only_id);
    end if;
    exit when cardinality(picked) >= p_want or 0 = all(p_lows);
    -- The rows found are locked by this transaction, so the search from the beginning finds them again.
    p_lows := array_fill(0::bigint, array[cardinality(p_lows)]);
  end loop;
  if has_budget then
    for i in 1 .. cardinality(p_types) loop
      if taken[i] > 0 and kinds[i].rate_per_s is not null then
        update job_type t set tokens = t.tokens - taken[i] where t.id = p_types[i];
      end if;
    end loop;
  end if;
  if rated then return _take_tokens(picked, p_now); end if;
  return picked;
end $$;

-- The rate limit of a type: its whole tokens, refilled to now. Its row stays locked until the claim commits.
create or replace function _refill(p_type int, p_now timestamptz) returns int language plpgsql set search_path from current as $$
declare whole int;
begin
  update job_type t
     set tokens = least(t.burst, t.tokens + coalesce(extract(epoch from p_now - t.refilled_at) * t.rate_per_s, t.burst)),
         refilled_at = p_now
   where t.id = p_type returning floor(t.tokens)::int into whole;
  return whole;
end $$;

-- A claim returns its jobs as one row of arrays, in claim order, because rows of many columns cost more to transfer
-- than to find. Large values (a large payload, a checkpoint, values that few jobs have) follow as rows of their own.
--
-- The next function returns the jobs of an earlier claim with the same id, if they are still held under it.
create or replace function _claimed_before(p_claim bigint, p_actor int, p_lifecycle smallint, p_types int[]) returns claimed language sql stable set search_path from current as $$
  select array_agg(d.id), array_agg(d.epoch), array_agg(d.state), array_agg(d.type), array_agg(d.attempt), array_agg(d.generation),
         array_agg(d.max_attempts), array_agg(d.deaths), array_agg(j.job_id), array_agg(null::bytea), array_agg(j.correlation_id),
         array_agg(d.prio), array_agg(null::bigint), array_agg(d.id)
    from (select * from lease d where d.claim = p_claim and d.owner = p_actor and d.lifecycle = p_lifecycle and d.type = any(p_types)
           order by d.id) d join job j on j.id = d.id
$$;

create or replace function _claim(
  p_actor int, p_role smallint, p_now timestamptz, p_batch bigint, l lifecycle, p_claim text, p_types int[], p_lease_ms int[],
  p_beat_ms int[], p_prios smallint[], p_lows bigint[], p_start int, p_prefetch int, p_isolates boolean,
  p_only text)
returns claimed language plpgsql set search_path from current as $$
#variable_conflict use_column
declare
  c claimed;
  claim_no bigint;
  picked tid[];
  -- Plain variables: a field of `l` would be unpacked again for every job.
  claim_to smallint[] := l.claim_to;
  claim_event smallint[] := l.claim_event;
  start_to smallint[] := l.start_to;
  start_event smallint[] := l.start_event;
  start_roles int[] := l.start_roles;
  inline constant int := 8192;
begin
  if l.claim_roles & (1 << p_role::int) = 0 then
    raise exception 'role % may not claim here', p_role using errcode = 'TR002';
  end if;
  select k.no into claim_no from claim k where k.claim_id = p_claim;
  if claim_no is not null then return _claimed_before(claim_no, p_actor, l.lifecycle, p_types); end if;
  picked := _pick(l.lifecycle, p_types, p_prios, p_lows, p_start + p_prefetch, p_now, p_isolates, p_only);
  if cardinality(picked) = 0 then return null; end if;
  insert into claim (claim_id, at) values (p_claim, p_now) on conflict do nothing returning no into claim_no;
  if claim_no is null then
    select k.no into claim_no from claim k where k.claim_id = p_claim;
    return _claimed_before(claim_no, p_actor, l.lifecycle, p_types);
  end if;
  p_batch := coalesce(p_batch, _open_batch());
  with taken as (
    delete from ready r using unnest(picked) with ordinality u(place, n) where r.ctid = u.place
    returning r.id, r.ckey, r.type, r.version, r.epoch + 1 as epoch, r.generation, r.attempt, r.max_attempts, r.deaths, r.prio,
              r.flags, r.pos, r.state, u.n, claim_to[r.state] as claimed_state, array_position(p_types, r.type) as k,
              -- A job that must run alone is not started here: the other jobs of its worker may have to end first, and
              -- may kill it.
              case when u.n <= p_start and start_roles[claim_to[r.state]] & (1 << p_role::int) <> 0
                    and (r.deaths = 0 or not p_isolates or not _runs_alone(
                           r.deaths, (select j.max_deaths from job j where j.id = r.id), r.attempt, r.max_attempts))
                   then start_to[claim_to[r.state]] end as started_state
  ), d as (
    insert into lease (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle,
                       prio, flags, lease_ms, beat_ms, claim)
    select t.id, t.ckey, p_now + _length(p_lease_ms[t.k], p_beat_ms[t.k]), t.type,
           t.version + (t.claimed_state is not null)::int + (t.started_state is not null)::int, t.epoch, p_actor, t.generation, t.attempt,
           t.max_attempts, t.deaths, coalesce(t.started_state, t.claimed_state, t.state), l.lifecycle, t.prio, t.flags,
           p_lease_ms[t.k], p_beat_ms[t.k], claim_no
      from taken t
  ), e as (
    insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role)
    select t.id, p_batch, p_now, t.version + 1, p_actor, t.epoch, claim_event[t.state], l.lifecycle, t.state, t.claimed_state,
           t.generation, t.attempt, p_role from taken t where t.claimed_state is not null
    union all
    select t.id, p_batch, p_now, t.version + 2, p_actor, t.epoch, start_event[t.claimed_state], l.lifecycle, t.claimed_state,
           t.started_state, t.generation, t.attempt, p_role from taken t where t.started_state is not null
  )
  -- In the order of the claim, whichever way the server joins.
  select array_agg(t.id order by t.n), array_agg(t.epoch order by t.n),
         array_agg(coalesce(t.started_state, t.claimed_state, t.state) order by t.n), array_agg(t.type order by t.n),
         array_agg(t.attempt order by t.n), array_agg(t.generation order by t.n), array_agg(t.max_attempts order by t.n),
         array_agg(t.deaths order by t.n), array_agg(j.job_id order by t.n),
         array_agg(case when octet_length(j.payload) <= inline then j.payload end order by t.n),
         array_agg(j.correlation_id order by t.n), array_agg(t.prio order by t.n), array_agg(t.pos order by t.n),
         array_agg(t.id order by t.n) filter (where t.epoch > 1 or t.attempt > 0 or t.flags <> 0 or j.trace is not null or j.parent_id is not null
                                                or j.deadline_at is not null or octet_length(j.payload) > inline)
    into c from taken t join job j on j.id = t.id;
  return c;
end $$;
