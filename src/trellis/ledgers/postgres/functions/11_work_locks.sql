-- Locks that last until the transaction is over.

-- Whether this transaction is now the only one at this kind of work; it never waits.
create or replace function _try_work_lock(p_kind text) returns boolean language plpgsql set search_path from current as $$
begin
  perform from work_lock w where w.kind = p_kind for update skip locked;
  return found;
end $$;

-- What is locked while jobs of a key are counted; another number than the key's own.
create or replace function _waiting_lock(p_name text) returns bigint language sql immutable as $$ select hashtextextended(p_name, 43) $$;

-- Lets those who count the jobs of one key do so one after the other. This is the one advisory lock: a row would give whoever waits a
-- transaction number, and the feed would wait for it. Anybody can hold an advisory lock, so nobody waits for it without end: after a time
-- that no count takes, the jobs are counted without it, and the bound of the key may be passed by those who count at the same moment.
create or replace function _lock_waiting(p_lock bigint) returns void language plpgsql set lock_timeout = '3s' as $$
begin
  perform pg_advisory_xact_lock(p_lock);
exception when lock_not_available then
  raise warning 'advisory lock % is held for too long; the waiting jobs of a key are counted without it', p_lock
    using hint = 'pg_locks names the session that holds it; end that session with pg_terminate_backend';
end $$;
