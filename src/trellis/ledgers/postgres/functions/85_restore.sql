-- Restores lost jobs, for the owner of the ledger only. The events are checked like all others. Jobs and events come as
-- JSON objects; bytes come in separate arrays and are referred to by index.

-- A slot for a job restored as held, beyond the limit if none is free: it may continue, as after a lowered limit.
create or replace function _seat_restored(p_id bigint, p_key bigint) returns void language sql set search_path from current as $$
  insert into slot (ckey, n, id)
  select p_key, s.n, p_id from generate_series(1, (select count(*)::int + 1 from slot o where o.ckey = p_key)) s(n)
   where not exists (select from slot o where o.ckey = p_key and o.n = s.n) order by s.n limit 1
$$;

-- Puts restored jobs in their places. j holds the data that `restore` collected for each, with its number.
create or replace function _place_restored(j jsonb, p_now timestamptz) returns void language plpgsql set search_path from current as $$
declare
  r record;
  t token;
begin
  for r in select x.*, coalesce(a.id, 0) as owner from jsonb_to_recordset(j) as x(
      id bigint, key_name text, type int, version int, epoch int, generation smallint, attempt int, max_attempts int, deaths smallint,
      state smallint, lifecycle smallint, prio smallint, compensates text, place text, due_at timestamptz, deadline_at timestamptz,
      updated_at timestamptz, owner_name text, owner_role smallint, owner_node text, held_until timestamptz)
      left join actor a on a.name = x.owner_name and a.role = x.owner_role and a.db_role = session_user and a.node = x.owner_node
      order by x.id loop
    t := (r.id, case when r.key_name is not null then _key_hash(r.key_name) end, r.held_until, r.type, r.version, r.epoch,
          nullif(r.owner, 0), r.generation, r.attempt, r.max_attempts, r.deaths, r.state, r.lifecycle, r.prio,
          case when r.compensates is null then 0 else 1 end)::token;
    if r.place = 'held' then
      if t.ckey is not null then perform _seat_restored(t.id, t.ckey); end if;
      insert into lease (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio,
                         flags, lease_ms, beat_ms)
      values (t.id, t.ckey, t.until, t.type, t.version, t.epoch, t.owner, t.generation, t.attempt, t.max_attempts, t.deaths, t.state,
              t.lifecycle, t.prio, t.flags, 1, 1);
    elsif r.place = 'ended' then
      insert into ended (id, at, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, type)
      values (t.id, r.updated_at, t.version, t.epoch, t.owner, t.generation, t.attempt, t.max_attempts, t.deaths, t.state, t.lifecycle, t.type);
    else
      perform _put_waiting(t, r.place = 'ready', r.due_at, p_now);
    end if;
    if r.place <> 'ended' and r.deadline_at is not null then insert into deadline (id, at) values (r.id, r.deadline_at); end if;
  end loop;
end $$;

-- Numbers for restored jobs, which the lost ledger cannot have given out: it counted from 1, or from an earlier time
-- like this one. The partition is created first. A concurrent submit with a later number waits until it exists.
create or replace function _restored_numbers(p_count int, p_now timestamptz) returns bigint[] language plpgsql
set search_path from current as $$
declare
  numbers constant text := pg_get_serial_sequence('job', 'id');
  first bigint := (extract(epoch from p_now) * 1000000)::bigint;
begin
  perform from work_lock w where w.kind = 'partitions' for update;
  first := greatest(first, coalesce(pg_sequence_last_value(numbers), 0));
  perform _make_partition(_partition_of(first)), _make_partition(_partition_of(first + p_count) + 1);
  perform _make_partition(_partition_of(first + p_count));
  if coalesce(pg_sequence_last_value(numbers), 0) < first then perform setval(numbers, first); end if;
  -- The journals that come back name signals of the lost ledger as read: new ones have higher numbers.
  perform setval(pg_get_serial_sequence('job_signal', 'no'),
                 greatest(first, coalesce(pg_sequence_last_value(pg_get_serial_sequence('job_signal', 'no')), 0)));
  return array(select nextval(numbers) from generate_series(1, p_count));
end $$;

create or replace function restore(p_actor int, p_jobs jsonb, p_payloads bytea[], p_events jsonb, p_data bytea[], p_letters jsonb,
                                   p_keys jsonb, p_fingerprints bytea[], p_journal jsonb, p_bodies bytea[])
returns table (job_id text) language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  now_at timestamptz := trellis.now();
  batch_no bigint;
  fresh text[];
  made jsonb;
  apart text;
begin
  perform _require(a.role, 'restore');
  if not pg_has_role(session_user, 'trellis_owner', 'member') then
    raise exception 'only a member of trellis_owner may put lost jobs back, and % is none', session_user using errcode = 'TR002';
  end if;
  perform from work_lock w where w.kind = 'restore' for update;
  fresh := array(select x.job_id from jsonb_to_recordset(p_jobs) as x(n int, job_id text)
                  where not exists (select from job j where j.job_id = x.job_id) order by x.n);
  if cardinality(fresh) = 0 then return; end if;
  batch_no := _open_batch();
  perform type_id(x.type_name) from jsonb_to_recordset(p_jobs) as x(type_name text) group by x.type_name;
  insert into actor (role, db_role, name, node)
  select distinct e.role, session_user, e.actor_name, e.node
    from jsonb_to_recordset(p_events) as e(role smallint, actor_name text, node text) union
  select distinct e.role, session_user, e.last_owner, e.node
    from jsonb_to_recordset(p_letters) as e(role smallint, last_owner text, node text)
   where e.last_owner is not null
  on conflict do nothing;

  insert into job (id, created_at, deadline_at, ckey, key_cap, key_name, compensates, type, max_attempts, max_deaths, lifecycle, prio,
                   job_id, correlation_id, trace, parent_id, payload, deadline_us, compensates_id)
  select i.id, x.created_at, x.deadline_at, case when x.key_name is not null then _key_hash(x.key_name) end, x.key_cap, x.key_name,
         null, t.id, x.asked_attempts, x.max_deaths, x.lifecycle, x.prio, x.job_id, x.correlation_id, x.trace, x.parent_id,
         p_payloads[x.n], x.deadline_us, x.compensates
    from jsonb_to_recordset(p_jobs) as x(
      n int, job_id text, created_at timestamptz, deadline_at timestamptz, key_name text, key_cap int, type_name text, asked_attempts int,
      max_deaths smallint, lifecycle smallint, prio smallint, correlation_id text, trace text, parent_id text, deadline_us bigint,
      compensates text)
    join unnest(fresh, _restored_numbers(cardinality(fresh), now_at)) i(job_id, id) on i.job_id = x.job_id
    join job_type t on t.name = x.type_name;
  update job j set compensates = o.id from job o where j.job_id = any(fresh) and j.compensates_id is not null and o.job_id = j.compensates_id;
  select jsonb_agg(x.value || jsonb_build_object('id', j.id, 'type', j.type)) into made
    from jsonb_array_elements(p_jobs) x join job j on j.job_id = x.value ->> 'job_id' where j.job_id = any(fresh);

  insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role, cause, request,
                     data, due_at)
  select j.id, batch_no, e.at, e.version, o.id, e.epoch, e.type, j.lifecycle, e.source, e.target, e.generation, e.attempt, e.role, e.cause,
         e.request, p_data[e.n], e.due_at
    from jsonb_to_recordset(p_events) as e(
      n int, job_id text, at timestamptz, version int, actor_name text, node text, epoch int, type smallint, source smallint, target smallint,
      generation smallint, attempt int, role smallint, cause text, request text, due_at timestamptz)
    join job j on j.job_id = e.job_id
    join actor o on o.name = e.actor_name and o.role = e.role and o.db_role = session_user and o.node = e.node
   where e.job_id = any(fresh) order by j.id, e.version;

  -- A job and its artifact may come back in any order. But a job has one final artifact, and none while it exists and
  -- has not completed.
  select w.job_id into apart from job w, lateral _final_artifacts(w.parent_id) o where w.job_id = any(fresh) and o.id = w.id and (
    exists (select from _final_artifacts(w.parent_id) m where m.id <> w.id)
    or exists (select from job p where p.job_id = w.parent_id and not exists (
      select from event e join transition x on x.lifecycle = e.lifecycle and x.finalizes and x.event = e.type and x.target = e.to_state
       where e.id = p.id))) limit 1;
  if found then
    raise exception 'artifact % cannot be final: its job has not completed, or has another', apart using errcode = 'TR001';
  end if;

  insert into dead_letter (id, version, at, reason_code, stage, last_error, attempts, last_owner, last_lease_expires_at, correlation_id,
                           requeued_at)
  select j.id, d.version, d.at, d.reason_code, d.stage, d.last_error, d.attempts, o.id, d.last_lease_expires_at,
         coalesce(j.correlation_id, j.job_id), d.requeued_at
    from jsonb_to_recordset(p_letters) as d(
      job_id text, version int, at timestamptz, reason_code text, stage text, last_error text, attempts int, last_owner text,
      role smallint, node text, last_lease_expires_at timestamptz, requeued_at timestamptz)
    join job j on j.job_id = d.job_id
    left join actor o on o.name = d.last_owner and o.role = d.role and o.db_role = session_user and o.node = d.node
   where d.job_id = any(fresh);

  -- A key that belongs to another job stays with that job.
  insert into idempotency (scope, key, at, id, fingerprint)
  select k.scope, k.key, j.created_at, j.id, p_fingerprints[k.n]
    from jsonb_to_recordset(p_keys) as k(n int, job_id text, scope text, key text) join job j on j.job_id = k.job_id
   where k.job_id = any(fresh) order by j.id on conflict do nothing;
  insert into journal (id, entry, at, epoch, body)
  select j.id, k.entry, k.at, k.epoch, p_bodies[k.n]
    from jsonb_to_recordset(p_journal) as k(n int, job_id text, entry text, at timestamptz, epoch int) join job j on j.job_id = k.job_id
   where k.job_id = any(fresh);
  insert into concurrency_key (id, name, cap)
  select distinct on (j.ckey) j.ckey, j.key_name, j.key_cap from job j where j.job_id = any(fresh) and j.ckey is not null
   order by j.ckey, j.id on conflict do nothing;
  perform _place_restored(made, now_at);
  perform _restore_unique_key(u.id, u.type, u.unique_scope, u.unique_key, u.unfinished, u.unique_until, u.first_at, now_at)
     from jsonb_to_recordset(made) as u(id bigint, type int, unique_scope text, unique_key text, unfinished boolean,
                                        unique_until timestamptz, first_at timestamptz)
    where u.unique_key is not null order by u.id;
  return query select unnest(fresh);
end $$;
