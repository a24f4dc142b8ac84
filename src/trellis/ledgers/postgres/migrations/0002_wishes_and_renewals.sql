-- Who asked for a soft cancel and why, the last renewal of a lease, and which keys an operator has limited.

-- Kept beside the lease and not in it: it outlives the lease until the cancel has been written down. It counts for its epoch only.
create table wish (id bigint primary key, epoch int not null, at timestamptz not null, actor int not null, cause text);

-- One row for each job that was ever renewed; `at` is in no index, so that a heartbeat stays a heap-only update here too.
create table renewal (id bigint primary key, at timestamptz not null)
  with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- A limit that somebody set stays, also while no job uses the key; one that the first submit brought goes with the last job.
alter table concurrency_key add column set_by int;
create index job_ckey on job (ckey) where ckey is not null;
