-- The kinds of ended jobs that a list reads: each is a range of the index on (lifecycle, state, type, id), in the order of the ids. Of one
-- type, and of those whose type is not filled in yet (0), or of every type that has such jobs, found by leaps through the index. p_codes is
-- lifecycle * 16 + state. With p_before only the p_most kinds whose newest job below that number is newest: no other has one on the page.
create or replace function ended_kinds(p_codes int[], p_type text, p_before bigint, p_most bigint)
returns table (lifecycle smallint, state smallint, type int) language plpgsql stable set search_path from current
set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
begin
  if p_type is not null then
    return query
      select (c.code / 16)::smallint, (c.code % 16)::smallint, o.type
        from unnest(p_codes) c(code) cross join lateral (
          select t.id as type from job_type t where t.name = p_type union all
          select 0 from job_type t where t.name = p_type and exists (
            select from ended n where n.lifecycle = (c.code / 16)::smallint and n.state = (c.code % 16)::smallint and n.type = 0)) o;
    return;
  end if;
  return query
    with recursive kind(lifecycle, state, type) as (
      select f.* from unnest(p_codes) c(code) cross join lateral (
        select n.lifecycle, n.state, n.type from ended n
         where (n.lifecycle, n.state, n.type) >= ((c.code / 16)::smallint, (c.code % 16)::smallint, 0)
           and (n.lifecycle, n.state) <= ((c.code / 16)::smallint, (c.code % 16)::smallint)
         order by n.lifecycle, n.state, n.type, n.id limit 1) f
      union all
      select f.* from kind k cross join lateral (
        select n.lifecycle, n.state, n.type from ended n
         where (n.lifecycle, n.state, n.type) > (k.lifecycle, k.state, k.type) and (n.lifecycle, n.state) <= (k.lifecycle, k.state)
         order by n.lifecycle, n.state, n.type, n.id limit 1) f
    )
    select k.lifecycle, k.state, k.type
      from kind k cross join lateral (
        select n.id from ended n
         where (n.lifecycle, n.state, n.type, n.id) < (k.lifecycle, k.state, k.type, coalesce(p_before, 9223372036854775807))
           and (n.lifecycle, n.state, n.type, n.id) > (k.lifecycle, k.state, k.type, 0)
         order by n.lifecycle desc, n.state desc, n.type desc, n.id desc limit 1) f
     order by f.id desc limit case when p_before is not null then p_most end;
end $$;
