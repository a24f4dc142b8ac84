-- Alerts. What a round of an evaluator observed is stored by one call, one call at a time: so an alert is raised once and resolved once,
-- however many evaluators there are. The rules are in engine/alerts.py.

create or replace function observe_alerts(p_actor int, p_mark bigint, p_ids text[], p_names text[], p_subjects text[],
                                          p_values float8[], p_texts text[], p_scope_names text[], p_scope_prefixes text[],
                                          p_unseen_s float8, p_keep_s float8)
returns table (change text, id text, name text, subject text, value float8, text text, raised_at timestamptz, last_seen_at timestamptz,
               resolved_at timestamptz)
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
  if greatest(cardinality(p_ids), cardinality(p_scope_names)) > 1000 then
    raise exception 'a round observes at most 1000 alerts' using errcode = 'TR004';
  end if;
  lock table alert in share row exclusive mode;
  insert into meta as m (name, value) values ('alert_round', '1')
    on conflict (name) do update set value = (m.value::bigint + 1)::text returning value::bigint into this_round;
  update alert o set value = w.value, text = w.text, last_seen_at = greatest(o.last_seen_at, now_at), seen_in = this_round
    from unnest(p_names, p_subjects, p_values, p_texts) w(name, subject, value, text)
   where o.name = w.name and o.subject = w.subject and o.resolved_at is null;
  -- A cause that somebody found to be over after this round had read it is not raised again.
  return query
  with made as (
    insert into alert as o (id, name, subject, value, text, raised_at, last_seen_at, seen_in)
    select w.id, w.name, w.subject, w.value, w.text, now_at, now_at, this_round
      from unnest(p_ids, p_names, p_subjects, p_values, p_texts) w(id, name, subject, value, text)
     where not exists (select from alert e where e.name = w.name and e.subject = w.subject and e.resolved_in > p_mark)
    on conflict do nothing
    returning o.*)
  select 'raised', m.id, m.name, m.subject, m.value, m.text, m.raised_at, m.last_seen_at, m.resolved_at from made m;
  return query
  with over as (
    update alert o set resolved_at = now_at, resolved_in = this_round
     where o.resolved_at is null
       and not exists (select from unnest(p_names, p_subjects) w(name, subject) where w.name = o.name and w.subject = o.subject)
       and (o.last_seen_at < now_at - p_unseen_s * interval '1 s'
            or (o.seen_in <= p_mark and exists (
                  select from unnest(p_scope_names, p_scope_prefixes) c(name, prefix)
                   where c.name = o.name and starts_with(o.subject || e'\n', c.prefix))))
    returning o.*)
  select 'resolved', v.id, v.name, v.subject, v.value, v.text, v.raised_at, v.last_seen_at, v.resolved_at from over v;
  delete from alert o where o.id = any(array(
    select e.id from alert e where e.resolved_at <= now_at - p_keep_s * interval '1 s' order by e.resolved_at limit 500));
end $$;
