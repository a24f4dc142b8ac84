-- Unique jobs (engine/uniqueness.py): the unique key of each job that has one. One job of a key holds it. The others had it before.
create table unique_job (
  id bigint primary key, type int not null, scope text collate "C" not null, key text collate "C" not null, holds boolean not null,
  unfinished boolean not null,  -- it holds the key until it has ended, not only while it waits
  until timestamptz,            -- and until then, whatever its state
  first_at timestamptz not null,  -- when the first of the jobs was submitted that were replaced one after the other
  replaced text collate "C"     -- the job that it replaced
);
create unique index unique_job_holder on unique_job (type, scope, key) where holds;
alter table unique_job enable row level security;
create policy application on unique_job for select to trellis_app using (true);
create policy own on unique_job for select using ((select reads_all()) or owns(id));

-- What a type declares about uniqueness, as JSON.
alter table type_options add column unique_rule text check (length(unique_rule) <= 2000);
