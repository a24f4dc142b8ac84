-- Steps by roles that hold no lease: move, cancel, requeue. The request id is stored with the event, so that a repeated
-- request gets its first answer. With p_key (see 72_request_keys.sql) a verb stores the key of the request; its outcome is
-- 'answered', and nothing changes, when an answer is stored with that key.

-- Takes a free slot for a job that moves into a held state; false if its key is full.
create or replace function _seat(p_id bigint, p_key bigint) returns boolean language plpgsql set search_path from current as $$
declare cap_now int;
begin
  if exists (select from slot o where o.id = p_id) then return true; end if;
  -- If no job of this key was ever parked, the key has no row: the job itself holds the key's limit.
  insert into concurrency_key (id, name, cap) select j.ckey, j.key_name, j.key_cap from job j where j.id = p_id on conflict do nothing;
  select k.cap into cap_now from concurrency_key k where k.id = p_key for update;
  insert into slot (ckey, n, id)
  select p_key, s.n, p_id from generate_series(1, cap_now) s(n)
   where (select count(*) from slot o where o.ckey = p_key) < cap_now and not exists (select from slot o where o.ckey = p_key and o.n = s.n) order by s.n limit 1;
  return found;
end $$;

-- The declared transition from a state to a target or by a trigger; one that this role may make comes first. Only the
-- engine records that a job was compensated, when the compensation succeeds. Only the completion of its job finalizes
-- an artifact. Only the submit of a batch suspends a job that nobody holds. What keeps the state (IN_PLACE in
-- lifecycles/lifecycle.py) is found by its trigger alone.
create or replace function _declared_step(p_lifecycle smallint, p_source smallint, p_target smallint, p_trigger text, p_role smallint,
                                          out x transition, out refusal text)
language plpgsql stable set search_path from current as $$
begin
  select r.* into x from transition r
   where r.lifecycle = p_lifecycle and r.source = p_source and (p_target is null or r.target = p_target)
     and case when p_trigger is null then r.trigger not in ('run_now', 'prioritize') else r.trigger = p_trigger end
   order by (r.roles & (1 << p_role::int) <> 0) desc, r.fenced limit 1;
  if not found and p_source = p_target then refusal := 'same';
  elsif not found then refusal := 'undeclared';
  elsif x.roles & (1 << p_role::int) = 0 then refusal := 'actor';
  elsif x.trigger in ('compensated', 'finalize') or (x.trigger = 'suspend' and not x.fenced) then refusal := 'engine';
  elsif x.fenced then refusal := 'fenced';
  end if;
end $$;

create or replace function _move_one(
  p_id bigint, p_target smallint, p_trigger text, p_actor int, p_role smallint, p_now timestamptz, p_batch bigint, p_request text,
  p_version int, p_delay float8, p_lease_ms int, p_beat_ms int, p_cause text, p_data bytea, p_reason text, p_stage text,
  p_error text, out outcome text, out source smallint, out target smallint, out version int, out epoch int)
language plpgsql set search_path from current as $$
declare
  k record;
  d record;
  s state;
  e event;
  t token;
  holder text;
begin
  k := _find(p_id);
  t := k.t;
  source := t.state; target := p_target; version := t.version; epoch := t.epoch;
  select o.* into e from event o where o.id = p_id and o.request = p_request;
  if found then
    outcome := 'repeated'; source := e.from_state; target := e.to_state; version := e.version; epoch := e.epoch;
    return;
  end if;
  if p_version <> t.version then outcome := 'version'; return; end if;
  d := _declared_step(t.lifecycle, t.state, p_target, p_trigger, p_role);
  if d.refusal is not null then outcome := d.refusal; return; end if;
  select n.* into s from state n where n.lifecycle = t.lifecycle and n.state = (d.x).target;
  if s.dead_letter and p_reason is null then outcome := 'reason'; return; end if;
  if s.phase = 1 then
    if t.ckey is not null and not _seat(t.id, t.ckey) then outcome := 'key'; return; end if;
    if t.ckey is not null and not _take_token(t, p_now) then
      if k.place <> 'ready' then delete from slot o where o.id = t.id; end if;
      outcome := 'rate';
      return;
    end if;
    t.owner := p_actor; t.until := null;
  elsif (d.x).opens = 2 then
    holder := _take_unique_key_back(p_id, p_now);
    if holder is not null then outcome := 'unique ' || holder; return; end if;
  end if;
  if k.place = 'held' or s.phase = 1 then t.epoch := t.epoch + 1; end if;
  perform _remove(p_id, k.place);
  t := _step(t, d.x, p_actor, p_role, p_now, p_batch, p_now + p_delay * interval '1 s', false, p_cause, p_request, p_data, p_reason,
             p_stage, p_error, p_lease_ms, p_beat_ms);
  outcome := 'moved'; target := (d.x).target; version := t.version; epoch := t.epoch;
end $$;

-- Carries out a cancel request, in the role that sweeps the lifecycle.
create or replace function _cancel_now(p_id bigint, p_actor int, p_now timestamptz, p_batch bigint, p_cause text) returns int language sql
set search_path from current as $$
  select case when m.outcome = 'moved' then m.version end from _move_one(
    p_id, null, 'cancel', p_actor, (select c.swept_by from lifecycle c join job j on j.lifecycle = c.lifecycle where j.id = p_id), p_now,
    p_batch, null, null, null, null, null, p_cause, null, null, null, null) m
$$;

-- Plain moves, all in one statement: from a waiting place to where the job can be claimed now, or to a lease. The jobs have no
-- concurrency key, and no step of theirs begins an attempt or ends anything. Moves that are not plain, or that would be refused,
-- get no answer here: `_move_one` judges them. A row of `ready` or `resting` is deleted by every step of its job. So a row that can
-- still be locked is as the statement sees it, and so are the requests of its job. Large tables are looked up for each move, and by
-- arrays, not joined: the plan stays good whatever the statistics said when it was made.
create or replace function _move_plain(
  p_actors int[], p_job_ids text[], p_targets text[], p_requests text[], p_versions int[], p_delays float8[], p_lease_ms int[],
  p_beat_ms int[], p_causes text[], p_datas bytea[], p_reasons text[], p_batch bigint)
returns table (
  n bigint, outcome text, id bigint, lifecycle smallint, source smallint, target smallint, version int, epoch int)
language plpgsql set search_path from current as $$
#variable_conflict use_column
declare
  now_at timestamptz := trellis.now();
begin
  if _is_limited() or cardinality(p_job_ids) > (select count(distinct u.job_id) from unnest(p_job_ids) u(job_id)) then return; end if;
  return query
  with wanted as materialized (
    select w.*, b.id, a.role
      from unnest(p_actors, p_job_ids, p_targets, p_requests, p_versions, p_delays, p_lease_ms, p_beat_ms, p_causes, p_datas, p_reasons)
           with ordinality w(actor, job_id, target, request, version, delay, lease_ms, beat_ms, cause, data, reason, n)
      cross join lateral (select j.id from job j where j.job_id = w.job_id and j.ckey is null offset 0) b
      join actor a on a.id = w.actor and a.db_role = session_user
     where w.reason is null order by b.id
  ), plain as materialized (
    select w.n, w.actor, w.role, w.request, w.cause, w.data, w.lease_ms, w.beat_ms, t.*, x.event, x.source, x.target, s.phase
      from wanted w
      cross join lateral (
        select q.* from (select true as is_ready, r.id, r.until, r.type, r.version, r.epoch, r.owner, r.generation, r.attempt,
                                r.max_attempts, r.deaths, r.state, r.lifecycle, r.prio, r.flags
                           from ready r where r.id = w.id for update) q
        union all
        select q.* from (select false, r.id, r.until, r.type, r.version, r.epoch, r.owner, r.generation, r.attempt,
                                r.max_attempts, r.deaths, r.state, r.lifecycle, r.prio, r.flags
                           from resting r where r.id = w.id for update) q) t
      join state s on s.lifecycle = t.lifecycle and s.name = w.target
      -- As in _declared_step.
      cross join lateral (
        select r.* from transition r
         where r.lifecycle = t.lifecycle and r.source = t.state and r.target = s.state and r.trigger not in ('run_now', 'prioritize')
           and r.roles & (1 << w.role::int) <> 0 order by r.fenced limit 1) x
     where (w.version is null or w.version = t.version) and x.opens = 0 and not x.fenced
       and x.trigger not in ('due', 'cancel', 'stop', 'dead_letter', 'deadline', 'discard', 'compensated', 'finalize', 'suspend')
       and case s.phase when 1 then w.lease_ms is not null and w.beat_ms is not null
                        when 0 then s.claimable and not t.is_ready and (w.delay is null or w.delay <= 0) end
       and not exists (select from event e where e.id = w.id and e.request = w.request)
  ), left_ready as (
    delete from ready r where r.id = any(array(select p.id from plain p where p.is_ready))
  ), left_resting as (
    delete from resting r where r.id = any(array(select p.id from plain p where not p.is_ready))
  ), e as (
    insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role, cause,
                       request, data)
    select p.id, p_batch, now_at, p.version + 1, p.actor, p.epoch + (p.phase = 1)::int, p.event, p.lifecycle, p.source, p.target,
           p.generation, p.attempt, p.role, p.cause, p.request, p.data from plain p
  ), l as (
    insert into lease (id, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio,
                       flags, lease_ms, beat_ms)
    select p.id, now_at + _length(p.lease_ms, p.beat_ms), p.type, p.version + 1, p.epoch + 1, p.actor, p.generation, p.attempt,
           p.max_attempts, p.deaths, p.target, p.lifecycle, p.prio, p.flags, p.lease_ms, p.beat_ms from plain p where p.phase = 1
  ), r as (
    insert into ready (id, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags)
    select p.id, p.until, p.type, p.version + 1, p.epoch, p.owner, p.generation, p.attempt, p.max_attempts, p.deaths, p.target,
           p.lifecycle, p.prio, p.flags from plain p where p.phase = 0 order by p.id
  )
  select p.n, 'moved', p.id, p.lifecycle, p.source, p.target, p.version + 1, p.epoch + (p.phase = 1)::int from plain p;
end $$;

-- Moves of many callers, each under its own actor, in one transaction. Waiting jobs are locked first, by number, then the others,
-- by number, so that two calls cannot deadlock. Moves of one job keep their order of arrival.
create or replace function moves(
  p_actors int[], p_job_ids text[], p_targets text[], p_requests text[], p_versions int[], p_delays float8[], p_lease_ms int[],
  p_beat_ms int[], p_causes text[], p_datas bytea[], p_reasons text[], p_stages text[], p_errors text[], p_key text[])
returns table (
  n bigint, outcome text, id bigint, lifecycle smallint, source smallint, target smallint, version int, epoch int)
language plpgsql security definer set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  batch_no bigint := _open_batch();
  jobs bigint[] := array(select b.id from job b where b.job_id = any(p_job_ids) order by b.id);
  done bigint[] := '{}';
  a record;
  u record;
begin
  perform _lock_family(jobs);
  if cardinality(jobs) > 1 then
    perform from unnest(jobs) o(id)
      cross join lateral (select from (select from ready r where r.id = o.id for update) q union all
                          select from (select from resting r where r.id = o.id for update) q) locked;
  end if;
  if p_key is null then
    for u in select m.* from _move_plain(p_actors, p_job_ids, p_targets, p_requests, p_versions, p_delays, p_lease_ms, p_beat_ms,
                                         p_causes, p_datas, p_reasons, batch_no) m loop
      n := u.n; outcome := u.outcome; id := u.id; lifecycle := u.lifecycle; source := u.source; target := u.target;
      version := u.version; epoch := u.epoch;
      return next;
      done := done || u.n;
    end loop;
    if cardinality(done) = cardinality(p_job_ids) then return; end if;
  end if;
  for u in
    select w.*, b.id, b.lifecycle, s.state as target_state
      from unnest(p_actors, p_job_ids, p_targets, p_requests, p_versions, p_delays, p_lease_ms, p_beat_ms, p_causes, p_datas,
                  p_reasons, p_stages, p_errors) with ordinality
           w(actor, job_id, target, request, version, delay, lease_ms, beat_ms, cause, data, reason, stage, error, n)
      left join job b on b.job_id = w.job_id left join state s on s.lifecycle = b.lifecycle and s.name = w.target
     where w.n <> all(done) order by b.id, w.n loop
    a := _actor(u.actor);
    if u.id is null or not _within_reach(a.role, u.id) then
      return query select u.n, 'missing', null::bigint, null::smallint, null::smallint, null::smallint, null::int, null::int;
    elsif p_key is not null and _take_request_key(p_key) is not null then
      return query select u.n, 'answered', u.id, u.lifecycle, (k.t).state, null::smallint, (k.t).version, (k.t).epoch from _find(u.id) k;
    elsif u.target_state is null then
      return query select u.n, 'unknown', u.id, u.lifecycle, (k.t).state, null::smallint, (k.t).version, (k.t).epoch from _find(u.id) k;
    else
      return query select u.n, m.outcome, u.id, u.lifecycle, m.source, m.target, m.version, m.epoch
        from _move_one(u.id, u.target_state, null, u.actor, a.role, trellis.now(), batch_no, u.request, u.version, u.delay, u.lease_ms,
                       u.beat_ms, u.cause, u.data, u.reason, u.stage, u.error) m;
    end if;
  end loop;
  perform _wake(batch_no, p_actors[1], trellis.now(), batch_no);
end $$;

-- Stores the request of a soft cancel with a held job's lease. Returns why not, or 'requested'. The first request stays.
create or replace function _request_cancel(t token, p_actor int, p_role smallint, p_grace_s float8, p_cause text, p_now timestamptz)
returns text language plpgsql set search_path from current as $$
declare
  d record := _declared_step(t.lifecycle, t.state, null, 'cancel', p_role);
begin
  if d.refusal is not null then return d.refusal; end if;
  update lease l set cancel_at = p_now + p_grace_s * interval '1 s' where l.id = t.id and l.cancel_at is null;
  if found then
    insert into wish (id, epoch, at, actor, cause) values (t.id, t.epoch, p_now, p_actor, p_cause)
      on conflict (id) do update set epoch = excluded.epoch, at = excluded.at, actor = excluded.actor, cause = excluded.cause;
  end if;
  return 'requested';
end $$;

-- A soft cancel stores a request with the lease. The holder learns of it when it renews. It is carried out as soon as
-- no user code runs (a start, the end of the attempt, a lost lease) or when its grace is over. The first requester and
-- reason are stored for the event of the cancel. A hard cancel, and any cancel of a waiting job, takes effect now.
create or replace function cancel(
  p_actor int, p_job_id text, p_soft boolean, p_request text, p_grace_s float8, p_cause text, p_key text[])
returns table (outcome text, id bigint, lifecycle smallint, source smallint, target smallint, version int, epoch int)
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  j job;
  k record;
  now_at timestamptz := trellis.now();
  batch_no bigint;
begin
  select b.* into j from job b where b.job_id = p_job_id;
  if not found or not _within_reach(a.role, j.id) then return; end if;
  if p_key is not null and _take_request_key(p_key) is not null then
    return query select 'answered', j.id, j.lifecycle, null::smallint, null::smallint, null::int, null::int;
    return;
  end if;
  perform _lock_family(array[j.id]);
  k := _find(j.id);
  if p_soft and k.place = 'held' and not exists (select from event e where e.id = j.id and e.request = p_request) then
    return query select _request_cancel(k.t, p_actor, a.role, p_grace_s, p_cause, now_at), j.id, j.lifecycle, (k.t).state, null::smallint,
                        (k.t).version, (k.t).epoch;
    return;
  end if;
  batch_no := _open_batch();
  return query select m.outcome, j.id, j.lifecycle, m.source, m.target, m.version, m.epoch
    from _move_one(j.id, null, 'cancel', p_actor, a.role, now_at, batch_no, p_request, null, null, null, null, p_cause, null, null,
                   null, null) m;
  perform _wake(batch_no, p_actor, now_at, batch_no);
end $$;

-- With a key, jobs that do not exist are refused: a key is stored with a change or not at all.
create or replace function requeue(p_actor int, p_job_ids text[], p_request text, p_cause text, p_key text[])
returns table (job_id text, outcome text, id bigint, lifecycle smallint, source smallint, target smallint, version int, epoch int)
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  now_at timestamptz := trellis.now();
  batch_no bigint := _open_batch();
  j record;
  missing text;
begin
  if p_key is not null and _take_request_key(p_key) is not null then
    return query select null::text, 'answered', null::bigint, null::smallint, null::smallint, null::smallint, null::int, null::int;
    return;
  elsif p_key is not null then
    select u.job_id into missing from unnest(p_job_ids) u(job_id)
     where not exists (select from job b where b.job_id = u.job_id and _within_reach(a.role, b.id)) limit 1;
    if found then
      raise exception 'there is no job %', missing using errcode = 'TR011', detail = missing;
    end if;
  end if;
  for j in select b.id, b.job_id, b.lifecycle from unnest(p_job_ids) with ordinality u(job_id, n) join job b on b.job_id = u.job_id
            where _within_reach(a.role, b.id) order by b.id loop
    return query select j.job_id, m.outcome, j.id, j.lifecycle, m.source, m.target, m.version, m.epoch
      from _move_one(j.id, null, 'requeue', p_actor, a.role, now_at, batch_no, p_request, null, null, null, null, p_cause, null, null,
                     null, null) m;
  end loop;
end $$;

-- Operators' settings. Each change is one administrative act; setting a value to what it already is records none.

create or replace function set_paused(p_actor int, p_type text, p_paused boolean, p_cause text default null) returns void
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  of_type int := type_id(p_type);
begin
  perform _require(a.role, 'pause');
  update job_type t set paused = p_paused where t.id = of_type and t.paused <> p_paused;
  if found then
    perform _record_act(p_actor, a.role, case when p_paused then 'type.paused' else 'type.resumed' end, p_type,
                        case when p_paused then 'active' else 'paused' end, case when p_paused then 'paused' else 'active' end, p_cause,
                        null);
  end if;
end $$;

create or replace function _rate_text(p_rate float8, p_burst int) returns text language sql immutable as $$
  select p_rate::text || '/s, burst ' || p_burst
$$;

create or replace function set_rate(p_actor int, p_type text, p_rate float8, p_burst int, p_cause text default null) returns void
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  of_type int := type_id(p_type);
  before job_type;
begin
  perform _require(a.role, 'limit_rate');
  select * into before from job_type t where t.id = of_type for no key update;
  if before.rate_per_s is distinct from p_rate or before.burst <> p_burst then
    update job_type t set rate_per_s = p_rate, burst = p_burst, tokens = least(t.tokens, p_burst) where t.id = of_type;
    if _rate_text(before.rate_per_s, before.burst) is distinct from _rate_text(p_rate, p_burst) then
      perform _record_act(p_actor, a.role, 'type.rate.changed', p_type, _rate_text(before.rate_per_s, before.burst),
                          _rate_text(p_rate, p_burst), p_cause, null);
    end if;
  end if;
end $$;

create or replace function set_held_max(p_actor int, p_type text, p_max int, p_cause text default null) returns void
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  of_type int := type_id(p_type);
  before int;
begin
  perform _require(a.role, 'limit_held');
  select t.held_max into before from job_type t where t.id = of_type for no key update;
  if before is distinct from p_max then
    update job_type t set held_max = p_max where t.id = of_type;
    perform _record_act(p_actor, a.role, 'type.held_limit.changed', p_type, before::text, p_max::text, p_cause, null);
  end if;
end $$;

create or replace function set_key_limit(p_actor int, p_key text, p_cap int, p_cause text default null) returns void
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  key_id bigint := _key_hash(p_key);
  before int;
begin
  perform _require(a.role, 'limit_key');
  select k.cap into before from concurrency_key k where k.id = key_id for update;
  insert into concurrency_key as k (id, name, cap, set_by) values (key_id, p_key, p_cap, p_actor)
    on conflict (id) do update set cap = p_cap, set_by = p_actor;
  if before is distinct from p_cap then
    perform _record_act(p_actor, a.role, 'key.limit.changed', p_key, before::text, p_cap::text, p_cause, null);
  end if;
  with surplus as (
    delete from ready r where r.id = any(array(
      select q.id from ready q where q.ckey = key_id order by q.prio desc, q.pos desc
       limit greatest(0, (select count(*) from slot s where s.ckey = key_id) - p_cap) for update skip locked)) returning r.*
  ), freed as (
    delete from slot s using surplus u where s.id = u.id
  )
  insert into parked (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio,
                      flags, pos)
  select id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags, pos
    from surplus;
  perform _promote(array[key_id], true);
end $$;
