-- Following the feed under a name: one at a time, each where the last one stopped, fenced by an epoch.

create or replace function follow(p_actor int, p_name text, p_lease_s float8) returns table (epoch int, place text)
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  now_at timestamptz := trellis.now();
begin
  perform _require(a.role, 'follow the feed under a name', array['projector', 'control-plane']);
  return query
  insert into follower as f (name, epoch, actor, until) values (p_name, 1, p_actor, now_at + p_lease_s * interval '1 s')
  on conflict (name) do update set epoch = f.epoch + 1, actor = p_actor, until = excluded.until
   where f.until <= now_at or f.actor = p_actor
  returning f.epoch, f.place;
end $$;

-- Also how it lets go: with nothing to remember and no time left.
create or replace function followed(p_name text, p_epoch int, p_place text, p_lease_s float8) returns boolean
language plpgsql security definer set search_path from current as $$
begin
  update follower f set place = coalesce(p_place, f.place), until = trellis.now() + p_lease_s * interval '1 s'
   where f.name = p_name and f.epoch = p_epoch
     and exists (select from actor o where o.id = f.actor and o.db_role = session_user);
  return found;
end $$;
