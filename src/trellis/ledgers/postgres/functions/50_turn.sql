-- A holder's turn: complete jobs, start prefetched ones, make the rarer steps, claim more. One transaction. Every step
-- is fenced by the lease's epoch: a late result, of a holder that lost its lease, changes nothing.

-- The finalized artifacts of a job, including those in a state that follows finalization.
create or replace function _final_artifacts(p_parent text) returns table (id bigint, job_id text) language sql stable
set search_path from current as $$
  select a.id, a.job_id from job a join transition x on x.lifecycle = a.lifecycle and x.trigger = 'finalize'
    join event e on e.id = a.id and e.type = x.event where a.parent_id = p_parent
$$;

-- The artifact that a job completes with makes its own step first, under the same actor. It must be staged and belong
-- to the job; otherwise nothing of the turn is written.
create or replace function _finalize(
  t token, x transition, p_artifact text, p_actor int, p_role smallint, p_now timestamptz, p_batch bigint) returns void
language plpgsql set search_path from current as $$
declare
  by_job text := (select j.job_id from job j where j.id = t.id);
  k record;
  own transition;
  reason text;
begin
  select f.* into k from job a, lateral _find(a.id) f where a.job_id = p_artifact and a.parent_id = by_job;
  if not found or k.place is null then
    reason := p_artifact || ' is no artifact of this job';
  else
    select r.* into own from transition r where r.lifecycle = (k.t).lifecycle and r.source = (k.t).state and r.trigger = 'finalize';
    if not found then
      reason := format('artifact %s is %s', p_artifact,
                       (select s.name from state s where s.lifecycle = (k.t).lifecycle and s.state = (k.t).state));
    end if;
  end if;
  if reason is null then
    select format('artifact %s of this job is final', o.job_id) into reason from _final_artifacts(by_job) o limit 1;
  end if;
  if reason is not null then
    raise exception 'job % cannot be completed: %', by_job, reason using errcode = 'TR005', detail = json_build_object(
      'job_id', by_job, 'reason', reason, 'actor', (select r.name from role r where r.role = p_role),
      'source', (select s.name from state s where s.lifecycle = x.lifecycle and s.state = x.source),
      'target', (select s.name from state s where s.lifecycle = x.lifecycle and s.state = x.target));
  end if;
  perform _remove((k.t).id, k.place);
  perform _step(k.t, own, p_actor, p_role, p_now, p_batch, null, false, 'finalized by ' || by_job);
end $$;

-- Whether this artifact of the job was finalized, including later states.
create or replace function _is_final(p_job bigint, p_artifact text) returns boolean language sql stable set search_path from current as $$
  select exists (select from job a join job j on j.job_id = a.parent_id join event e on e.id = a.id
                   join transition x on x.lifecycle = a.lifecycle and x.trigger = 'finalize' and x.event = e.type
                  where a.job_id = p_artifact and j.id = p_job)
$$;

-- Whether this is a start by the claiming role. It asks whether user code may run, so its lease must be alive. Where
-- another role starts jobs, the start reports work that already runs, and only the epoch decides.
create or replace function _asks_to_start(x transition) returns boolean language sql stable set search_path from current as $$
  select x.trigger = 'start' and x.roles & l.claim_roles <> 0 from lifecycle l where l.lifecycle = x.lifecycle
$$;

-- The rarer steps come as a JSON array, one object each; most carry an error, a delay or a dead letter. One answer per
-- step, in order. `later` is the number of steps of the same lease that follow.
create or replace function _advance_others(p_others jsonb, p_actor int, p_role smallint, p_now timestamptz, p_batch bigint)
returns table (kind smallint, id bigint, version int) language plpgsql set search_path from current as $$
#variable_conflict use_column
declare
  o record;
  x transition;
  s state;
  t token;
  cancelled int;
begin
  if _is_limited() then
    perform _check_holder(p_role, array(select (u.step ->> 'id')::bigint from jsonb_array_elements(p_others) u(step)));
  end if;
  for o in select * from jsonb_to_recordset(p_others) as r(
      id bigint, epoch int, lifecycle smallint, source smallint, trigger text, delay float8, spare boolean, cause text, data text,
      result text, ttl float8, reason text, stage text, error text, version int, finalizes text, guarded boolean, wait jsonb, n int,
      later int) order by r.n loop
    select r.* into x from transition r where r.lifecycle = o.lifecycle and r.source = o.source and r.trigger = o.trigger and r.fenced;
    if not found then
      raise exception 'lifecycle % declares no % from state % for a holder', o.lifecycle, o.trigger, o.source using errcode = 'TR001';
    elsif x.finalizes <> (o.finalizes is not null) then
      raise exception 'job %: exactly a step that finalizes names an artifact', o.id using errcode = 'TR001';
    elsif (x.trigger = 'suspend') <> (o.wait is not null) then
      raise exception 'job %: exactly a step that suspends says what the job waits for', o.id using errcode = 'TR001';
    end if;
    select n.* into s from state n where n.lifecycle = x.lifecycle and n.state = x.target;
    cancelled := null;
    if ((x.trigger = 'start' and o.later = 0) or s.phase = 0)
       and exists (select from lease l where l.id = o.id and l.epoch = o.epoch and l.state = o.source and l.lifecycle = o.lifecycle
                     and l.cancel_at is not null and (o.version is null or l.version = o.version)) then
      -- A cancel was requested and no user code runs, before a start or when the holder releases the job: cancel now.
      -- If later steps of the same lease follow a start in the turn, the work has already run.
      cancelled := _cancel_now(o.id, p_actor, p_now, p_batch, ((_decide(o.lifecycle, o.source, 'cancel_let_go', 0)).d).cause);
      if cancelled is not null then
        return query select case when x.trigger = 'start' then 1 else 3 end::smallint, o.id, cancelled;
        continue;
      end if;
      -- The lifecycle has no cancel here. The request does not apply to the next holder.
      if s.phase = 0 then delete from wish w where w.id = o.id; end if;
    end if;
    if s.phase = 1 then
      update lease l set state = x.target, version = l.version + 1, until = p_now + _length(l.lease_ms, l.beat_ms)
       where l.id = o.id and l.epoch = o.epoch and l.state = o.source and l.lifecycle = o.lifecycle
         and (o.version is null or l.version = o.version) and (l.until > p_now or not _asks_to_start(x))
      returning l.id, l.ckey, l.until, l.type, l.version, l.epoch, l.owner, l.generation, l.attempt, l.max_attempts, l.deaths,
                l.state, l.lifecycle, l.prio, l.flags into t;
      if found then
        insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role,
                           cause, data)
        values (t.id, p_batch, p_now, t.version, p_actor, t.epoch, x.event, t.lifecycle, x.source, x.target, t.generation,
                t.attempt, p_role, o.cause, convert_to(o.data, 'UTF8'));
      end if;
    else
      delete from lease l where l.id = o.id and l.epoch = o.epoch and l.state = o.source and l.lifecycle = o.lifecycle
         and (o.version is null or l.version = o.version) and (l.cancel_at is null or o.guarded is not true)
      returning l.id, l.ckey, l.until, l.type, l.version, l.epoch, l.owner, l.generation, l.attempt, l.max_attempts, l.deaths,
                l.state, l.lifecycle, l.prio, l.flags into t;
      if found then
        if x.finalizes then perform _finalize(t, x, o.finalizes, p_actor, p_role, p_now, p_batch); end if;
        t := _step(t, x, p_actor, p_role, p_now, p_batch,
                   case when o.delay > 0 then p_now + o.delay * interval '1 s' when o.delay is not null and not s.claimable then p_now end,
                   coalesce(o.spare, false) and s.phase = 0, o.cause, null, convert_to(o.data, 'UTF8'), o.reason, o.stage, o.error);
        if o.result is not null and s.success then
          insert into result (id, at, expires_at, body)
          values (t.id, p_now, p_now + o.ttl * interval '1 s', decode(o.result, 'base64'));
        end if;
        if o.wait is not null then perform _begin_wait(t.id, o.epoch, o.wait, p_batch); end if;
      end if;
    end if;
    if t.id = o.id then
      return query select 3::smallint, o.id, t.version;
    else
      -- A step that released a job with a cancel request was replaced by the cancel: the first event of the next epoch,
      -- under the holder's name.
      return query select coalesce(c.kind, r.kind), r.id, coalesce(c.version, r.version)
        from _was_applied(o.id, o.epoch, x.source, x.target, x.event, o.version, o.finalizes, o.later) r
        left join lateral (select 2::smallint as kind, e.version from event e join transition n on n.lifecycle = e.lifecycle
                              and n.source = e.from_state and n.trigger = 'cancel' and n.target = e.to_state and n.event = e.type
                            where s.phase = 0 and e.id = o.id and e.epoch = o.epoch + 1 and e.actor = p_actor
                              and e.from_state = o.source and e.request is null and (o.version is null or e.version = o.version + 1)
                              and not exists (select from event b where b.id = e.id and b.version = e.version - 1 and b.epoch = e.epoch)
                            order by e.version limit 1) c on true;
    end if;
    t := null;
  end loop;
end $$;

-- For a step that found no lease to move: kind 2 (repeated) or 1 (lost). It is a repeat if it is the last step that a
-- holder made in its epoch, or, if `p_later` steps of the same turn follow it, one of the last p_later + 1, or the one
-- at the version it names. A step into a held state also needs the job to still have that epoch. A step that names an
-- artifact must have finalized that one. Steps that others made in the same epoch after the holder released the job do
-- not count.
create or replace function _was_applied(
  p_id bigint, p_epoch int, p_source smallint, p_target smallint, p_type smallint, p_version int, p_artifact text, p_later int)
returns table (kind smallint, id bigint, version int) language sql stable set search_path from current as $$
  select case when e.version is not null
                   and (not exists (select from state s where s.lifecycle = e.lifecycle and s.state = p_target and s.phase = 1)
                        or exists (select from lease d where d.id = p_id and d.epoch = p_epoch)
                        or (p_later > 0 and exists (
                              select from ended n where n.id = p_id and n.epoch = p_epoch union all
                              select from ready n where n.id = p_id and n.epoch = p_epoch union all
                              select from resting n where n.id = p_id and n.epoch = p_epoch union all
                              select from parked n where n.id = p_id and n.epoch = p_epoch)))
                   and (p_artifact is null or _is_final(p_id, p_artifact)) then 2 else 1 end::smallint,
         p_id, e.version
    from (select) one left join lateral (
      select h.version, h.lifecycle from (
        select o.from_state, o.to_state, o.version, o.type, o.lifecycle from event o
         where o.id = p_id and o.epoch = p_epoch and (p_version is null or o.version = p_version + 1) and o.request is null
           and exists (select from transition x where x.lifecycle = o.lifecycle and x.source = o.from_state and x.target = o.to_state
                          and x.event = o.type and x.fenced)
         order by o.version desc limit p_later + 1) h
       where h.to_state = p_target and h.type = p_type and (p_source is null or h.from_state = p_source)
       order by h.version desc limit 1) e on true
$$;

-- Answers: kinds 1 to 3 are outcomes of steps (lost, repeated, applied); `part` says whether of a start, a completion
-- or another step. Kind 0 holds the claimed jobs, kind 4 the large values of a claimed job. Kind 5: jobs were resumed.
create or replace function turn(
  p_actor int, p_lifecycle smallint,
  p_done bigint[], p_done_epochs int[], p_done_source smallint, p_results bytea[], p_ttls float8[],
  p_starts bigint[], p_start_epochs int[],
  p_others jsonb,
  p_claim text, p_types int[], p_lease_ms int[], p_beat_ms int[], p_prios smallint[], p_lows bigint[], p_start int, p_prefetch int,
  p_isolates boolean, p_only text)
returns table (
  kind smallint, part smallint, id bigint, version int, ids bigint[], versions int[], epochs int[], states smallint[], types int[],
  attempts int[], generations smallint[], max_attempts int[], deaths smallint[], job_ids text[], payloads bytea[],
  correlations text[], prios smallint[], places bigint[], payload bytea, extra text)
language plpgsql security definer set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  l lifecycle;
  now_at timestamptz := trellis.now();
  batch_no bigint;
  got bigint[];
  got_versions int[];
  keyed bigint[];
  keys bigint[];
  compensations bigint[];
  woke boolean := false;
  has_family boolean := false;
  linked boolean := false;
  one bigint;
  told record;
  c claimed;
begin
  select f.* into l from lifecycle f where f.lifecycle = p_lifecycle;
  if p_starts is not null or p_done is not null then
    perform _check_holder(a.role, coalesce(p_starts, '{}') || coalesce(p_done, '{}'));
  end if;
  if greatest(cardinality(p_starts), cardinality(p_done), p_start + p_prefetch) >= 20 then
    perform set_config('trellis.many_events', 'on', true);  -- for the check of events, until the transaction ends
  end if;
  if p_others is not null then
    perform _lock_family(coalesce(p_done, '{}') || array(select (u.step ->> 'id')::bigint from jsonb_array_elements(p_others) u(step)));
    has_family := true;
  elsif p_done is not null then
    perform from spawned s where s.id = any(p_done) order by s.id, s.parent for update;
    has_family := found;
  end if;
  if p_starts is not null then
    batch_no := coalesce(batch_no, _open_batch());
    with x as (
      update lease d set state = l.start_to[d.state], version = d.version + 1,
                         until = now_at + _length(d.lease_ms, d.beat_ms)
       where d.id = any(p_starts) and d.epoch = p_start_epochs[width_bucket(d.id, p_starts)] and d.lifecycle = p_lifecycle
         and l.start_to[d.state] is not null and d.cancel_at is null
         and (d.until > now_at or l.start_roles[d.state] & l.claim_roles = 0)
      returning d.id, d.version, d.epoch, d.generation, d.attempt, d.state
    ), e as (
      insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role)
      select x.id, batch_no, now_at, x.version, p_actor, x.epoch, l.start_event[f.n], p_lifecycle, f.n, x.state, x.generation,
             x.attempt, a.role from x, lateral (select array_position(l.start_to, x.state)::smallint as n) f
    )
    select array_agg(x.id), array_agg(x.version) into got, got_versions from x;
    if coalesce(cardinality(got), 0) < cardinality(p_starts) then
      for told in select w.*, c.cancel_at, c.lifecycle, c.state from (select u.id, u.epoch from unnest(p_starts, p_start_epochs) u(id, epoch)
          where got is null or u.id <> all(got)) m
        left join lease c on c.id = m.id and c.epoch = m.epoch,
        lateral _was_applied(m.id, m.epoch, null, c.state, l.start_event[array_position(l.start_to, c.state)], null, null, 0) w loop
        -- A cancel was requested before user code began: cancel now.
        if told.cancel_at is not null and told.kind = 1 then
          perform _cancel_now(told.id, p_actor, now_at, batch_no, ((_decide(told.lifecycle, told.state, 'cancel_let_go', 0)).d).cause);
        end if;
        kind := told.kind; id := told.id; version := told.version; part := 0;
        return next;
      end loop;
    end if;
    if got is not null then
      kind := 3; id := null; part := 0; ids := got; versions := got_versions;
      return next;
      ids := null; versions := null;
    end if;
  end if;

  if p_done is not null then
    if l.done_to[p_done_source] is null then
      raise exception 'lifecycle % declares no completion from state % that names nothing', p_lifecycle, p_done_source
        using errcode = 'TR001';
    end if;
    batch_no := coalesce(batch_no, _open_batch());
    -- Looked up by its index in the sorted array, not by a join, so that the primary key is used whatever the
    -- statistics say.
    with x as (
      delete from lease d
       where d.id = any(p_done) and d.epoch = p_done_epochs[width_bucket(d.id, p_done)] and d.state = p_done_source
         and d.lifecycle = p_lifecycle
      returning d.id, d.ckey, d.type, d.version + 1 as version, d.epoch, d.owner, d.generation, d.attempt, d.max_attempts, d.deaths, d.flags,
                p_results[width_bucket(d.id, p_done)] as body, p_ttls[width_bucket(d.id, p_done)] as ttl, d.cancel_at
    ), n as (
      insert into ended (id, at, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, type)
      select x.id, now_at, x.version, x.epoch, x.owner, x.generation, x.attempt, x.max_attempts, x.deaths, l.done_to[p_done_source],
             p_lifecycle, x.type from x
    ), r as (
      insert into result (id, at, expires_at, body)
      select x.id, now_at, now_at + x.ttl * interval '1 s', x.body from x where x.body is not null
    ), e as (
      insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role, data)
      select x.id, batch_no, now_at, x.version, p_actor, x.epoch, l.done_event[p_done_source], p_lifecycle, p_done_source,
             l.done_to[p_done_source], x.generation, x.attempt, a.role,
             case when x.cancel_at is not null then _with_cancel_request(null, x.id, x.epoch) end from x
    )
    select array_agg(x.id), array_agg(x.version), array_agg(x.id) filter (where x.ckey is not null),
           array_agg(x.ckey) filter (where x.ckey is not null), array_agg(x.id) filter (where x.flags & 1 = 1),
           coalesce(bool_or(x.flags & 2 = 2), false)
      into got, got_versions, keyed, keys, compensations, linked from x;
    if keyed is not null then perform _free_slots(keyed, keys, true); end if;
    if has_family or linked then
      with gone as (delete from spawned s where s.id = any(got) returning s.parent, s.awaited)
      insert into wake (batch, id, reason) select distinct batch_no, g.parent, 'children_ended' from gone g where g.awaited;
      woke := found;
    end if;
    if compensations is not null then
      foreach one in array compensations loop perform _compensated(one, p_actor, a.role, now_at, batch_no); end loop;
    end if;
    if coalesce(cardinality(got), 0) < cardinality(p_done) then
      for told in select w.* from (select u.id, u.epoch from unnest(p_done, p_done_epochs) u(id, epoch)
          where got is null or u.id <> all(got)) m,
        lateral _was_applied(m.id, m.epoch, p_done_source, l.done_to[p_done_source], l.done_event[p_done_source], null, null, 0) w loop
        kind := told.kind; id := told.id; version := told.version; part := 1;
        return next;
      end loop;
    end if;
    if got is not null then
      kind := 3; id := null; part := 1; ids := got; versions := got_versions;
      return next;
      kind := null; ids := null; versions := null;
    end if;
  end if;

  if p_others is not null then
    batch_no := coalesce(batch_no, _open_batch());
    for told in select o.* from _advance_others(p_others, p_actor, a.role, now_at, batch_no) o loop
      kind := told.kind; id := told.id; version := told.version; part := 2;
      return next;
    end loop;
  end if;
  if (woke or p_others is not null) and _wake(batch_no, p_actor, now_at, batch_no) > 0 then
    kind := 5; part := null; id := null; version := null;
    return next;
  end if;

  if p_claim is not null then
    -- What came before may have waited. The rates of keys count by the time of the claim.
    now_at := trellis.now();
    c := _claim(p_actor, a.role, now_at, batch_no, l, p_claim, p_types, p_lease_ms, p_beat_ms, p_prios, p_lows, p_start, p_prefetch,
                p_isolates, p_only);
    if c.ids is not null then
      kind := 0; id := null; ids := c.ids; epochs := c.epochs; states := c.states; types := c.types; attempts := c.attempts;
      generations := c.generations; max_attempts := c.max_attempts; deaths := c.deaths; job_ids := c.job_ids; payloads := c.payloads;
      correlations := c.correlations; prios := c.prios; places := c.places;
      return next;
    end if;
    if c.wide is not null then
      return query select 4::smallint, null::smallint, j.id, null::int, null::bigint[], null::int[], null::int[], null::smallint[],
        null::int[], null::int[], null::smallint[], null::int[], null::smallint[], null::text[], null::bytea[], null::text[],
        null::smallint[], null::bigint[], j.payload,
        -- Values that few jobs have. Here and not in a function of its own, which would cost as much as the rest of the claim.
        json_build_object(
          'trace', j.trace, 'parent_id', j.parent_id, 'deadline_s', extract(epoch from j.deadline_at - now_at),
          'compensates', case when j.compensates is not null then (select o.job_id from job o where o.id = j.compensates) end,
          'spared', d.max_attempts - j.max_attempts,
          'runs_alone', d.deaths > 0 and _runs_alone(d.deaths, j.max_deaths, d.attempt, d.max_attempts),
          'checkpoint', (select encode(k.body, 'base64') from checkpoint k where k.id = j.id))::text
        from job j left join lease d on d.id = j.id where j.id = any(c.wide);
    end if;
  end if;
end $$;

-- Makes together, in one statement for each kind of step, the steps of many jobs that are as simple as most are: the only step of its
-- job in this call, from one held state to another; the only step, which completes the job; or a start and the completion after it. The
-- caller has locked the leases if they are of more than one job. Left out, and made one by one, are jobs with a cancel request or a
-- relation to another job, steps that name an artifact, a wait or a dead letter, and steps that would be refused. `place` numbers the
-- steps of a turn from 1.
create or replace function _advance_together(p_actors int[], p_bodies jsonb[], p_batch bigint)
returns table (turn bigint, place bigint, id bigint, version int) language plpgsql set search_path from current as $$
#variable_conflict use_column
declare
  now_at timestamptz := trellis.now();
  x transition;
  first transition;
  ends boolean;
  of_lifecycle smallint;
  by_role smallint;
  with_trigger text;
  source_state smallint;
  start_source smallint;
  ids bigint[];
  epochs int[];
  versions int[];
  actors int[];
  turns bigint[];
  places bigint[];
  causes text[];
  datas text[];
  results text[];
  ttls float8[];
  start_causes text[];
  start_datas text[];
  alive boolean;
  got bigint[];
  got_versions int[];
  got_at int[];
  keyed bigint[];
  keys bigint[];
begin
  if _is_limited() then return; end if;
  for of_lifecycle, by_role, with_trigger, source_state, start_source, ids, epochs, versions, actors, turns, places, causes, datas, results,
      ttls, start_causes, start_datas in
    select z.lifecycle, z.role, z.trigger, z.source, z.start_source, array_agg(z.id order by z.id), array_agg(z.epoch order by z.id),
           array_agg(z.version order by z.id), array_agg(z.actor order by z.id), array_agg(z.turn order by z.id),
           array_agg(z.place order by z.id), array_agg(z.cause order by z.id), array_agg(z.data order by z.id),
           array_agg(z.result order by z.id), array_agg(z.ttl order by z.id), array_agg(z.start_cause order by z.id),
           array_agg(z.start_data order by z.id)
      from (
        select u.turn, u.actor, a.role, r.*, count(*) over job as steps_of_job,
               r.reason is null and r.finalizes is null and r.wait is null and r.n = r.place - 1 as is_plain,
               lag(r.source) over job as start_source, lag(r.cause) over job as start_cause, lag(r.data) over job as start_data,
               lag(r.trigger = 'start' and r.reason is null and r.finalizes is null and r.wait is null and r.version is null) over job
                 and (lag(u.turn) over job, lag(r.place) over job, lag(r.epoch) over job, lag(r.lifecycle) over job)
                     = (u.turn, r.place - 1, r.epoch, r.lifecycle) as follows_start
          from unnest(p_actors, p_bodies) with ordinality u(actor, body, turn)
          join actor a on a.id = u.actor and a.db_role = session_user
          cross join lateral rows from (jsonb_to_recordset(u.body) as (
            id bigint, epoch int, lifecycle smallint, source smallint, trigger text, cause text, data text, result text, ttl float8,
            reason text, version int, finalizes text, wait jsonb, n int)) with ordinality as r(
            id, epoch, lifecycle, source, trigger, cause, data, result, ttl, reason, version, finalizes, wait, n, place)
        window job as (partition by r.id order by u.turn, r.place rows between unbounded preceding and unbounded following)) z
     where z.is_plain and (z.steps_of_job = 1 or (z.steps_of_job = 2 and z.trigger = 'complete' and z.version is null and z.follows_start))
     group by z.lifecycle, z.role, z.trigger, z.source, z.start_source
  loop
    select r.* into x from transition r where r.lifecycle = of_lifecycle and r.source = source_state and r.trigger = with_trigger
       and r.fenced and not r.finalizes and r.roles & (1 << by_role::int) <> 0;
    continue when not found;
    select s.phase = 2 into ends from state s where s.lifecycle = of_lifecycle and s.state = x.target
       and (s.phase = 1 or (s.phase = 2 and s.success and not s.dead_letter and with_trigger = 'complete' and x.opens = 0));
    continue when not found;
    if start_source is not null then
      select r.* into first from transition r where r.lifecycle = of_lifecycle and r.source = start_source and r.trigger = 'start'
         and r.fenced and r.target = source_state and r.opens = 0 and not r.finalizes and r.roles & (1 << by_role::int) <> 0;
      continue when not found;
    end if;
    if not ends then
      alive := _asks_to_start(x);
      return query
      with moved as (
        update lease l set state = x.target, version = l.version + 1, until = now_at + _length(l.lease_ms, l.beat_ms)
         where l.id = any(ids) and l.epoch = epochs[width_bucket(l.id, ids)] and l.state = source_state and l.lifecycle = of_lifecycle
           and coalesce(l.version = versions[width_bucket(l.id, ids)], true) and l.cancel_at is null and (l.until > now_at or not alive)
        returning l.id, l.version, l.epoch, l.generation, l.attempt, width_bucket(l.id, ids) as i
      ), e as (
        insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role, cause, data)
        select m.id, p_batch, now_at, m.version, actors[m.i], m.epoch, x.event, of_lifecycle, source_state, x.target, m.generation,
               m.attempt, by_role, causes[m.i], convert_to(datas[m.i], 'UTF8') from moved m
      )
      select turns[m.i], places[m.i], m.id, m.version from moved m;
      continue;
    end if;
    alive := start_source is not null and _asks_to_start(first);
    with gone as (
      delete from lease l
       where l.id = any(ids) and l.epoch = epochs[width_bucket(l.id, ids)] and l.state = coalesce(start_source, source_state)
         and l.lifecycle = of_lifecycle and coalesce(l.version = versions[width_bucket(l.id, ids)], true)
         and l.flags = 0 and l.cancel_at is null and (l.until > now_at or not alive)
         and not exists (select from wish w where w.id = l.id) and not exists (select from spawned c where c.id = l.id)
      returning l.id, l.ckey, l.type, l.version + 1 + (start_source is not null)::int as version, l.epoch, l.owner, l.generation, l.attempt,
                l.max_attempts, l.deaths, width_bucket(l.id, ids) as i
    ), e as (
      insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role, cause, data)
      select g.id, p_batch, now_at, g.version - 1, actors[g.i], g.epoch, first.event, of_lifecycle, start_source, source_state,
             g.generation, g.attempt, by_role, start_causes[g.i], convert_to(start_datas[g.i], 'UTF8')
        from gone g where start_source is not null
      union all
      select g.id, p_batch, now_at, g.version, actors[g.i], g.epoch, x.event, of_lifecycle, source_state, x.target, g.generation,
             g.attempt, by_role, causes[g.i], convert_to(datas[g.i], 'UTF8') from gone g
    ), n as (
      insert into ended (id, at, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle)
      select g.id, now_at, g.type, g.version, g.epoch, g.owner, g.generation, g.attempt, g.max_attempts, g.deaths, x.target, of_lifecycle
        from gone g
    ), r as (
      insert into result (id, at, expires_at, body)
      select g.id, now_at, now_at + ttls[g.i] * interval '1 s', decode(results[g.i], 'base64') from gone g where results[g.i] is not null
    )
    select array_agg(g.id), array_agg(g.version), array_agg(g.i), array_agg(g.id) filter (where g.ckey is not null),
           array_agg(g.ckey) filter (where g.ckey is not null)
      into got, got_versions, got_at, keyed, keys from gone g;
    if keyed is not null then perform _free_slots(keyed, keys, false); end if;
    return query select turns[u.i], places[u.i] - s.n, u.id, u.version - s.n
      from unnest(got, got_versions, got_at) u(id, version, i) cross join generate_series(0, (start_source is not null)::int) s(n);
  end loop;
end $$;

-- The steps of many turns without claims, each under its own actor, in one transaction. `turn` numbers them from 1. The
-- answers of each turn are in the order of its steps. Leases are locked by number, so that two calls cannot deadlock.
create or replace function turns(p_actors int[], p_others text[])
returns table (turn bigint, kind smallint, part smallint, id bigint, version int)
language plpgsql security definer set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  batch_no bigint := _open_batch();
  bodies jsonb[] := p_others::jsonb[];
  jobs bigint[];
  steps int;
  -- Steps, each as the number of its turn and its place there in one number: those made together, and those that have an answer.
  together bigint[];
  answered bigint[];
  kinds smallint[];
  ids bigint[];
  versions int[];
  a record;
  u record;
begin
  select array_agg(distinct (s.step ->> 'id')::bigint order by (s.step ->> 'id')::bigint), count(*) into jobs, steps
    from unnest(bodies) w(body), jsonb_array_elements(w.body) s(step);
  perform _lock_family(jobs);
  if cardinality(jobs) > 1 then perform from lease d where d.id = any(jobs) order by d.id for update; end if;
  if steps > 1 then
    select array_agg(m.turn << 20 | m.place), array_agg(3::smallint), array_agg(m.id), array_agg(m.version)
      into together, kinds, ids, versions
      from (select t.* from _advance_together(p_actors, bodies, batch_no) t order by t.turn, t.place) m;
    answered := together;
  end if;
  if coalesce(cardinality(together), 0) < steps then
    for u in select t.actor, rest.* from unnest(p_actors, bodies) with ordinality t(actor, body, n) cross join lateral (
          select jsonb_agg(s.step order by s.at) as steps, array_agg(s.at order by s.at) as at
            from (select e.step, t.n << 20 | e.place as at from jsonb_array_elements(t.body) with ordinality e(step, place)) s
           where coalesce(together[width_bucket(s.at, together)] <> s.at, true)) rest
       where rest.steps is not null order by t.n loop
      a := _actor(u.actor);
      select answered || array_agg(u.at[o.place]), kinds || array_agg(o.kind), ids || array_agg(o.id), versions || array_agg(o.version)
        into answered, kinds, ids, versions
        from _advance_others(u.steps, u.actor, a.role, trellis.now(), batch_no) with ordinality o(kind, id, version, place);
    end loop;
  end if;
  return query select n.at >> 20, n.kind, 2::smallint, n.id, n.version from unnest(answered, kinds, ids, versions) n(at, kind, id, version)
    order by n.at;
  if coalesce(cardinality(together), 0) < steps and _wake(batch_no, p_actors[1], trellis.now(), batch_no) > 0 then
    return query select 1::bigint, 5::smallint, null::smallint, null::bigint, null::int;
  end if;
end $$;
