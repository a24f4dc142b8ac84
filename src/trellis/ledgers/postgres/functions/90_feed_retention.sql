-- The sequencer of the feed, and retention.

-- Assigns dense positions to every batch whose transaction, and every older one, has ended. May be called from
-- anywhere, often.
create or replace function sequence_feed() returns void language plpgsql security definer set search_path from current as $$
declare
  horizon bigint;
  before bigint;
begin
  horizon := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
  if not exists (select from batch b where b.xid < horizon) then return; end if;
  -- One sequencer at a time, by a row that only the ledger's functions can lock (see work_lock).
  select f.pos into before from feed_end f for update skip locked;
  if not found then return; end if;
  with over as (
    delete from batch b where b.no = any(array(select o.no from batch o where o.xid < horizon order by o.no limit 10000)) returning b.no
  ), placed as (
    insert into feed (pos, batch, at) select before + row_number() over (order by o.no), o.no, trellis.now() from over o returning pos
  )
  update feed_end f set pos = greatest(f.pos, (select max(p.pos) from placed p));
end $$;

-- The next positions of the feed, after new batches have got theirs. Only reads if there are none.
create or replace function feed_places(p_from bigint, p_limit int) returns table (pos bigint, batch bigint)
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
begin
  if exists (select from batch) then perform sequence_feed(); end if;
  return query select f.pos, f.batch from feed f where f.pos >= p_from order by f.pos limit p_limit;
end $$;

-- Removes keys that no job refers to and whose limit no operator set. Some each time, in rotation; true when another
-- pass would find more. Keys are locked first and checked again: a submit that had the key meanwhile has committed its
-- job by then, and a later one waits for this transaction and creates the key again.
create or replace function _prune_keys(p_limit int) returns boolean language plpgsql set search_path from current as $$
declare
  lowest constant bigint := -9223372036854775808;
  after bigint := coalesce((select m.value::bigint from meta m where m.name = 'keys_pruned_up_to'), lowest);
  seen bigint[] := array(select c.id from concurrency_key c where c.id > after order by c.id limit p_limit);
  unused bigint[];
begin
  if after = lowest and cardinality(seen) = 0 then return false; end if;
  insert into meta as m (name, value)
  values ('keys_pruned_up_to', case when cardinality(seen) = p_limit then seen[p_limit] else lowest end)
    on conflict (name) do update set value = excluded.value where m.value <> excluded.value;
  unused := array(select c.id from concurrency_key c where c.id = any(seen) and c.set_by is null
                     and not exists (select from job j where j.ckey = c.id) order by c.id for update skip locked);
  delete from concurrency_key c where c.id = any(unused) and not exists (select from job j where j.ckey = c.id);
  return found and cardinality(seen) = p_limit;
end $$;

-- Removes feed positions whose events are gone. Jobs that rest for ever keep theirs: a page of such positions is
-- skipped until the next round. True when another pass would find more.
create or replace function _prune_feed(p_before timestamptz, p_limit int) returns boolean language plpgsql set search_path from current as $$
declare
  after bigint := coalesce((select m.value::bigint from meta m where m.name = 'feed_pruned_up_to'), 0);
  page record;
  passed int;
begin
  select array_agg(o.pos) as places, count(*) as looked, max(o.pos) as last, min(o.batch) as lowest, max(o.batch) as highest into page
    from (select f.pos, f.batch, f.at from feed f where f.pos > after order by f.pos limit p_limit) o where o.at < p_before;
  delete from feed f where f.pos = any(page.places)
     and f.batch not in (select e.batch from event e where e.batch between page.lowest and page.highest);
  get diagnostics passed = row_count;
  insert into meta as m (name, value)
  values ('feed_pruned_up_to', case when page.looked < p_limit then 0 when passed > 0 then after else page.last end)
    on conflict (name) do update set value = excluded.value where m.value <> excluded.value;
  return passed > 0 and page.looked = p_limit;
end $$;

-- Which of these ended jobs have a last event that a subscriber, for which retention waits, has not read. An event
-- without a feed position is unread.
create or replace function _unread(p_ids bigint[]) returns bigint[] language plpgsql set search_path from current as $$
declare
  slowest record;
begin
  select p.pos, p.id, p.version into slowest from follower_place p where p.waits order by p.pos, p.id, p.version limit 1;
  if not found then return '{}'; end if;
  return array(select n.id from ended n where n.id = any(p_ids) and not exists (
    select from event e join feed f on f.batch = e.batch where e.id = n.id and e.version = n.version
       and (f.pos, e.id, e.version) <= (slowest.pos, slowest.id, slowest.version)));
end $$;

create or replace function retain(p_ended_s float8, p_signals_s float8, p_unread_s float8, p_limit int)
returns table (jobs int, events int, results int, signals int, keys int, more boolean, unread int)
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  now_at timestamptz := trellis.now();
  gone bigint[];
  held bigint[];
  renewals int;
  changes int;
begin
  if not exists (select from authority g join rule_grant r on r.role = g.role and r.rule = 'ledger.retain' and r.reach = 'yes'
                  where pg_has_role(session_user, g.db_role, 'member')) then
    raise exception 'database role % may not %', session_user, _action('retain') using errcode = 'TR002';
  end if;
  jobs := 0; events := 0; results := 0; signals := 0; keys := 0; more := false; unread := 0;
  -- One pass at a time: a second one would only wait for the first.
  if not _try_work_lock('retain') then
    return next;
    return;
  end if;
  delete from result r where r.id = any(array(
    select o.id from result o where o.expires_at <= now_at limit p_limit for update skip locked));
  get diagnostics results = row_count;
  delete from signal s where s.no = any(array(select o.no from signal o where o.at < now_at - p_signals_s * interval '1 s' limit p_limit));
  get diagnostics signals = row_count;
  delete from renewal r where r.id = any(array(
    select o.id from renewal o where o.id = any(array(select w.id from renewal w order by w.id limit 40 * p_limit))
       and o.at < now_at - p_signals_s * interval '1 s' limit p_limit for update skip locked));
  get diagnostics renewals = row_count;
  signals := signals + renewals;
  -- Jobs end roughly in the order of their keys, so the oldest are at the low end of the primary key.
  gone := array(select w.id from (select n.id, n.at from ended n order by n.id limit 40 * p_limit) w
                 where w.at < now_at - p_ended_s * interval '1 s'
                   and not exists (select from idempotency k where k.id = w.id and k.at > now_at - _key_age())
                 order by w.id limit p_limit);
  -- Locked and checked again: a job requeued meanwhile has not ended, and a job with another idempotency key is kept
  -- for it. Locked jobs are skipped.
  gone := array(select n.id from ended n join job j on j.id = n.id where n.id = any(gone) and n.at < now_at - p_ended_s * interval '1 s'
                 order by n.id for update of n, j skip locked);
  gone := array(select g.id from unnest(gone) g(id)
                 where not exists (select from idempotency k where k.id = g.id and k.at > now_at - _key_age()));
  held := _unread(gone);
  if cardinality(held) > 0 then
    gone := array(select n.id from ended n where n.id = any(gone)
                     and (n.id <> all(held) or n.at < now_at - (p_ended_s + p_unread_s) * interval '1 s'));
    unread := (select count(*) from unnest(held) h(id) where h.id = any(gone));
  end if;
  delete from idempotency k where k.id = any(gone);
  get diagnostics keys = row_count;
  delete from result r where r.id = any(gone);
  delete from checkpoint c where c.id = any(gone);
  delete from journal j where j.id = any(gone);
  delete from signal s where s.id = any(gone);
  delete from renewal r where r.id = any(gone);
  delete from wish w where w.id = any(gone);
  delete from deadline d where d.id = any(gone);
  delete from dead_letter d where d.id = any(gone);
  delete from event e where e.id = any(gone);
  get diagnostics events = row_count;
  delete from ended n where n.id = any(gone);
  delete from job j where j.id = any(gone);
  get diagnostics jobs = row_count;
  delete from act c where c.no = any(array(
    select o.no from act o where o.at < now_at - p_ended_s * interval '1 s'
       and (o.published or o.at < now_at - (p_ended_s + p_unread_s) * interval '1 s') limit p_limit for update skip locked));
  -- Keys of changes belong to no job and leave by their age.
  delete from request_key k using (
    select o.scope, o.key from request_key o where o.at <= now_at - _key_age() order by o.at limit p_limit for update skip locked) old
   where k.scope = old.scope and k.key = old.key;
  get diagnostics changes = row_count;
  keys := keys + changes;
  delete from worker w where w.seen_at < now_at - greatest(p_ended_s, 86400) * interval '1 s';
  more := jobs = p_limit or results = p_limit or signals >= p_limit or changes = p_limit;
  more := _prune_feed(now_at - p_ended_s * interval '1 s', 10 * p_limit) or more;
  more := _prune_keys(p_limit) or more;
  return next;
end $$;
