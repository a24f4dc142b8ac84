-- Whoever may act in a role of ours reads everything and writes through the verb functions only; those that start with _ are
-- internal.
do $$
declare
  f regprocedure;
  grantee name;
begin
  revoke all on all tables in schema trellis from public;
  revoke all on all functions in schema trellis from public;
  for grantee in select distinct a.db_role from trellis.authority a join pg_roles r on r.rolname = a.db_role loop
    execute format('revoke all on all tables in schema trellis from %I', grantee);
    execute format('revoke all on all functions in schema trellis from %I', grantee);
    execute format('grant usage on schema trellis to %I', grantee);
    execute format('grant select on all tables in schema trellis to %I', grantee);
    for f in select p.oid::regprocedure from pg_proc p where p.pronamespace = 'trellis'::regnamespace and p.prokind = 'f'
              and left(p.proname, 1) <> '_' and p.prorettype <> 'trigger'::regtype loop
      execute format('grant execute on function %s to %I', f, grantee);
    end loop;
  end loop;
end $$;
