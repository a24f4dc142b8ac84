-- Who asked for a soft cancel and why, the last renewal of a lease, which keys an operator has limited, and who follows the feed.

-- Kept beside the lease and not in it: it outlives the lease until the cancel has been written down. It counts for its epoch only.
create table wish (id bigint primary key, epoch int not null, at timestamptz not null, actor int not null, cause text);

-- One row for each job that was ever renewed; `at` is in no index, so that a heartbeat stays a heap-only update here too.
create table renewal (id bigint primary key, at timestamptz not null)
  with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- A limit that somebody set stays, also while no job uses the key; one that the first submit brought goes with the last job.
alter table concurrency_key add column set_by int;
-- Until now nobody wrote down who had set a limit, so all that are there count as set: no operator's decision is forgotten.
update concurrency_key set set_by = 0;
create index job_ckey on job (ckey) where ckey is not null;

-- How many of a type may be held at once; null for any number.
alter table job_type add column held_max int;

-- Who follows the feed under a name, how far, and until when nobody else may.
create table follower (
  name text collate "C" primary key, epoch int not null, actor int not null, until timestamptz not null, place text collate "C"
);

-- A claim is answered with columns. The functions that answered with rows go here, once: a function that is dropped at every
-- migration would be missing to whoever is just calling it.
drop function if exists turn;
drop function if exists _claim;
drop function if exists _claimed;
drop function if exists renew;
create type claimed as (
  ids bigint[], epochs int[], states smallint[], types int[], attempts int[], generations smallint[], max_attempts int[],
  deaths smallint[], job_ids text[], payloads bytea[], correlations text[], prios smallint[], places bigint[], wide bigint[]
);
