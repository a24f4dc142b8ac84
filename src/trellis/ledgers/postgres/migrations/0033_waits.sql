-- Jobs that wait for other jobs, for signals or for a time: `suspended` in the lifecycle leased-job.
--   spawned     one row for each child that a job spawned and that has not ended
--   suspension  what a suspended job waits for, besides the time in `resting`
--   wake        suspended jobs to look at in this transaction; rows that stay are looked at by the next sweep
--   job_signal  signals that were sent to jobs, oldest first
create table spawned (
  id bigint primary key,  -- the child
  parent bigint not null, awaited boolean not null default false, cancels boolean not null, orphaned boolean not null default false
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
create index spawned_parent on spawned (parent, awaited);
create index spawned_orphaned on spawned (id) where orphaned;
create table suspension (id bigint primary key, mode smallint not null, signal text collate "C", after bigint not null default 0);
create table wake (batch bigint not null, id bigint not null, reason text not null)
  with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
create index wake_batch on wake (batch);
create table job_signal (
  no bigint generated always as identity primary key, id bigint not null, name text collate "C" not null, at timestamptz not null,
  actor int not null, key text collate "C", body bytea not null check (octet_length(body) <= 1048576)
);
create index job_signal_job on job_signal (id, name, no);
create unique index job_signal_key on job_signal (id, key) where key is not null;

do $$
declare of_jobs text;
begin
  foreach of_jobs in array array['spawned', 'suspension', 'wake', 'job_signal'] loop
    execute format('alter table %I enable row level security', of_jobs);
    execute format('create policy application on %I for select to trellis_app using (true)', of_jobs);
    execute format('create policy own on %I for select using ((select reads_all()) or owns(id))', of_jobs);
  end loop;
end $$;
comment on column token.flags is '1: a compensation of another job; 2: a job waits for it again, after it was requeued or put back';
