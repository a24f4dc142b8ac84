-- Waits of suspended jobs. A job that ends, and a signal that arrives, resume the jobs that wait for them in their own
-- transaction.
--
-- Locks are taken in one order, so that two transactions cannot wait for each other: first rows of `spawned`, by child
-- (`_lock_family`), at the end rows of suspended jobs, by number (`_wake`). The sweep comes to jobs in another order, and so
-- waits for no row of `spawned` (`_may_end`).

-- What a wait needs: all children ended (1), all ended or one without success (2), one of them ended (3), all jobs of its batch
-- ended (4).

-- In PL/pgSQL, which keeps its plan in every version of the server.
create or replace function _lock_family(p_ids bigint[]) returns void language plpgsql set search_path from current as $$
begin
  perform from spawned s where s.id = any(p_ids) or s.parent = any(p_ids) order by s.id, s.parent for update;
end $$;

-- Whether the sweep may end this job now. False while another transaction has it or a relative: the next sweep tries again.
create or replace function _may_end(p_id bigint) returns boolean language plpgsql set search_path from current as $$
begin
  if exists (select from spawned s where s.id = p_id) or exists (select from spawned s where s.parent = p_id) then
    perform from spawned s where s.id = p_id or s.parent = p_id order by s.id, s.parent for update nowait;
  end if;
  return true;
exception when lock_not_available then return false;
end $$;

-- A child has ended: it leaves `spawned`. A job that waits for it is looked at when this transaction ends.
create or replace function _child_ended(p_ids bigint[], p_batch bigint, p_success boolean) returns void language sql
set search_path from current as $$
  with gone as (delete from spawned s where s.id = any(p_ids) returning s.parent, s.awaited)
  insert into wake (batch, id, reason)
  select distinct p_batch, g.parent, case when p_success then 'children_ended' else 'child_failed' end from gone g where g.awaited
$$;

-- Children that run again after they had ended (a requeue), that were put back (a restore), and jobs of a batch that existed before it
-- have no row in `spawned`.
create or replace function _link_again(p_parent bigint, p_children bigint[]) returns void language plpgsql
set search_path from current as $$
declare
  one bigint;
  k record;
begin
  for one in select c.id from unnest(p_children) c(id) where not exists (select from spawned s where s.id = c.id and s.parent = p_parent)
                and not exists (select from ended e where e.id = c.id) order by c.id loop
    k := _find(one);
    if k.place <> 'ended' and one <> p_parent then
      insert into spawned (id, parent, cancels) values (one, p_parent, false) on conflict do nothing;
      -- A turn that ends the child, and saw no row for it before it came to the lease, sees this.
      update lease l set flags = l.flags | 2 where l.id = one;
    end if;
  end loop;
end $$;

-- The jobs of a batch that are in the ledger, by the journal of its completion job.
create or replace function _members_of(p_id bigint) returns bigint[] language sql stable set search_path from current as $$
  select array(select distinct j.id from journal o, json_array_elements_text(convert_from(o.body, 'UTF8')::json -> 'ids') m(job_id)
                 join job j on j.job_id = m.job_id where o.id = p_id and o.entry = '@batch')
$$;

-- Stores what a job waits for that was just suspended. If it has happened already, the job is resumed when this
-- transaction ends. p_wait: {"mode": …, "children": [job ids], "signal": name, "after": number of the last signal read,
-- "entry" and "body": a journal entry to store, "restart": the input of a handler that begins anew}.
create or replace function _begin_wait(p_id bigint, p_epoch int, p_wait jsonb, p_batch bigint) returns void language plpgsql
set search_path from current as $$
declare
  kind smallint := coalesce((p_wait ->> 'mode')::smallint, 1);
  children bigint[];
  expected int := jsonb_array_length(p_wait -> 'children');
  open_children int;
  reasons text[] := '{}';
begin
  -- What an earlier wait of this job left. Its caller has locked these rows.
  update spawned s set awaited = false where s.parent = p_id and s.awaited;
  insert into suspension (id, mode, signal, after)
  values (p_id, kind, p_wait ->> 'signal', coalesce((p_wait ->> 'after')::bigint, 0));
  if p_wait ->> 'restart' is not null then
    delete from journal o where o.id = p_id and o.entry <> '@batch';
    delete from job_signal g using json_each_text(convert_from(decode(p_wait ->> 'restart', 'base64'), 'UTF8')::json -> 'signals') r(name, no)
     where g.id = p_id and g.name = r.name and g.no <= r.no::bigint;
    insert into journal (id, entry, at, epoch, body) values (p_id, '@input', trellis.now(), p_epoch, decode(p_wait ->> 'restart', 'base64'));
    reasons := reasons || text 'begins_anew';
  elsif p_wait ->> 'entry' is not null then
    insert into journal (id, entry, at, epoch, body)
    values (p_id, p_wait ->> 'entry', trellis.now(), p_epoch, decode(p_wait ->> 'body', 'base64')) on conflict do nothing;
  end if;
  if kind = 4 then
    children := _members_of(p_id);
    expected := cardinality(children);
  elsif expected > 0 then
    children := array(select j.id from jsonb_array_elements_text(p_wait -> 'children') c(job_id)
                        join job j on j.job_id = c.job_id and j.parent_id = (select p.job_id from job p where p.id = p_id));
  end if;
  if expected > 0 or kind = 4 then
    perform _link_again(p_id, children);
    update spawned s set awaited = true where s.id = any(children) and s.parent = p_id;
    get diagnostics open_children = row_count;
    if kind = 2 and open_children < expected and exists (
        select from unnest(children) c(id) join ended e on e.id = c.id join state s on s.lifecycle = e.lifecycle and s.state = e.state
         where not s.success) then
      reasons := reasons || text 'child_failed';
    elsif open_children = 0 or (kind = 3 and open_children < expected) then
      reasons := reasons || text 'children_ended';
    end if;
  end if;
  if exists (select from job_signal g where g.id = p_id and g.name = p_wait ->> 'signal'
                and g.no > coalesce((p_wait ->> 'after')::bigint, 0)) then
    reasons := reasons || text 'signal_arrived';
  end if;
  insert into wake (batch, id, reason) select p_batch, p_id, u.reason from unnest(reasons) u(reason);
end $$;

-- Resumes the suspended jobs of `wake` whose wait is over. With p_batch: those of one transaction, which waits for locked
-- rows. Without: those that other transactions left, as far as their rows are not locked. Returns how many were resumed.
create or replace function _wake(p_batch bigint, p_actor int, p_now timestamptz, p_new_batch bigint) returns int language plpgsql
set search_path from current as $$
declare
  ids bigint[];
  early bigint[];
  r resting;
  w suspension;
  x transition;
  t token;
  failed boolean;
  signalled boolean;
  anew boolean;
  resumed int := 0;
begin
  if p_batch is not null then
    ids := array(select distinct k.id from wake k where k.batch = p_batch order by 1);
    if cardinality(ids) = 0 then return 0; end if;
    -- A job that waits for all stays suspended while one of them is open that no transaction ends now. That one is locked, not the
    -- job: its end comes after this transaction, and looks again. So transactions that end children of one job do not wait for each
    -- other. The newest child is taken, which is likely to end last.
    early := array(
      select q.id from unnest(ids) q(id) join suspension v on v.id = q.id and v.mode <> 3
        cross join lateral (select from spawned s where s.parent = q.id and s.awaited order by s.id desc limit 1 for update skip locked) open_child
       where not exists (select from wake k where k.batch = p_batch and k.id = q.id
                            and (k.reason in ('signal_arrived', 'begins_anew') or (k.reason = 'child_failed' and v.mode = 2))));
    if cardinality(early) > 0 then
      delete from wake k where k.batch = p_batch and k.id = any(early);
      ids := array(select u.id from unnest(ids) u(id) where u.id <> all(early) order by 1);
      if cardinality(ids) = 0 then return 0; end if;
    end if;
    perform from resting d where d.id = any(ids) order by d.id for update;
  else
    ids := array(select distinct k.id from (select q.id from wake q limit 1000) k order by 1);
    if cardinality(ids) = 0 then return 0; end if;
    ids := array(select d.id from resting d where d.id = any(ids) order by d.id for update skip locked)
        || array(select u.id from unnest(ids) u(id) where not exists (select from resting d where d.id = u.id));
  end if;
  for r in select d.* from resting d where d.id = any(ids) order by d.id loop
    select s.* into w from suspension s where s.id = r.id;
    continue when not found;
    select bool_or(k.reason = 'child_failed'), bool_or(k.reason = 'signal_arrived'), bool_or(k.reason = 'begins_anew')
      into failed, signalled, anew from wake k
     where k.id = r.id and (p_batch is null or k.batch = p_batch);
    if not signalled and not anew and not (w.mode = 2 and failed) and w.mode <> 3
       and exists (select from spawned s where s.parent = r.id and s.awaited) then
      continue;
    end if;
    select o.* into x from transition o where o.lifecycle = r.lifecycle and o.source = r.state and o.trigger = 'due';
    t := (r.id, r.ckey, r.until, r.type, r.version, r.epoch, r.owner, r.generation, r.attempt, r.max_attempts, r.deaths, r.state,
          r.lifecycle, r.prio, r.flags)::token;
    delete from resting d where d.id = r.id;
    perform _step(t, x, p_actor, (select l.swept_by from lifecycle l where l.lifecycle = r.lifecycle), p_now, p_new_batch, null, false,
                  case when anew then _cause('begins_anew') when signalled then format(_cause('signal_arrived'), w.signal) when failed and w.mode = 2 then _cause('child_failed')
                       when w.mode = 4 then _cause('batch_ended') else _cause('children_ended') end);
    resumed := resumed + 1;
  end loop;
  delete from wake k where k.id = any(ids) and (p_batch is null or k.batch = p_batch);
  return resumed;
end $$;

-- Sends a signal to a job that has not ended. A repeated key is answered like the first. Outcome: 'sent', 'repeated',
-- 'ended', 'full' or 'missing'; 'answered' when an answer is stored with the key of the request (72_request_keys.sql).
create or replace function send_signal(p_actor int, p_job_id text, p_name text, p_body bytea, p_key text, p_request text[],
                                       p_repeat boolean)
returns table (outcome text, state text, number bigint) language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  now_at timestamptz := trellis.now();
  of_job bigint;
  k record;
  batch_no bigint;
  new_no bigint;
begin
  perform _require(a.role, 'send_signal');
  if length(p_name) not between 1 and 200 or octet_length(p_body) > 1048576 or length(p_key) not between 1 and 200 then
    raise exception 'a signal has a name of 1 to 200 characters, a key of as many, and at most 1 MiB' using errcode = 'TR004';
  end if;
  begin
    perform convert_from(p_body, 'UTF8')::json;
  exception when data_exception then
    raise exception 'the body of a signal is JSON in UTF-8' using errcode = 'TR004';
  end;
  select j.id into of_job from job j where j.job_id = p_job_id;
  if not found or not _within_reach(a.role, of_job) then
    return query select 'missing', null::text, null::bigint;
    return;
  end if;
  if p_request is not null and _take_request_key(p_request) is not null then
    return query select 'answered', null::text, null::bigint;
    return;
  end if;
  k := _find(of_job);
  return query select 'repeated', n.name, g.no from job_signal g
     join state n on n.lifecycle = (k.t).lifecycle and n.state = (k.t).state where g.id = of_job and g.key = p_key;
  if found then return; end if;
  -- A repeated call whose answer was lost finds its own signal as the last one.
  if p_repeat then
    return query select 'sent', n.name, last.no
      from (select g.no, g.name, g.body, g.actor from job_signal g where g.id = of_job order by g.no desc limit 1) last
      join state n on n.lifecycle = (k.t).lifecycle and n.state = (k.t).state
     where last.name = p_name and last.body = p_body and last.actor = p_actor;
    if found then return; end if;
  end if;
  if k.place = 'ended' then
    return query select 'ended', n.name, null::bigint from state n where n.lifecycle = (k.t).lifecycle and n.state = (k.t).state;
    return;
  elsif (select count(*) from job_signal g where g.id = of_job) >= _job_signals_max() then
    return query select 'full', null::text, null::bigint;
    return;
  end if;
  insert into job_signal (id, name, at, actor, key, body) values (of_job, p_name, now_at, p_actor, p_key, p_body) returning no into new_no;
  perform _record_act(p_actor, a.role, 'job.signalled', p_job_id, null, p_name, null, null, p_job_id);
  if exists (select from suspension w where w.id = of_job and w.signal = p_name and w.after < new_no) then
    batch_no := _open_batch();
    insert into wake (batch, id, reason) values (batch_no, of_job, 'signal_arrived');
    perform _wake(batch_no, p_actor, now_at, batch_no);
  end if;
  return query select 'sent', n.name, new_no from state n where n.lifecycle = (k.t).lifecycle and n.state = (k.t).state;
end $$;

-- Cancels the children of cancelled jobs: at once while they wait, by a request while they are held.
create or replace function _sweep_orphans(p_actor int, p_now timestamptz, p_batch bigint, p_limit int) returns int
language plpgsql set search_path from current as $$
declare
  d record;
  k record;
  done int := 0;
begin
  for d in select s.id from spawned s where s.orphaned order by s.id limit p_limit for update skip locked loop
    continue when not _may_end(d.id);
    begin
      update spawned s set orphaned = false where s.id = d.id;
      k := _find(d.id);
      if k.place = 'held' then
        update lease l set cancel_at = p_now + _orphan_grace() where l.id = d.id and l.cancel_at is null;
        if found then
          insert into wish (id, epoch, at, actor, cause) values (d.id, (k.t).epoch, p_now, p_actor, _cause('parent_ended'))
            on conflict (id) do update set epoch = excluded.epoch, at = excluded.at, actor = excluded.actor, cause = excluded.cause;
        end if;
      elsif k.place <> 'ended' then
        perform _cancel_now(d.id, p_actor, p_now, p_batch, _cause('parent_ended'));
      end if;
      done := done + 1;
    exception when others then raise warning 'trellis: the child % of a cancelled job could not be cancelled: %', d.id, sqlerrm;
    end;
  end loop;
  return done;
end $$;
