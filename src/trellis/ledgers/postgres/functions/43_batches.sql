-- Batches: a job that starts once, when all jobs of its batch have ended. It is suspended from its submit on.

-- Locks the concurrency keys of a batch that exist, in one order and before its parts are submitted: each part locks its own keys, and two
-- batches would lock them in different orders.
create or replace function lock_keys(p_names text[]) returns void language sql security definer set search_path from current as $$
  select from concurrency_key c where c.id = any(array(select _key_hash(_of_login(u.name)) from unnest(p_names) u(name))) order by c.id for update
$$;

-- Makes a job that this transaction has submitted the completion job of these jobs, which may have been submitted before. If all of them
-- have ended, it is resumed when this returns. Unless p_abandon, those that this transaction has submitted are cancelled with it.
-- p_types: runs of jobs of the same type, as [[type, count], …].
create or replace function _complete_batch(p_actor int, p_role smallint, p_job_id text, p_members text[], p_types jsonb, p_abandon boolean)
returns void language plpgsql set search_path from current as $$
declare
  own bigint;
  now_at timestamptz := trellis.now();
  this_xid bigint := pg_current_xact_id()::text::bigint;
  batch_no bigint;
  k record;
  x transition;
  unknown text;
begin
  if cardinality(p_members) > _batch_max() then
    raise exception 'a batch has at most % jobs, and this one has %', _batch_max(), cardinality(p_members) using errcode = 'TR004';
  end if;
  select j.id into own from job j where j.job_id = p_job_id and exists (
    select from event e join batch b on b.no = e.batch where e.id = j.id and e.version = 1 and b.xid = this_xid);
  if not found then
    raise exception 'job % was not submitted in this transaction: only a new job can complete a batch', p_job_id using errcode = 'TR004';
  end if;
  perform _check_links(p_role, p_members);
  select u.job_id into unknown from unnest(p_members) u(job_id)
   where u.job_id = p_job_id or not exists (select from job j where j.job_id = u.job_id) limit 1;
  if found then
    raise exception 'job % cannot be of the batch: it is unknown, or the job that completes it', unknown using errcode = 'TR004';
  end if;
  k := _find(own);
  select o.* into x from transition o where o.lifecycle = (k.t).lifecycle and o.source = (k.t).state and o.trigger = 'suspend';
  if not found or x.fenced then
    raise exception 'job % cannot complete a batch: its lifecycle does not let a job wait', p_job_id using errcode = 'TR004';
  elsif k.place = 'resting' then
    raise exception 'job % has a start time: a completion job starts when the jobs of its batch have ended', p_job_id using errcode = 'TR004';
  end if;
  batch_no := _open_batch();
  perform _remove(own, k.place);
  perform _step(k.t, x, p_actor, p_role, now_at, batch_no, p_spare => true,
                p_data => convert_to(format('{"waits_for": {"batch": %s}}', cardinality(p_members)), 'UTF8'));
  -- Jobs of this transaction cannot end before it does. Others may: `_begin_wait` links them one by one.
  insert into spawned (id, parent, cancels)
  select j.id, own, not p_abandon from (select distinct u.job_id from unnest(p_members) u(job_id)) m join job j on j.job_id = m.job_id
   where exists (select from event e join batch b on b.no = e.batch where e.id = j.id and e.version = 1 and b.xid = this_xid)
     and not exists (select from ended n where n.id = j.id) order by j.id;
  perform _begin_wait(own, 0, jsonb_build_object(
    'mode', 4, 'entry', '@batch',
    'body', encode(convert_to(json_build_object('ids', p_members, 'types', p_types)::text, 'UTF8'), 'base64')), batch_no);
  perform _wake(batch_no, p_actor, now_at, batch_no);
end $$;

create or replace function complete_batch(p_actor int, p_job_id text, p_members text[], p_types jsonb, p_abandon boolean)
returns void language plpgsql security definer set search_path from current as $$
declare a record := _actor(p_actor);
begin
  perform _complete_batch(p_actor, a.role, p_job_id, p_members, p_types, p_abandon);
end $$;

-- For any driver, inside any transaction: submits the job that starts when the jobs of p_members have ended. They were submitted before,
-- in this transaction (`submit_job`) or in another; those of this transaction are cancelled with it unless p_abandon. Returns its id.
-- A repeated idempotency key returns the first job, and links nothing.
create or replace function submit_completion(
  p_members text[], p_type text, p_payload jsonb default 'null', p_abandon boolean default false, p_job_id text default null,
  p_priority text default null, p_deadline_s float8 default null, p_max_attempts int default null, p_concurrency_key text default null,
  p_concurrency_limit int default null, p_idempotency_key text default null, p_correlation_id text default null,
  p_trace text default null, p_parent_id text default null)
returns text language plpgsql security definer set search_path from current as $$
declare
  done record;
  as_role smallint := (select r.role from role r where r.name = 'submitter');
begin
  if p_members is null or array_position(p_members, null) is not null then
    raise exception 'p_members are the ids of the jobs to wait for, and none of them is null' using errcode = 'TR004';
  end if;
  select s.* into done from _submit_in_sql(p_type, p_payload, p_job_id, p_priority, 0, null, p_deadline_s, p_max_attempts, p_concurrency_key,
    p_concurrency_limit, p_idempotency_key, p_correlation_id, p_trace, p_parent_id, null) s;
  if done.outcome = 'created' then
    perform _complete_batch(register_actor('sql:' || session_user, as_role), as_role, done.job_id, p_members, (
      select coalesce(jsonb_agg(jsonb_build_array(t.name, 1) order by u.n), '[]') from unnest(p_members) with ordinality u(job_id, n)
        join job j on j.job_id = u.job_id join job_type t on t.id = j.type), p_abandon);
  end if;
  return done.job_id;
end $$;
