-- What readers ask. Everything here runs with SELECT alone.

-- What rows.py reads as a job, an event, an act, a dead letter and a held lease.
-- part: job_columns
s.*, t.name as type_name, a.name as owner_name,
       (select o.job_id from job o where o.id = s.compensates) as compensates_id,
       (select max(e.at) from event e where e.id = s.id) as updated_at

-- part: job_rows
select {job_columns}
  from job_status s join job_type t on t.id = s.type left join actor a on a.id = s.owner

-- part: event_columns
e.*, j.job_id, coalesce(j.correlation_id, j.job_id) as correlation_id, a.name as actor_name, a.node as actor_node

-- part: act_rows
select c.no, c.act_id, c.at, c.role, a.name as actor_name, a.node as actor_node, c.event, c.subject, c.source, c.target, c.cause,
       c.correlation_id, c.job_id as act_job, c.facts
  from act c join actor a on a.id = c.actor

-- part: letter_rows
select d.*, j.job_id, j.lifecycle, t.name as type_name, a.name as owner_name, n.state
  from dead_letter d join job j on j.id = d.id join job_type t on t.id = j.type join ended n on n.id = d.id
  left join actor a on a.id = d.last_owner

-- part: lease_columns
l.id, l.epoch, j.job_id, l.lifecycle, t.name as type_name, l.state, l.attempt, l.max_attempts, l.version, a.name as owner_name,
       extract(epoch from l.until - trellis.now())::float8 as left_s, l.cancel_at is not null as cancel,
       coalesce(j.correlation_id, j.job_id) as correlation_id

-- Jobs with an open dead letter of reason $5 in the ends $3: the letters by their reason or, if they are many, the ended jobs.
-- part: buried
(select d.id from dead_letter d join ended n on n.id = d.id join job j on j.id = d.id
      where (not $6::boolean or (select count(*) <= 2000 from f)) and d.requeued_at is null and d.reason_code = $5 and d.id < $1
        and n.lifecycle * 16 + n.state = any($3::int[]) and ($4::text is null or j.type = (select k.id from k))
      order by d.reason_code desc, d.id desc limit $2)
    union all
    select w.id from ended_kinds(case when $6::boolean and (select count(*) > 2000 from f) then $3::int[] end, $4, null, null) q cross join lateral (
      select n.id from ended n
       where (n.lifecycle, n.state, n.type, n.id) < (q.lifecycle, q.state, q.type, $1::bigint)
         and (n.lifecycle, n.state, n.type, n.id) > (q.lifecycle, q.state, q.type, 0::bigint)
         and ($4::text is null or q.type > 0 or exists (select from job j where j.id = n.id and j.type = (select k.id from k)))
         and exists (select from dead_letter d where d.id = n.id and d.requeued_at is null and ($5::text is null or d.reason_code = $5))
       order by n.lifecycle desc, n.state desc, n.type desc, n.id desc limit $2) w

-- The ready jobs of the types and lifecycles that are wanted, if there are few, by the claim's index.
-- part: claimable
c as materialized (
  select o.id, o.code, o.ckey from (select distinct (l.code / 16)::smallint as lifecycle from unnest($3::int[]) l(code)) l cross join job_type t
    cross join lateral (
      select r.id, r.lifecycle * 16 + r.state as code, r.ckey from ready r
       where (r.type, r.lifecycle) >= (t.id, l.lifecycle) and (r.type, r.lifecycle) <= (t.id, l.lifecycle)
       order by r.type, r.lifecycle, r.prio, r.pos limit 2001) o
   where (select w.falls_short from w) and ($4::text is null or t.id = (select k.id from k)) limit 2001)

-- The types and lifecycles that are ready, found by leaps through the claim's index.
-- part: kinds_ready
kind(type, lifecycle) as (
  (select r.type, r.lifecycle from ready r order by r.type, r.lifecycle, r.prio, r.pos limit 1)
  union all
  select n.type, n.lifecycle from kind k cross join lateral (
    select r.type, r.lifecycle from ready r where (r.type, r.lifecycle) > (k.type, k.lifecycle)
     order by r.type, r.lifecycle, r.prio, r.pos limit 1) n
)

-- name: job
select s.*, j.payload, t.name as type_name, a.name as owner_name,
       (select o.job_id from job o where o.id = s.compensates) as compensates_id,
       (select max(e.at) from event e where e.id = s.id) as updated_at,
       (select g.data from signal g where g.id = s.id and g.type = 1 order by g.no desc limit 1) as progress,
       o.asked_by, o.asked_at, o.asked_why,
       case when s.place = 'ended' then
         (select e.data from event e where e.id = s.id and e.generation = s.generation
             and position(convert_to('"cancel_requested"', 'UTF8') in e.data) > 0 order by e.version desc limit 1) end as end_data
  from job j join job_status s on s.id = j.id join job_type t on t.id = j.type
  left join actor a on a.id = s.owner
  left join lateral (select b.name as asked_by, w.at as asked_at, w.cause as asked_why from wish w join actor b on b.id = w.actor
                      where s.cancel_at is not null and w.id = s.id and w.epoch = s.epoch) o on true
 where j.job_id = $1

-- name: jobs_any
{job_rows}
 where s.id = any(array(
    select j.id from job j where j.id < $1 order by j.id desc limit $2))
 order by s.id desc

-- name: jobs_related
-- Jobs of a parent or of a correlation id: the first of these that is given is looked up by its index, newest first, and the rest is read
-- of as many as the page needs. A job without a correlation id of its own has its job id.
{job_rows}
 where s.id = any(array(
    select o.id from (
      (select j.id from job j where j.parent_id = $3 and j.id < $1)
      union all (select j.id from job j where $3::text is null and j.correlation_id = $6 and j.id < $1)
      union all (select j.id from job j where $3::text is null and j.job_id = $6 and j.correlation_id is null and j.id < $1)
      order by id desc) o
     cross join lateral (
      select from job_status s join job_type t on t.id = s.type
       where s.id = o.id and ($4::smallint is null or s.lifecycle = $4) and ($5::text is null or t.name = $5)
         and ($6::text is null or coalesce(s.correlation_id, s.job_id) = $6)
         and ($7::text is null or s.ckey = hashtextextended($7, 42))
         and ($8::int[] is null or s.lifecycle * 16 + s.state = any($8))
         and ($9::text is null or exists (select from dead_letter d where d.id = s.id and d.requeued_at is null and d.reason_code = $9))
         and ($10::text is null or s.place = $10)
       limit 1) f
     order by o.id desc limit $2))
 order by s.id desc

-- name: jobs_of_key
-- Jobs of a key, by the index on (ckey, id): compared as rows, so that no other index has their order.
{job_rows}
 where s.id = any(array(
    select o.id from (
      select j.id, j.ckey from job j
       where j.ckey is not null and (j.ckey, j.id) < (hashtextextended($3, 42), $1::bigint) and (j.ckey, j.id) > (hashtextextended($3, 42), 0::bigint)
       order by j.ckey desc, j.id desc) o
     cross join lateral (
      select from job_status s join job_type t on t.id = s.type
       where s.id = o.id and ($4::smallint is null or s.lifecycle = $4) and ($5::text is null or t.name = $5)
         and ($6::int[] is null or s.lifecycle * 16 + s.state = any($6))
         and ($7::text is null or exists (select from dead_letter d where d.id = s.id and d.requeued_at is null and d.reason_code = $7))
         and ($8::text is null or s.place = $8)
       limit 1) f
     order by o.ckey desc, o.id desc limit $2))
 order by s.id desc

-- name: children
-- Whether those below a number are still the same, and in the same row and snapshot each of those above it; one row at least.
select o.many, o.total, a.id, a.job_id
  from (select count(*) as many, coalesce(sum(j.id), 0)::text as total from job j where j.parent_id = $1 and j.id <= $2) o
  left join lateral (select j.id, j.job_id from job j where j.parent_id = $1 and j.id > $2 order by j.id limit $3) a on true
 order by a.id

-- name: jobs_in
-- Jobs in certain states, newest first; $3 are the states that are no end, $6 the ends, each lifecycle * 16 + state. Of each place, the newest:
-- * Ready: the newest few, if they are enough. Else, if few have the type and a lifecycle that are wanted, the claim's index finds them all;
--   else a walk by number meets enough of them soon. $5 is false for states in which jobs only rest.
-- * Resting: of each state a walk down the index that begins with it.
-- * Ended: of each kind (`ended_kinds`) a walk down its index. Kinds are compared as rows, so that no other index has their order, whatever
--   the planner knows.
with k as materialized (select t.id from job_type t where t.name = $4),
n as materialized (
  select o.id from (
    select o.id, o.type, o.lifecycle * 16 + o.state as code, o.ckey from ready o
     where $5::boolean and ($7::text is null or $7 = 'ready') and o.id < $1 order by o.id desc limit $2 + 400) o
   where ($4::text is null or o.type = (select k.id from k)) and o.code = any($3::int[])
   order by o.id desc limit $2),
w as materialized (
  select count(*) < $2 and $5::boolean and ($7::text is null or $7 = 'ready') as falls_short from n),
{claimable}
{job_rows}
 where s.id = any(array(
    select u.id from (
    (select n.id from n where not (select w.falls_short from w))
    union all
    (select c.id from c where (select count(*) <= 2000 from c) and c.id < $1 and c.code = any($3::int[])
      order by c.id desc limit $2)
    union all
    (select o.id from ready o
      where (select count(*) > 2000 from c) and o.id < $1 and ($4::text is null or o.type = (select k.id from k))
        and o.lifecycle * 16 + o.state = any($3::int[])
      order by o.id desc limit $2)
    union all
    (select o.id from parked o
      where $5::boolean and ($7::text is null or $7 = 'parked') and o.id < $1 and ($4::text is null or o.type = (select k.id from k))
        and o.lifecycle * 16 + o.state = any($3::int[])
      order by o.id desc limit $2)
    union all
    (select o.id from lease o
      where $5::boolean and ($7::text is null or $7 = 'held') and o.id < $1 and ($4::text is null or o.type = (select k.id from k))
        and o.lifecycle * 16 + o.state = any($3::int[])
      order by o.id desc limit $2)
    union all
    select r.id from unnest($3::int[]) w(code) cross join lateral (
      select o.id from resting o where o.lifecycle = (w.code / 16)::smallint and o.state = (w.code % 16)::smallint and -o.id > -$1::bigint
         and ($7::text is null or $7 = 'resting') and ($4::text is null or o.type = (select k.id from k))
       order by -o.id limit $2) r
    union all
    select w.id from ended_kinds($6::int[], $4, $1, $2) q cross join lateral (
      select n.id from ended n
       where (n.lifecycle, n.state, n.type, n.id) < (q.lifecycle, q.state, q.type, $1::bigint)
         and (n.lifecycle, n.state, n.type, n.id) > (q.lifecycle, q.state, q.type, 0::bigint)
         and ($4::text is null or q.type > 0 or exists (select from job j where j.id = n.id and j.type = (select k.id from k)))
       order by n.lifecycle desc, n.state desc, n.type desc, n.id desc limit $2) w) u
     order by u.id desc limit $2))
 order by s.id desc

-- name: jobs_buried
-- Jobs with an open dead letter of reason $5 in the ends $3. The letters are walked by their reason. If there are many and $6, a type or
-- state that is wanted, the ended jobs are walked by that instead, as in jobs_in.
with k as materialized (select t.id from job_type t where t.name = $4),
f as materialized (select from dead_letter d where d.requeued_at is null and d.reason_code = $5 and d.id < $1 limit 2001)
{job_rows}
 where s.id = any(array(
    select u.id from (
    {buried}) u
     order by u.id desc limit $2))
 order by s.id desc

-- name: jobs_oldest
-- the open jobs of jobs_in, from their head
with k as materialized (select t.id from job_type t where t.name = $4),
n as materialized (
  select o.id from (
    select o.id, o.type, o.lifecycle * 16 + o.state as code, o.ckey from ready o
     where $5::boolean and ($6::text is null or $6 = 'ready') and o.id > $1 order by o.id limit $2 + 400) o
   where ($4::text is null or o.type = (select k.id from k)) and o.code = any($3::int[])
     and ($7::text is null or exists (select from job j where j.id = o.id and coalesce(j.correlation_id, j.job_id) = $7))
     and ($8::text is null or o.ckey = hashtextextended($8, 42))
   order by o.id limit $2),
w as materialized (
  select count(*) < $2 and $5::boolean and ($6::text is null or $6 = 'ready') as falls_short from n),
{claimable}
{job_rows}
 where s.id = any(array(
    select u.id from (
    (select n.id from n where not (select w.falls_short from w))
    union all
    (select c.id from c where (select count(*) <= 2000 from c) and c.id > $1 and c.code = any($3::int[])
        and ($7::text is null or exists (select from job j where j.id = c.id and coalesce(j.correlation_id, j.job_id) = $7))
        and ($8::text is null or c.ckey = hashtextextended($8, 42))
      order by c.id limit $2)
    union all
    (select o.id from ready o
      where (select count(*) > 2000 from c) and o.id > $1 and ($4::text is null or o.type = (select k.id from k))
        and o.lifecycle * 16 + o.state = any($3::int[])
        and ($7::text is null or exists (select from job j where j.id = o.id and coalesce(j.correlation_id, j.job_id) = $7))
        and ($8::text is null or o.ckey = hashtextextended($8, 42))
      order by o.id limit $2)
    union all
    (select o.id from parked o
      where $5::boolean and ($6::text is null or $6 = 'parked') and o.id > $1 and ($4::text is null or o.type = (select k.id from k))
        and o.lifecycle * 16 + o.state = any($3::int[])
        and ($7::text is null or exists (select from job j where j.id = o.id and coalesce(j.correlation_id, j.job_id) = $7))
        and ($8::text is null or o.ckey = hashtextextended($8, 42))
      order by o.id limit $2)
    union all
    (select o.id from lease o
      where $5::boolean and ($6::text is null or $6 = 'held') and o.id > $1 and ($4::text is null or o.type = (select k.id from k))
        and o.lifecycle * 16 + o.state = any($3::int[])
        and ($7::text is null or exists (select from job j where j.id = o.id and coalesce(j.correlation_id, j.job_id) = $7))
        and ($8::text is null or o.ckey = hashtextextended($8, 42))
      order by o.id limit $2)
    union all
    select r.id from unnest($3::int[]) w(code) cross join lateral (
      select o.id from resting o where o.lifecycle = (w.code / 16)::smallint and o.state = (w.code % 16)::smallint and -o.id < -$1::bigint
         and ($6::text is null or $6 = 'resting') and ($4::text is null or o.type = (select k.id from k))
        and ($7::text is null or exists (select from job j where j.id = o.id and coalesce(j.correlation_id, j.job_id) = $7))
        and ($8::text is null or o.ckey = hashtextextended($8, 42))
       order by -o.id desc limit $2) r) u
     order by u.id limit $2))
 order by s.id

-- name: events
select {event_columns}
  from job j join event e on e.id = j.id join actor a on a.id = e.actor where j.job_id = $1 order by e.version

-- name: events_of
select {event_columns}
  from event e join job j on j.id = e.id join actor a on a.id = e.actor where e.id = any($1::bigint[]) order by e.id, e.version

-- name: events_of_jobs
select {event_columns}
  from job j join event e on e.id = j.id join actor a on a.id = e.actor where j.job_id = any($1::text[])
   and e.version > coalesce((select max(x.version) from event x where x.id = j.id) - $2::int, 0) order by e.id, e.version

-- name: contents_of_jobs
select {event_columns},
       case when row_number() over (partition by e.id order by e.version) = 1 then j.payload end as payload
  from job j join event e on e.id = j.id join actor a on a.id = e.actor where j.job_id = any($1::text[])
 order by e.id, e.version

-- name: payloads
select j.job_id, j.payload from job j where j.job_id = any($1::text[])

-- name: events_by_rare_type
-- the index's condition must stand here word for word
select {event_columns}
  from event e join job j on j.id = e.id join actor a on a.id = e.actor
 where e.type not in (1, 2, 3, 4, 14, 31, 32) and e.type = $1 and e.at >= coalesce($2::timestamptz, '-infinity')
 order by e.at, e.id, e.version limit $3

-- name: events_by_frequent_type
-- Those of a window of time, by the index on time. The end of the window stands first: every range of the index that is later is compared
-- with that alone.
select {event_columns}
  from (select o.* from event o where o.type = $1 and o.at < coalesce($4::timestamptz, 'infinity') and o.at >= coalesce($2::timestamptz, '-infinity')
         order by o.at, o.id, o.version limit $3) e join job j on j.id = e.id join actor a on a.id = e.actor
 order by e.at, e.id, e.version

-- name: event_times
-- when the events begin, about (the first one of the oldest job); when the oldest jobs were submitted that have $1 events each of four
-- types together; and the present
select coalesce(o.first, trellis.now()) as first, o.early, trellis.now() as now
  from (select (array_agg(e.at order by e.id, e.version))[1] as first, max(e.at) filter (where e.version = 1) as early
          from (select e.id, e.version, e.at from event e order by e.id, e.version limit 4 * $1::bigint) e) o

-- name: count_events
select e.type, count(*) as many from event e where e.type = any($1::smallint[]) and e.at >= $2 group by e.type

-- name: count_infrequent_events
-- of one lifecycle that is neither leased-job nor bus-job; the index's condition must stand here word for word
select e.type, count(*) as many from event e
 where e.lifecycle not in (4, 5) and e.lifecycle = $3 and e.type = any($1::smallint[]) and e.at >= $2 group by e.type

-- name: count_frequent_events
select e.type, count(*) as many from event e
 where e.lifecycle = $3 and e.type = any($1::smallint[]) and e.at >= $2 group by e.type

-- name: sample_events
-- the newest of each type, by the same index
select e.type, e.at, j.created_at, e.role, e.from_state, e.cause, e.data
  from unnest($1::smallint[]) with ordinality w(type, no) cross join lateral (
    select o.* from event o where o.lifecycle not in (4, 5) and o.lifecycle = $3 and o.type = w.type and o.at >= $2
     order by o.at desc, o.id desc, o.version desc limit $4) e join job j on j.id = e.id
 order by w.no, e.at desc, e.id desc, e.version desc

-- name: events_by_correlation
select {event_columns}
  from job j join event e on e.id = j.id join actor a on a.id = e.actor
 where j.id in (select o.id from job o where o.correlation_id = $1 union select o.id from job o where o.job_id = $1 and o.correlation_id is null)
   and ($2::timestamptz is null or e.at >= $2) and ($4::smallint is null or e.type = $4)
 order by e.at, e.id, e.version limit $3

-- name: feed_batches
select pos, batch from feed_places($1, $2)

-- name: feed_events
-- The page is cut before jobs and actors are looked up. `e.batch + 0`: the index on batches would be read once for each number of a list.
select {event_columns}
  from (select f.pos, o.* from event o join feed f on f.batch = o.batch
         where o.batch between $1 and $2 and o.batch + 0 = any($10::bigint[]) and f.pos between $3 and $4
           and (f.pos, o.id, o.version) > ($5, $6, $7)
           and ($8::smallint[] is null or o.lifecycle = any($8)) and ($11::smallint[] is null or o.type = any($11))
         order by f.pos, o.id, o.version limit $9) e join job j on j.id = e.id join actor a on a.id = e.actor
 order by e.pos, e.id, e.version

-- name: feed_infrequent_events
-- the same without leased-jobs and bus-jobs, found by the index that leaves those out; its condition must stand here word for word
select f.pos, {event_columns}
  from event e join feed f on f.batch = e.batch join job j on j.id = e.id join actor a on a.id = e.actor
 where e.lifecycle not in (4, 5) and e.batch between $1 and $2 and e.batch = any($10::bigint[])
   and f.pos between $3 and $4 and (f.pos, e.id, e.version) > ($5, $6, $7) and e.lifecycle = any($8::smallint[])
   and ($11::smallint[] is null or e.type = any($11))
 order by f.pos, e.id, e.version limit $9

-- name: feed_end
select pos from feed_end

-- A ledger that was moved from SQLite knows the positions that it gave there.
-- name: moved_feed_end
select (m.value::jsonb ->> 'feed_end')::bigint as feed_end from meta m where m.name = 'move'

-- name: signals
-- what holders wrote, and the one renewal that is kept of each job
select * from (
  select * from (
    (select j.job_id, g.no, g.type, g.at, g.data from job j join signal g on g.id = j.id where j.job_id = $1
      order by g.no desc limit $2)
    union all
    select j.job_id, 0, 2::smallint, r.at, null from job j join renewal r on r.id = j.id where j.job_id = $1) both_kinds
   order by at desc, no desc limit $2) s
 order by s.at, s.no

-- name: result
select r.body from job j join result r on r.id = j.id where j.job_id = $1 and (r.expires_at is null or r.expires_at > trellis.now())

-- name: key_used
select j.job_id, k.fingerprint from idempotency k join job j on j.id = k.id where k.scope = $1 and k.key = $2

-- name: job_signals
select g.no, g.name, g.body from job j join job_signal g on g.id = j.id where j.job_id = $1 and g.name = $2 and g.no > $3
 order by g.no limit $4

-- name: outcomes
select j.job_id, t.name as type_name, o.lifecycle, o.state, o.place = 'ended' as has_ended, s.success,
       case when s.success and $2 then (select r.body from result r where r.id = j.id and (r.expires_at is null or r.expires_at > trellis.now())) end as body,
       case when o.place = 'ended' and not s.success then coalesce(
         (select d.last_error from dead_letter d where d.id = j.id and d.version = o.version),
         (select e.cause from event e where e.id = j.id and e.version = o.version)) end as error
  from job j join job_type t on t.id = j.type join job_status o on o.id = j.id
  join state s on s.lifecycle = o.lifecycle and s.state = o.state where j.job_id = any($1)

-- name: journal
select o.entry, o.body from job j join journal o on o.id = j.id where j.job_id = $1

-- name: journal_entries
select j.job_id, o.entry, o.body from unnest($1::text[], $2::text[]) as wanted(job_id, entry)
  join job j on j.job_id = wanted.job_id join journal o on o.id = j.id and o.entry = wanted.entry

-- name: dead_letters
-- Open dead letters of jobs in the ends $3, newest first. Without a type, state or lifecycle that is wanted ($6), and if there are few, the
-- letters are walked, by their reason if one is wanted; else the ended jobs, as in jobs_in.
with k as materialized (select t.id from job_type t where t.name = $4),
f as materialized (select from dead_letter d where d.requeued_at is null and ($5::text is null or d.reason_code = $5) and d.id < $1 limit 2001)
{letter_rows}
 where d.requeued_at is null and d.id = any(array(
    select u.id from (
    {buried}
    union all
    (select d.id from dead_letter d join ended n on n.id = d.id join job j on j.id = d.id
      where $5::text is null and (not $6::boolean or (select count(*) <= 2000 from f)) and d.requeued_at is null and d.id < $1
        and n.lifecycle * 16 + n.state = any($3::int[]) and ($4::text is null or j.type = (select k.id from k))
      order by d.id desc limit $2)) u
     order by u.id desc limit $2))
 order by d.id desc limit $2

-- name: dead_letters_related
-- Those of the jobs of a parent, of a correlation id or of a key, which are looked up as in jobs_related.
{letter_rows}
 where d.requeued_at is null and d.id = any(array(
    select o.id from (
      (select j.id from job j where j.parent_id = $6 and j.id < $1)
      union all (select j.id from job j where $6::text is null and j.correlation_id = $7 and j.id < $1)
      union all (select j.id from job j where $6::text is null and j.job_id = $7 and j.correlation_id is null and j.id < $1)
      union all (select j.id from job j where coalesce($6::text, $7::text) is null and (j.ckey, j.id) < (hashtextextended($8, 42), $1::bigint)
                    and (j.ckey, j.id) > (hashtextextended($8, 42), 0::bigint) and j.ckey is not null order by j.ckey desc, j.id desc)
      order by id desc) o
     cross join lateral (
      select from ended n join job j on j.id = n.id join job_type t on t.id = j.type join dead_letter d on d.id = n.id and d.requeued_at is null
       where n.id = o.id and n.lifecycle * 16 + n.state = any($3::int[]) and ($4::text is null or t.name = $4)
         and ($5::text is null or d.reason_code = $5) and ($7::text is null or coalesce(j.correlation_id, j.job_id) = $7)
         and ($8::text is null or j.ckey = hashtextextended($8, 42))
       limit 1) f
     order by o.id desc limit $2))
 order by d.id desc limit $2

-- name: dead_letter
select d.*, j.job_id, j.lifecycle, t.name as type_name, a.name as owner_name, n.state
  from job j join ended n on n.id = j.id join dead_letter d on d.id = j.id and d.requeued_at is null
  join job_type t on t.id = j.type left join actor a on a.id = d.last_owner
 where j.job_id = $1 order by d.version desc limit 1

-- name: dead_letters_of
select d.*, j.job_id, j.lifecycle, t.name as type_name, a.name as owner_name, null::smallint as state
  from dead_letter d join job j on j.id = d.id join job_type t on t.id = j.type left join actor a on a.id = d.last_owner
 where d.id = any($1::bigint[]) order by d.id, d.version

-- name: requeueable
-- Oldest first: jobs in the states $2, which declare a requeue. Most have ended; a failed queue job waits for its operator. Those of a
-- parent, a correlation or a key are looked up as in jobs_related, others walked as in jobs_in.
with k as materialized (select t.id from job_type t where t.name = $3)
select j.job_id from job j where j.id = any(array(
    select u.id from (
    select o.id from (
      select j.id from job j where j.parent_id = $7
      union all select j.id from job j where $7::text is null and j.correlation_id = $4
      union all select j.id from job j where $7::text is null and j.job_id = $4 and j.correlation_id is null
      union all select j.id from job j where coalesce($7::text, $4::text) is null and j.ckey = hashtextextended($5, 42)) o
     cross join lateral (
      select from job_status s where s.id = o.id and s.lifecycle * 16 + s.state = any($2::int[]) and ($3::text is null or s.type = (select k.id from k))
         and ($4::text is null or coalesce(s.correlation_id, s.job_id) = $4) and ($5::text is null or s.ckey = hashtextextended($5, 42))
         and ($8::text is null or s.place = $8)
         and ($6::text is null or exists (select from dead_letter d where d.id = s.id and d.requeued_at is null and d.reason_code = $6))
       limit 1) f
    union all
    select w.id from ended_kinds(case when coalesce($4::text, $5::text, $7::text) is null and ($8::text is null or $8 = 'ended') then $2::int[] end,
                                 $3, null, null) q cross join lateral (
      select n.id from ended n
       where (n.lifecycle, n.state, n.type) >= (q.lifecycle, q.state, q.type) and (n.lifecycle, n.state, n.type) <= (q.lifecycle, q.state, q.type)
         and ($3::text is null or q.type > 0 or exists (select from job j where j.id = n.id and j.type = (select k.id from k)))
         and ($6::text is null or exists (select from dead_letter d where d.id = n.id and d.requeued_at is null and d.reason_code = $6))
       order by n.lifecycle, n.state, n.type, n.id limit $1) w
    union all
    select w.id from unnest($2::int[]) p(code) cross join lateral (
      select r.id from resting r
       where coalesce($4::text, $5::text, $7::text) is null and ($8::text is null or $8 = 'resting')
         and r.lifecycle = (p.code / 16)::smallint and r.state = (p.code % 16)::smallint and ($3::text is null or r.type = (select k.id from k))
         and ($6::text is null or exists (select from dead_letter d where d.id = r.id and d.requeued_at is null and d.reason_code = $6))
       order by -r.id desc limit $1) w) u
     order by u.id limit $1))
 order by j.id

-- name: requested
select j.job_id from event e join job j on j.id = e.id join event_type t on t.type = e.type and t.name = 'job_requeued'
 where e.request = $1 order by j.id

-- name: queues
-- At most $1 jobs are counted of each type that is ready, of each lifecycle in `resting` ($3, and at most $2 of those in $4), of `parked` and
-- of `lease`. The types that are ready are found by leaps through the claim's index.
with recursive {kinds_ready}, counted as (
  select k.type, k.lifecycle, 0 as place, (
      select count(*) from (select from ready r where (r.type, r.lifecycle) >= (k.type, k.lifecycle) and (r.type, r.lifecycle) <= (k.type, k.lifecycle)
                             order by r.type, r.lifecycle, r.prio, r.pos limit $1) o) as many from kind k
  union all
  select o.type, o.lifecycle, 1, count(*)
    from (select l.lifecycle, $1::bigint as most from unnest($3::smallint[]) l(lifecycle) union all
          select l.lifecycle, $2::bigint from unnest($4::smallint[]) l(lifecycle)) l
    cross join lateral (select r.type, r.lifecycle from resting r where r.lifecycle >= l.lifecycle and r.lifecycle <= l.lifecycle
                         order by r.lifecycle, r.state, -r.id limit l.most) o group by o.type, o.lifecycle
  union all
  select o.type, o.lifecycle, 2, count(*) from (select p.type, p.lifecycle from parked p limit $1) o group by o.type, o.lifecycle
  union all
  select o.type, o.lifecycle, 3, count(*) from (select d.type, d.lifecycle from lease d limit $1) o group by o.type, o.lifecycle
)
select t.name, c.lifecycle, t.paused, t.rate_per_s,
       (select o.rate_per_key from type_options o
         where o.type = t.id and o.lifecycle = coalesce(c.lifecycle, (select l.lifecycle from lifecycle l where l.name = 'leased-job')))
         as rate_per_key, c.ready, c.resting, c.parked, c.held,
       (select extract(epoch from trellis.now() - max(e.at))::float8
          from (select r.id from ready r where r.type = t.id and r.lifecycle = c.lifecycle order by r.type, r.lifecycle, r.prio, r.pos limit 1) r
          join event e on e.id = r.id) as oldest_s
  from job_type t left join (
    select o.type, o.lifecycle, sum(o.many) filter (where o.place = 0)::bigint as ready, sum(o.many) filter (where o.place = 1)::bigint as resting,
           sum(o.many) filter (where o.place = 2)::bigint as parked, sum(o.many) filter (where o.place = 3)::bigint as held
      from counted o group by o.type, o.lifecycle) c
    on c.type = t.id
 order by t.name, c.lifecycle

-- name: figures
select s.tick, c.type_name, c.lifecycle, c.many
  from sweeper s left join (
    select t.name as type_name, j.lifecycle, count(*) as many
      from (select o.id from dead_letter o where o.requeued_at is null order by o.id desc limit $1) d
      join job j on j.id = d.id join job_type t on t.id = j.type group by t.name, j.lifecycle) c on true
 order by c.type_name, c.lifecycle

-- name: home_issuer
select m.value from meta m where m.name = 'home_issuer';

-- name: declared_types
select t.name, o.lifecycle, o.prio, o.max_attempts, o.max_deaths, o.deadline_s, o.concurrency_limit, o.keyed, o.compensation,
       o.unique_rule, o.rate_per_key, o.burst_per_key
  from type_options o join job_type t on t.id = o.type where $1::text is null or t.name = $1 order by t.name, o.lifecycle limit $2

-- name: schedules
select s.name, s.version, s.spec, s.paused, s.owner, s.since, s.next_at, s.firing, s.last_at, s.last_job, s.skipped
  from schedule s where $1::text is null or s.name = $1 order by s.name limit $2

-- The time and the next due time come with every row, and alone if nothing is due.
-- name: due_schedules
select n.now, (select min(l.next_at) from schedule l where l.next_at > n.now and ($1 or not l.on_topic)) as later,
       s.name, s.version, s.spec, s.paused, s.owner, s.since, s.next_at, s.firing, s.last_at, s.last_job, s.skipped
  from (select trellis.now() as now) n left join schedule s on s.next_at <= n.now and ($1 or not s.on_topic)
 order by s.next_at, s.name limit $2

-- name: workers
select a.name, w.seen_at, w.info, (select count(*) from lease l where l.owner = a.id) as held
  from worker w join actor a on a.id = w.actor where w.seen_at > trellis.now() - interval '1 day' order by w.seen_at desc limit 1000

-- name: acts
{act_rows} where c.no > $1 order by c.no limit $2

-- name: acts_unpublished
{act_rows} where not c.published and c.no > $1 order by c.no limit $2

-- name: acts_unsealed
{act_rows} where not c.sealed and c.published and c.no > $1 order by c.no limit $2

-- name: audit_head
select h.number, h.sha256, h.place as position, h.feed, h.at from audit_head h

-- name: followers
select f.name, a.name as actor, f.until, coalesce(p.waits, false) as waits,
       (select n.at from feed n where p.name is not null and n.pos >= p.pos and (n.pos > p.pos or (p.id < 9223372036854775807
           and exists (select from event e where e.batch = n.batch and (e.id, e.version) > (p.id, p.version)))) order by n.pos limit 1) as unread_since
  from follower f join actor a on a.id = f.actor left join follower_place p on p.name = f.name order by f.name limit 1000

-- name: histories
select {job_columns}
  from (select j.id, j.ckey, j.type from job j where j.id > $1 order by j.id limit $2) j
  join job_status s on s.id = j.id join job_type t on t.id = j.type
  left join actor a on a.id = s.owner
 order by s.id

-- name: key_limit
select c.cap from concurrency_key c where c.id = hashtextextended($1, 42)

-- name: keys_over
select c.name as key, count(*) as held, c.cap as "limit" from lease l join concurrency_key c on c.id = l.ckey group by c.id
having count(*) > c.cap + (select count(*) from slot s where s.ckey = c.id and s.n > c.cap)
 order by c.name limit 1000

-- name: unpaired
-- Both ways: jobs that ended with an artifact and do not have exactly one, and artifacts made final whose job is there and has not ended
-- so. $1 and $2 are the states such jobs end in, $3 and $4 those of artifacts made final.
with final as (
  select j.parent_id, count(*) as artifacts
    from unnest($3::smallint[], $4::smallint[]) w(lifecycle, state) cross join lateral (
      select r.id from resting r where r.lifecycle = w.lifecycle and r.state = w.state union all
      select n.id from ended n where n.lifecycle = w.lifecycle and n.state = w.state) m
    join job j on j.id = m.id
   where j.parent_id is not null
   group by j.parent_id
), complete as (
  select j.job_id from ended n join job j on j.id = n.id
   where (n.lifecycle, n.state) in (select * from unnest($1::smallint[], $2::smallint[]))
)
select c.job_id, true as complete, coalesce(f.artifacts, 0) as artifacts from complete c left join final f on f.parent_id = c.job_id
 where coalesce(f.artifacts, 0) <> 1
union all
select j.job_id, false, f.artifacts from final f join job j on j.job_id = f.parent_id
 where not exists (select from complete c where c.job_id = j.job_id)
limit 1000

-- name: alerts
-- open ones first, then resolved ones, each newest first; $2 false leaves the resolved ones out
(select o.* from alert o where o.resolved_at is null order by o.raised_at desc, o.id limit $1)
union all
(select e.* from alert e where $2::boolean and e.resolved_at is not null order by e.resolved_at desc, e.id limit $1)
limit $1

-- name: alert_mark
select coalesce((select m.value::bigint from meta m where m.name = 'alert_round'), 0) as mark,
       exists (select from alert o where o.resolved_at is null) as has_open,
       array(select distinct unnest(o.report_types) from alert o where o.resolved_at is not null and o.report_types <> '{}') as unreported,
       (select to_timestamp(m.value::float8) from meta m where m.name = 'alert_evaluated_at') as evaluated_at,
       (select to_timestamp(m.value::float8) from meta m where m.name = 'alert_stale_at') as stale_at

-- name: alert
select o.* from alert o where o.id = $1

-- name: waiting_types
-- The first ready job of each type, lifecycle and priority, as in `queues`; of queue jobs also the first that waits for the slot of its agent.
with recursive {kinds_ready}, head as (
  select k.type, k.lifecycle, f.id from kind k cross join unnest('{0,1,2}'::smallint[]) p(prio) cross join lateral (
    select o.id from ready o
     where (o.type, o.lifecycle, o.prio) >= (k.type, k.lifecycle, p.prio) and (o.type, o.lifecycle, o.prio) <= (k.type, k.lifecycle, p.prio)
     order by o.type, o.lifecycle, o.prio, o.pos limit 1) f
  union all
  select t.id, 2::smallint, f.id from job_type t cross join lateral (
    select o.id from parked o where o.lifecycle = 2 and o.type >= t.id and o.type <= t.id order by o.type, o.pos limit 1) f
)
select t.name, h.lifecycle,
       extract(epoch from trellis.now() - min((select e.at from event e where e.id = h.id order by e.version desc limit 1)))::float8 as waited_s
  from head h join job_type t on t.id = h.type
 group by t.name, h.lifecycle order by waited_s desc nulls last limit $1

-- name: stage_steps
-- How queue jobs (lifecycle 2) left their stages, by the index of infrequent events, whose condition must stand here word for word
select {event_columns}
  from unnest($1::smallint[]) w(type) cross join lateral (
    select o.* from event o where o.lifecycle not in (4, 5) and o.lifecycle = 2 and o.type = w.type order by o.at desc limit $2) e
  join job j on j.id = e.id join actor a on a.id = e.actor
 order by e.at desc, e.id desc, e.version desc

-- name: type_by_name
select id from job_type where name = $1

-- name: inspect
select (select setting from pg_settings where name = 'fsync') as fsync,
       (select setting from pg_settings where name = 'full_page_writes') as full_page_writes,
       (select setting from pg_settings where name = 'synchronous_commit') as synchronous_commit,
       (select setting from pg_settings where name = 'autovacuum') as autovacuum,
       (select value from meta where name = 'schema_version') as schema_version,
       (select rolsuper from pg_roles where rolname = session_user) as is_superuser,
       pg_has_role(session_user, 'trellis_owner', 'member') as is_owner,
       session_user as db_role,
       (select extract(epoch from trellis.now() - tick)::float8 from sweeper) as sweep_age_s,
       (select count(*) from batch) as unsequenced,
       (select count(*) from lease) as held,
       (select extract(epoch from max(clock_timestamp() - xact_start))::float8 from pg_stat_activity
         where backend_xid is not null or backend_xmin is not null) as oldest_transaction_s,
       current_setting('server_version') as version,
       current_setting('transaction_read_only') = 'on' as is_read_only,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int as connections_max,
       (select count(*) from pg_stat_activity where backend_type = 'client backend') as connections,
       (select count(*) from pg_stat_activity where backend_type = 'client backend' and application_name like 'trellis%')
         as own_connections

-- name: beside
select j.job_id, e.version, e.due_at, e.request, t.name as type_name, j.created_at
  from unnest($1::text[], $2::int[]) w(job_id, version) join job j on j.job_id = w.job_id
  join event e on e.id = j.id and e.version = w.version join job_type t on t.id = j.type

-- Only what never changes: a row older than migration 3 says nothing of its deadline and of what it compensates, because all that could be
-- read in their place changes later.
-- name: submissions
select j.job_id, t.name as type_name, j.prio, j.max_attempts, j.max_deaths, j.payload, j.key_name, j.key_cap, j.trace, j.parent_id,
       j.deadline_us, j.compensates_id, u.scope as unique_scope, u.key as unique_key, u.unfinished, u.until as unique_until, u.first_at
  from job j join job_type t on t.id = j.type left join unique_job u on u.id = j.id where j.job_id = any($1::text[])

-- Those that it was submitted with: a record says what was asked, and a key that came later changes nothing of that.
-- name: idempotency_keys
select j.job_id, k.scope, k.key, k.fingerprint from job j join idempotency k on k.id = j.id and k.at = j.created_at
 where j.job_id = any($1::text[])
 order by k.scope, k.key

-- name: dead_letters_at
select d.*, j.job_id, j.lifecycle, t.name as type_name, a.name as owner_name, e.to_state as state
  from unnest($1::text[], $2::int[]) w(job_id, version) join job j on j.job_id = w.job_id
  join dead_letter d on d.id = j.id and d.version = w.version join event e on e.id = j.id and e.version = w.version
  join job_type t on t.id = j.type left join actor a on a.id = d.last_owner

-- name: heads
select h.*, 'ready' as place, null as owner_name, null::timestamptz as until, null::timestamptz as due_at, null::timestamptz as cancel_at
  from heads($1, $2, $3) h

-- name: holds
select {lease_columns}
  from job j join lease l on l.id = j.id join job_type t on t.id = l.type left join actor a on a.id = l.owner
 where j.job_id = any($1::text[])

-- name: expiring
-- the leases are few, and the sweep reads them all every second
select {lease_columns}
  from (select d.* from lease d where d.lifecycle = $1 and d.until <= trellis.now() + $2::float8 * interval '1 s' order by d.until limit $3) l
  join job j on j.id = l.id join job_type t on t.id = l.type left join actor a on a.id = l.owner
 order by l.until
