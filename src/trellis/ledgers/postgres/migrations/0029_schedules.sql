-- Schedules of jobs. `spec` is JSON (engine/schedules.py). `next_at` says when something is to be done, null while paused. `firing` is the
-- instant whose job is being submitted. A limited login reads none: a schedule fires for everybody.
create table schedule (
  name text collate "C" primary key check (length(name) <= 100), version int not null,
  spec text not null check (octet_length(spec) <= 65536), on_topic boolean not null, paused boolean not null,
  owner text not null check (length(owner) <= 500), since timestamptz not null, next_at timestamptz, firing timestamptz,
  last_at timestamptz, last_job text check (length(last_job) <= 200), skipped text check (length(skipped) <= 500),
  changed_by int not null, changed_at timestamptz not null
);
create index schedule_next on schedule (next_at) where next_at is not null;
alter table schedule enable row level security;
create policy application on schedule for select to trellis_app using (true);
