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
                     and not exists (select from job j where j.ckey = c.id)
                     and not exists (select from key_rate r where r.ckey = c.id and r.used_until > trellis.now())
                   order by c.id for update skip locked);
  with gone as (delete from concurrency_key c where c.id = any(unused) and not exists (select from job j where j.ckey = c.id) returning c.id)
  select array_agg(g.id) into unused from gone g;
  delete from key_rate r where r.ckey = any(unused);
  return unused is not null and cardinality(seen) = p_limit;
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

-- Whether the audit chain seals this ledger: it has begun, or a projector, which begins it, follows the feed and is waited
-- for.
create or replace function _is_sealed() returns boolean language sql stable set search_path from current as $$
  select exists (select from audit_head) or exists (select from follower_place p where p.name = 'projector' and p.waits)
$$;

-- Which of these ended jobs have a last event that the audit chain does not reach. None where nothing seals this ledger.
create or replace function _unsealed(p_ids bigint[]) returns bigint[] language plpgsql set search_path from current as $$
declare
  head record;
begin
  if not _is_sealed() then return '{}'; end if;
  select h.at[1]::numeric as pos, h.at[2]::numeric as id, h.at[3]::numeric as version into head
    from (select regexp_match(coalesce(a.place, ''), '^(\d{1,20})\.(\d{1,20})\.(\d{1,10})') as at from audit_head a) h;
  return array(select n.id from ended n where n.id = any(p_ids) and not exists (
    select from event e join feed f on f.batch = e.batch where e.id = n.id and e.version = n.version
       and (f.pos, e.id, e.version) <= (head.pos, head.id, head.version)));
end $$;

-- How long ended jobs are kept, by lifecycle and state. A state that is not in p_ages is kept for ever.
create or replace function _ages(p_ages jsonb) returns table (lifecycle smallint, state smallint, keep interval, is_set boolean)
language sql immutable as $$
  select (x.code / 16)::smallint, (x.code % 16)::smallint, x.keep_s * interval '1 s', x.is_set
    from jsonb_to_recordset(p_ages) as x(code int, keep_s float8, is_set boolean)
$$;

create or replace function _moment_text(p_at timestamptz) returns text language sql stable as $$
  select to_char(p_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
$$;

-- The ended jobs among these that are over their time, by the setting of their state, and that no idempotency key and no
-- dead letter keeps. A dead letter keeps its job unless a setting names the state.
create or replace function _over(p_ids bigint[], p_ages jsonb, p_now timestamptz) returns setof bigint language sql stable
set search_path from current as $$
  select n.id from ended n join _ages(p_ages) a on a.lifecycle = n.lifecycle and a.state = n.state
   where n.id = any(p_ids) and n.at < p_now - a.keep
     and not exists (select from idempotency k where k.id = n.id and k.at > p_now - _key_age())
     and (a.is_set or not exists (select from dead_letter d where d.id = n.id and d.version = n.version))
$$;

-- The next ended jobs to remove. Jobs end roughly in the order of their keys, so the oldest are at the low end of the
-- primary key. Jobs that are kept stay there: each pass goes on where the last one stopped, and begins again where no job
-- is old enough. True when another pass of this round may find more.
create or replace function _next_over(p_ages jsonb, p_now timestamptz, p_limit int, out gone bigint[], out more boolean)
language plpgsql set search_path from current as $$
declare
  after bigint := coalesce((select m.value::bigint from meta m where m.name = 'retained_up_to'), 0);
  least interval := (select min(a.keep) from _ages(p_ages) a);
  page record;
begin
  select array_agg(w.id) as ids, count(*) as looked, max(w.id) as last, count(*) filter (where w.at < p_now - least) as old into page
    from (select n.id, n.at from ended n where n.id > after order by n.id limit 40 * p_limit) w;
  gone := array(select o.id from _over(page.ids, p_ages, p_now) o(id) order by o.id limit p_limit);
  more := page.old > 0 and (page.looked = 40 * p_limit or cardinality(gone) = p_limit);
  insert into meta as m (name, value)
  values ('retained_up_to', case when not more then 0 when cardinality(gone) = p_limit then gone[p_limit] else page.last end)
    on conflict (name) do update set value = excluded.value where m.value <> excluded.value;
end $$;

-- p_ages: [{"code": lifecycle * 16 + state, "keep_s": …, "is_set": …}, …]. p_acts_s: how long administrative acts are kept;
-- null for ever. p_from_the_start: begin again with the oldest job.
create or replace function retain(p_actor int, p_ages jsonb, p_acts_s float8, p_signals_s float8, p_unread_s float8, p_limit int,
                                  p_cause text default null, p_from_the_start boolean default false)
returns table (jobs int, events int, results int, signals int, keys int, more boolean, unread int, acts int)
language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  a record := _actor(p_actor);
  now_at timestamptz := trellis.now();
  gone bigint[];
  held bigint[];
  round_goes_on boolean;
  renewals int;
  changes int;
  is_sealed boolean := _is_sealed();
  old_acts bigint[];
  facts jsonb;
begin
  perform _require(a.role, 'retain');
  jobs := 0; events := 0; results := 0; signals := 0; keys := 0; more := false; unread := 0; acts := 0;
  -- One pass at a time: a second one would only wait for the first.
  if not _try_work_lock('retain') then
    return next;
    return;
  end if;
  if p_from_the_start then delete from meta m where m.name = 'retained_up_to'; end if;
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
  select o.gone, o.more into gone, round_goes_on from _next_over(p_ages, now_at, p_limit) o;
  -- Locked and checked again: a job requeued meanwhile has not ended, and a job with another idempotency key is kept
  -- for it. Locked jobs are skipped.
  gone := array(select n.id from ended n join job j on j.id = n.id where n.id = any(gone) order by n.id for update of n, j skip locked);
  gone := array(select o.id from _over(gone, p_ages, now_at) o(id) order by o.id);
  held := _unsealed(gone);
  gone := array(select g.id from unnest(gone) g(id) where g.id <> all(held));
  held := _unread(gone);
  if cardinality(held) > 0 then
    gone := array(select n.id from ended n join _ages(p_ages) s on s.lifecycle = n.lifecycle and s.state = n.state where n.id = any(gone)
                     and (n.id <> all(held) or n.at < now_at - s.keep - p_unread_s * interval '1 s'));
    unread := (select count(*) from unnest(held) h(id) where h.id = any(gone));
  end if;
  select jsonb_build_object(
           'removed', coalesce(jsonb_object_agg(o.name, o.counts), '{}'), 'ended_before', coalesce(jsonb_object_agg(o.name, o.cutoffs), '{}'))
    into facts
    from (select l.name, jsonb_object_agg(s.name, c.n) as counts, jsonb_object_agg(s.name, _moment_text(now_at - g.keep)) as cutoffs
            from (select n.lifecycle, n.state, count(*) as n from ended n where n.id = any(gone) group by n.lifecycle, n.state) c
            join lifecycle l on l.lifecycle = c.lifecycle join state s on s.lifecycle = c.lifecycle and s.state = c.state
            join _ages(p_ages) g on g.lifecycle = c.lifecycle and g.state = c.state group by l.name) o;
  facts := facts || jsonb_build_object('jobs', coalesce((select jsonb_agg(j.job_id order by j.id) from job j where j.id = any(gone)), '[]'));
  delete from idempotency k where k.id = any(gone);
  get diagnostics keys = row_count;
  delete from unique_job u where u.id = any(gone);
  delete from result r where r.id = any(gone);
  delete from checkpoint c where c.id = any(gone);
  delete from journal j where j.id = any(gone);
  delete from signal s where s.id = any(gone);
  delete from job_signal s where s.id = any(gone);
  delete from renewal r where r.id = any(gone);
  delete from wish w where w.id = any(gone);
  delete from deadline d where d.id = any(gone);
  delete from dead_letter d where d.id = any(gone);
  delete from event e where e.id = any(gone);
  get diagnostics events = row_count;
  delete from ended n where n.id = any(gone);
  delete from job j where j.id = any(gone);
  get diagnostics jobs = row_count;
  old_acts := array(select o.no from act o where o.at < now_at - p_acts_s * interval '1 s'
       and (o.published or o.at < now_at - (p_acts_s + p_unread_s) * interval '1 s')
       and (o.sealed or not is_sealed) order by o.no limit p_limit for update skip locked);
  -- Every removal is recorded as an act. So one old act of retention stays until something else is removed: otherwise each
  -- record of a removal would lead to another one.
  if jobs > 0 or cardinality(old_acts) > 1 or exists (select from act c where c.no = any(old_acts) and c.event <> 'retention.removed') then
    delete from act c where c.no = any(old_acts);
    get diagnostics acts = row_count;
    facts := facts || jsonb_build_object('events', events, 'acts', acts, 'acts_before',
      case when acts > 0 then _moment_text(now_at - p_acts_s * interval '1 s') end);
    perform _record_act(p_actor, a.role, 'retention.removed', 'ledger', null, null, p_cause, null, null, facts::text);
  end if;
  -- Keys of changes belong to no job and leave by their age.
  delete from request_key k using (
    select o.scope, o.key from request_key o where o.at <= now_at - _key_age() order by o.at limit p_limit for update skip locked) old
   where k.scope = old.scope and k.key = old.key;
  get diagnostics changes = row_count;
  keys := keys + changes;
  delete from worker w where w.seen_at < now_at - interval '7 days';
  more := round_goes_on or jobs = p_limit or results = p_limit or signals >= p_limit or changes = p_limit;
  more := _prune_feed(now_at - (select min(g.keep) from _ages(p_ages) g), 10 * p_limit) or more;
  more := _prune_keys(p_limit) or more;
  return next;
end $$;

-- What a pass would find: ended jobs by lifecycle and state, and by what holds them back.
create or replace function retention_plan(p_ages jsonb, p_unread_s float8)
returns table (code int, jobs bigint, oldest timestamptz, over boolean, letter boolean, keyed boolean, unsealed boolean, unread boolean)
language plpgsql stable security definer set search_path from current as $$
#variable_conflict use_column
declare
  now_at timestamptz := trellis.now();
  slowest record;
  head record;
begin
  if not (reads_all() or not _is_limited()) then
    raise exception 'database role % may not %', session_user, _action('retain') using errcode = 'TR002';
  end if;
  select p.pos, p.id, p.version into slowest from follower_place p where p.waits order by p.pos, p.id, p.version limit 1;
  select _is_sealed() as seals, max(h.at[1])::numeric as pos, max(h.at[2])::numeric as id, max(h.at[3])::numeric as version into head
    from (select regexp_match(coalesce(a.place, ''), '^(\d{1,20})\.(\d{1,20})\.(\d{1,10})') as at from audit_head a) h;
  return query
  select w.code, count(*), min(w.at), w.over, w.letter, w.keyed, w.unsealed, w.unread
    from (select n.lifecycle * 16 + n.state as code, n.at, coalesce(n.at < now_at - a.keep, false) as over,
                 not coalesce(a.is_set, false) and exists (select from dead_letter d where d.id = n.id and d.version = n.version) as letter,
                 exists (select from idempotency k where k.id = n.id and k.at > now_at - _key_age()) as keyed,
                 head.seals and coalesce((f.pos, e.id, e.version) > (head.pos, head.id, head.version), true) as unsealed,
                 slowest.pos is not null and coalesce((f.pos, e.id, e.version) > (slowest.pos, slowest.id, slowest.version), true)
                   and n.at >= now_at - a.keep - p_unread_s * interval '1 s' as unread
            from ended n join event e on e.id = n.id and e.version = n.version left join feed f on f.batch = e.batch
            left join _ages(p_ages) a on a.lifecycle = n.lifecycle and a.state = n.state) w
   group by w.code, w.over, w.letter, w.keyed, w.unsealed, w.unread;
end $$;
