-- Rate limits of concurrency keys (engine/key_rates.py). A parked job becomes ready only with a token of its key that no other ready job
-- of its type needs, so that jobs without a token never stand in the way of others. A claim takes the tokens of the jobs that it takes.
--
-- Locks: whoever lets jobs become ready has locked the row of `concurrency_key` and reads `key_rate`. Claims lock rows of `key_rate`, in
-- order, and wait for nothing after that.

-- The types of the parked jobs of a key. Reads one row of each.
create or replace function _parked_kinds(p_key bigint) returns table (type int, lifecycle smallint) language sql stable rows 2
set search_path from current as $$
  with recursive kinds(type, lifecycle) as (
    (select p.type, p.lifecycle from parked p where p.ckey = p_key order by p.type, p.lifecycle limit 1)
    union all
    select n.type, n.lifecycle from kinds k cross join lateral (
      select p.type, p.lifecycle from parked p where p.ckey = p_key and (p.type, p.lifecycle) > (k.type, k.lifecycle)
       order by p.type, p.lifecycle limit 1) n
  )
  select k.type, k.lifecycle from kinds k
$$;

-- The first parked job of each type of a key, and how many jobs of the type may become ready now, at most 1,000. `due_at` is when the next
-- may, if none may now. One statement reads what claims have used and what is ready: both change in one transaction.
create or replace function _key_heads(p_key bigint, p_now timestamptz)
returns table (lifecycle smallint, type int, prio smallint, pos bigint, rated boolean, tokens int, due_at timestamptz) language sql
set search_path from current as $$
  select k.lifecycle, k.type, h.prio, h.pos, o.token_us is not null,
         case when o.token_us is null then 1000 else least(1000, greatest(0, o.burst_per_key - n.needed))::int end,
         case when n.needed >= o.burst_per_key then n.use + (o.token_us - o.burst_per_key * o.token_us) * interval '1 microsecond' end
    from _parked_kinds(p_key) k
    cross join lateral (select p.prio, p.pos from parked p where p.ckey = p_key and p.type = k.type and p.lifecycle = k.lifecycle
                         order by p.prio, p.pos limit 1) h
    left join type_options o on o.lifecycle = k.lifecycle and o.type = k.type and o.rate_per_key is not null
    left join key_rate u on u.ckey = p_key and u.type = k.type and u.lifecycle = k.lifecycle
    -- The tokens that are used or set aside for ready jobs, a part of one counted as one.
    left join lateral (
      select greatest(u.used_until, p_now) + count(*) * o.token_us * interval '1 microsecond' as use,
             ceil(extract(epoch from greatest(u.used_until - p_now, interval '0')) * 1000000 / o.token_us) + count(*) as needed
        from slot s join ready r on r.id = s.id
       where o.token_us is not null and s.ckey = p_key and r.type = k.type and r.lifecycle = k.lifecycle) n on true
$$;

-- Whether a parked job of this key is of a type that declares a rate.
create or replace function _waits_for_rate(p_key bigint) returns boolean language sql stable set search_path from current as $$
  select exists (select from _parked_kinds(p_key) k join type_options o on o.type = k.type and o.lifecycle = k.lifecycle where o.rate_per_key is not null)
$$;

-- Gives free slots of a key to its jobs parked first, as far as the key has tokens for them, and notes when the key is
-- looked at again. The caller has locked the key. p_due: when it was to be looked at.
create or replace function _promote_by_rate(p_key bigint, p_cap int, p_due timestamptz, p_now timestamptz) returns int language plpgsql
set search_path from current as $$
declare
  h record;
  next_at timestamptz;
  filled int;
  promoted int := 0;
begin
  loop
    select k.*, count(*) over () as kinds, min(k.due_at) over () as next_at into h from _key_heads(p_key, p_now) k
     order by (k.tokens = 0), k.prio, k.pos limit 1;
    next_at := h.next_at;
    exit when h.type is null or h.tokens = 0;
    filled := _fill_slots(p_key, p_cap, case when h.kinds = 1 then h.tokens else 1 end, h.lifecycle, h.type);
    promoted := promoted + filled;
    exit when filled = 0 or promoted >= 1000;
  end loop;
  -- The tokens of a key that was due are set aside for ready jobs that nobody claims: it is looked at less often.
  if next_at is not null and promoted = 0 and p_due <= p_now then next_at := greatest(next_at, p_now + _unclaimed_wait()); end if;
  update concurrency_key c set due_at = next_at where c.id = p_key and c.due_at is distinct from next_at;
  for h in select k.* from _key_heads(p_key, p_now) k order by k.prio, k.pos loop
    promoted := promoted + _let_urgent_pass_of(p_key, h.lifecycle, h.type, h.rated);
  end loop;
  return promoted;
end $$;

-- Gives the slot of a ready, unclaimed job to a parked job of this type and of a more urgent priority. If the type has a rate, the token
-- goes with the slot, from a job of the same type. The caller has locked the key.
create or replace function _let_urgent_pass_of(p_key bigint, p_lifecycle smallint, p_type int, p_rated boolean) returns int language plpgsql
set search_path from current as $$
declare
  head parked;
  behind ready;
  passed int := 0;
begin
  loop
    select q.* into head from parked q where q.ckey = p_key and q.type = p_type and q.lifecycle = p_lifecycle
     order by q.prio, q.pos limit 1 for update skip locked;
    exit when not found;
    select r.* into behind from slot o join ready r on r.id = o.id
     where o.ckey = p_key and r.prio > head.prio and (not p_rated or (r.type = p_type and r.lifecycle = p_lifecycle))
     order by r.prio desc, r.pos desc limit 1 for update of r skip locked;
    exit when not found;
    perform _exchange_slot(behind, head);
    passed := passed + 1;
  end loop;
  return passed;
end $$;

-- Lets jobs become ready whose keys have tokens again, of at most so many keys. Keys that are locked are skipped.
create or replace function _promote_due(p_limit int, p_now timestamptz) returns int language plpgsql set search_path from current as $$
declare
  keys bigint[] := array(select c.id from concurrency_key c where c.due_at <= p_now order by c.due_at limit p_limit for update skip locked);
begin
  if cardinality(keys) = 0 then return 0; end if;
  return _promote_at(keys, false, p_now);
end $$;

-- Takes the tokens of the jobs that a claim has picked. Returns the picks whose keys have tokens for them. The others wait for their keys
-- again: a clock that was set back, or a claim that waited, may have picked them.
create or replace function _take_tokens(p_picked tid[], p_now timestamptz) returns tid[] language plpgsql set search_path from current as $$
declare
  us constant interval := interval '1 microsecond';
  taken_keys bigint[];
  due timestamptz[];
  over jsonb;
begin
  with needed as materialized (
    select r.ckey, r.lifecycle, r.type, count(*) * o.token_us as use, o.burst_per_key * o.token_us as room, o.token_us
      from unnest(p_picked) u(place) join ready r on r.ctid = u.place
      join type_options o on o.lifecycle = r.lifecycle and o.type = r.type and o.rate_per_key is not null
     where r.ckey is not null group by r.ckey, r.lifecycle, r.type, o.token_us, o.burst_per_key
  ), taken as (
    insert into key_rate as k (ckey, lifecycle, type, used_until)
    select n.ckey, n.lifecycle, n.type, p_now + n.use * us from needed n where n.use <= n.room order by n.ckey, n.type, n.lifecycle
    on conflict (ckey, type, lifecycle) do update set used_until = greatest(k.used_until, p_now) + (excluded.used_until - p_now)
    where greatest(k.used_until, p_now) + (excluded.used_until - p_now)
          <= p_now + (select n.room from needed n where n.ckey = k.ckey and n.type = k.type and n.lifecycle = k.lifecycle) * us
    returning ckey, lifecycle, type, used_until
  )
  select array_agg(n.ckey) filter (where t.ckey is not null), array_agg(t.used_until + (n.token_us - n.room) * us) filter (where t.ckey is not null),
         jsonb_agg(jsonb_build_array(n.ckey::text, n.lifecycle, n.type)) filter (where t.ckey is null)
    into taken_keys, due, over
    from needed n left join taken t on t.ckey = n.ckey and t.type = n.type and t.lifecycle = n.lifecycle;
  -- The next tokens of these keys, if jobs wait for them. Keys that are locked are looked at by whoever has locked them, or later.
  if taken_keys is not null then
    -- Another type of a key may have its next token sooner.
    update concurrency_key c set due_at = least(c.due_at, greatest(d.at, p_now))
      from (select u.ckey, min(u.at) as at from unnest(taken_keys, due) u(ckey, at)
             where exists (select from parked p where p.ckey = u.ckey) group by u.ckey) d
     where c.id = d.ckey and c.id = any(array(select o.id from concurrency_key o where o.id = any(taken_keys) for update skip locked));
  end if;
  if over is null then return p_picked; end if;
  return _give_back_picks(p_picked, over, p_now);
end $$;

-- Lets the picked jobs of these keys and types wait for their keys again. Returns the other picks, in their order.
create or replace function _give_back_picks(p_picked tid[], p_over jsonb, p_now timestamptz) returns tid[] language plpgsql
set search_path from current as $$
declare
  kept tid[] := array(
    select u.place from unnest(p_picked) with ordinality u(place, n) join ready r on r.ctid = u.place
     where not p_over @> jsonb_build_array(jsonb_build_array(r.ckey::text, r.lifecycle, r.type)) order by u.n);
begin
  perform _park_again(array(select u.place from unnest(p_picked) u(place) where u.place <> all(kept)), p_now);
  return kept;
end $$;

-- Takes ready jobs, with their slots, back to the jobs that wait for their keys, and has these keys looked at soon.
create or replace function _park_again(p_places tid[], p_now timestamptz) returns void language plpgsql set search_path from current as $$
declare keys bigint[];
begin
  with back as (
    delete from ready r where r.ctid = any(p_places) returning r.*
  ), freed as (
    delete from slot s using back b where s.id = b.id
  ), waiting as (
    insert into parked (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio,
                        flags, pos)
    select id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags, pos
      from back
  )
  select array_agg(distinct b.ckey) into keys from back b;
  perform _look_at_keys(keys, p_now);
end $$;

-- Has these keys looked at soon. Those that are locked are looked at by whoever has locked them, or by a later sweep.
create or replace function _look_at_keys(p_keys bigint[], p_now timestamptz) returns void language sql set search_path from current as $$
  update concurrency_key c set due_at = p_now
   where c.id = any(array(select o.id from concurrency_key o where o.id = any(p_keys) order by o.id for update skip locked))
$$;

-- Takes the token of one job that a move gives to a holder; false if its key has none.
create or replace function _take_token(t token, p_now timestamptz) returns boolean language plpgsql set search_path from current as $$
declare o type_options;
begin
  select d.* into o from type_options d where d.lifecycle = t.lifecycle and d.type = t.type and d.rate_per_key is not null;
  if not found then return true; end if;
  insert into key_rate as k (ckey, lifecycle, type, used_until)
  values (t.ckey, t.lifecycle, t.type, p_now + o.token_us * interval '1 microsecond')
    on conflict (ckey, type, lifecycle) do update set used_until = greatest(k.used_until, p_now) + o.token_us * interval '1 microsecond'
    where greatest(k.used_until, p_now) + (o.token_us - o.burst_per_key * o.token_us) * interval '1 microsecond' <= p_now;
  return found;
end $$;

-- When the rate of a type changes, its used tokens stay used, its ready jobs wait for their keys again, and every key that waits, or for
-- which jobs of the type wait, is looked at soon: without a rate, an urgent job may pass jobs of other types. p_factor: how much longer
-- a token lasts than before.
create or replace function _key_rate_changed(p_lifecycle smallint, p_type int, p_factor float8, p_now timestamptz) returns void
language plpgsql set search_path from current as $$
begin
  update key_rate k set used_until = p_now + (k.used_until - p_now) * p_factor
   where k.type = p_type and k.lifecycle = p_lifecycle and k.used_until > p_now;
  perform _park_again(array(select q.ctid from ready q where q.lifecycle = p_lifecycle and q.type = p_type and q.ckey is not null
                             for update skip locked), p_now);
  perform _look_at_keys(array(select c.id from concurrency_key c where c.due_at is not null or exists (
    select from parked p where p.ckey = c.id and p.type = p_type and p.lifecycle = p_lifecycle)), p_now);
end $$;
