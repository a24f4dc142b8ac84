-- Fills a migrated database as if it had worked for a long time: jobs 1 … finished have succeeded, the rest wait.
-- Triggers are off and tables are filled from generate_series; what they would have checked holds by construction, and
-- a sample is verified afterwards. Every statement is run with the numbers in braces filled in.

-- name: names
insert into actor (role, db_role, name) values ({submitter}, '{db_role}', 'bench-submitter'), ({worker}, '{db_role}', 'bench-worker');
insert into job_type (name) values ('{type}');

-- name: jobs
truncate job;
insert into job (id, created_at, type, max_attempts, max_deaths, lifecycle, prio, job_id, payload)
select g, clock_timestamp(), (select id from job_type where name = '{type}'), 5, 2, {lifecycle}, 2, 'bench-' || lpad(g::text, 10, '0'), '0'::bytea
  from generate_series(1::bigint, {finished} + {ready}) g;

-- name: ended
truncate ended;
insert into ended (id, at, version, epoch, owner, generation, attempt, max_attempts, deaths, state, lifecycle, type)
select g, clock_timestamp(), 4, 1, (select id from actor where name = 'bench-worker'), 0, 0, 5, 0, {succeeded}, {lifecycle},
       (select id from job_type where name = '{type}')
  from generate_series(1::bigint, {finished}) g;

-- name: ready
truncate ready;
insert into ready (id, type, version, epoch, generation, attempt, max_attempts, deaths, state, lifecycle, prio, flags)
select g, (select id from job_type where name = '{type}'), 1, 0, 0, 0, 5, 0, {waiting}, {lifecycle}, 2, 0
  from generate_series({finished} + 1::bigint, {finished} + {ready}) g;

-- name: events
truncate event;
insert into event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state, generation, attempt, role)
select g, 2 * ((g - 1) / 500) + case when s.version = 1 then 1 else 2 end, clock_timestamp(), s.version,
       (select id from actor where name = case when s.version = 1 then 'bench-submitter' else 'bench-worker' end),
       case when s.version = 1 then 0 else 1 end, s.event, {lifecycle}, s.source, s.target, 0, 0, s.role
  from generate_series(1::bigint, {finished} + {ready}) g,
       (values {steps}) s(version, event, source, target, role)
 where s.version = 1 or g <= {finished};

-- name: batches
insert into batch (no, xid) overriding system value select n, 3 from generate_series(1, 2 * (({finished} + {ready} - 1) / 500) + 2) n;
select setval(pg_get_serial_sequence('batch', 'no'), (select max(no) from batch));
