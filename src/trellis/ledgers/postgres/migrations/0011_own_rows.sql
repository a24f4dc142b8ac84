-- Who reads what: every login that is no member of trellis_app sees the jobs that it submitted or holds, unless one of its roles may
-- read them all. The policies ask functions that are replaced at every migration, so a later rule needs no new policy.

-- The authority matrices, loaded from engine/matrices.py: how far the right of a role reaches, 'no', 'own' or 'yes'.
create table rule_grant (
  rule text collate "C", role smallint, reach text collate "C" not null check (reach in ('no', 'own', 'yes')), primary key (rule, role)
);

create or replace function reads_all() returns boolean language sql stable as $$ select false $$;
create or replace function owns(p_id bigint) returns boolean language sql stable as $$ select false $$;

do $$
declare of_jobs text;
begin
  foreach of_jobs in array array['job', 'event', 'ready', 'resting', 'parked', 'lease', 'ended', 'deadline', 'idempotency', 'result',
                                 'checkpoint', 'journal', 'signal', 'dead_letter', 'wish', 'renewal', 'slot'] loop
    execute format('alter table %I enable row level security', of_jobs);
    execute format('create policy application on %I for select to trellis_app using (true)', of_jobs);
    execute format('create policy own on %I for select using ((select reads_all()) or owns(id))', of_jobs);
  end loop;
  alter table concurrency_key enable row level security;
  create policy application on concurrency_key for select to trellis_app using (true);
  create policy own on concurrency_key for select using (
    (select reads_all()) or exists (select from job j where j.ckey = concurrency_key.id));
end $$;
