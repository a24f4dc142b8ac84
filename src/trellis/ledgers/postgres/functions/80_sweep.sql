-- The sweep: steps that time causes. One of many sweepers is elected through the row in `sweeper`.

-- The decision for a job in this state on this occasion, with its step. The table `decision` holds every answer of
-- engine/decide.py. A null occasion in `d` means that nothing happens; a null trigger means that the job keeps its
-- state.
create or replace function _decide(p_lifecycle smallint, p_state smallint, p_occasion text, p_facts int, out d decision, out x transition)
language plpgsql stable set search_path from current as $$
begin
  select r.* into d from decision r
   where r.lifecycle = p_lifecycle and r.state = p_state and r.occasion = p_occasion and r.facts = p_facts;
  select r.* into x from transition r where r.lifecycle = p_lifecycle and r.source = p_state and r.trigger = d.trigger;
end $$;

create or replace function _reap(l lease, p_actor int, p_now timestamptz, p_batch bigint) returns text language plpgsql
set search_path from current as $$
declare
  t token := (l.id, l.ckey, l.until, l.type, l.version, l.epoch + 1, l.owner, l.generation, l.attempt, l.max_attempts, l.deaths, l.state,
              l.lifecycle, l.prio, l.flags)::token;
  v record;
  d decision;
  by_role smallint;
  deaths_max smallint;
  cause text;
begin
  select c.swept_by into by_role from lifecycle c where c.lifecycle = l.lifecycle;
  select j.max_deaths into deaths_max from job j where j.id = l.id;
  v := _decide(l.lifecycle, l.state, 'lease_lost', _facts(
    cancel_requested => l.cancel_at is not null, attempts_left => t.attempt + 1 < t.max_attempts, first_death => t.deaths = 0,
    last_death => deaths_max between 1 and t.deaths + 1, sparable => _sparable(t.attempt)));
  d := v.d;
  if d.occasion is null then
    raise exception 'job %: nothing is decided for a lost lease in state %', l.id, l.state using errcode = 'TR001';
  end if;
  if d.trigger = 'cancel' then
    perform _cancel_now(l.id, p_actor, p_now, p_batch, d.cause);
    return 'cancelled';
  end if;
  if l.cancel_at is not null then delete from wish w where w.id = l.id; end if;  -- its lifecycle does not let it be carried out
  if d.counts_death then t.deaths := t.deaths + 1; end if;
  delete from lease o where o.id = l.id;
  if d.trigger is null and (exists (select from concurrency_key k where k.id = t.ckey and k.cap = 0)
                            or exists (select from type_options o where o.lifecycle = t.lifecycle and o.type = t.type
                                          and o.rate_per_key is not null and t.ckey is not null)) then
    -- The key's limit is 0 now, or its next claim needs a token: the job is parked with the others, without a slot.
    delete from slot o where o.id = t.id;
    perform _put_waiting(t, true, null, p_now);
    perform _promote(array[t.ckey], false);
    return 'stayed';
  end if;
  if d.trigger is null then
    insert into ready (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio,
                       flags)
    values (t.id, t.ckey, t.until, t.type, t.version, t.epoch, t.owner, t.generation, t.attempt, t.max_attempts, t.deaths, t.state,
            t.lifecycle, t.prio, t.flags);
    -- It keeps its slot, unless a more urgent job of its key waits.
    if t.ckey is not null then perform _promote(array[t.ckey], false); end if;
    return 'stayed';
  end if;
  cause := replace(d.cause, '%s', t.deaths::text);
  perform _step(t, v.x, p_actor, by_role, p_now, p_batch, case when d.trigger = 'expire' then p_now end, d.spares_attempt, cause,
                null, null, d.reason_code, d.stage, cause);
  return case when d.trigger = 'expire' then 'expired' else 'exhausted' end;
end $$;

-- Handles a waiting job whose timer is due. Returns whether its attempts were exhausted; null when it no longer rests.
create or replace function _ring(p_id bigint, p_actor int, p_now timestamptz, p_batch bigint, p_windows jsonb) returns boolean
language plpgsql set search_path from current as $$
declare
  k record := _find(p_id);
  t token := k.t;
  v record;
  d decision;
  by_role smallint;
  late boolean;
begin
  if k.place <> 'resting' then return null; end if;
  select coalesce(j.deadline_at <= p_now, false) into late from job j where j.id = p_id;
  v := _decide(t.lifecycle, t.state, 'timer_due', _facts(attempts_left => t.attempt + 1 < t.max_attempts, deadline_passed => late));
  d := v.d;
  if d.occasion is null then return null; end if;
  select c.swept_by into by_role from lifecycle c where c.lifecycle = t.lifecycle;
  perform _remove(p_id, 'resting');
  perform _step(t, v.x, p_actor, by_role, p_now, p_batch, _own_timer(t.lifecycle, (v.x).target, p_now, p_windows), false, d.cause, null,
                null, d.reason_code, d.stage, d.cause);
  return d.trigger = 'exhaust';
end $$;

-- When a state's timer is due, if the lifecycle or the sweep's options set one: the operator window of a failed job.
-- p_windows: seconds by lifecycle * 16 + state.
create or replace function _own_timer(p_lifecycle smallint, p_state smallint, p_now timestamptz, p_windows jsonb) returns timestamptz
language sql stable set search_path from current as $$
  select p_now + coalesce((p_windows ->> (p_lifecycle * 16 + p_state)::text)::float8, s.timer_s) * interval '1 s' from state s where s.lifecycle = p_lifecycle and s.state = p_state
$$;

-- Fills in the types of jobs that ended before migration 38, or in a call that had begun before it: a part at a time, by the index in
-- which those without a type come first. A row that somebody holds is met again. `ended_untyped` only says that there is much to do.
-- A session keeps its first plan of this statement. If that was made while `ended` was empty, it would read the whole table once for each
-- state at every sweep: hence no sequential scan.
create or replace function _fill_types() returns void language plpgsql set search_path from current set enable_seqscan = off as $$
declare
  ids bigint[] := array(select f.id from (select o.* from state o where o.phase = 2) s cross join lateral (
    select n.id from ended n where n.lifecycle = s.lifecycle and n.state = s.state and n.type = 0 order by n.id desc limit 2000) f limit 2000);
begin
  if ids = '{}' then
    delete from meta m where m.name = 'ended_untyped';
    return;
  end if;
  with missing as (select n.id from ended n where n.id = any(ids) and n.type = 0 for update skip locked)
  update ended n set type = j.type from missing m join job j on j.id = m.id where n.id = m.id;
end $$;

create or replace function _sweep_due(p_actor int, p_now timestamptz, p_batch bigint, p_limit int, p_windows jsonb,
                                      out due int, out exhausted int)
language plpgsql set search_path from current as $$
declare
  d record;
  keys bigint[];
  moved int;
  spent boolean;
begin
  due := 0; exhausted := 0;
  -- Jobs whose timer makes a step come first, then those whose delay is over; each oldest first, as on SQLite.
  for d in select o.id from (
             select r.id from resting r join transition x on x.lifecycle = r.lifecycle and x.source = r.state and x.trigger = 'due'
              where r.due_at <= p_now order by r.due_at limit p_limit for update of r skip locked) o order by o.id loop
    continue when not _may_end(d.id);
    begin
      spent := _ring(d.id, p_actor, p_now, p_batch, p_windows);
      due := due + (spent is false)::int;
      exhausted := exhausted + (spent is true)::int;
    exception when others then raise warning 'trellis: the timer of job % could not be served: %', d.id, sqlerrm;
    end;
  end loop;
  -- A due time without meaning in the job's state is cleared; otherwise every sweep would find it again.
  update resting r set due_at = null where r.id = any(array(
    select q.id from resting q join state s on s.lifecycle = q.lifecycle and s.state = q.state and not s.claimable
     where q.due_at <= p_now and not exists (select from transition x where x.lifecycle = q.lifecycle and x.source = q.state
                                                 and x.trigger = 'due') limit p_limit for update of q skip locked));
  with rested as (
    delete from resting r where r.id = any(array(
      select q.id from resting q join state s on s.lifecycle = q.lifecycle and s.state = q.state and s.claimable
       where q.due_at <= p_now order by q.due_at limit p_limit for update of q skip locked)) returning r.*
  ), placed as materialized (
    -- Jobs with and without a key get their positions in one sequence.
    select o.*, nextval('ready_pos') as pos from (select * from rested order by rested.id) o
  ), to_ready as (
    insert into ready (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio,
                       flags, pos)
    select id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags, pos
      from placed where ckey is null
  ), to_parked as (
    insert into parked (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio,
                        flags, pos)
    select id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags, pos
      from placed where ckey is not null
  )
  select count(*), array_agg(distinct rested.ckey) filter (where rested.ckey is not null) into moved, keys from rested;
  if keys is not null then perform _promote(keys, false); end if;
  due := due + moved;
end $$;

-- A deadline that has no transition in the current state is left for a later one.
create or replace function _sweep_deadlines(p_actor int, p_now timestamptz, p_batch bigint, p_limit int) returns int language plpgsql
set search_path from current as $$
declare
  d record;
  k record;
  v record;
  t token;
  done int := 0;
  by_role smallint;
begin
  for d in select o.id from deadline o join job_status s on s.id = o.id
             left join decision r on r.lifecycle = s.lifecycle and r.state = s.state and r.occasion = 'deadline'
            where o.at <= p_now and (r.occasion is not null or s.place = 'ended') order by o.at limit p_limit
              for update of o skip locked loop
    continue when not _may_end(d.id);
    begin
      k := _find(d.id);
      t := k.t;
      v := _decide(t.lifecycle, t.state, 'deadline', 0);
      if (v.d).occasion is not null then
        select c.swept_by into by_role from lifecycle c where c.lifecycle = t.lifecycle;
        perform _remove(d.id, k.place);
        if k.place = 'held' then t.epoch := t.epoch + 1; end if;
        -- If the target state has a timer, it is due at once, and its handler finds that the deadline has passed.
        perform _step(t, v.x, p_actor, by_role, p_now, p_batch, p_now, false, (v.d).cause, null, null, (v.d).reason_code, (v.d).stage,
                      (v.d).cause);
        done := done + 1;
      end if;
      delete from deadline o where o.id = d.id;
    exception when others then raise warning 'trellis: the deadline of job % could not be served: %', d.id, sqlerrm;
    end;
  end loop;
  return done;
end $$;

create or replace function _sweep_cancels(p_actor int, p_now timestamptz, p_batch bigint, p_limit int) returns int language plpgsql
set search_path from current as $$
declare
  d record;
  done int := 0;
begin
  for d in select l.id, l.lifecycle, l.state from lease l where l.cancel_at <= p_now order by l.id limit p_limit
              for update skip locked loop
    continue when not _may_end(d.id);
    begin
      perform _cancel_now(d.id, p_actor, p_now, p_batch, ((_decide(d.lifecycle, d.state, 'cancel_grace_over', 0)).d).cause);
      done := done + 1;
    exception when others then raise warning 'trellis: job % could not be cancelled: %', d.id, sqlerrm;
    end;
  end loop;
  return done;
end $$;

-- Promotes jobs of keys with parked jobs and a free slot that earlier promotions skipped. At most 1,000 keys per sweep,
-- in rotation. Keys that wait for a token are looked at when it is due.
create or replace function _heal_keys() returns int language plpgsql set search_path from current as $$
declare
  now_at constant timestamptz := trellis.now();
  seen bigint[];
  promoted int;
begin
  with recursive keys(ckey, n) as (
    select (select min(p.ckey) from parked p where p.ckey > (select s.key_cursor from sweeper s)), 1
    union all
    select (select min(p.ckey) from parked p where p.ckey > k.ckey), k.n + 1 from keys k where k.ckey is not null and k.n < 1000
  )
  select array_agg(k.ckey) filter (where k.ckey is not null) into seen from keys k;
  update sweeper s set key_cursor = case when cardinality(seen) = 1000 then seen[1000] else -9223372036854775808 end
   where s.key_cursor <> case when cardinality(seen) = 1000 then seen[1000] else -9223372036854775808 end;
  if seen is null then return 0; end if;
  select _promote(array_agg(k.ckey), false) into promoted from unnest(seen) k(ckey) left join concurrency_key c on c.id = k.ckey
   where c.id is null or ((c.due_at is null or c.due_at <= now_at
            -- Whoever freed a token while the key was locked could not look at it. Each sweep asks one of eight keys that wait.
            or (hashint8(k.ckey # extract(epoch from now_at)::bigint) & 7 = 0 and exists (select from _key_heads(k.ckey, now_at) h where h.tokens > 0)))
          and (select count(*) from slot s where s.ckey = k.ckey) < c.cap);
  return coalesce(promoted, 0);
end $$;

-- Whether nothing can happen before the next sweep: nothing is held or parked, nothing falls due, no type is to be filled in. Then the tick is
-- written only every 5 s (SWEEP_QUIET_S), to show that a sweeper is alive.
create or replace function _is_quiet(p_now timestamptz, p_interval_s float8) returns boolean language sql stable
set search_path from current as $$
  select s.tick > p_now - interval '5 s' and s.tick <= p_now and not exists (select from lease)
     and not exists (select from parked) and not exists (select from resting r where r.due_at <= p_now + p_interval_s * interval '1 s')
     and not exists (select from deadline o where o.at <= p_now + p_interval_s * interval '1 s')
     and not exists (select from spawned c where c.orphaned) and not exists (select from wake)
     and not exists (select from meta m where m.name = 'ended_untyped')
    from sweeper s
$$;

-- Whether a lease, cancel, timer or deadline is due.
create or replace function _anything_due(p_now timestamptz) returns boolean language sql stable set search_path from current as $$
  select exists (select from lease d where d.until <= p_now or d.cancel_at <= p_now)
      or exists (select from resting r where r.due_at <= p_now) or exists (select from deadline o where o.at <= p_now)
      or exists (select from spawned c where c.orphaned) or exists (select from wake)
$$;

create or replace function sweep(p_actor int, p_elect boolean, p_interval_s float8, p_limit int, p_windows jsonb)
returns table (elected boolean, amnesty int, expired int, exhausted int, due int, deadlines int, cancelled int, promoted int,
               next_due_s float8)
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  now_at timestamptz := trellis.now();
  last timestamptz;
  batch_no bigint;
  what text;
  l lease;
begin
  perform _require(a.role, 'sweep');
  elected := false; amnesty := 0; expired := 0; exhausted := 0; due := 0; deadlines := 0; cancelled := 0; promoted := 0;
  if p_elect and _is_quiet(now_at, p_interval_s) then
    return next;
    return;
  end if;
  select s.tick into last from sweeper s for update skip locked;
  if not found or (p_elect and last > now_at - p_interval_s * interval '1 s' and last <= now_at) then
    return next;
    return;
  end if;
  elected := true;
  update sweeper s set tick = now_at, actor = p_actor;
  -- A lease renewed after the last sweep (its end minus its length) had no outage before the renewal.
  update lease d set until = now_at + _length(d.lease_ms, d.beat_ms)
   where now_at - greatest(last, d.until - _length(d.lease_ms, d.beat_ms))
         > greatest(_length(d.lease_ms, d.beat_ms) / 2, 2.5 * p_interval_s * interval '1 s')
     and last is not null and d.until < now_at + _length(d.lease_ms, d.beat_ms);
  get diagnostics amnesty = row_count;
  if _anything_due(now_at) then
    batch_no := _open_batch();
    cancelled := _sweep_cancels(p_actor, now_at, batch_no, p_limit);
    for l in select d.* from lease d where d.until <= now_at order by d.id limit p_limit for update skip locked loop
      continue when not _may_end(l.id);
      -- A job whose lease cannot be ended must not block the others.
      begin
        what := _reap(l, p_actor, now_at, batch_no);
      exception when others then
        what := 'failed';
        raise warning 'trellis: the lease of job % could not be ended: %', l.id, sqlerrm;
      end;
      if what = 'exhausted' then exhausted := exhausted + 1;
      elsif what = 'cancelled' then cancelled := cancelled + 1;
      elsif what <> 'failed' then expired := expired + 1; end if;
    end loop;
    select w.rested, exhausted + w.spent into due, exhausted
      from _sweep_due(p_actor, now_at, batch_no, p_limit, p_windows) w(rested, spent);
    deadlines := _sweep_deadlines(p_actor, now_at, batch_no, p_limit);
    cancelled := cancelled + _sweep_orphans(p_actor, now_at, batch_no, p_limit);
    due := due + _wake(null, p_actor, now_at, batch_no);
    -- Nothing moved, so there is no event: every subscriber would read an empty feed position.
    if expired + exhausted + cancelled + due + deadlines = 0 then delete from batch b where b.no = batch_no; end if;
  end if;
  promoted := _promote_due(p_limit, now_at) + _heal_keys();
  perform _fill_types();
  perform _ensure_partitions();
  perform sequence_feed();
  delete from claim c where c.no in (select o.no from claim o where o.at < now_at - interval '1 hour' order by o.no limit p_limit);
  select extract(epoch from min(w.at) - now_at)::float8 into next_due_s from (
    select min(d.until) as at from lease d where d.until > now_at union all
    select min(d.cancel_at) from lease d where d.cancel_at > now_at union all
    select min(r.due_at) from resting r where r.due_at > now_at union all select min(o.at) from deadline o where o.at > now_at union all
    select greatest(min(k.due_at), now_at + _token_wait()) from concurrency_key k where k.due_at is not null having count(*) > 0) w;
  if greatest(expired + exhausted, due, deadlines, cancelled) >= p_limit then next_due_s := 0; end if;
  return next;
end $$;
