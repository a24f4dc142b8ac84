-- The application reads everything and writes through the verb functions only; functions that start with _ are internal.
revoke all on all tables in schema trellis from public, trellis_app;
revoke all on all functions in schema trellis from public, trellis_app;
grant usage on schema trellis to trellis_app;
grant select on all tables in schema trellis to trellis_app;
do $$
declare f regprocedure;
begin
  for f in select p.oid::regprocedure from pg_proc p where p.pronamespace = 'trellis'::regnamespace and p.prokind = 'f'
            and left(p.proname, 1) <> '_' and p.prorettype <> 'trigger'::regtype loop
    execute format('grant execute on function %s to trellis_app', f);
  end loop;
end $$;
