-- Makes a used test database as good as new, much faster than copying the template again. Run in the template, as the
-- superuser: keeps what the tables hold there, and a function that brings it back. A table is written only if it
-- changed: its rows are counted and the newest transaction that wrote one is compared. The function names every table in
-- statements of its own, so that a session which stays plans them once.
create schema fresh;
do $$
declare t name; n bigint; newest bigint; body text := '';
begin
  for t in select c.relname from pg_class c
            where c.relnamespace = 'trellis'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition loop
    execute format('select count(*), max(xmin::text::bigint) from trellis.%I', t) into n, newest;
    if n = 0 then
      body := body || format('delete from trellis.%I; ', t);
    else
      execute format('create table fresh.%I as table trellis.%I', t, t);
      body := body || format('if (select (count(*), max(xmin::text::bigint)) is distinct from (%s, %s) from trellis.%I) then '
        'delete from trellis.%I; insert into trellis.%I overriding system value select * from fresh.%I; end if; ',
        n, newest, t, t, t, t);
    end if;
  end loop;
  for t in select c.relname from pg_class c where c.relnamespace = 'trellis'::regnamespace and c.relkind = 'S' loop
    body := body || format('perform setval(%L, (select seqstart from pg_sequence where seqrelid = %L::regclass), false); ',
                           'trellis.' || quote_ident(t), 'trellis.' || quote_ident(t));
  end loop;
  -- events are never changed, but for this
  execute format('create function fresh.reset() returns void language plpgsql set session_replication_role = replica '
                 'as %L', 'begin ' || body || 'end');
end $$;
