-- Whoever may act in a role of ours writes through the verb functions only; those that start with _ are internal. It reads what row
-- security lets it read: everything, or its own. A partition is read through its table, which has the policies.
do $$
declare
  f regprocedure;
  grantee name;
  part regclass;
begin
  revoke all on all tables in schema trellis from public;
  revoke all on all functions in schema trellis from public;
  for grantee in select distinct a.db_role from trellis.authority a join pg_roles r on r.rolname = a.db_role loop
    execute format('revoke all on all tables in schema trellis from %I', grantee);
    execute format('revoke all on all functions in schema trellis from %I', grantee);
    execute format('grant usage on schema trellis to %I', grantee);
    execute format('grant select on all tables in schema trellis to %I', grantee);
    for part in select c.oid from pg_class c where c.relnamespace = 'trellis'::regnamespace and c.relispartition and c.relkind = 'r' loop
      execute format('revoke all on %s from %I', part, grantee);
    end loop;
    for f in select p.oid::regprocedure from pg_proc p where p.pronamespace = 'trellis'::regnamespace and p.prokind = 'f'
              and left(p.proname, 1) <> '_' and p.prorettype <> 'trigger'::regtype loop
      execute format('grant execute on function %s to %I', f, grantee);
    end loop;
  end loop;
end $$;
