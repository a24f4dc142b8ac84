-- The roles of the ledger. trellis_owner owns everything and cannot log in; trellis_app is what applications are members of.
do $$
begin
  if not exists (select from pg_roles where rolname = 'trellis_owner') then
    create role trellis_owner nologin;
  end if;
  if not exists (select from pg_roles where rolname = 'trellis_app') then
    create role trellis_app nologin;
  end if;
exception when duplicate_object or unique_violation then
  null; -- another database of this cluster is migrated at the same moment
end $$;
do $$
begin
  if not pg_has_role(current_user, 'trellis_owner', 'usage') then
    execute format('grant trellis_owner to %I', current_user);
  end if;
end $$;
do $$
begin
  if to_regnamespace('trellis') is null then
    create schema trellis authorization trellis_owner;
  end if;
end $$;
set local role trellis_owner;
