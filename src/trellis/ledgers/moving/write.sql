-- What is written to PostgreSQL, in one statement for each page that source.sql read: its columns as arrays. Each returns how
-- many rows of the page it wrote.

-- name: actors
with m as (select * from unnest($1::text[], $2::text[], $3::smallint[]) as x(name, node, role)),
w as (insert into actor (name, node, role, db_role) select m.name, m.node, m.role, session_user from m on conflict do nothing)
select count(*) from m

-- name: types
with m as (select * from unnest($1::text[], $2::int[], $3::float8[], $4::int[], $5::float8[], $6::bigint[], $7::int[])
  as x(name, paused, rate, burst, tokens, refilled, held_max)),
w as (insert into job_type (name, paused, rate_per_s, burst, tokens, refilled_at, held_max)
  select m.name, m.paused = 1, m.rate, m.burst, m.tokens, _moment_at(m.refilled), m.held_max from m)
select count(*) from m

-- name: type_options
with m as (select x.*, t.id as type, a.id as actor from unnest($1::smallint[], $2::text[], $3::smallint[], $4::int[], $5::smallint[], $6::float8[],
    $7::int[], $8::int[], $9::text[], $10::text[], $11::float8[], $12::int[], $13::smallint[], $14::text[], $15::text[], $16::bigint[])
  as x(lifecycle, name, prio, max_attempts, max_deaths, deadline_s, concurrency_limit, keyed, compensation, unique_rule, rate_per_key,
       burst_per_key, role, actor_name, node, at)
  join job_type t on t.name = x.name
  join actor a on a.name = x.actor_name and a.node = x.node and a.role = x.role and a.db_role = session_user),
w as (insert into type_options (lifecycle, type, prio, max_attempts, max_deaths, deadline_s, concurrency_limit, keyed, compensation,
    unique_rule, rate_per_key, burst_per_key, changed_by, changed_at)
  select m.lifecycle, m.type, m.prio, m.max_attempts, m.max_deaths, m.deadline_s, m.concurrency_limit, m.keyed = 1, m.compensation,
    m.unique_rule, m.rate_per_key, m.burst_per_key, m.actor, _moment_at(m.at) from m)
select count(*) from m

-- name: keys
with m as (select x.*, a.id as actor from unnest($1::text[], $2::int[], $3::smallint[], $4::text[], $5::text[]) as x(name, cap, role, actor_name, node)
  left join actor a on a.name = x.actor_name and a.node = x.node and a.role = x.role and a.db_role = session_user),
w as (insert into concurrency_key (id, name, cap, set_by) select _key_hash(m.name), m.name, m.cap, m.actor from m)
select count(*) from m

-- name: key_rates
with m as (select x.*, t.id as type from unnest($1::text[], $2::text[], $3::smallint[], $4::bigint[]) as x(name, type_name, lifecycle, used_until)
  join job_type t on t.name = x.type_name),
w as (insert into key_rate (ckey, lifecycle, type, used_until) select _key_hash(m.name), m.lifecycle, m.type, _moment_at(m.used_until) from m)
select count(*) from m

-- name: jobs
with m as materialized (
  select x.*, t.id as type, a.id as owner, _key_hash(x.key_name) as ckey, (x.compensates is not null)::int::smallint as flags
    from unnest($1::bigint[], $2::smallint[], $3::text[], $4::smallint[], $5::int[], $6::int[], $7::int[], $8::smallint[], $9::int[],
      $10::smallint[], $11::bigint[], $12::int[], $13::smallint[], $14::int[], $15::bigint[], $16::smallint[], $17::text[], $18::text[],
      $19::bigint[], $20::bigint[], $21::bigint[], $22::text[], $23::int[], $24::int[], $25::bigint[], $26::text[], $27::bigint[], $28::int[],
      $29::smallint[], $30::text[], $31::text[], $32::text[], $33::bytea[], $34::bigint[], $35::text[], $36::bigint[])
    as x(id, lifecycle, type_name, state, place, version, epoch, generation, attempt, prio, pos, max_attempts, deaths, lease_ms, until,
      role, actor_name, node, due_at, deadline_at, cancel_at, key_name, key_cap, slot, compensates, job_id, created_at, asked_attempts,
      max_deaths, correlation, trace, parent, payload, deadline_us, compensates_id, ended_at)
    join job_type t on t.name = x.type_name
    left join actor a on a.name = x.actor_name and a.node = x.node and a.role = x.role and a.db_role = session_user),
j as (insert into job (id, created_at, deadline_at, ckey, key_cap, key_name, compensates, type, max_attempts, max_deaths, lifecycle, prio,
    job_id, correlation_id, trace, parent_id, payload, deadline_us, compensates_id)
  select m.id, _moment_at(m.created_at), _moment_at(m.deadline_at), m.ckey, m.key_cap, m.key_name, m.compensates, m.type, m.asked_attempts,
    m.max_deaths, m.lifecycle, m.prio, m.job_id, m.correlation, m.trace, m.parent, m.payload, m.deadline_us, m.compensates_id from m),
r as (insert into ready (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags, pos)
  select m.id, m.ckey, _moment_at(m.until), m.type, m.version, m.epoch, m.owner, m.generation, m.attempt, m.max_attempts, m.deaths, m.state,
    m.lifecycle, m.prio, m.flags, m.pos from m where m.place = 1),
s as (insert into resting (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio,
    flags, due_at)
  select m.id, m.ckey, _moment_at(m.until), m.type, m.version, m.epoch, m.owner, m.generation, m.attempt, m.max_attempts, m.deaths, m.state,
    m.lifecycle, m.prio, m.flags, _moment_at(m.due_at) from m where m.place = 2),
p as (insert into parked (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags, pos)
  select m.id, m.ckey, _moment_at(m.until), m.type, m.version, m.epoch, m.owner, m.generation, m.attempt, m.max_attempts, m.deaths, m.state,
    m.lifecycle, m.prio, m.flags, m.pos from m where m.place = 3),
l as (insert into lease (id, ckey, until, type, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, prio,
    flags, lease_ms, beat_ms, cancel_at)
  select m.id, m.ckey, _moment_at(m.until), m.type, m.version, m.epoch, m.owner, m.generation, m.attempt, m.max_attempts, m.deaths, m.state,
    m.lifecycle, m.prio, m.flags, m.lease_ms, m.lease_ms, _moment_at(m.cancel_at) from m where m.place = 4),
n as (insert into ended (id, at, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle)
  select m.id, _moment_at(m.ended_at), m.version, m.epoch, m.owner, m.generation, m.attempt, m.max_attempts, m.deaths, m.state, m.lifecycle
    from m where m.place = 5),
d as (insert into deadline (id, at) select m.id, _moment_at(m.deadline_at) from m where m.place < 5 and m.deadline_at is not null),
o as (insert into slot (ckey, n, id) select m.ckey, m.slot + 1, m.id from m where m.slot is not null)
select count(*) from m

-- name: partitions
select _make_partition(p.n) from (select distinct _partition_of(x.id) as n from unnest($1::bigint[]) as x(id)) p

-- name: events
with m as materialized (
  select x.*, a.id as actor
    from unnest($1::bigint[], $2::bigint[], $3::int[], $4::smallint[], $5::smallint[], $6::smallint[], $7::smallint[], $8::smallint[], $9::text[],
      $10::text[], $11::int[], $12::smallint[], $13::int[], $14::bigint[], $15::bigint[], $16::text[], $17::bytea[], $18::text[])
    as x(seq, id, version, lifecycle, type, source, target, role, actor_name, node, epoch, generation, attempt, at, due_at, cause, data, request)
    join actor a on a.name = x.actor_name and a.node = x.node and a.role = x.role and a.db_role = session_user),
e as (insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role, cause, request,
    data, due_at)
  select m.id, m.seq, _moment_at(m.at), m.version, m.actor, m.epoch, m.type, m.lifecycle, m.source, m.target, m.generation, m.attempt, m.role,
    m.cause, m.request, m.data, _moment_at(m.due_at) from m order by m.seq),
f as (insert into feed (pos, batch, at) select m.seq, m.seq, _moment_at(m.at) from m order by m.seq)
select count(*) from m

-- name: dead_letters
with m as (select x.*, a.id as owner from unnest($1::bigint[], $2::int[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::int[], $8::text[],
    $9::bigint[], $10::text[], $11::bigint[])
  as x(id, version, at, reason, stage, last_error, attempts, last_owner, until, correlation, requeued_at)
  left join lateral (select o.id from actor o where o.name = x.last_owner and o.db_role = session_user order by o.id limit 1) a on true),
w as (insert into dead_letter (id, version, at, reason_code, stage, last_error, attempts, last_owner, last_lease_expires_at, correlation_id,
    requeued_at)
  select m.id, m.version, _moment_at(m.at), m.reason, m.stage, m.last_error, m.attempts, m.owner, _moment_at(m.until), m.correlation,
    _moment_at(m.requeued_at) from m)
select count(*) from m

-- name: idempotency_keys
with m as (select * from unnest($1::text[], $2::text[], $3::bigint[], $4::bytea[], $5::bigint[]) as x(scope, key, id, fingerprint, at)),
w as (insert into idempotency (scope, key, id, fingerprint, at) select m.scope, m.key, m.id, m.fingerprint, _moment_at(m.at) from m)
select count(*) from m

-- name: unique_jobs
with m as (select x.*, t.id as type_id from unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::int[], $6::int[], $7::bigint[],
    $8::bigint[], $9::text[]) as x(id, type, scope, key, holds, unfinished, until, first_at, replaced) join job_type t on t.name = x.type),
w as (insert into unique_job (id, type, scope, key, holds, unfinished, until, first_at, replaced)
  select m.id, m.type_id, m.scope, m.key, m.holds = 1, m.unfinished = 1, _moment_at(m.until), _moment_at(m.first_at), m.replaced from m)
select count(*) from m

-- name: results
with m as (select * from unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::bigint[]) as x(id, body, expires_at, at)),
w as (insert into result (id, at, expires_at, body) select m.id, _moment_at(m.at), _moment_at(m.expires_at), m.body from m)
select count(*) from m

-- name: checkpoints
with m as (select * from unnest($1::bigint[], $2::int[], $3::bigint[], $4::bytea[]) as x(id, epoch, at, body)),
w as (insert into checkpoint (id, at, epoch, body) select m.id, _moment_at(m.at), m.epoch, m.body from m)
select count(*) from m

-- name: journal
with m as (select * from unnest($1::bigint[], $2::text[], $3::int[], $4::bigint[], $5::bytea[]) as x(id, entry, epoch, at, body)),
w as (insert into journal (id, entry, at, epoch, body) select m.id, m.entry, _moment_at(m.at), m.epoch, m.body from m)
select count(*) from m

-- name: signals
with m as (select * from unnest($1::bigint[], $2::bigint[], $3::smallint[], $4::bigint[], $5::bytea[]) as x(no, id, type, at, data)),
w as (insert into signal (no, id, at, type, data) overriding system value select m.no, m.id, _moment_at(m.at), m.type, m.data from m)
select count(*) from m

-- name: renewals
with m as (select * from unnest($1::bigint[], $2::bigint[]) as x(id, at)),
w as (insert into renewal (id, at) select m.id, _moment_at(m.at) from m)
select count(*) from m

-- name: job_signals
with m as (select x.*, a.id as actor from unnest($1::bigint[], $2::bigint[], $3::text[], $4::bigint[], $5::smallint[], $6::text[], $7::text[],
    $8::text[], $9::bytea[]) as x(no, id, name, at, role, actor_name, node, key, body)
  join actor a on a.name = x.actor_name and a.node = x.node and a.role = x.role and a.db_role = session_user),
w as (insert into job_signal (no, id, name, at, actor, key, body) overriding system value
  select m.no, m.id, m.name, _moment_at(m.at), m.actor, m.key, m.body from m)
select count(*) from m

-- name: spawned
with m as (select * from unnest($1::bigint[], $2::bigint[], $3::int[], $4::int[], $5::int[]) as x(id, parent, awaited, cancels, orphaned)),
w as (insert into spawned (id, parent, awaited, cancels, orphaned) select m.id, m.parent, m.awaited = 1, m.cancels = 1, m.orphaned = 1 from m)
select count(*) from m

-- name: suspensions
with m as (select * from unnest($1::bigint[], $2::smallint[], $3::text[], $4::bigint[]) as x(id, mode, signal, after)),
w as (insert into suspension (id, mode, signal, after) select m.id, m.mode, m.signal, m.after from m)
select count(*) from m

-- name: cancel_requests
with m as (select x.*, a.id as actor from unnest($1::bigint[], $2::int[], $3::smallint[], $4::text[], $5::text[], $6::text[], $7::bigint[])
  as x(id, epoch, role, actor_name, node, cause, at)
  join actor a on a.name = x.actor_name and a.node = x.node and a.role = x.role and a.db_role = session_user),
w as (insert into wish (id, epoch, at, actor, cause) select m.id, m.epoch, _moment_at(m.at), m.actor, m.cause from m)
select count(*) from m

-- name: workers
with m as (select x.*, a.id as actor from unnest($1::text[], $2::smallint[], $3::text[], $4::bigint[], $5::bytea[]) as x(name, role, node, at, info)
  join actor a on a.name = x.name and a.node = x.node and a.role = x.role and a.db_role = session_user),
w as (insert into worker (actor, seen_at, info) select m.actor, _moment_at(m.at), m.info from m)
select count(*) from m

-- name: followers
with m as (select x.*, a.id as actor from unnest($1::text[], $2::int[], $3::smallint[], $4::text[], $5::text[], $6::bigint[], $7::text[])
  as x(name, epoch, role, actor_name, node, until, place)
  join actor a on a.name = x.actor_name and a.node = x.node and a.role = x.role and a.db_role = session_user),
w as (insert into follower (name, epoch, actor, until, place) select m.name, m.epoch, m.actor, _moment_at(m.until), m.place from m)
select count(*) from m

-- name: acts
with m as (select x.*, a.id as actor from unnest($1::bigint[], $2::text[], $3::bigint[], $4::smallint[], $5::text[], $6::text[], $7::text[],
    $8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::int[], $14::text[], $15::text[])
  as x(no, id, at, role, actor_name, node, event, subject, source, target, cause, correlation, published, job_id, facts)
  join actor a on a.name = x.actor_name and a.node = x.node and a.role = x.role and a.db_role = session_user),
w as (insert into act (no, act_id, at, role, actor, event, subject, source, target, cause, correlation_id, published, job_id, facts)
  overriding system value
  select _acts_before_move() + m.no, m.id, _moment_at(m.at), m.role, m.actor, m.event, m.subject, m.source, m.target, m.cause, m.correlation,
    m.published = 1, m.job_id, m.facts from m)
select count(*) from m

-- name: request_keys
with m as (select * from unnest($1::text[], $2::text[], $3::bigint[], $4::bytea[], $5::text[], $6::bytea[])
  as x(scope, key, at, fingerprint, about, answer)),
w as (insert into request_key (scope, key, at, fingerprint, about, answer)
  select m.scope, m.key, _moment_at(m.at), m.fingerprint, m.about, m.answer from m)
select count(*) from m

-- name: alerts
with m as (select x.*, a.id as observer from unnest($1::text[], $2::text[], $3::text[], $4::float8[], $5::text[], $6::bigint[], $7::bigint[],
    $8::bigint[], $9::bigint[], $10::bigint[], $11::text[], $12::bigint[], $13::text[])
  as x(id, name, subject, value, text, raised_at, last_seen_at, resolved_at, seen_in, resolved_in, seen_by, unread_at, report_types)
  left join lateral (select o.id from actor o where o.name = x.seen_by and o.db_role = session_user order by o.id limit 1) a on true),
w as (insert into alert (id, name, subject, value, text, raised_at, last_seen_at, resolved_at, seen_in, resolved_in, seen_by, unread_at,
    report_types)
  select m.id, m.name, m.subject, m.value, m.text, _moment_at(m.raised_at), _moment_at(m.last_seen_at), _moment_at(m.resolved_at), m.seen_in,
    m.resolved_in, m.observer, _moment_at(m.unread_at), coalesce(string_to_array(nullif(m.report_types, ''), ' '), '{}') from m)
select count(*) from m

-- name: schedules
with m as (select x.*, a.id as actor from unnest($1::text[], $2::int[], $3::text[], $4::int[], $5::int[], $6::text[], $7::bigint[], $8::bigint[],
    $9::bigint[], $10::bigint[], $11::text[], $12::text[], $13::smallint[], $14::text[], $15::text[], $16::bigint[])
  as x(name, version, spec, on_topic, paused, owner, since, next_at, firing, last_at, last_job, skipped, role, actor_name, node, changed_at)
  join actor a on a.name = x.actor_name and a.node = x.node and a.role = x.role and a.db_role = session_user),
w as (insert into schedule (name, version, spec, on_topic, paused, owner, since, next_at, firing, last_at, last_job, skipped, changed_by,
    changed_at)
  select m.name, m.version, m.spec, m.on_topic = 1, m.paused = 1, m.owner, _moment_at(m.since), _moment_at(m.next_at), _moment_at(m.firing),
    _moment_at(m.last_at), m.last_job, m.skipped, m.actor, _moment_at(m.changed_at) from m)
select count(*) from m

-- name: audit_head
with m as (select * from unnest($1::int[], $2::bigint[], $3::text[], $4::int[], $5::bigint[]) as x(one, number, sha256, feed, at)),
w as (insert into audit_head (number, sha256, place, feed, at) select m.number, m.sha256, null, m.feed, _moment_at(m.at) from m)
select count(*) from m

-- name: settings
with m as (select * from unnest($1::text[], $2::text[]) as x(name, value)),
w as (insert into meta (name, value) select m.name, case when m.name like '%\_at' then (m.value::numeric / 1000000)::text else m.value end
    from m where m.name <> 'sweep_tick'),
t as (update sweeper s set tick = _moment_at(m.value::bigint) from m where m.name = 'sweep_tick')
select count(*) from m

-- name: numbers
select setval(pg_get_serial_sequence('trellis.job', 'id'), greatest($1::bigint, 1), $1::bigint > 0),
       setval(pg_get_serial_sequence('trellis.batch', 'no'), greatest($2::bigint, 1), $2::bigint > 0),
       setval('trellis.ready_pos', greatest($2::bigint, 1), $2::bigint > 0),
       setval(pg_get_serial_sequence('trellis.signal', 'no'), greatest($3::bigint, 1), $3::bigint > 0),
       setval(pg_get_serial_sequence('trellis.act', 'no'), greatest(_acts_before_move() + $4::bigint, 1), _acts_before_move() + $4::bigint > 0),
       setval(pg_get_serial_sequence('trellis.job_signal', 'no'), greatest($5::bigint, 1), $5::bigint > 0)

-- name: feed_end
update feed_end set pos = $1

-- Blocks that a BRIN index does not know yet are read whole by everybody who follows the feed.
-- name: summarize
select brin_summarize_new_values(c.oid) from pg_class c join pg_am a on a.oid = c.relam
 where c.relnamespace = 'trellis'::regnamespace and c.relkind = 'i' and a.amname = 'brin'

-- name: statistics
analyze job, event, feed, ready, resting, parked, lease, ended, dead_letter, idempotency, result, journal, signal, job_type, actor
