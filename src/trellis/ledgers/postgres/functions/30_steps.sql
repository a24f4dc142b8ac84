-- The single way to make one step of a job, used by every verb that moves jobs one by one. Callers first take the job's
-- moving row out of its place. `_step` writes the event and puts the row where its new state belongs.

create or replace function _actor(p_actor int, out role smallint, out name text) language plpgsql stable
set search_path from current as $$
begin
  select a.role, a.name into role, name from actor a where a.id = p_actor and a.db_role = session_user;
  if not found then
    raise exception 'actor % is not of database role %', p_actor, session_user using errcode = 'TR002';
  end if;
end $$;

-- Administrative verbs are no transitions of a lifecycle. auth/principals.py says which roles may use them;
-- `rule_grant` holds that.
create or replace function _require(p_role smallint, p_verb text) returns void language plpgsql stable set search_path from current as $$
begin
  if not exists (select from rule_grant g where g.rule = 'ledger.' || p_verb and g.role = p_role and g.reach = 'yes') then
    raise exception 'role % may not %', (select r.name from role r where r.role = p_role), _action(p_verb) using errcode = 'TR002';
  end if;
end $$;

-- A limited login cannot write another's name into the history: its actors carry its own prefix. `p_node` is the
-- machine it writes from; without one, the address of its connection is used.
create or replace function register_actor(p_name text, p_role smallint, p_node text default null) returns int language plpgsql
security definer set search_path from current as $$
declare
  found_id int;
  at_node text := left(coalesce(nullif(p_node, ''), host(inet_client_addr()), 'local'), 255);
begin
  p_name := _of_login(p_name);
  if not exists (select from authority g where g.role = p_role and pg_has_role(session_user, g.db_role, 'member')) then
    raise exception 'database role % may not act as %', session_user, (select r.name from role r where r.role = p_role)
      using errcode = 'TR002';
  end if;
  select a.id into found_id from actor a where a.name = p_name and a.role = p_role and a.db_role = session_user and a.node = at_node;
  if found_id is null then
    insert into actor (role, db_role, name, node) values (p_role, session_user, p_name, at_node)
      on conflict do nothing returning id into found_id;
    if found_id is null then
      select a.id into found_id from actor a
       where a.name = p_name and a.role = p_role and a.db_role = session_user and a.node = at_node;
    end if;
  end if;
  return found_id;
end $$;

create or replace function type_id(p_name text) returns int language plpgsql security definer set search_path from current as $$
declare found_id int;
begin
  select t.id into found_id from job_type t where t.name = p_name;
  if found_id is null then
    insert into job_type (name) values (p_name) on conflict do nothing returning id into found_id;
    if found_id is null then
      select t.id into found_id from job_type t where t.name = p_name;
    end if;
  end if;
  return found_id;
end $$;

create or replace function _open_batch() returns bigint language sql volatile set search_path from current as $$
  insert into batch (xid) values (pg_current_xact_id()::text::bigint) returning no
$$;

-- Creates the rows of keys that jobs wait for. A job locked by another transaction is skipped; the next caller creates
-- the row.
create or replace function _make_keys(p_keys bigint[]) returns void language sql set search_path from current as $$
  insert into concurrency_key (id, name, cap)
  select w.ckey, head.key_name, head.key_cap from (
    select distinct on (p.ckey) p.ckey, p.id from parked p
     where p.ckey = any(p_keys) and not exists (select from concurrency_key c where c.id = p.ckey) order by p.ckey, p.pos) w
    cross join lateral (select j.key_name, j.key_cap from job j where j.id = w.id for no key update skip locked) head
  on conflict do nothing
$$;

-- Gives free slots and tokens of these keys to the jobs parked first. A caller that may wait locks keys in order, once in
-- its transaction. Other callers skip locked keys, and every caller skips a parked row that is being cancelled. The next
-- sweep promotes what was skipped.
create or replace function _promote(p_keys bigint[], p_wait boolean) returns int language plpgsql set search_path from current as $$
begin
  return _promote_at(p_keys, p_wait, trellis.now());
end $$;

create or replace function _promote_at(p_keys bigint[], p_wait boolean, p_now timestamptz) returns int language plpgsql
set search_path from current as $$
declare
  k record;
  promoted int := 0;
  mine bigint[];
  rated boolean;
begin
  if coalesce(cardinality(p_keys), 0) = 0 then return 0; end if;
  rated := exists (select from type_options o where o.rate_per_key is not null);
  perform _make_keys(p_keys);
  if p_wait then
    mine := array(select c.id from concurrency_key c where c.id = any(p_keys) order by c.id for update);
    if exists (select from unnest(p_keys) u(id) where u.id <> all(mine)) then
      -- Removed as unused while this transaction waited: the parked jobs create the key again.
      perform _make_keys(p_keys);
      mine := array(select c.id from concurrency_key c where c.id = any(p_keys) order by c.id for update);
    end if;
  else
    mine := array(select c.id from concurrency_key c where c.id = any(p_keys) order by c.id for update skip locked);
  end if;
  for k in select c.id, c.cap, c.due_at from concurrency_key c where c.id = any(mine) order by c.id loop
    if rated and _waits_for_rate(k.id) then
      promoted := promoted + _promote_by_rate(k.id, k.cap, k.due_at, p_now);
      continue;
    end if;
    if k.due_at is not null then update concurrency_key c set due_at = null where c.id = k.id; end if;
    promoted := promoted + _fill_slots(k.id, k.cap, 1000, null, null) + _let_urgent_pass(k.id);
  end loop;
  return promoted;
end $$;

-- Gives free slots of a key to its jobs parked first, at most p_most of them; with p_type, to those of that type. The
-- caller has locked the key.
create or replace function _fill_slots(p_key bigint, p_cap int, p_most int, p_lifecycle smallint, p_type int) returns int language plpgsql
set search_path from current as $$
declare
  seat int;
  head parked;
  taken int := (select count(*) from slot o where o.ckey = p_key);
  promoted int := 0;
begin
  -- After a limit was lowered, slots beyond it may still be taken, so the number of slots counts.
  for seat in select s.n from generate_series(1, least(p_cap, taken + p_most)) s(n)
               where not exists (select from slot o where o.ckey = p_key and o.n = s.n)
               order by s.n limit greatest(0, least(p_most, p_cap - taken)) loop
    if p_type is null then
      delete from parked p where p.id = (select q.id from parked q where q.ckey = p_key order by q.prio, q.pos limit 1
                                          for update skip locked) returning p.* into head;
    else
      delete from parked p where p.id = (select q.id from parked q where q.ckey = p_key and q.type = p_type and q.lifecycle = p_lifecycle
                                          order by q.prio, q.pos limit 1 for update skip locked) returning p.* into head;
    end if;
    exit when not found;
    insert into slot (ckey, n, id) values (p_key, seat, head.id);
    -- The job keeps its position within its priority, because it has waited since then.
    insert into ready (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state,
                       lifecycle, prio, flags, pos)
    values (head.id, head.ckey, head.until, head.type, head.version, head.epoch, head.owner, head.generation, head.attempt,
            head.max_attempts, head.deaths, head.state, head.lifecycle, head.prio, head.flags, head.pos);
    promoted := promoted + 1;
  end loop;
  return promoted;
end $$;

-- Gives the slot of a ready, unclaimed job to a parked job of a more urgent priority. The caller has locked the key.
create or replace function _let_urgent_pass(p_key bigint) returns int language plpgsql set search_path from current as $$
declare
  head parked;
  behind ready;
  passed int := 0;
begin
  loop
    select q.* into head from parked q where q.ckey = p_key order by q.prio, q.pos limit 1 for update skip locked;
    exit when not found;
    select r.* into behind from slot o join ready r on r.id = o.id where o.ckey = p_key and r.prio > head.prio
     order by r.prio desc, r.pos desc limit 1 for update of r skip locked;
    exit when not found;
    perform _exchange_slot(behind, head);
    passed := passed + 1;
  end loop;
  return passed;
end $$;

-- Lets a parked job take the slot of the last ready, unclaimed job of its key, if there is one. A job of its own type comes first: if the
-- type has a rate per key, its token is free with the slot. Does not wait for a locked key or row: the caller's next claim tries again.
create or replace function _overtake(p_id bigint) returns void language plpgsql set search_path from current as $$
declare
  head parked;
  behind ready;
begin
  perform from concurrency_key c where c.id = (select q.ckey from parked q where q.id = p_id) for update skip locked;
  if not found then return; end if;
  select q.* into head from parked q where q.id = p_id for update skip locked;
  if not found then return; end if;
  select r.* into behind from slot o join ready r on r.id = o.id where o.ckey = head.ckey
   order by (r.type = head.type and r.lifecycle = head.lifecycle) desc, r.prio desc, r.pos desc limit 1 for update of r skip locked;
  if found then perform _exchange_slot(behind, head); end if;
end $$;

-- Gives the slot of a ready job to a parked one of the same key. The caller has locked the key and both rows.
create or replace function _exchange_slot(behind ready, head parked) returns void language plpgsql set search_path from current as $$
begin
  delete from ready r where r.id = behind.id;
  delete from parked p where p.id = head.id;
  update slot o set id = head.id where o.id = behind.id;
  insert into parked (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle,
                      prio, flags, pos)
  values (behind.id, behind.ckey, behind.until, behind.type, behind.version, behind.epoch, behind.owner, behind.generation,
          behind.attempt, behind.max_attempts, behind.deaths, behind.state, behind.lifecycle, behind.prio, behind.flags, behind.pos);
  insert into ready (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle,
                     prio, flags, pos)
  values (head.id, head.ckey, head.until, head.type, head.version, head.epoch, head.owner, head.generation, head.attempt,
          head.max_attempts, head.deaths, head.state, head.lifecycle, head.prio, head.flags, head.pos);
end $$;

create or replace function _free_slots(p_ids bigint[], p_keys bigint[], p_wait boolean) returns void language plpgsql
set search_path from current as $$
begin
  delete from slot s where s.id = any(p_ids);
  perform _promote(p_keys, p_wait);
end $$;

-- Whether a state has a timer. In other states a due time has no meaning, unless the job can be claimed after it.
create or replace function _is_timed(p_lifecycle smallint, p_state smallint) returns boolean language sql stable set search_path from current as $$
  select exists (select from transition r where r.lifecycle = p_lifecycle and r.source = p_state and r.trigger in ('due', 'exhaust'))
$$;

-- Puts a waiting job where its state and delay say. A null delay means now in a claimable state, and "until moved"
-- elsewhere.
create or replace function _put_waiting(t token, p_claimable boolean, p_due timestamptz, p_now timestamptz) returns void
language plpgsql set search_path from current as $$
begin
  if p_claimable and (p_due is null or p_due <= p_now) then
    if t.ckey is null then
      insert into ready (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state,
                         lifecycle, prio, flags)
      values (t.id, t.ckey, t.until, t.type, t.version, t.epoch, t.owner, t.generation, t.attempt, t.max_attempts, t.deaths,
              t.state, t.lifecycle, t.prio, t.flags);
    else
      insert into parked (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state,
                          lifecycle, prio, flags)
      values (t.id, t.ckey, t.until, t.type, t.version, t.epoch, t.owner, t.generation, t.attempt, t.max_attempts, t.deaths,
              t.state, t.lifecycle, t.prio, t.flags);
    end if;
  else
    insert into resting (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state,
                         lifecycle, prio, flags, due_at)
    values (t.id, t.ckey, t.until, t.type, t.version, t.epoch, t.owner, t.generation, t.attempt, t.max_attempts, t.deaths,
            t.state, t.lifecycle, t.prio, t.flags, p_due);
  end if;
end $$;

-- A dead letter counts the attempts that failed or were lost. A snooze, and a lease lost before anything ran, are
-- spared by one more allowed attempt each. Where a timer begins the next attempt, every attempt that began counts (D38;
-- `attempts_spent` in engine/records.py).
create or replace function _bury(t token, p_now timestamptz, p_reason text, p_stage text, p_error text) returns void
language plpgsql set search_path from current as $$
begin
  insert into dead_letter (id, version, at, reason_code, stage, last_error, attempts, last_owner, last_lease_expires_at,
                           correlation_id)
  select t.id, t.version, p_now, case when t.flags & 1 = 1 then 'compensation_failed' else p_reason end, p_stage, p_error,
         greatest(1, t.attempt + 1 - case when exists (select from transition r where r.lifecycle = t.lifecycle and r.trigger = 'due'
                                                          and r.opens = 1) then 0 else t.max_attempts - j.max_attempts end),
         t.owner, t.until, coalesce(nullif(j.correlation_id, ''), j.job_id)
    from job j where j.id = t.id;
end $$;

-- Records a succeeded compensation on its original: a versioned event without a change of state.
create or replace function _compensated(p_id bigint, p_actor int, p_role smallint, p_now timestamptz, p_batch bigint) returns void
language plpgsql set search_path from current as $$
declare
  e ended;
  x transition;
  original bigint;
  by_job text;
begin
  select j.compensates, j.job_id into original, by_job from job j where j.id = p_id;
  select n.* into e from ended n where n.id = original for update;
  if not found then return; end if;
  select r.* into x from transition r where r.lifecycle = e.lifecycle and r.source = e.state and r.trigger = 'compensated';
  if not found or x.roles & (1 << p_role::int) = 0 then return; end if;
  update ended n set version = n.version + 1 where n.id = original;
  insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role, cause)
  values (original, p_batch, p_now, e.version + 1, p_actor, e.epoch, x.event, e.lifecycle, e.state, e.state, e.generation,
          e.attempt, p_role, format(_cause('compensated'), by_job));
end $$;

-- Who requested the soft cancel that is being carried out, and why; null without a request. `p_epoch` is the job's
-- current epoch: that of the lease, or one more if the lease was revoked.
create or replace function _asked(p_id bigint, p_epoch int) returns bytea language sql stable set search_path from current as $$
  select convert_to(format('{"asked_by": %s, "asked_as": %s, "reason": %s}', to_json(a.name), to_json(r.name),
                           coalesce(to_json(w.cause)::text, 'null')), 'UTF8')
    from wish w join actor a on a.id = w.actor join role r on r.role = a.role
   where w.id = p_id and w.epoch between p_epoch - 1 and p_epoch
$$;

-- The data of an end event, with who requested a cancel, when and why. Data that is not a JSON object stays unchanged
-- (`with_cancel_request` in engine/event_data.py). `p_epoch` as in `_asked`.
create or replace function _with_cancel_request(p_data bytea, p_id bigint, p_epoch int) returns bytea language plpgsql stable
set search_path from current as $$
declare
  body text;
  member text := (
    select format('"cancel_requested": {"actor": %s, "role": %s, "at": "%s", "cause": %s}', to_json(a.name), to_json(r.name),
                  to_char(w.at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), coalesce(to_json(w.cause)::text, 'null'))
      from wish w join actor a on a.id = w.actor join role r on r.role = a.role
     where w.id = p_id and w.epoch between p_epoch - 1 and p_epoch);
begin
  if member is null then return p_data; end if;
  body := btrim(convert_from(coalesce(p_data, '{}'), 'UTF8'), E' \t\r\n');
  if left(body, 1) <> '{' or right(body, 1) <> '}' then return p_data; end if;
  return convert_to(case when btrim(substr(body, 2, length(body) - 2), E' \t\r\n') = '' then '{' || member || '}'
                         else left(body, -1) || ', ' || member || '}' end, 'UTF8');
exception when character_not_in_repertoire then return p_data;
end $$;

-- t: the previous moving row, already out of its place; its epoch is already raised if a lease is revoked or granted.
create or replace function _step(
  t token, x transition, p_actor int, p_role smallint, p_now timestamptz, p_batch bigint,
  p_due timestamptz default null, p_spare boolean default false, p_cause text default null, p_request text default null,
  p_data bytea default null, p_reason text default null, p_stage text default null, p_error text default null,
  p_lease_ms int default null, p_beat_ms int default null) returns token
language plpgsql set search_path from current as $$
declare
  s state;
  j job;
  was token := t;
  length interval;
begin
  if x.roles & (1 << p_role::int) = 0 then
    raise exception 'job %: role % may not %', t.id, p_role, x.trigger using errcode = 'TR001';
  end if;
  select n.* into s from state n where n.lifecycle = x.lifecycle and n.state = x.target;
  if x.trigger in ('due', 'cancel', 'dead_letter', 'deadline') then delete from suspension w where w.id = t.id; end if;
  t.version := t.version + 1;
  t.state := x.target;
  if s.phase = 0 and not s.claimable and p_due is not null and not _is_timed(x.lifecycle, x.target) then p_due := null; end if;
  if p_spare then t.max_attempts := t.max_attempts + 1; end if;
  if x.opens = 1 then t.attempt := t.attempt + 1; end if;
  if x.opens = 2 then
    select b.* into j from job b where b.id = t.id;
    t.generation := t.generation + 1; t.attempt := 0; t.deaths := 0; t.max_attempts := j.max_attempts;
    t.owner := null; t.until := null;
    update dead_letter d set requeued_at = p_now where d.id = t.id and d.requeued_at is null;
    delete from result r where r.id = t.id;
    if j.deadline_at is not null then
      length := coalesce(j.deadline_us * interval '1 microsecond', j.deadline_at - j.created_at);
      update job o set deadline_at = p_now + length where o.id = t.id;
      insert into deadline (id, at) values (t.id, p_now + length)
        on conflict (id) do update set at = excluded.at;
    end if;
  end if;
  if x.trigger = 'discard' then update dead_letter d set requeued_at = p_now where d.id = t.id and d.requeued_at is null; end if;
  if s.dead_letter and p_reason is null then
    raise exception 'job %: a dead letter needs its reason', t.id using errcode = 'TR003';
  end if;
  if x.trigger in ('cancel', 'stop') and p_request is null then
    p_data := coalesce(p_data, _asked(t.id, t.epoch));
    delete from wish w where w.id = t.id;
  elsif x.opens = 2 then
    delete from wish w where w.id = t.id;
  elsif s.phase = 2 and exists (select from wish w where w.id = t.id)
        and exists (select from state n where n.lifecycle = x.lifecycle and n.state = x.source and n.phase = 1)
        -- A cancel does not copy an earlier cancel request into its event, nor does a move that is identical to a
        -- cancel.
        and not (p_request is not null and exists (select from transition n where n.lifecycle = x.lifecycle and n.source = x.source
                    and n.trigger = 'cancel' and n.target = x.target and n.event = x.event)) then
    p_data := _with_cancel_request(p_data, t.id, t.epoch);
  end if;
  insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role,
                     cause, request, data, due_at)
  values (t.id, p_batch, p_now, t.version, p_actor, t.epoch, x.event, t.lifecycle, x.source, x.target, t.generation, t.attempt,
          p_role, p_cause, p_request, p_data, case when s.phase = 0 and (not s.claimable or p_due > p_now) then p_due end);
  if p_reason is not null and s.phase = 2 and x.trigger <> 'discard' then perform _bury(t, p_now, p_reason, p_stage, p_error); end if;
  if s.phase = 1 then
    insert into lease (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle,
                       prio, flags, lease_ms, beat_ms)
    values (t.id, t.ckey, coalesce(t.until, p_now + _length(p_lease_ms, p_beat_ms)), t.type, t.version,
            t.epoch, t.owner, t.generation, t.attempt, t.max_attempts, t.deaths, t.state, t.lifecycle, t.prio, t.flags,
            p_lease_ms, p_beat_ms);
  elsif s.phase = 0 then
    perform _put_waiting(t, s.claimable, p_due, p_now);
  else
    insert into ended (id, at, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, type)
    values (t.id, p_now, t.version, t.epoch, t.owner, t.generation, t.attempt, t.max_attempts, t.deaths, t.state, t.lifecycle, t.type);
    if s.success and t.flags & 1 = 1 then perform _compensated(t.id, p_actor, p_role, p_now, p_batch); end if;
    if exists (select from spawned c where c.id = t.id) then perform _child_ended(array[t.id], p_batch, s.success); end if;
    if x.trigger in ('cancel', 'stop') then update spawned c set orphaned = true where c.parent = t.id and c.cancels and not c.orphaned; end if;
  end if;
  if t.ckey is not null and s.phase <> 1 then perform _free_slots(array[t.id], array[t.ckey], false); end if;
  return t;
end $$;

-- Finds a job's moving row and locks it in its place. A row that moves meanwhile is searched again. `place` is null if
-- the job is unknown.
create or replace function _find(p_id bigint, out t token, out place text)
language plpgsql set search_path from current as $$
declare again int;
begin
  for again in 1 .. 20 loop
    select l.id, l.ckey, l.until, l.type, l.version, l.epoch, l.owner, l.generation, l.attempt, l.max_attempts, l.deaths, l.state,
           l.lifecycle, l.prio, l.flags into t from lease l where l.id = p_id for update;
    if found then place := 'held'; return; end if;
    select r.id, r.ckey, r.until, r.type, r.version, r.epoch, r.owner, r.generation, r.attempt, r.max_attempts, r.deaths, r.state,
           r.lifecycle, r.prio, r.flags into t from ready r where r.id = p_id for update;
    if found then place := 'ready'; return; end if;
    select r.id, r.ckey, r.until, r.type, r.version, r.epoch, r.owner, r.generation, r.attempt, r.max_attempts, r.deaths, r.state,
           r.lifecycle, r.prio, r.flags into t from resting r where r.id = p_id for update;
    if found then place := 'resting'; return; end if;
    select r.id, r.ckey, r.until, r.type, r.version, r.epoch, r.owner, r.generation, r.attempt, r.max_attempts, r.deaths, r.state,
           r.lifecycle, r.prio, r.flags into t from parked r where r.id = p_id for update;
    if found then place := 'parked'; return; end if;
    select n.id, j.ckey, null::timestamptz, j.type, n.version, n.epoch, n.owner, n.generation, n.attempt, n.max_attempts, n.deaths,
           n.state, n.lifecycle, j.prio, case when j.compensates is null then 0 else 1 end
      into t from ended n join job j on j.id = n.id where n.id = p_id for update of n;
    if found then place := 'ended'; return; end if;
    exit when not exists (select from job j where j.id = p_id);
  end loop;
  place := null;
end $$;

-- Takes a found and locked row out of its place.
create or replace function _remove(p_id bigint, p_place text) returns void language plpgsql set search_path from current as $$
begin
  case p_place
    when 'held' then delete from lease d where d.id = p_id;
    when 'ready' then delete from ready d where d.id = p_id;
    when 'resting' then delete from resting d where d.id = p_id;
    when 'parked' then delete from parked d where d.id = p_id;
    when 'ended' then delete from ended d where d.id = p_id;
  end case;
end $$;
