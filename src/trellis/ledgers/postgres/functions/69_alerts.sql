-- Alerts. What a round of an evaluator observed is stored by one call, one call at a time: so an alert is raised once and resolved once,
-- however many evaluators there are. The rules are in engine/alerts.py.

create or replace function observe_alerts(p_actor int, p_mark bigint, p_ids text[], p_names text[], p_subjects text[],
                                          p_values float8[], p_texts text[], p_scope_names text[], p_scope_prefixes text[],
                                          p_unread_names text[], p_unread_prefixes text[], p_report_types text[],
                                          p_hold_s float8, p_unseen_s float8, p_keep_s float8, p_stale_s float8)
returns table (change text, id text, name text, subject text, value float8, text text, raised_at timestamptz, last_seen_at timestamptz,
               resolved_at timestamptz, report_types text[])
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  now_at timestamptz := trellis.now();
  this_round bigint;
begin
  perform _require(a.role, 'observe_alerts');
  if _is_limited() then
    raise exception 'alerts are about the whole ledger: only a member of trellis_app may raise them, and % is none', session_user
      using errcode = 'TR002';
  end if;
  if greatest(cardinality(p_ids), cardinality(p_scope_names), cardinality(p_unread_names), cardinality(p_report_types)) > 1000 then
    raise exception 'a round observes at most 1000 alerts' using errcode = 'TR004';
  end if;
  lock table alert in share row exclusive mode;
  insert into meta as m (name, value) values ('alert_round', '1')
    on conflict (name) do update set value = (m.value::bigint + 1)::text returning value::bigint into this_round;
  -- The latest round says when it is out of date, also if a round before it has named a later time.
  if not exists (select from meta m where m.name = 'alert_evaluated_at' and m.value::numeric > extract(epoch from now_at)) then
    insert into meta as m (name, value)
    values ('alert_evaluated_at', extract(epoch from now_at)::text),
           ('alert_stale_at', extract(epoch from now_at + p_stale_s * interval '1 s')::text)
    on conflict (name) do update set value = excluded.value;
  end if;
  update alert o set value = w.value, text = w.text, last_seen_at = greatest(o.last_seen_at, now_at), seen_in = this_round, seen_by = p_actor
    from unnest(p_names, p_subjects, p_values, p_texts) w(name, subject, value, text)
   where o.name = w.name and o.subject = w.subject and o.resolved_at is null;
  update alert o set unread_at = now_at
   where o.resolved_at is null and exists (
           select from unnest(p_unread_names, p_unread_prefixes) c(name, prefix)
            where c.name = o.name and starts_with(o.subject || e'\n', c.prefix));
  -- A cause that somebody found to be over after this round had read it is not raised again.
  return query
  with made as (
    insert into alert as o (id, name, subject, value, text, raised_at, last_seen_at, seen_in, seen_by)
    select w.id, w.name, w.subject, w.value, w.text, now_at, now_at, this_round, p_actor
      from unnest(p_ids, p_names, p_subjects, p_values, p_texts) w(id, name, subject, value, text)
     where not exists (select from alert e where e.name = w.name and e.subject = w.subject and e.resolved_in > p_mark)
    on conflict do nothing
    returning o.*)
  select 'raised', m.id, m.name, m.subject, m.value, m.text, m.raised_at, m.last_seen_at, m.resolved_at, '{}'::text[] from made m;
  return query
  with over as (
    update alert o set resolved_at = now_at, resolved_in = this_round
     where o.resolved_at is null and o.unread_at is distinct from now_at
       and not exists (select from unnest(p_names, p_subjects) w(name, subject) where w.name = o.name and w.subject = o.subject)
       and (greatest(o.last_seen_at, o.unread_at) < now_at - p_unseen_s * interval '1 s'
            or (o.seen_in <= p_mark
                and (coalesce(o.seen_by, p_actor) = p_actor or o.last_seen_at <= now_at - p_hold_s * interval '1 s')
                and exists (
                  select from unnest(p_scope_names, p_scope_prefixes) c(name, prefix)
                   where c.name = o.name and starts_with(o.subject || e'\n', c.prefix))))
    returning o.*)
  select 'resolved', v.id, v.name, v.subject, v.value, v.text, v.raised_at, v.last_seen_at, v.resolved_at, '{}'::text[] from over v;
  -- Reports: that an alert was raised, through the channels of this evaluator that have not said so; and that one is over whose beginning
  -- they have said. So it does not matter which evaluator raised or resolved it.
  return query
  with late as (
    select o.id, array(select unnest(p_report_types) except select unnest(o.report_types)) as missing from alert o
     where (o.resolved_at is null or (o.resolved_at = now_at and o.resolved_in = this_round)) and not o.report_types @> p_report_types),
  made as (update alert o set report_types = o.report_types || l.missing from late l where o.id = l.id returning o.*, l.missing)
  select 'report raised', m.id, m.name, m.subject, m.value, m.text, m.raised_at, m.last_seen_at, m.resolved_at, m.missing from made m;
  return query
  with ended as (
    select o.id, array(select unnest(o.report_types) intersect select unnest(p_report_types)) as known from alert o
     where o.resolved_at is not null and o.report_types <> '{}' and o.report_types && p_report_types),
  made as (
    update alert o set report_types = array(select unnest(o.report_types) except select unnest(e.known)) from ended e where o.id = e.id
    returning o.*, e.known)
  select 'report resolved', m.id, m.name, m.subject, m.value, m.text, m.raised_at, m.last_seen_at, m.resolved_at, m.known from made m;
  delete from alert o where o.id = any(array(
    select e.id from alert e where e.resolved_at <= now_at - p_keep_s * interval '1 s' order by e.resolved_at limit 500));
end $$;
