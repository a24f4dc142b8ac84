-- Alerts: one row for each time that a condition began to hold. It is open until resolved_at is set; then it is kept for some days. They are
-- about the whole ledger, so a limited login reads none.
create table alert (
  id text collate "C" primary key check (length(id) <= 100), name text collate "C" not null check (length(name) <= 100),
  subject text collate "C" not null check (length(subject) <= 300), value float8 not null, text text not null check (length(text) <= 1000),
  raised_at timestamptz not null, last_seen_at timestamptz not null, resolved_at timestamptz,
  -- the numbers of the rounds that saw it last and that resolved it
  seen_in bigint not null, resolved_in bigint
);
create unique index alert_open on alert (name, subject) where resolved_at is null;
create index alert_resolved on alert (resolved_at) where resolved_at is not null;
alter table alert enable row level security;
create policy application on alert for select to trellis_app using (true);

-- For the alert about queue jobs (lifecycle 2) that nobody claims: those that wait behind the slot of their agent.
create index parked_queue_jobs on parked (type, pos) where lifecycle = 2;
