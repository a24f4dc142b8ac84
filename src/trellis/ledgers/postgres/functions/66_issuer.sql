-- The issuer whose subjects have plain names in this ledger. Recorded once; replacing it is an operator's act.
create or replace function set_home_issuer(p_actor int, p_issuer text, p_replaces text, p_cause text default null)
returns text
language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  before text;
begin
  perform _require(a.role, case when p_replaces is null then 'set_home_issuer' else 'replace_home_issuer' end);
  if _is_limited() then
    raise exception 'the issuer of plain names holds for everybody: only a member of trellis_app may set it, and % is none', session_user
      using errcode = 'TR002';
  end if;
  if p_issuer = '' or length(p_issuer) > 500 then
    raise exception 'an issuer has 1 to 500 characters' using errcode = 'TR004';
  end if;
  insert into meta (name, value) values ('home_issuer', p_issuer) on conflict do nothing;
  if not found then
    select m.value into before from meta m where m.name = 'home_issuer' for update;
    if before is distinct from p_replaces or before = p_issuer then return before; end if;
    update meta m set value = p_issuer where m.name = 'home_issuer';
    perform _record_act(p_actor, a.role, 'issuer.changed', 'issuer', before, p_issuer, p_cause, null);
  end if;
  return p_issuer;
end $$;
