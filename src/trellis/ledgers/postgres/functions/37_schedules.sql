-- Schedules of jobs. A change names the version that it read. Each change by a person or an application is one
-- administrative act; what is decided about an instant is none.

create or replace function _refuse_limited_schedule() returns void language plpgsql stable set search_path from current as $$
begin
  if _is_limited() then
    raise exception 'a schedule fires for everybody: only a member of trellis_app may change it, and % is none', session_user
      using errcode = 'TR002';
  end if;
end $$;

create or replace function save_schedule(p_actor int, p_name text, p_version int, p_spec text, p_on_topic boolean, p_paused boolean,
                                         p_owner text, p_since timestamptz, p_next timestamptz, p_cause text default null)
returns boolean language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  before schedule;
begin
  perform _require(a.role, 'save_schedule');
  perform _refuse_limited_schedule();
  select * into before from schedule s where s.name = p_name for update;
  if before.name is not null and before.spec = p_spec and before.paused = p_paused then return true; end if;
  if coalesce(before.version, 0) <> p_version then return false; end if;
  if before.name is null and (select count(*) from schedule) >= 1000 then
    raise exception 'there are 1000 schedules already; remove one' using errcode = 'TR004';
  end if;
  insert into schedule as s (name, version, spec, on_topic, paused, owner, since, next_at, changed_by, changed_at)
  values (p_name, 1, p_spec, p_on_topic, p_paused, p_owner, p_since, p_next, p_actor, trellis.now())
  on conflict (name) do update set version = s.version + 1, spec = p_spec, on_topic = p_on_topic, paused = p_paused, owner = p_owner,
    since = p_since, next_at = p_next, firing = null, changed_by = p_actor, changed_at = trellis.now()
   where s.version = p_version;
  if not found then return false; end if;
  if before.name is null or before.spec <> p_spec then
    perform _record_act(p_actor, a.role, case when before.name is null then 'schedule.added' else 'schedule.changed' end, p_name,
                        left(before.spec, 2000), left(p_spec, 2000), p_cause, null);
  end if;
  if coalesce(before.paused, false) <> p_paused then
    perform _record_act(p_actor, a.role, case when p_paused then 'schedule.paused' else 'schedule.resumed' end, p_name,
                        case when p_paused then 'active' else 'paused' end, case when p_paused then 'paused' else 'active' end, p_cause, null);
  end if;
  return true;
end $$;

create or replace function remove_schedule(p_actor int, p_name text, p_cause text default null) returns boolean
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  before text;
begin
  perform _require(a.role, 'remove_schedule');
  perform _refuse_limited_schedule();
  delete from schedule s where s.name = p_name returning s.spec into before;
  if before is null then return false; end if;
  perform _record_act(p_actor, a.role, 'schedule.removed', p_name, left(before, 2000), null, p_cause, null);
  return true;
end $$;

create or replace function advance_schedule(p_actor int, p_name text, p_version int, p_since timestamptz, p_next timestamptz,
                                            p_firing timestamptz, p_last_at timestamptz, p_last_job text, p_skipped text)
returns boolean language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
begin
  perform _require(a.role, 'advance_schedule');
  perform _refuse_limited_schedule();
  update schedule s set version = s.version + 1, since = p_since, next_at = p_next, firing = p_firing, last_at = p_last_at,
    last_job = p_last_job, skipped = p_skipped
   where s.name = p_name and s.version = p_version;
  return found;
end $$;
