-- Changes of many jobs in one transaction: cancel, discard, run now, prioritize (engine/job_changes.py). Each job makes one
-- declared step with its event, by the functions that make the step of a single job.

-- Makes a step that keeps the state of a waiting job: 'run_now' ends its delay, 'prioritize' gives it p_prio. Its place in the
-- queue is then the last of its priority.
create or replace function _change_in_place(p_id bigint, p_trigger text, p_prio smallint, p_actor int, p_role smallint, p_now timestamptz,
                                            p_batch bigint, p_request text, p_version int, p_cause text, out outcome text,
                                            out source smallint, out target smallint, out version int, out epoch int)
language plpgsql set search_path from current as $$
declare
  k record := _find(p_id);
  t token := k.t;
  e event;
  d record;
  due timestamptz;
  note bytea;
begin
  source := t.state; target := t.state; version := t.version; epoch := t.epoch;
  select o.* into e from event o where o.id = p_id and o.request = p_request;
  if found then
    outcome := 'repeated'; source := e.from_state; target := e.to_state; version := e.version; epoch := e.epoch;
    return;
  end if;
  if p_version <> t.version then outcome := 'version'; return; end if;
  d := _declared_step(t.lifecycle, t.state, null, p_trigger, p_role);
  if d.refusal is not null then outcome := d.refusal; return; end if;
  if p_trigger = 'run_now' then
    if k.place <> 'resting' then outcome := 'not delayed'; return; end if;
  else
    if t.prio = p_prio then outcome := 'same priority'; return; end if;
    select r.due_at into due from resting r where r.id = p_id;
    note := convert_to(format('{"before": "%s", "priority": "%s"}', _priority_name(t.prio), _priority_name(p_prio)), 'UTF8');
    t.prio := p_prio;
    update job j set prio = p_prio where j.id = p_id;
  end if;
  perform _remove(p_id, k.place);
  t := _step(t, d.x, p_actor, p_role, p_now, p_batch, due, false, p_cause, p_request, note);
  outcome := 'moved'; version := t.version;
end $$;

-- p_versions: a job with another version is skipped; null means any. p_selected_by: the filter, for the administrative act, which
-- counts the outcomes; null for jobs that were named. With p_key (see 72_request_keys.sql) the outcome is 'answered', and
-- nothing changes, when an answer is stored with that key. Jobs that do not exist, or that are another's, are left out.
-- Without any other job nothing is stored, not even the key.
create or replace function change_jobs(
  p_actor int, p_change text, p_job_ids text[], p_versions int[], p_request text, p_cause text, p_soft boolean, p_grace_s float8,
  p_prio smallint, p_selected_by text, p_key text[])
returns table (job_id text, outcome text, id bigint, lifecycle smallint, source smallint, target smallint, version int, epoch int)
language plpgsql security definer set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  now_at timestamptz := trellis.now();
  batch_no bigint;
  j record;
  k record;
  m record;
  answer text;
  changed int := 0;
  requested int := 0;
begin
  if (p_change in ('cancel', 'discard', 'run_now', 'prioritize') and (p_change = 'prioritize') = (p_prio is not null)
      and coalesce(p_prio, 0) between 0 and 2) is not true then
    raise exception 'a change is cancel, discard, run_now, or prioritize with a priority from 0 to 2' using errcode = 'TR004';
  end if;
  if (cardinality(p_job_ids) between 1 and _changed_max()) is not true or cardinality(p_job_ids) is distinct from cardinality(p_versions)
     or length(p_selected_by) > 1000 then
    raise exception 'a change names 1 to % jobs, each with its version or null, and a filter of at most 1000 characters', _changed_max()
      using errcode = 'TR004';
  end if;
  if not exists (select from unnest(p_job_ids) u(job_id) join job b on b.job_id = u.job_id where _within_reach(a.role, b.id)) then
    return;  -- and stores no key
  elsif p_key is not null and _take_request_key(p_key) is not null then
    return query select null::text, 'answered', null::bigint, null::smallint, null::smallint, null::smallint, null::int, null::int;
    return;
  end if;
  batch_no := _open_batch();
  perform _lock_family(array(select b.id from unnest(p_job_ids) u(job_id) join job b on b.job_id = u.job_id));
  -- All rows before the first step, which locks a concurrency key: turns lock what they end, then its keys.
  for j in select b.id from unnest(p_job_ids) u(job_id) join job b on b.job_id = u.job_id where _within_reach(a.role, b.id) order by b.id loop
    perform _find(j.id);
  end loop;
  for j in select b.id, b.job_id, b.lifecycle, u.version from unnest(p_job_ids, p_versions) u(job_id, version)
             join job b on b.job_id = u.job_id order by b.id loop
    continue when not _within_reach(a.role, j.id);
    k := _find(j.id);
    if p_change = 'cancel' and p_soft and k.place = 'held' and not exists (select from event e where e.id = j.id and e.request = p_request) then
      answer := case when j.version <> (k.t).version then 'version'
                     else _request_cancel(k.t, p_actor, a.role, p_grace_s, p_cause, now_at) end;
      requested := requested + (answer = 'requested')::int;
      return query select j.job_id, answer, j.id, j.lifecycle, (k.t).state, null::smallint, (k.t).version, (k.t).epoch;
      continue;
    elsif p_change in ('cancel', 'discard') then
      m := _move_one(j.id, null, p_change, p_actor, a.role, now_at, batch_no, p_request, j.version, null, null, null, p_cause, null, null,
                     null, null);
    else
      m := _change_in_place(j.id, p_change, p_prio, p_actor, a.role, now_at, batch_no, p_request, j.version, p_cause);
    end if;
    changed := changed + (m.outcome in ('moved', 'repeated'))::int;
    return query select j.job_id, m.outcome, j.id, j.lifecycle, m.source, m.target, m.version, m.epoch;
  end loop;
  if p_selected_by is not null and changed + requested > 0 then
    perform _record_act(p_actor, a.role, 'jobs.changed', 'ledger', null, p_change, p_cause, null, null,
                        json_build_object('selected_by', p_selected_by, 'changed', changed, 'requested', requested,
                                          'skipped', cardinality(p_job_ids) - changed - requested)::text,
                        'act-' || md5(concat_ws(E'\n', p_actor, p_request, p_job_ids[1])));
  end if;
  perform _wake(batch_no, p_actor, now_at, batch_no);
end $$;
