-- The columns of source.sql, as PostgreSQL has them after they were written. Rows may come in another order: the first columns
-- are a key of PostgreSQL's own.

-- name: types
select t.name, t.paused::int, t.rate_per_s, t.burst, t.tokens, _microseconds(t.refilled_at), t.held_max
  from job_type t where t.name collate "C" > $1 order by t.name collate "C" limit $2

-- name: type_options
select o.lifecycle, t.name, o.prio, o.max_attempts, o.max_deaths, o.deadline_s, o.concurrency_limit, o.keyed::int, o.compensation, o.unique_rule,
       o.rate_per_key, o.burst_per_key, a.role, a.name,
       a.node, _microseconds(o.changed_at)
  from type_options o join job_type t on t.id = o.type join actor a on a.id = o.changed_by
 where (o.lifecycle, t.name collate "C") > ($1, $2) order by o.lifecycle, t.name collate "C" limit $3

-- name: keys
select k.name, k.cap, a.role, a.name, a.node from concurrency_key k left join actor a on a.id = k.set_by
 where k.name > $1 and k.id = _key_hash(k.name) order by k.name limit $2

-- name: key_rates
select k.name, t.name, u.lifecycle, _microseconds(u.used_until)
  from key_rate u join concurrency_key k on k.id = u.ckey join job_type t on t.id = u.type
 where (k.name, t.name collate "C", u.lifecycle) > ($1, $2, $3) order by k.name, t.name collate "C", u.lifecycle limit $4

-- name: jobs
select j.id, j.lifecycle, t.name, m.state, m.place, m.version, m.epoch, m.generation, m.attempt, j.prio, m.pos, m.max_attempts, m.deaths,
       m.lease_ms, _microseconds(m.until), a.role, a.name, a.node, _microseconds(m.due_at),
       _microseconds(case when m.place = 5 then j.deadline_at else d.at end), _microseconds(m.cancel_at), j.key_name, j.key_cap, s.n - 1,
       j.compensates, j.job_id, _microseconds(j.created_at), j.max_attempts, j.max_deaths, j.correlation_id, j.trace, j.parent_id, j.payload,
       j.deadline_us, j.compensates_id, _microseconds(m.ended_at)
  from (select o.* from job o where o.id > $1 order by o.id limit $2) j join job_type t on t.id = j.type
  cross join lateral (
    select 1 as place, version, epoch, generation, attempt, max_attempts, deaths, state, owner, until, pos, null::int as lease_ms,
           null::timestamptz as due_at, null::timestamptz as cancel_at, null::timestamptz as ended_at from ready where id = j.id
    union all
    select 2, version, epoch, generation, attempt, max_attempts, deaths, state, owner, until, null, null, due_at, null, null
      from resting where id = j.id
    union all
    select 3, version, epoch, generation, attempt, max_attempts, deaths, state, owner, until, pos, null, null, null, null
      from parked where id = j.id
    union all
    select 4, version, epoch, generation, attempt, max_attempts, deaths, state, owner, until, null, lease_ms, null, cancel_at, null
      from lease where id = j.id
    union all
    select 5, version, epoch, generation, attempt, max_attempts, deaths, state, owner, null, null, null, null, null, at
      from ended where id = j.id) m
  left join actor a on a.id = m.owner left join deadline d on d.id = j.id left join slot s on s.id = j.id and s.ckey = _key_hash(j.key_name)
 order by j.id

-- name: events
select e.id, e.version, f.pos, e.lifecycle, e.type, e.from_state, e.to_state, e.role, a.name, a.node, e.epoch, e.generation, e.attempt,
       _microseconds(e.at), _microseconds(e.due_at), e.cause, e.data, e.request
  from event e join actor a on a.id = e.actor left join feed f on f.batch = e.batch
 where (e.id, e.version) > ($1, $2) order by e.id, e.version limit $3

-- name: dead_letters
select d.id, d.version, _microseconds(d.at), d.reason_code, d.stage, d.last_error, d.attempts, a.name, _microseconds(d.last_lease_expires_at),
       d.correlation_id, _microseconds(d.requeued_at)
  from dead_letter d left join actor a on a.id = d.last_owner where (d.id, d.version) > ($1, $2) order by d.id, d.version limit $3

-- name: idempotency_keys
select k.scope, k.key, k.id, k.fingerprint, _microseconds(k.at) from idempotency k
 where (k.scope, k.key) > ($1, $2) order by k.scope, k.key limit $3

-- name: unique_jobs
select u.id, t.name, u.scope, u.key, u.holds::int, u.unfinished::int, _microseconds(u.until), _microseconds(u.first_at), u.replaced
  from unique_job u join job_type t on t.id = u.type where u.id > $1 order by u.id limit $2

-- name: results
select r.id, r.body, _microseconds(r.expires_at), _microseconds(r.at) from result r where r.id > $1 order by r.id limit $2

-- name: checkpoints
select c.id, c.epoch, _microseconds(c.at), c.body from checkpoint c where c.id > $1 order by c.id limit $2

-- name: journal
select o.id, o.entry, o.epoch, _microseconds(o.at), o.body from journal o
 where (o.id, o.entry collate "C") > ($1, $2) order by o.id, o.entry collate "C" limit $3

-- name: signals
select g.no, g.id, g.type, _microseconds(g.at), g.data from signal g where g.no > $1 order by g.no limit $2

-- name: renewals
select r.id, _microseconds(r.at) from renewal r where r.id > $1 order by r.id limit $2

-- name: job_signals
select g.no, g.id, g.name, _microseconds(g.at), a.role, a.name, a.node, g.key, g.body from job_signal g join actor a on a.id = g.actor
 where g.no > $1 order by g.no limit $2

-- name: spawned
select s.id, s.parent, s.awaited::int, s.cancels::int, s.orphaned::int from spawned s
 where (s.id, s.parent) > ($1, $2) order by s.id, s.parent limit $3

-- name: suspensions
select s.id, s.mode, s.signal, s.after from suspension s where s.id > $1 order by s.id limit $2

-- name: cancel_requests
select w.id, w.epoch, a.role, a.name, a.node, w.cause, _microseconds(w.at) from wish w join actor a on a.id = w.actor
 where w.id > $1 order by w.id limit $2

-- name: workers
select a.name, a.role, a.node, _microseconds(w.seen_at), w.info from worker w join actor a on a.id = w.actor
 where a.name collate "C" > $1 order by a.name collate "C" limit $2

-- name: followers
select f.name, f.epoch, a.role, a.name, a.node, _microseconds(f.until), f.place from follower f join actor a on a.id = f.actor
 where f.name > $1 order by f.name limit $2

-- name: acts
select c.no - _acts_before_move(), c.act_id, _microseconds(c.at), c.role, a.name, a.node, c.event, c.subject, c.source, c.target, c.cause,
       c.correlation_id, c.published::int, c.job_id, c.facts
  from act c join actor a on a.id = c.actor where c.no > _acts_before_move() + $1 order by c.no limit $2

-- name: request_keys
select k.scope, k.key, _microseconds(k.at), k.fingerprint, k.about, k.answer from request_key k
 where (k.scope, k.key) > ($1, $2) order by k.scope, k.key limit $3

-- name: alerts
select o.id, o.name, o.subject, o.value, o.text, _microseconds(o.raised_at), _microseconds(o.last_seen_at), _microseconds(o.resolved_at),
       o.seen_in, o.resolved_in, coalesce(a.name, ''), _microseconds(o.unread_at), array_to_string(o.report_types, ' ')
  from alert o left join actor a on a.id = o.seen_by where o.id > $1 order by o.id limit $2

-- name: schedules
select s.name, s.version, s.spec, s.on_topic::int, s.paused::int, s.owner, _microseconds(s.since), _microseconds(s.next_at),
       _microseconds(s.firing), _microseconds(s.last_at), s.last_job, s.skipped, a.role, a.name, a.node, _microseconds(s.changed_at)
  from schedule s join actor a on a.id = s.changed_by where s.name > $1 order by s.name limit $2

-- name: audit_head
select h.one::int, h.number, h.sha256, h.feed, _microseconds(h.at) from audit_head h where h.one::int > $1 and h.place is null limit $2

-- name: settings
select u.name, u.value from (
  select m.name, case when m.name like '%\_at' then round(m.value::numeric * 1000000)::bigint::text else m.value end as value from meta m
   where m.name in ('home_issuer', 'alert_round', 'alert_evaluated_at', 'alert_stale_at')
  union all select 'sweep_tick', _microseconds(s.tick)::text from sweeper s where s.tick is not null) u
 where u.name collate "C" > $1 order by u.name collate "C" limit $2

-- name: is_made
select to_regclass('trellis.meta') is not null

-- name: in_use
select t.name from (
  select 'jobs' as name where exists (select from job) union all select 'events' where exists (select from event)
  union all select 'job types' where exists (select from job_type) union all select 'schedules' where exists (select from schedule)
  union all select 'subscribers' where exists (select from follower) union all select 'alerts' where exists (select from alert)
  union all select 'keys of requests' where exists (select from request_key)
  union all select 'an audit chain' where exists (select from audit_head)
  union all select 'workers' where exists (select from worker)
  union all select 'concurrency keys' where exists (select from concurrency_key)
  union all select 'administrative acts' where exists (select from act c where c.event not in ('ledger.migrated', 'authority.granted'))
  union all select 'a home issuer' where exists (select from meta m where m.name = 'home_issuer')) t limit 3

-- name: mark
select value from trellis.meta where name = 'move'

-- name: places
select name, value from trellis.meta where name like 'move:%'
