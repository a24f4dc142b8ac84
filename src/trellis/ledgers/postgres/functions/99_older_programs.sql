-- Functions that only programs of version OLDEST_PROGRAM (migrate.py) to the one before this call, while a ledger is shared with them.
-- This program calls none of them. When OLDEST_PROGRAM is raised past a function's last version, it goes, by a migration that drops it.

-- Until version 24: stores a new key and returns no row, or returns what is stored. The row stays locked until the transaction ends, so
-- that requests with one key come one after the other.
create or replace function take_request_key(p_scope text, p_key text, p_fingerprint bytea, p_about text)
returns table (fingerprint bytea, about text, answer bytea) language plpgsql security definer set search_path from current as $$
#variable_conflict use_column
declare
  own_scope text := _of_login(p_scope);
begin
  for n in 1..10 loop
    insert into request_key (scope, key, at, fingerprint, about) values (own_scope, p_key, trellis.now(), p_fingerprint, p_about)
      on conflict do nothing;
    if found then return; end if;
    return query select k.fingerprint, k.about, k.answer from request_key k where k.scope = own_scope and k.key = p_key for update;
    if found then return; end if;
  end loop;
  raise exception 'key % changes hands all the time', p_key using errcode = '40001';
end $$;

-- Until version 27: retention by one age for all. It removes nothing any more, because the owner's settings per state are not known to
-- the program that asks; processes of this version remove.
create or replace function retain(p_ended_s float8, p_signals_s float8, p_unread_s float8, p_limit int)
returns table (jobs int, events int, results int, signals int, keys int, more boolean, unread int)
language sql stable security definer set search_path from current as $$
  select 0, 0, 0, 0, 0, false, 0
$$;
