-- Makes a used test database as good as new, much faster than copying the template again. Run in the template, as the
-- superuser: keeps what the tables hold there, and a function that brings it back.
create schema fresh;
do $$
declare t name; filled boolean;
begin
  for t in select c.relname from pg_class c
            where c.relnamespace = 'trellis'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition loop
    execute format('select exists (select from trellis.%I)', t) into filled;
    if filled then
      execute format('create table fresh.%I as table trellis.%I', t, t);
    end if;
  end loop;
end $$;
create function fresh.reset() returns void language plpgsql as $$
declare t name;
begin
  set local session_replication_role = replica; -- events are never changed, but for this
  for t in select c.relname from pg_class c
            where c.relnamespace = 'trellis'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition loop
    execute format('delete from trellis.%I', t);
    if to_regclass(format('fresh.%I', t)) is not null then
      execute format('insert into trellis.%I overriding system value select * from fresh.%I', t, t);
    end if;
  end loop;
  for t in select c.relname from pg_class c where c.relnamespace = 'trellis'::regnamespace and c.relkind = 'S' loop
    execute format('alter sequence trellis.%I restart', t);
  end loop;
end $$;
