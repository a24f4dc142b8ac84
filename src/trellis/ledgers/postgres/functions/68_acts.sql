-- Administrative acts, each recorded in the transaction of its change. Only these functions write them.

create or replace function _record_act(p_actor int, p_role smallint, p_event text, p_subject text, p_source text, p_target text,
                                       p_cause text, p_correlation text, p_job text default null, p_facts text default null,
                                       p_id text default null) returns text language plpgsql set search_path from current as $$
declare
  its_id text := coalesce(p_id, 'act-' || replace(gen_random_uuid()::text, '-', ''));
begin
  insert into act (act_id, at, role, actor, event, subject, source, target, cause, correlation_id, job_id, facts)
  values (its_id, trellis.now(), p_role, p_actor, p_event, p_subject, p_source, p_target,
          coalesce(left(nullif(p_cause, ''), 2000), 'no reason given'), p_correlation, p_job, p_facts)
  on conflict (act_id) do nothing;
  return its_id;
end $$;

-- Raises TR004 for facts that could not be published: names that no fact may have, text that is no UTF-8, deep nesting.
-- Each \u0000 is read as \u0001, because jsonb refuses it and Python does not.
create or replace function _check_facts(p_facts text) returns void language plpgsql immutable set search_path from current as $$
declare
  facts jsonb;
begin
  begin
    facts := replace(p_facts, '\u0000', '\u0001')::jsonb;
  exception when data_exception or statement_too_complex or program_limit_exceeded then
    raise exception 'the facts of an act are JSON that can be written as UTF-8' using errcode = 'TR004';
  end;
  if jsonb_typeof(facts) <> 'object' then
    raise exception 'the facts of an act are a JSON object' using errcode = 'TR004';
  end if;
  if jsonb_path_exists(facts, '$.**{33}') then
    raise exception 'the facts of an act are nested at most 32 deep' using errcode = 'TR004';
  end if;
  if exists (select from jsonb_object_keys(facts) k(name) where k.name !~ '^[a-z][a-z0-9_]{0,49}$' or k.name in (
      'ts', 'event', 'actor', 'job_id', 'from', 'to', 'node', 'format', 'event_id', 'subject', 'role', 'actor_name', 'correlation_id',
      'cause', 'lifecycle', 'version')) then
    raise exception 'a fact of an act has a lower-case name of at most 50 characters that is no field of every record'
      using errcode = 'TR004';
  end if;
end $$;

-- For changes outside this database (an agent's file, a token), and for requests that a gateway refused. An existing
-- act with the caller's own id stays unchanged. No such id can be an event's, which ends with the version of a job: a
-- hyphen and at most ten digits. Otherwise an act could take the place of an event's audit record.
create or replace function record_act(p_actor int, p_event text, p_subject text, p_source text, p_target text, p_cause text,
                                      p_correlation text, p_job text default null, p_facts text default null, p_id text default null)
returns text language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
begin
  perform _require(a.role, 'record_act');
  if length(p_event) > 100 or length(p_subject) > 500 or greatest(length(p_source), length(p_target), length(p_cause)) > 2000
     or greatest(length(p_correlation), length(p_job)) > 200 or octet_length(p_facts) > 1048576 then
    raise exception 'an administrative act has at most 100 characters of event, 500 of subject, 2000 of any other text and 1 MiB of facts'
      using errcode = 'TR004';
  end if;
  if p_event in ('type.paused', 'type.resumed', 'type.rate.changed', 'type.held_limit.changed', 'key.limit.changed', 'follower.left_behind',
      'job.signalled', 'jobs.changed', 'type.options.changed', 'ledger.migrated', 'retention.removed', 'authority.granted', 'issuer.changed', 'schedule.added',
      'schedule.changed', 'schedule.paused', 'schedule.resumed', 'schedule.removed') then
    raise exception 'the ledger itself records the event %, with its change', p_event using errcode = 'TR004';
  end if;
  if _is_limited() and (p_id is not null or p_facts is not null) then
    raise exception 'only a member of trellis_app may give an act its id or facts, and % is none', session_user using errcode = 'TR004';
  end if;
  if p_id !~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$' or p_id !~ '^(refused|objects-rebuilt|ledger-rebuilt)-.|.-agent$'
     or p_id ~ '-[0-9]{1,10}$' then
    raise exception 'the id of an act has at most 200 letters, digits, dots and hyphens, begins with refused-, objects-rebuilt- or '
      'ledger-rebuilt- or ends with -agent, and is no id of an event' using errcode = 'TR004';
  end if;
  if p_facts is not null then perform _check_facts(p_facts); end if;
  return _record_act(p_actor, a.role, p_event, p_subject, p_source, p_target, p_cause, p_correlation, p_job, p_facts, p_id);
end $$;

create or replace function acts_published(p_actor int, p_nos bigint[]) returns void language plpgsql security definer
set search_path from current as $$
declare
  a record := _actor(p_actor);
begin
  perform _require(a.role, 'publish_acts');
  update act c set published = true where c.no = any(p_nos) and not c.published;
end $$;

-- Restores acts that were lost with the database, for the owner of the ledger only. Existing acts stay unchanged.
create or replace function restore_acts(p_actor int, p_acts jsonb) returns void language plpgsql security definer
set search_path from current as $$
declare
  a record := _actor(p_actor);
begin
  perform _require(a.role, 'restore');
  if not pg_has_role(session_user, 'trellis_owner', 'member') then
    raise exception 'only a member of trellis_owner may put lost acts back, and % is none', session_user using errcode = 'TR002';
  end if;
  insert into actor (role, db_role, name, node)
  select distinct x.role, session_user, x.actor, x.node from jsonb_to_recordset(p_acts) as x(role smallint, actor text, node text)
  on conflict do nothing;
  insert into act (act_id, at, role, actor, event, subject, source, target, cause, correlation_id, job_id, facts, published)
  select x.act_id, x.at, x.role, o.id, x.event, x.subject, x.source, x.target, x.cause, x.correlation_id, x.job_id, x.facts, true
    from jsonb_to_recordset(p_acts) as x(
      act_id text, at timestamptz, role smallint, actor text, node text, event text, subject text, source text, target text, cause text,
      correlation_id text, job_id text, facts text)
    join actor o on o.name = x.actor and o.role = x.role and o.db_role = session_user and o.node = x.node
  on conflict do nothing;
end $$;
