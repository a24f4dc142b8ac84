-- Named subscribers of the feed: one process at a time per name, from the last stored position, fenced by an epoch. An
-- empty place means that the subscriber has read nothing yet. Retention does not wait for a place that begins with !,
-- until the subscriber reads on from there.

create or replace function follow(p_actor int, p_name text, p_lease_s float8, p_reads boolean, p_first text)
returns table (epoch int, place text)
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  now_at timestamptz := trellis.now();
begin
  perform _require(a.role, 'follow');
  return query
  insert into follower as f (name, epoch, actor, until, place)
  values (p_name, 1, p_actor, now_at + p_lease_s * interval '1 s', case when p_reads then coalesce(p_first, '') end)
  on conflict (name) do update set epoch = f.epoch + 1, actor = p_actor, until = excluded.until,
    place = case when p_reads then coalesce(nullif(ltrim(f.place, '!'), ''), p_first, '') else f.place end
   where f.until <= now_at or f.actor = p_actor
  returning f.epoch, nullif(ltrim(f.place, '!'), '');
end $$;

-- Also ends a subscription: with no position and no time left.
create or replace function followed(p_name text, p_epoch int, p_place text, p_lease_s float8) returns boolean
language plpgsql security definer set search_path from current as $$
begin
  update follower f set place = coalesce(p_place, f.place), until = trellis.now() + p_lease_s * interval '1 s'
   where f.name = p_name and f.epoch = p_epoch
     and exists (select from actor o where o.id = f.actor and o.db_role = session_user);
  return found;
end $$;

create or replace function leave_behind(p_actor int, p_name text, p_cause text default null) returns boolean
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  waited boolean;
begin
  perform _require(a.role, 'leave_behind');
  select left(f.place, 1) <> '!' into waited from follower f where f.name = p_name and f.place is not null for update;
  if waited then
    update follower f set place = '!' || f.place where f.name = p_name;
    perform _record_act(p_actor, a.role, 'follower.left_behind', p_name, 'waited for', 'left behind', p_cause, null);
  end if;
  return waited is not null;
end $$;

-- How far each subscriber with a place has read. A place begins with a position; any other place is before all events.
create or replace view follower_place as
select f.name, left(f.place, 1) <> '!' as waits, coalesce(m.at[1]::numeric, 0) as pos, coalesce(m.at[2]::numeric, 0) as id,
       coalesce(m.at[3]::numeric, 0) as version
  from follower f cross join lateral (select regexp_match(f.place, '^!?(\d{1,20})\.(\d{1,20})\.(\d{1,10})') as at) m
 where f.place is not null;
