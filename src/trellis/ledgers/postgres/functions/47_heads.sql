-- The next jobs for a role that takes jobs by id: the first ready jobs of each type and priority, longest ready first.
-- If they are still too many, the longest lists are cut. A large payload is left out; otherwise one call could return
-- thousands of them. The settings force index scans, because statistics mislead for a table that is empty one moment
-- and long the next. The language keeps the plan: a function in SQL would be planned at every call.
create or replace function heads(p_lifecycle smallint, p_each int, p_limit int)
returns table (
  id bigint, job_id text, lifecycle smallint, type_name text, state smallint, prio smallint, generation smallint, attempt int,
  max_attempts int, version int, epoch int, deaths smallint, created_at timestamptz, updated_at timestamptz, deadline_at timestamptz,
  key_name text, correlation_id text, trace text, parent_id text, compensates_id text, payload bytea)
language plpgsql stable set search_path from current
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
begin
  return query
  select r.id, j.job_id, r.lifecycle, h.name, r.state, r.prio, r.generation, r.attempt, r.max_attempts, r.version, r.epoch, r.deaths,
         j.created_at, (select e.at from event e where e.id = r.id order by e.version desc limit 1), j.deadline_at, j.key_name,
         j.correlation_id, j.trace, j.parent_id, (select o.job_id from job o where o.id = j.compensates),
         case when octet_length(j.payload) <= 8192 then j.payload end
    from (
      select t.name, f.id, f.pos from job_type t cross join unnest('{0,1,2}'::smallint[]) p(prio) cross join lateral (
        select q.id, q.pos, row_number() over (order by q.pos) as nth from (
          select o.id, o.pos from ready o where o.type = t.id and o.lifecycle = p_lifecycle and o.prio = p.prio
           order by o.pos limit p_each) q) f
       where not t.paused order by f.nth, f.pos limit p_limit) h
    join ready r on r.id = h.id join job j on j.id = h.id
   order by h.pos;
end $$;
