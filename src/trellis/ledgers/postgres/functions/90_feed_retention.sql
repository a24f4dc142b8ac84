-- The feed's sequencer and the removal of what nobody keeps.

-- Dense positions for every batch whose transaction, and every older one, is over. Safe to call from anywhere, often.
create or replace function sequence_feed() returns void language plpgsql security definer set search_path from current as $$
declare horizon bigint;
begin
  if not pg_try_advisory_xact_lock(hashtext('trellis.feed')) then return; end if;
  horizon := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
  if not exists (select from batch b where b.xid < horizon) then return; end if;
  with over as (
    delete from batch b where b.no = any(array(select o.no from batch o where o.xid < horizon order by o.no limit 10000)) returning b.no
  )
  insert into feed (pos, batch, at)
  select (select coalesce(max(f.pos), 0) from feed f) + row_number() over (order by o.no), o.no, trellis.now() from over o;
end $$;

create or replace function retain(p_ended_s float8, p_signals_s float8, p_limit int)
returns table (jobs int, events int, results int, signals int, keys int, more boolean)
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  now_at timestamptz := trellis.now();
  gone bigint[];
begin
  if not exists (select from authority g join role r on r.role = g.role and r.name in ('sweeper', 'control-plane')
                  where pg_has_role(session_user, g.db_role, 'member')) then
    raise exception 'database role % may not remove finished work', session_user using errcode = 'TR002';
  end if;
  delete from result r where r.id = any(array(
    select o.id from result o where o.expires_at <= now_at limit p_limit for update skip locked));
  get diagnostics results = row_count;
  delete from signal s where s.no = any(array(select o.no from signal o where o.at < now_at - p_signals_s * interval '1 s' limit p_limit));
  get diagnostics signals = row_count;
  gone := array(select n.id from ended n where n.at < now_at - p_ended_s * interval '1 s'
                   and not exists (select from idempotency k where k.id = n.id and k.at > now_at - interval '1 day')
                 order by n.at limit p_limit for update skip locked);
  delete from idempotency k where k.id = any(gone);
  get diagnostics keys = row_count;
  delete from result r where r.id = any(gone);
  delete from checkpoint c where c.id = any(gone);
  delete from journal j where j.id = any(gone);
  delete from signal s where s.id = any(gone);
  delete from deadline d where d.id = any(gone);
  delete from dead_letter d where d.id = any(gone);
  delete from event e where e.id = any(gone);
  get diagnostics events = row_count;
  delete from ended n where n.id = any(gone);
  delete from job j where j.id = any(gone);
  get diagnostics jobs = row_count;
  delete from feed f where f.pos in (select o.pos from feed o where o.at < now_at - p_ended_s * interval '1 s' order by o.pos limit p_limit);
  more := jobs = p_limit or results = p_limit or signals = p_limit;
  return next;
end $$;
