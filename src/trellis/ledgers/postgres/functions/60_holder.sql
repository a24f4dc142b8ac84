-- A holder's calls between steps: lease renewal, checkpoint, journal, signal, all fenced by the epoch. And remarks by
-- others.

create or replace function renew(p_actor int, p_ids bigint[], p_epochs int[])
returns table (id bigint, epoch int, cancel boolean) language plpgsql security definer set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  now_at timestamptz := trellis.now();
begin
  return query
  with renewed as (
    update lease d set until = now_at + _length(d.lease_ms, d.beat_ms)
     where d.id = any(p_ids) and d.epoch = p_epochs[width_bucket(d.id, p_ids)]
       and exists (select from actor o where o.id = d.owner and o.db_role = session_user)
    returning d.id, d.epoch, d.cancel_at is not null as cancel
  ), noted as (
    insert into renewal (id, at) select r.id, now_at from renewed r on conflict (id) do update set at = excluded.at
  )
  select r.id, r.epoch, r.cancel from renewed r;
end $$;

create or replace function save_checkpoint(p_id bigint, p_epoch int, p_body bytea) returns int language plpgsql security definer
set search_path from current as $$
declare held int;
begin
  select d.version into held from lease d where d.id = p_id and d.epoch = p_epoch
     and exists (select from actor o where o.id = d.owner and o.db_role = session_user) for update;
  if not found then return null; end if;
  insert into checkpoint as c (id, at, epoch, body) values (p_id, trellis.now(), p_epoch, p_body)
    on conflict (id) do update set at = excluded.at, epoch = excluded.epoch, body = excluded.body;
  return held;
end $$;

-- Journal entries of many holders at once. The first body under a name stays and is returned. An entry whose lease is
-- lost is not returned.
create or replace function journal_entries(p_ids bigint[], p_epochs int[], p_entries text[], p_bodies bytea[])
returns table (n int, body bytea) language plpgsql security definer set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare at timestamptz := trellis.now();
begin
  -- A key share lock keeps the leases from ending before this transaction does, without blocking their renewal.
  perform from lease d where d.id = any(p_ids) order by d.id for key share;
  insert into journal (id, entry, at, epoch, body)
  select u.id, u.entry, at, u.epoch, u.body from unnest(p_ids, p_epochs, p_entries, p_bodies) u(id, epoch, entry, body)
    join lease d on d.id = u.id and d.epoch = u.epoch
    join actor o on o.id = d.owner and o.db_role = session_user on conflict do nothing;
  return query
  select u.n::int, j.body from unnest(p_ids, p_epochs, p_entries) with ordinality u(id, epoch, entry, n)
    join lease d on d.id = u.id and d.epoch = u.epoch join actor o on o.id = d.owner and o.db_role = session_user
    join journal j on j.id = u.id and j.entry = u.entry;
end $$;

create or replace function add_signals(p_id bigint, p_epoch int, p_types smallint[], p_data bytea[]) returns int language plpgsql
security definer set search_path from current as $$
declare
  held int;
  at timestamptz := trellis.now();
begin
  select d.version into held from lease d where d.id = p_id and d.epoch = p_epoch
     and exists (select from actor o where o.id = d.owner and o.db_role = session_user) for update;
  if not found then return null; end if;
  -- Signals have no ids. The same signals directly after themselves repeat a call whose answer was lost, and add
  -- nothing.
  if exists (select from (select array_agg(r.type order by r.no) as types, array_agg(r.data order by r.no) as data
                            from (select s.no, s.type, s.data from signal s where s.id = p_id order by s.no desc
                                   limit cardinality(p_types)) r) last
              where last.types = p_types and last.data is not distinct from p_data) then
    return held;
  end if;
  insert into signal (id, at, type, data) select p_id, at, u.type, u.data from unnest(p_types, p_data) u(type, data);
  return held;
end $$;

-- A remark about a job by another role than its holder. A repeated call finds its own remark as the last one.
create or replace function remark(p_actor int, p_job_id text, p_type smallint, p_body bytea, p_most int, p_repeat boolean) returns boolean
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  of_job bigint;
begin
  perform _require(a.role, 'remark');
  select j.id into of_job from job j where j.job_id = p_job_id;
  if not found then return false; end if;
  perform from job j where j.id = of_job for no key update;
  if p_repeat and exists (select from (select g.type, g.data from signal g where g.id = of_job and g.type = 4 order by g.no desc limit 1) last
                           where last.type = p_type and last.data = p_body) then
    return true;
  end if;
  if (select count(*) from signal g where g.id = of_job and g.type = 4) >= p_most then return false; end if;
  insert into signal (id, at, type, data) values (of_job, trellis.now(), p_type, p_body);
  return true;
end $$;

create or replace function beat(p_actor int, p_info bytea) returns void language plpgsql security definer set search_path from current as $$
declare a record := _actor(p_actor);
begin
  insert into worker (actor, seen_at, info) values (p_actor, trellis.now(), p_info)
    on conflict (actor) do update set seen_at = excluded.seen_at, info = excluded.info;
end $$;
