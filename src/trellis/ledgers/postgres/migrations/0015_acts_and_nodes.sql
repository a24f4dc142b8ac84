-- Administrative acts: what people and components change that is no step of a job. An act is written in the transaction that makes the
-- change, and stays until the projector has published its audit record and retention removes it.
create table act (
  no bigint generated always as identity primary key, act_id text collate "C" not null unique, at timestamptz not null, role smallint not null,
  actor int not null, event text not null, subject text not null, source text, target text, cause text, correlation_id text,
  published boolean not null default false
);
create index act_unpublished on act (no) where not published;
create index act_at on act (at);
alter table act enable row level security;
create policy application on act for select to trellis_app using (true);
create policy own on act for select using ((select reads_all()));

-- The machine that an actor wrote from. The same name may write from several. `register_actor` takes it from this version on.
alter table actor add column node text collate "C" not null default '';
alter table actor drop constraint actor_name_role_db_role_key;
alter table actor add constraint actor_name_role_db_role_node_key unique (name, role, db_role, node);
drop function if exists register_actor(text, smallint);
