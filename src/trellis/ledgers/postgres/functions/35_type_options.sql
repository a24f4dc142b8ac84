-- Type options: what applications declare about their job types (D66). The bits of the options that a submit sets, as
-- in engine/jobs.py: 1 priority, 2 max_attempts, 4 max_deaths, 8 deadline, 16 concurrency key, 32 concurrency limit; 63
-- is all.

create or replace function _refuse_unkeyed(p_type int) returns boolean language plpgsql stable set search_path from current as $$
declare of_type text := (select t.name from job_type t where t.id = p_type);
begin
  raise exception 'jobs of type % are limited by their concurrency key: give the key', of_type
    using errcode = 'TR008', detail = of_type;
end $$;

-- A type's options as administrative acts show them. engine/jobs.py produces the same text.
create or replace function _options_text(p_prio smallint, p_attempts int, p_deaths smallint, p_deadline float8, p_limit int, p_keyed boolean,
                                         p_compensation text, p_unique text, p_rate float8, p_burst int) returns text language sql
immutable set search_path from current as $$
  select concat_ws(', ', 'priority ' || p_prio, 'max_attempts ' || p_attempts, 'max_deaths ' || p_deaths, 'deadline_s ' || p_deadline,
                   'concurrency_limit ' || p_limit, case when p_keyed then 'keyed' end, 'compensation ' || p_compensation, 'unique ' || p_unique,
                   'rate_per_key ' || p_rate || '/s, burst ' || p_burst)
$$;

-- Unchanged declarations are not written again, so that starting workers do not wait for each other.
create or replace function declare_types(
  p_actor int, p_only_new boolean, p_lifecycles smallint[], p_types text[], p_prios smallint[], p_max_attempts int[],
  p_max_deaths smallint[], p_deadlines float8[], p_limits int[], p_keyed boolean[], p_compensations text[], p_uniques text[],
  p_rates float8[], p_bursts int[]) returns void
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  d record;
  before text;
  rate_before float8;
  burst_before int;
begin
  perform _require(a.role, 'declare_types');
  if _is_limited() then
    raise exception 'what a type declares holds for everybody: only a member of trellis_app may declare it, and % is none', session_user
      using errcode = 'TR002';
  end if;
  for d in select u.lifecycle, u.name, type_id(u.name) as type, u.prio, u.max_attempts, u.max_deaths, u.deadline_s, u.lim, u.keyed, u.compensation,
                  u.unique_rule, u.rate, u.burst
             from unnest(p_lifecycles, p_types, p_prios, p_max_attempts, p_max_deaths, p_deadlines, p_limits, p_keyed, p_compensations, p_uniques,
                         p_rates, p_bursts)
                  u(lifecycle, name, prio, max_attempts, max_deaths, deadline_s, lim, keyed, compensation, unique_rule, rate, burst)
            order by u.lifecycle, u.name loop
    continue when exists (
      select from type_options o where o.lifecycle = d.lifecycle and o.type = d.type and (p_only_new or
        (o.prio, o.max_attempts, o.max_deaths, o.deadline_s, o.concurrency_limit, o.keyed, o.compensation, o.unique_rule, o.rate_per_key,
         o.burst_per_key) is not distinct from
        (d.prio, d.max_attempts, d.max_deaths, d.deadline_s, d.lim, d.keyed, d.compensation, d.unique_rule, d.rate, d.burst)));
    select _options_text(o.prio, o.max_attempts, o.max_deaths, o.deadline_s, o.concurrency_limit, o.keyed, o.compensation, o.unique_rule,
                         o.rate_per_key, o.burst_per_key), o.rate_per_key, o.burst_per_key
      into before, rate_before, burst_before from type_options o where o.lifecycle = d.lifecycle and o.type = d.type;
    insert into type_options as o (lifecycle, type, prio, max_attempts, max_deaths, deadline_s, concurrency_limit, keyed, compensation,
                                   unique_rule, rate_per_key, burst_per_key, changed_by, changed_at)
    values (d.lifecycle, d.type, d.prio, d.max_attempts, d.max_deaths, d.deadline_s, d.lim, d.keyed, d.compensation, d.unique_rule, d.rate,
            d.burst, p_actor, trellis.now())
    on conflict (lifecycle, type) do update set prio = d.prio, max_attempts = d.max_attempts, max_deaths = d.max_deaths,
      deadline_s = d.deadline_s, concurrency_limit = d.lim, keyed = d.keyed, compensation = d.compensation,
      unique_rule = d.unique_rule, rate_per_key = d.rate, burst_per_key = d.burst, changed_by = p_actor, changed_at = trellis.now()
      where not p_only_new;
    if found then
      if (rate_before, burst_before) is distinct from (d.rate, d.burst) then
        perform _key_rate_changed(d.lifecycle, d.type, coalesce(rate_before / d.rate, 0), trellis.now());
      end if;
      perform _record_act(p_actor, a.role, 'type.options.changed', d.name, before,
                          _options_text(d.prio, d.max_attempts, d.max_deaths, d.deadline_s, d.lim, d.keyed, d.compensation,
                                        d.unique_rule, d.rate, d.burst),
                          'declared by an application', null);
    end if;
  end loop;
end $$;
