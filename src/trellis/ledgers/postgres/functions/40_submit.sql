-- Submit. `submit_plain` takes jobs without keys of any kind, set-wise; `submit_alike_jobs` those that differ only in id and payload.
-- `submit_keyed` takes jobs with given ids set-wise, and those with idempotency keys, concurrency keys, unique keys and compensations
-- one by one.
-- `submit_one` takes one job of either kind: arrays and a statement for sets cost more than one job does. `submit_job` and
-- `submit_unique_job` are for SQL callers inside their own transaction. A second submit with the same idempotency key returns the
-- first job.

-- Tells the check of events, until the transaction ends, that it makes first events only. Called where a variable is set: that needs no
-- statement.
create or replace function _only_first_events() returns text language sql volatile as $$
  select set_config('trellis.first_events', 'on', true)
$$;

create or replace function _refuse_reserved(p_job_id text) returns void language plpgsql set search_path from current as $$
begin
  raise exception 'job id % ends as only ids do that the engine makes itself (.c, .r1, .q-1f, @1, -resolved-webhook); choose another id', p_job_id
    using errcode = 'TR007', detail = p_job_id;
end $$;

-- Inserts jobs of one lifecycle that have no keys, by one statement. An array of one value holds for all jobs. With p_repeat, jobs
-- that exist are left out. A nested loop keeps the order of the arrays, in which the jobs get their numbers and places.
create or replace function _submit_set(
  p_actor int, p_role smallint, p_now timestamptz, p_batch bigint, p_lifecycle smallint, p_repeat boolean, p_job_ids text[], p_types int[],
  p_prios smallint[], p_payloads bytea[], p_max_attempts smallint[], p_max_deaths smallint[], p_delays float8[], p_run_ats timestamptz[],
  p_deadlines float8[], p_correlations text[], p_traces text[], p_parents text[], p_chosen smallint[]) returns void
language plpgsql set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
declare
  l lifecycle;
  may_rest boolean;
begin
  if _may_be_reserved(array_to_string(p_job_ids, ' ')) then
    perform _refuse_reserved(u.job_id) from unnest(p_job_ids) u(job_id) where _id_is_reserved(u.job_id, p_lifecycle, p_role);
  end if;
  select c.* into l from lifecycle c where c.lifecycle = p_lifecycle;
  may_rest := l.initial_claimable or _is_timed(p_lifecycle, l.initial);
  with i as materialized (
    select nextval('job_id_seq') as id, u.job_id, v.type, u.payload, u.correlation_id, u.trace, u.parent_id, w.*,
           case when not may_rest then null
                when greatest(u.run_at, p_now + u.delay * interval '1 s') > p_now then greatest(u.run_at, p_now + u.delay * interval '1 s')
                else p_now + l.initial_timer_s * interval '1 s' end as due_at,
           case when w.deadline is not null then p_now + w.deadline * interval '1 s' end as deadline_at,
           case when o.unique_rule is not null then _refuse_plain(v.type)
                when o.keyed and v.chosen & 16 = 0 then _refuse_unkeyed(v.type) end as refused
      from unnest(p_job_ids, p_types, p_prios, p_payloads, p_max_attempts, p_max_deaths, p_delays, p_run_ats, p_deadlines,
                  p_correlations, p_traces, p_parents, p_chosen)
           u(job_id, type, prio, payload, max_attempts, max_deaths, delay, run_at, deadline, correlation_id, trace, parent_id, chosen)
           cross join lateral (select coalesce(u.type, p_types[1]) as type, coalesce(u.chosen, p_chosen[1]) as chosen) v
           left join type_options o on o.lifecycle = p_lifecycle and o.type = v.type and v.chosen <> 63
           cross join lateral (
             select case when o.type is null or v.chosen & 1 > 0 then coalesce(u.prio, p_prios[1]) else o.prio end as prio,
                    case when o.type is null or v.chosen & 2 > 0 then coalesce(u.max_attempts, p_max_attempts[1])
                         else o.max_attempts end as max_attempts,
                    case when o.type is null or v.chosen & 4 > 0 then coalesce(u.max_deaths, p_max_deaths[1])
                         else o.max_deaths end as max_deaths,
                    case when o.type is null or v.chosen & 8 > 0 then u.deadline else o.deadline_s end as deadline) w
     where not p_repeat or not exists (select from job o where o.job_id = u.job_id)
  ), j as (
    insert into job (id, created_at, deadline_at, type, max_attempts, max_deaths, lifecycle, prio, job_id, correlation_id, trace,
                     parent_id, payload, deadline_us)
    select id, p_now, deadline_at, type, max_attempts, max_deaths, p_lifecycle, prio, job_id, correlation_id, trace, parent_id,
           payload, deadline * 1000000 from i
  ), r as (
    insert into ready (id, type, version, epoch, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags)
    select id, type, 1, 0, 0, 0, max_attempts, 0, l.initial, p_lifecycle, prio, 0 from i
     where l.initial_claimable and due_at is null
  ), d as (
    insert into resting (id, type, version, epoch, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags, due_at)
    select id, type, 1, 0, 0, 0, max_attempts, 0, l.initial, p_lifecycle, prio, 0, due_at from i
     where not l.initial_claimable or due_at is not null
  ), t as (
    insert into deadline (id, at) select id, deadline_at from i where deadline_at is not null
  )
  insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role, due_at)
  select id, p_batch, p_now, 1, p_actor, 0, l.initial_event, p_lifecycle, 0, l.initial, 0, 0, p_role, due_at from i;
end $$;

create or replace function submit_plain(
  p_actor int, p_lifecycle smallint, p_repeat boolean, p_job_ids text[], p_types int[], p_prios smallint[], p_payloads bytea[],
  p_max_attempts smallint[], p_max_deaths smallint[], p_delays float8[], p_run_ats timestamptz[], p_deadlines float8[],
  p_correlations text[], p_traces text[], p_parents text[], p_chosen smallint[]) returns void
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  first_events text := _only_first_events();
begin
  perform _check_lifecycle(a.role, array[p_lifecycle]), _check_links(a.role, p_parents);
  perform _submit_set(p_actor, a.role, trellis.now(), _open_batch(), p_lifecycle, p_repeat, p_job_ids, p_types, p_prios, p_payloads,
                      p_max_attempts, p_max_deaths, p_delays, p_run_ats, p_deadlines, p_correlations, p_traces, p_parents, p_chosen);
end $$;

-- Jobs without keys and times that differ only in id and payload, as one call submits many, or one. One statement asks what concerns all
-- of them, and one inserts them, because a statement costs as much to begin as an insert. Nothing is inserted if the login is limited, if
-- the type or the lifecycle asks for more, and if an id may be reserved or the actor is another login's: then `submit_plain` has the jobs.
-- The ids come as one text with a space between two, the payloads one after the other with their ends (the first is 0, where the first
-- payload begins): drivers look at each element of an array.
create or replace function submit_alike_jobs(
  p_actor int, p_lifecycle smallint, p_type int, p_prio smallint, p_max_attempts smallint, p_max_deaths smallint, p_correlation text,
  p_trace text, p_parent text, p_chosen smallint, p_job_ids text, p_ends text, p_payloads bytea) returns void
language plpgsql security definer set search_path from current as $$
declare
  ends int[] := string_to_array(p_ends, ' ')::int[];
  ids text[];
  first_events text := _only_first_events();
  now_at timestamptz := trellis.now();
  as_role smallint;
  first_state smallint;
  first_event smallint;
  as_prio smallint;
  attempts smallint;
  deaths_max smallint;
begin
  select a.role, l.initial, l.initial_event, case when o.type is null or p_chosen & 1 > 0 then p_prio else o.prio end,
         case when o.type is null or p_chosen & 2 > 0 then p_max_attempts else o.max_attempts end,
         case when o.type is null or p_chosen & 4 > 0 then p_max_deaths else o.max_deaths end
    into as_role, first_state, first_event, as_prio, attempts, deaths_max
    from actor a join lifecycle l on l.lifecycle = p_lifecycle
         left join type_options o on o.lifecycle = p_lifecycle and o.type = p_type and p_chosen <> 63
   where a.id = p_actor and a.db_role = session_user and not _is_limited() and l.initial_claimable and l.initial_timer_s is null
     and o.unique_rule is null and (o.keyed is not true or p_chosen & 16 > 0) and (o.deadline_s is null or p_chosen & 8 > 0)
     and not _may_be_reserved(p_job_ids);
  if not found then
    ids := string_to_array(p_job_ids, ' ');
    perform submit_plain(p_actor, p_lifecycle, false, ids, array[p_type], array[p_prio],
                         array(select substr(p_payloads, ends[n] + 1, ends[n + 1] - ends[n]) from generate_series(1, cardinality(ids)) n),
                         array[p_max_attempts], array[p_max_deaths], null, null, null, array_fill(p_correlation, array[cardinality(ids)]),
                         array_fill(p_trace, array[cardinality(ids)]), array_fill(p_parent, array[cardinality(ids)]), array[p_chosen]);
    return;
  end if;
  with i as materialized (
    select nextval('job_id_seq') as id, u.job_id, substr(p_payloads, ends[u.n] + 1, ends[u.n + 1] - ends[u.n]) as payload
      from string_to_table(p_job_ids, ' ') with ordinality u(job_id, n)
  ), b as (
    insert into batch (xid) values (pg_current_xact_id()::text::bigint) returning no
  ), j as (
    insert into job (id, created_at, type, max_attempts, max_deaths, lifecycle, prio, job_id, correlation_id, trace, parent_id, payload)
    select id, now_at, p_type, attempts, deaths_max, p_lifecycle, as_prio, job_id, p_correlation, p_trace, p_parent, payload from i
  ), r as (
    insert into ready (id, type, version, epoch, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags)
    select id, p_type, 1, 0, 0, 0, attempts, 0, first_state, p_lifecycle, as_prio, 0 from i
  )
  insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role)
  select id, (select no from b), now_at, 1, p_actor, 0, first_event, p_lifecycle, 0, first_state, 0, 0, as_role from i;
end $$;

-- The stored form of an idempotency key's scope. Compensations are not scoped by login: each is made once, for a job that is
-- the login's own.
create or replace function _scope_of_login(p_scope text, p_compensates text) returns text language sql stable
set search_path from current as $$
  select case when p_scope = 'job_id' or p_compensates is not null then p_scope else _of_login(p_scope) end
$$;

create or replace function _key_hash(p_name text) returns bigint language sql immutable as $$ select hashtextextended(p_name, 42) $$;

-- Locks bounded keys in one order, before the transaction locks or writes anything else. So two submits that bound the
-- same keys cannot deadlock, and a waiting one has no transaction id yet that the feed would wait for. Several calls of
-- one transaction lock all their keys here first.
create or replace function lock_waiting(p_names text[]) returns void language plpgsql security definer set search_path from current as $$
begin
  perform _lock_waiting(o.no) from (select distinct _waiting_lock(_of_login(u.name)) as no from unnest(p_names) u(name) order by 1) o;
end $$;

-- Raises an error if the key has no room. The caller holds the lock until it has committed, so that concurrent submits
-- count one another. Ready jobs that own a slot also count as waiting.
create or replace function _refuse_full(p_key text, p_max int) returns void language plpgsql set search_path from current as $$
declare
  key_id bigint := _key_hash(p_key);
  found_waiting bigint;
begin
  perform _lock_waiting(_waiting_lock(p_key));
  select (select count(*) from parked p where p.ckey = key_id) + (select count(*) from resting r where r.ckey = key_id)
       + (select count(*) from slot s join ready r on r.id = s.id where s.ckey = key_id) into found_waiting;
  if found_waiting >= p_max then
    raise exception '% jobs of key % wait and % is the limit', found_waiting, p_key, p_max
      using errcode = 'TR006', detail = json_build_object('key', p_key, 'waiting', found_waiting, 'limit', p_max)::text;
  end if;
end $$;

-- Takes an idempotency key, or returns the job that has it. That job's row is locked: retention skips locked rows and
-- so does not remove it before this transaction commits. A key whose job is gone is free.
create or replace function _take_key(p_scope text, p_key text, p_now timestamptz, p_id bigint, p_fingerprint bytea, out taken boolean, out id bigint,
  out job_id text, out fingerprint bytea) language plpgsql set search_path from current as $$
#variable_conflict use_column
begin
  for n in 1..10 loop
    insert into idempotency (scope, key, at, id, fingerprint) values (p_scope, p_key, p_now, p_id, p_fingerprint) on conflict do nothing;
    taken := found;
    if taken then return; end if;
    select j.id, j.job_id, k.fingerprint into id, job_id, fingerprint from idempotency k join job j on j.id = k.id
     where k.scope = p_scope and k.key = p_key for key share of j;
    if found then return; end if;
    delete from idempotency k where k.scope = p_scope and k.key = p_key and not exists (select from job j where j.id = k.id);
  end loop;
  raise exception 'key % changes hands all the time', p_key using errcode = '40001';
end $$;

-- outcome: 'created', 'existing', 'mismatch' or 'mismatched_id'. An existing job with the same generated id and the same request is our
-- own earlier submit if there may have been one (p_asked_before). `replaced` is the job whose unique key the new one took.
create or replace function _submit_one(
  p_actor int, p_role smallint, p_now timestamptz, p_batch bigint, p_lifecycle smallint, p_job_id text, p_type int, p_prio smallint,
  p_payload bytea, p_max_attempts smallint, p_max_deaths smallint, p_delay float8, p_run_at timestamptz, p_deadline float8,
  p_correlation text, p_trace text, p_parent text, p_compensates text, p_ckey text, p_cap int, p_scope text, p_key text,
  p_fingerprint bytea, p_asked_before boolean, p_given boolean, p_waiting_max int, p_chosen smallint, p_rule jsonb, p_unique_scope text,
  out outcome text, out job_id text, out replaced text)
language plpgsql set search_path from current as $$
declare
  l record;
  new_id bigint := nextval('job_id_seq');
  old record;
  key_id bigint;
  original bigint;
  due timestamptz;
  t token;
  r record;
  taken record;
  has_key boolean := false;
begin
  if p_scope = 'job_id' and p_key is distinct from p_job_id then
    raise exception 'a job id is reserved by the job that has it' using errcode = 'TR004';
  end if;
  if p_key is not null then
    select had.* into old from _take_key(p_scope, p_key, p_now, new_id, p_fingerprint) had;
    if not old.taken then
      job_id := old.job_id;
      outcome := case when old.fingerprint <> p_fingerprint then 'mismatch' when old.job_id = p_job_id and p_asked_before
                      then 'created' else 'existing' end;
      return;
    end if;
  end if;
  if p_given and p_scope <> 'job_id' then
    select had.* into old from _take_key('job_id', p_job_id, p_now, new_id, p_fingerprint) had;
    if not old.taken then
      job_id := p_job_id;
      if old.fingerprint = p_fingerprint then
        update idempotency k set id = old.id where k.id = new_id;
        outcome := 'existing';
      else
        delete from idempotency k where k.id = new_id;
        outcome := 'mismatched_id';
      end if;
      return;
    end if;
  end if;
  -- A condition with a query in it costs a query even where its other half decides, so such conditions are nested here.
  if _id_is_reserved(p_job_id, p_lifecycle, p_role) then
    if not exists (select from job j where j.job_id = p_job_id) then perform _refuse_reserved(p_job_id); end if;
  end if;
  select c.initial, c.initial_event, c.initial_claimable, c.initial_timer_s, o.type, o.prio, o.max_attempts, o.max_deaths, o.deadline_s,
         o.concurrency_limit, o.keyed, o.unique_rule
    into l from lifecycle c left join type_options o on o.lifecycle = c.lifecycle and o.type = p_type and p_chosen <> 63
   where c.lifecycle = p_lifecycle;
  if l.type is not null then
    if l.keyed and p_chosen & 16 = 0 then
      if not exists (select from job j where j.job_id = p_job_id) then perform _refuse_unkeyed(p_type); end if;
    end if;
    p_prio := case when p_chosen & 1 > 0 then p_prio else l.prio end;
    p_max_attempts := case when p_chosen & 2 > 0 then p_max_attempts else l.max_attempts end;
    p_max_deaths := case when p_chosen & 4 > 0 then p_max_deaths else l.max_deaths end;
    p_deadline := case when p_chosen & 8 > 0 then p_deadline else l.deadline_s end;
    p_cap := case when p_chosen & 32 > 0 then p_cap else l.concurrency_limit end;
  end if;
  if p_rule is not null or l.unique_rule is not null then
    has_key := not exists (select from job j where j.job_id = p_job_id);
  end if;
  if has_key then
    r := _resolve_rule(p_rule, l.unique_rule::jsonb, p_type, p_payload);
    taken := _take_unique_key(p_actor, p_now, p_batch, new_id, p_job_id, p_type, p_unique_scope, r.key, r.on_conflict, r.unfinished,
                              r.window_s);
    if taken.keeper is not null and r.on_conflict = 'raise' then
      raise exception 'job % holds the unique key', taken.keeper_job using errcode = 'TR014',
        detail = json_build_object('job_id', taken.keeper_job, 'type', (select n.name from job_type n where n.id = p_type),
                                   'key', regexp_replace(r.key, '^key:', ''))::text;
    elsif taken.keeper is not null then
      -- An idempotency key of this request is bound to the job that was there.
      update idempotency k set id = taken.keeper where k.id = new_id and k.scope <> 'job_id';
      delete from idempotency k where k.id = new_id;
      job_id := taken.keeper_job;
      outcome := 'existing';
      return;
    end if;
    replaced := taken.replaced;
    if r.debounce_s is not null then
      p_run_at := null;
      p_delay := extract(epoch from least(r.debounce_s * interval '1 s', taken.first_at + r.debounce_max_s * interval '1 s' - p_now));
    end if;
  end if;
  if p_waiting_max is not null then
    if not exists (select from job j where j.job_id = p_job_id) then perform _refuse_full(p_ckey, p_waiting_max); end if;
  end if;
  due := greatest(p_run_at, p_now + p_delay * interval '1 s');
  due := case when not (l.initial_claimable or _is_timed(p_lifecycle, l.initial)) then null when due > p_now then due
              else p_now + l.initial_timer_s * interval '1 s' end;
  if p_compensates is not null then
    select j.id into original from job j where j.job_id = p_compensates;
    if original is null then
      raise exception 'there is no job % to compensate', p_compensates using errcode = 'TR004';
    end if;
  end if;
  if p_ckey is not null then key_id := _key_hash(p_ckey); end if;
  insert into job (id, created_at, deadline_at, ckey, key_cap, key_name, compensates, type, max_attempts, max_deaths, lifecycle, prio,
                   job_id, correlation_id, trace, parent_id, payload, deadline_us, compensates_id)
  values (new_id, p_now, p_now + p_deadline * interval '1 s', key_id, p_cap, p_ckey, original, p_type, p_max_attempts, p_max_deaths, p_lifecycle,
          p_prio, p_job_id, p_correlation, p_trace, p_parent, p_payload, p_deadline * 1000000, p_compensates)
  on conflict on constraint job_job_id_key do nothing;
  if not found then
    -- The id exists. If a caller chose it, the fingerprint says whether this is the same request; otherwise the request
    -- itself is compared. An idempotency key of the same request is bound to that job.
    if has_key then raise exception 'job % was submitted just now', p_job_id using errcode = '40001'; end if;
    job_id := p_job_id;
    replaced := (select u.replaced from unique_job u join job j on j.id = u.id where j.job_id = p_job_id);
    select j.id, coalesce((select k.fingerprint = p_fingerprint from idempotency k where k.scope = 'job_id' and k.key = p_job_id
                              and k.id <> new_id), (j.lifecycle, j.type, j.payload) = (p_lifecycle, p_type, p_payload)) as same
      into old from job j where j.job_id = p_job_id for key share;
    if not found then raise exception 'job % was removed just now', p_job_id using errcode = '40001'; end if;
    outcome := case when not old.same then 'mismatched_id' when p_key is null and p_asked_before then 'created' else 'existing' end;
    if outcome = 'existing' then update idempotency k set id = old.id where k.id = new_id and k.scope <> 'job_id'; end if;
    delete from idempotency k where k.id = new_id;
    return;
  end if;
  if p_deadline is not null then insert into deadline (id, at) values (new_id, p_now + p_deadline * interval '1 s'); end if;
  insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role, due_at)
  values (new_id, p_batch, p_now, 1, p_actor, 0, l.initial_event, p_lifecycle, 0, l.initial, 0, 0, p_role, due);
  if key_id is null and original is null and l.initial_claimable and due is null then  -- most jobs
    insert into ready (id, type, version, epoch, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags)
    values (new_id, p_type, 1, 0, 0, 0, p_max_attempts, 0, l.initial, p_lifecycle, p_prio, 0);
  else
    t := (new_id, key_id, null, p_type, 1, 0, null, 0, 0, p_max_attempts, 0, l.initial, p_lifecycle, p_prio,
          case when original is null then 0 else 1 end)::token;
    perform _put_waiting(t, l.initial_claimable, due, p_now);
  end if;
  job_id := p_job_id;
  outcome := 'created';
end $$;

-- Inserts jobs whose ids were chosen, by one statement, and the keys that say so. The keys come first, as in _submit_one: two
-- transactions with the same id then wait for its key, and not for each other. False, and nothing is inserted, if another transaction
-- took one of the ids meanwhile.
create or replace function _submit_given(
  p_actor int, p_role smallint, p_now timestamptz, p_batch bigint, p_lifecycle smallint, p_job_ids text[], p_types int[],
  p_prios smallint[], p_payloads bytea[], p_max_attempts smallint[], p_max_deaths smallint[], p_delays float8[], p_run_ats timestamptz[],
  p_deadlines float8[], p_correlations text[], p_traces text[], p_parents text[], p_chosen smallint[], p_fingerprints bytea[])
returns boolean language plpgsql set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
begin
  insert into idempotency (scope, key, at, id, fingerprint)
  select 'job_id', u.job_id, p_now, 0, u.fingerprint from unnest(p_job_ids, p_fingerprints) u(job_id, fingerprint);
  perform _submit_set(p_actor, p_role, p_now, p_batch, p_lifecycle, false, p_job_ids, p_types, p_prios, p_payloads, p_max_attempts,
                      p_max_deaths, p_delays, p_run_ats, p_deadlines, p_correlations, p_traces, p_parents, p_chosen);
  update idempotency k set id = b.id
    from unnest(p_job_ids) u(job_id) cross join lateral (select j.id from job j where j.job_id = u.job_id offset 0) b
   where k.scope = 'job_id' and k.key = u.job_id;
  return true;
exception when unique_violation then return false;
end $$;

-- Jobs one by one, but neighbours without keys together, and neighbours whose ids were chosen and are free. With p_key (see
-- 72_request_keys.sql) the key of the request is stored with them; the only outcome is 'answered', and nothing is submitted,
-- when an answer is stored with that key.
create or replace function submit_keyed(
  p_actor int, p_lifecycles smallint[], p_job_ids text[], p_types int[], p_prios smallint[], p_payloads bytea[],
  p_max_attempts smallint[], p_max_deaths smallint[], p_delays float8[], p_run_ats timestamptz[], p_deadlines float8[],
  p_correlations text[], p_traces text[], p_parents text[], p_compensates text[], p_ckeys text[], p_caps int[], p_scopes text[],
  p_keys text[], p_fingerprints bytea[], p_repeat boolean, p_given boolean[], p_waiting_max int[], p_chosen smallint[],
  p_key text[], p_rules text[], p_unique_scopes text[])
returns table (outcome text, job_id text, replaced text)
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  first_events text := _only_first_events();
  at timestamptz;
  no bigint;
  kinds int[];  -- 0: by itself; 1: with others without keys; 2: with others whose ids were chosen
  i int := 1;
  j int;
begin
  if p_key is not null and _take_request_key(p_key) is not null then
    return query select 'answered', null::text, null::text;
    return;
  end if;
  perform lock_waiting(array(select u.name from unnest(p_ckeys, p_waiting_max) u(name, most) where u.most is not null));
  perform _check_lifecycle(a.role, p_lifecycles), _check_links(a.role, p_parents || p_compensates);
  if _is_limited() then
    p_ckeys := array(select _of_login(u.name) from unnest(p_ckeys) with ordinality u(name, n) order by u.n);
    p_scopes := array(select _scope_of_login(u.name, p_compensates[u.n]) from unnest(p_scopes) with ordinality u(name, n) order by u.n);
  end if;
  at := trellis.now();
  no := _open_batch();
  if cardinality(p_job_ids) > 1 then
    kinds := array(
      select case when u.ckey is not null or u.compensates is not null or u.rule is not null or u.most is not null
                    or exists (select from job e where e.job_id = u.job_id)
                    or exists (select from type_options o where o.lifecycle = u.lifecycle and o.type = u.type and u.chosen <> 63
                                                            and o.unique_rule is not null) then 0
                  when u.key is null and not u.given then 1
                  when u.given and u.scope = 'job_id' and u.key = u.job_id and array_position(p_job_ids, u.job_id) = u.n
                    and not exists (select from idempotency k where k.scope = 'job_id' and k.key = u.job_id) then 2
                  else 0 end
        from unnest(p_ckeys, p_scopes, p_keys, p_given, p_compensates, p_rules, p_waiting_max, p_lifecycles, p_types, p_chosen, p_job_ids)
             with ordinality u(ckey, scope, key, given, compensates, rule, most, lifecycle, type, chosen, job_id, n) order by u.n);
  end if;
  while i <= cardinality(p_job_ids) loop
    j := i;
    while kinds[i] > 0 and kinds[j + 1] = kinds[i] and p_lifecycles[j + 1] = p_lifecycles[i] loop j := j + 1; end loop;
    if j > i then
      if kinds[i] = 1 then
        perform _submit_set(p_actor, a.role, at, no, p_lifecycles[i], p_repeat, p_job_ids[i:j], p_types[i:j], p_prios[i:j],
                            p_payloads[i:j], p_max_attempts[i:j], p_max_deaths[i:j], p_delays[i:j], p_run_ats[i:j], p_deadlines[i:j],
                            p_correlations[i:j], p_traces[i:j], p_parents[i:j], p_chosen[i:j]);
      elsif not _submit_given(p_actor, a.role, at, no, p_lifecycles[i], p_job_ids[i:j], p_types[i:j], p_prios[i:j], p_payloads[i:j],
                              p_max_attempts[i:j], p_max_deaths[i:j], p_delays[i:j], p_run_ats[i:j], p_deadlines[i:j],
                              p_correlations[i:j], p_traces[i:j], p_parents[i:j], p_chosen[i:j], p_fingerprints[i:j]) then
        kinds[i:j] := array_fill(0, array[j - i + 1]);
        continue;
      end if;
      return query select 'created', u.job_id, null::text from unnest(p_job_ids[i:j]) with ordinality u(job_id, n) order by u.n;
    else
      return query select s.outcome, s.job_id, s.replaced from _submit_one(
        p_actor, a.role, at, no, p_lifecycles[i], p_job_ids[i], p_types[i], p_prios[i], p_payloads[i], p_max_attempts[i],
        p_max_deaths[i], p_delays[i], p_run_ats[i], p_deadlines[i], p_correlations[i], p_traces[i], p_parents[i], p_compensates[i],
        p_ckeys[i], p_caps[i], p_scopes[i], p_keys[i], p_fingerprints[i], p_repeat, p_given[i], p_waiting_max[i],
        p_chosen[i], p_rules[i]::jsonb, _of_login(coalesce(p_unique_scopes[i], ''))) s;
    end if;
    i := j + 1;
  end loop;
  if array_remove(p_ckeys, null) <> '{}' then
    perform _promote(array(select distinct _key_hash(k) from unnest(p_ckeys) k where k is not null), true);
  end if;
end $$;

-- One job, with or without keys, as `submit_keyed` takes it. Returns null when the job was created and replaced no other;
-- otherwise the outcome, the job's id and the job that it replaced.
create or replace function submit_one(
  p_actor int, p_lifecycle smallint, p_job_id text, p_type int, p_prio smallint, p_payload bytea, p_max_attempts smallint,
  p_max_deaths smallint, p_delay float8, p_run_at timestamptz, p_deadline float8, p_correlation text, p_trace text, p_parent text,
  p_compensates text, p_ckey text, p_cap int, p_scope text, p_key text, p_fingerprint bytea, p_repeat boolean, p_given boolean,
  p_waiting_max int, p_chosen smallint, p_rule text, p_unique_scope text) returns text[]
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  first_events text := _only_first_events();
  new record;
begin
  if p_waiting_max is not null then perform lock_waiting(array[p_ckey]); end if;
  if _is_limited() then
    perform _check_lifecycle(a.role, array[p_lifecycle]), _check_links(a.role, array[p_parent, p_compensates]);
    p_ckey := _of_login(p_ckey);
    p_scope := _scope_of_login(p_scope, p_compensates);
    p_unique_scope := _of_login(p_unique_scope);
  end if;
  new := _submit_one(
    p_actor, a.role, trellis.now(), _open_batch(), p_lifecycle, p_job_id, p_type, p_prio, p_payload, p_max_attempts, p_max_deaths, p_delay,
    p_run_at, p_deadline, p_correlation, p_trace, p_parent, p_compensates, p_ckey, p_cap, p_scope, p_key, p_fingerprint, p_repeat, p_given,
    p_waiting_max, p_chosen, p_rule::jsonb, p_unique_scope);
  if p_ckey is not null then perform _promote(array[_key_hash(p_ckey)], true); end if;
  return case when new.outcome <> 'created' or new.replaced is not null then array[new.outcome, new.job_id, new.replaced] end;
end $$;

-- What `submit_job` and `submit_unique_job` do.
create or replace function _submit_in_sql(
  p_type text, p_payload jsonb, p_job_id text, p_priority text, p_delay_s float8, p_run_at timestamptz, p_deadline_s float8,
  p_max_attempts int, p_concurrency_key text, p_concurrency_limit int, p_idempotency_key text, p_correlation_id text, p_trace text,
  p_parent_id text, p_rule jsonb, out job_id text, out outcome text, out replaced text)
language plpgsql set search_path from current as $$
declare
  as_actor int;
  as_role smallint := (select r.role from role r where r.name = 'submitter');
  made record;
  prio smallint := array_position(array['critical', 'interactive', 'batch'], coalesce(p_priority, 'batch')) - 1;
  chosen smallint := case when p_priority is null then 0 else 1 end + case when p_max_attempts is null then 0 else 2 end
                   + case when p_deadline_s is null then 0 else 8 end + case when p_concurrency_key is null then 0 else 16 end
                   + case when p_concurrency_limit is null then 0 else 32 end;
  body bytea := convert_to(p_payload::text, 'UTF8');
  print bytea;
  reused text;
begin
  if p_type !~ '^[A-Za-z0-9][A-Za-z0-9._:>*-]{0,199}$' then
    raise exception 'job type % is not a name: letters, digits and . _ : > * - only', p_type using errcode = 'TR004';
  elsif prio is null then
    raise exception 'priority % is none of critical, interactive, batch', p_priority using errcode = 'TR004';
  elsif p_delay_s < 0 then
    raise exception 'delay % is negative', p_delay_s using errcode = 'TR004';
  elsif octet_length(body) > 1048576 then
    raise exception 'the payload has % bytes and the limit is 1048576', octet_length(body) using errcode = 'TR004';
  elsif p_max_attempts not between 1 and 1000 or p_concurrency_limit < 1 then
    raise exception 'max_attempts must be 1 to 1000 and concurrency_limit at least 1' using errcode = 'TR004';
  end if;
  if not exists (select from job_type t where t.name = p_type) then
    raise exception 'job type % is unknown here: start a worker that serves it, or commit `select trellis.type_id(%)` once', p_type,
      quote_literal(p_type) using errcode = 'TR004';
  elsif p_job_id !~ '^[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}$' then
    raise exception 'job id % is not an id: letters, digits and . _ : @ - only, 200 at most', p_job_id using errcode = 'TR004';
  elsif p_correlation_id = '' or length(p_correlation_id) > 200 or length(p_trace) > 1000 or length(p_parent_id) > 200 then
    raise exception 'correlation id, trace or parent id is empty or too long' using errcode = 'TR004';
  elsif p_concurrency_key = '' or length(p_concurrency_key) > 200 or p_idempotency_key = '' or length(p_idempotency_key) > 200 then
    raise exception 'concurrency key or idempotency key is empty or longer than 200' using errcode = 'TR004';
  elsif p_deadline_s <= 0 or p_delay_s > 31622400 or p_deadline_s > 31622400 then
    raise exception 'delay and deadline are positive and at most 366 days' using errcode = 'TR004';
  elsif p_run_at >= '3000-01-01 00:00:00+00' then  -- PostgreSQL has years that its clients cannot read
    raise exception 'run_at % is not before the year 3000', p_run_at using errcode = 'TR004';
  end if;
  as_actor := register_actor('sql:' || session_user, as_role);
  perform _check_links(as_role, array[p_parent_id]);
  print := sha256(convert_to(p_type, 'UTF8') || body);
  select s.* into made from _submit_one(
    as_actor, as_role, trellis.now(), _open_batch(), (select l.lifecycle from lifecycle l where l.name = 'leased-job'),
    coalesce(p_job_id, gen_random_uuid()::text), type_id(p_type), prio, body, coalesce(p_max_attempts, 5)::smallint, 3::smallint, p_delay_s,
    p_run_at, p_deadline_s, p_correlation_id, p_trace, p_parent_id, null, _of_login('user:' || p_concurrency_key),
    coalesce(p_concurrency_limit, 1), case when p_idempotency_key is not null then _of_login('key:') when p_job_id is not null then 'job_id' end,
    coalesce(p_idempotency_key, p_job_id), print, false, p_job_id is not null, null, chosen, p_rule, _of_login('')) s;
  if made.outcome like 'mismatch%' then
    reused := case made.outcome when 'mismatch' then coalesce(p_idempotency_key, p_job_id) else p_job_id end;
    raise exception 'key % was used before for another request (job %)', reused, made.job_id
      using errcode = 'TR010', detail = json_build_object('key', reused, 'job_id', made.job_id)::text;
  end if;
  job_id := made.job_id;
  outcome := made.outcome;
  replaced := made.replaced;
end $$;

-- For any driver, inside any transaction: the job exists if and only if that transaction commits. Returns the job id.
-- The caller may keep its transaction open for long, so nothing is locked here that others need. A job with a
-- concurrency key gets its slot from the next sweep (within a second). Its type must be known before, from a worker or
-- from `type_id`. Missing options are taken from the type's declaration.
create or replace function submit_job(
  p_type text, p_payload jsonb default 'null', p_job_id text default null, p_priority text default null,
  p_delay_s float8 default 0, p_run_at timestamptz default null, p_deadline_s float8 default null,
  p_max_attempts int default null, p_concurrency_key text default null, p_concurrency_limit int default null,
  p_idempotency_key text default null, p_correlation_id text default null, p_trace text default null,
  p_parent_id text default null)
returns text language sql security definer set search_path from current as $$
  select s.job_id from _submit_in_sql(p_type, p_payload, p_job_id, p_priority, p_delay_s, p_run_at, p_deadline_s, p_max_attempts,
                                      p_concurrency_key, p_concurrency_limit, p_idempotency_key, p_correlation_id, p_trace, p_parent_id,
                                      null) s
$$;

-- As `submit_job`, with what the submit says about uniqueness, if anything; the type declares what it leaves out. Returns the job id,
-- whether the job was 'created', 'returned' or 'replaced' another, and the job that it replaced. Until the transaction ends, other submits
-- with the same unique key wait for it.
create or replace function submit_unique_job(
  p_type text, p_payload jsonb default 'null', p_unique text default null, p_while text default null, p_window_s float8 default null,
  p_on_conflict text default null, p_debounce_s float8 default null, p_debounce_max_s float8 default null, p_job_id text default null,
  p_priority text default null, p_delay_s float8 default 0, p_run_at timestamptz default null, p_deadline_s float8 default null,
  p_max_attempts int default null, p_concurrency_key text default null, p_concurrency_limit int default null,
  p_idempotency_key text default null, p_correlation_id text default null, p_trace text default null, p_parent_id text default null)
returns table (job_id text, outcome text, replaced text) language sql security definer set search_path from current as $$
  select s.job_id, case when s.outcome = 'existing' then 'returned' when s.replaced is null then 'created' else 'replaced' end, s.replaced
    from _submit_in_sql(
      p_type, p_payload, p_job_id, p_priority, p_delay_s, p_run_at, p_deadline_s, p_max_attempts, p_concurrency_key, p_concurrency_limit,
      p_idempotency_key, p_correlation_id, p_trace, p_parent_id,
      nullif(jsonb_strip_nulls(jsonb_build_object(
        'key', p_unique, 'while_', p_while, 'window_s', p_window_s, 'on_conflict', p_on_conflict, 'debounce_s', p_debounce_s,
        'debounce_max_s', p_debounce_max_s)), '{}')) s
$$;
