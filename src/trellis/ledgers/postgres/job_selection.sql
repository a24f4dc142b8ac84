-- Changes of many jobs (engine/job_changes.py): reads with SELECT alone. A page first reads the ids of jobs that may be meant,
-- through an index and never more than a bound, then compares those jobs with the whole selection.

-- name: of_correlation
with meant as materialized (
  select j.id from job j where j.correlation_id = $1 union select j.id from job j where j.job_id = $1 and j.correlation_id is null)
select m.id from meant m where m.id > $2 order by m.id limit $3

-- name: of_parent
with meant as materialized (select j.id from job j where j.parent_id = $1 and j.id > $2)
select m.id from meant m order by m.id limit $3

-- name: in_places
-- All jobs in these places and states, of one type where an index has the type. The caller asks for one more than it takes: if that
-- many come, they are too many to be read again for every page. $1 the type, $2 and $3 the states, $4 the places.
select u.id from (
  select o.id from ready o where 'ready' = any($4::text[]) and o.type = $1::int
  union all select o.id from ready o where 'ready' = any($4) and $1::int is null
  union all select r.id from unnest($2::smallint[], $3::smallint[]) w(lifecycle, state) cross join lateral (
    select o.id from resting o where 'resting' = any($4) and o.lifecycle = w.lifecycle and o.state = w.state limit $5) r
  union all select o.id from parked o where 'parked' = any($4)
  union all select o.id from lease o where 'held' = any($4)
  union all select n.id from unnest($2::smallint[], $3::smallint[]) w(lifecycle, state) cross join lateral (
    select o.id from ended o where 'ended' = any($4) and o.lifecycle = w.lifecycle and o.state = w.state limit $5) n
) u limit $5

-- name: next_jobs
-- The next jobs in these places and states, in the order of their ids. $1 the last id, $2 and $3 the states, $4 the places.
select u.id from (
  (select o.id from ready o where 'ready' = any($4::text[]) and o.id > $1 order by o.id limit $5)
  union all (select o.id from resting o where 'resting' = any($4) and o.id > $1 order by o.id limit $5)
  union all (select o.id from parked o where 'parked' = any($4) and o.id > $1 order by o.id limit $5)
  union all (select o.id from lease o where 'held' = any($4) and o.id > $1 order by o.id limit $5)
  union all select n.id from ended_kinds(case when 'ended' = any($4) then array(
      select w.lifecycle * 16 + w.state from unnest($2::smallint[], $3::smallint[]) w(lifecycle, state)) end, null, null, null) k cross join lateral (
    select o.id from ended o
     where (o.lifecycle, o.state, o.type, o.id) > (k.lifecycle, k.state, k.type, $1) and (o.lifecycle, o.state, o.type) <= (k.lifecycle, k.state, k.type)
     order by o.lifecycle, o.state, o.type, o.id limit $5) n
) u order by u.id limit $5

-- name: selected
select j.job_id, j.lifecycle, j.prio, j.created_at, j.id, t.name as type_name, s.version, s.state
  from unnest($1::bigint[]) w(id) join job j on j.id = w.id join job_type t on t.id = j.type
  cross join lateral (
    select r.version, r.state, 'ready' as place, null::timestamptz as cancel_at from ready r where r.id = j.id
    union all select r.version, r.state, 'resting', null from resting r where r.id = j.id
    union all select p.version, p.state, 'parked', null from parked p where p.id = j.id
    union all select l.version, l.state, 'held', l.cancel_at from lease l where l.id = j.id
    union all select n.version, n.state, 'ended', null from ended n where n.id = j.id) s
 where ($2::text is null or t.name = $2)
   and ($3::text is null or coalesce(j.correlation_id, j.job_id) = $3)
   and ($4::text is null or j.ckey = hashtextextended($4, 42))
   and ($5::text is null or j.parent_id = $5)
   and ($6::smallint is null or j.prio = $6)
   and ($7::smallint is null or j.prio <> $7)
   and ($8::timestamptz is null or j.created_at < $8)
   and ($9::timestamptz is null or j.created_at > $9)
   and (j.lifecycle, s.state) in (select * from unnest($10::smallint[], $11::smallint[]))
   and (not $12::boolean or s.place = 'resting')
   and (not $13::boolean or s.cancel_at is null)
   and ($14::text is null or exists (select from dead_letter d where d.id = j.id and d.requeued_at is null and d.reason_code = $14))
   and ($16::text is null or exists (
     select from event e join actor a on a.id = e.actor where e.id = j.id and e.version = 1
        and (a.name = $16 or starts_with(a.name, $17::text) or e.role = $18::smallint)))
 order by j.id limit $15
