-- Limited logins: logins that are not members of trellis_app and act only in the roles that `authority` gives them. A
-- job is owned by the login that submitted it, and by the login that holds it while it does. A login limited to reading
-- its own jobs may also change only its own. The names it gives (actors, idempotency keys, concurrency keys) are its
-- own, too, so that no login can use, block or discover another's.

create or replace function _is_limited() returns boolean language sql stable as $$
  select not pg_has_role(session_user, 'trellis_app', 'member')
$$;

-- The stored form of a limited login's name; the application's names stay unchanged. The language keeps the plan: a function in SQL
-- would be planned at every call.
create or replace function _of_login(p_name text) returns text language plpgsql stable set search_path from current as $$
begin
  return case when _is_limited() then 'db:' || session_user || ':' || p_name else p_name end;
end $$;

-- The prefix of names that this login gives; empty for the application. Clients compare owners with it.
create or replace function name_prefix() returns text language sql stable security definer set search_path from current as $$
  select _of_login('')
$$;

create or replace function reads_all() returns boolean language sql stable security definer set search_path from current as $$
  select exists (select from authority g join rule_grant r on r.role = g.role and r.rule = 'jobs.read' and r.reach = 'yes'
                  where pg_has_role(session_user, g.db_role, 'member'))
$$;

create or replace function owns(p_id bigint) returns boolean language sql stable security definer set search_path from current as $$
  select exists (select from event e join actor a on a.id = e.actor
                  where e.id = p_id and e.version = 1 and a.db_role = session_user)
      or exists (select from lease d join actor a on a.id = d.owner where d.id = p_id and a.db_role = session_user)
$$;

-- Whether an actor in this role may access the job. If not, the answer is that there is no such job.
create or replace function _within_reach(p_role smallint, p_id bigint) returns boolean language sql stable
set search_path from current as $$
  select not _is_limited() or exists (select from rule_grant r where r.rule = 'jobs.read' and r.role = p_role and r.reach = 'yes')
      or owns(p_id)
$$;

-- A limited login may use only its own leases, unless its role may change every job: everyone who may read jobs can
-- read an epoch.
create or replace function _check_holder(p_role smallint, p_ids bigint[]) returns void language plpgsql stable
set search_path from current as $$
begin
  if not _is_limited() then return; end if;  -- before the condition below, which costs a query
  if exists (select from lease d join actor o on o.id = d.owner where d.id = any(p_ids) and o.db_role <> session_user)
     and not exists (select from rule_grant r where r.rule = 'jobs.update' and r.role = p_role and r.reach = 'yes') then
    raise exception 'database role % does not hold these jobs', session_user using errcode = 'TR002';
  end if;
end $$;

-- A login limited to its own jobs may submit plain jobs only: jobs on topics name parties and links that the gateway
-- checks.
create or replace function _check_lifecycle(p_role smallint, p_lifecycles smallint[]) returns void language plpgsql stable
set search_path from current as $$
begin
  if not _is_limited() then return; end if;  -- before the condition below, which costs a query
  if exists (select from rule_grant r where r.rule = 'jobs.read' and r.role = p_role and r.reach = 'own')
     and exists (select from lifecycle l where l.lifecycle = any(p_lifecycles) and l.name = 'bus-job') then
    raise exception 'database role % submits jobs on topics through the gateway or the bus', session_user using errcode = 'TR002';
  end if;
end $$;

-- A limited login may link jobs only to its own: a child is undone and cancelled with its parent, and a compensation is
-- written into the history of the job it undoes.
create or replace function _check_links(p_role smallint, p_job_ids text[]) returns void language plpgsql stable
set search_path from current as $$
declare foreign_id text;
begin
  if not _is_limited() then return; end if;
  select u.job_id into foreign_id from unnest(p_job_ids) u(job_id)
   where u.job_id is not null
     and not coalesce((select _within_reach(p_role, j.id) from job j where j.job_id = u.job_id), false) limit 1;
  if found then
    raise exception 'there is no job % of yours to link to', foreign_id using errcode = 'TR004';
  end if;
end $$;
