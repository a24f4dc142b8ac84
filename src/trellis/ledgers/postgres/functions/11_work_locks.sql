-- Locks that last until the end of the transaction.

-- Whether this transaction has taken the lock of this kind of work. Never waits.
create or replace function _try_work_lock(p_kind text) returns boolean language plpgsql set search_path from current as $$
begin
  perform from work_lock w where w.kind = p_kind for update skip locked;
  return found;
end $$;

-- The lock number for counting the jobs of a key. It differs from the key's own number.
create or replace function _waiting_lock(p_name text) returns bigint language sql immutable as $$ select hashtextextended(p_name, 43) $$;

-- Serializes transactions that count the waiting jobs of one key. No function takes another advisory lock: waiting for a row
-- lock would assign a transaction id, and the feed would wait for it. Any login can hold an advisory lock, so the wait
-- is bounded. After a time that no count takes, the jobs are counted without the lock, and concurrent submits may
-- exceed the key's bound. A transaction that has an id never waits: the feed would wait for it.
create or replace function _lock_waiting(p_lock bigint) returns void language plpgsql set lock_timeout = '3s' as $$
begin
  if pg_current_xact_id_if_assigned() is not null then
    perform pg_try_advisory_xact_lock(p_lock);
  else
    perform pg_advisory_xact_lock(p_lock);
  end if;
exception when lock_not_available then
  raise warning 'advisory lock % is held for too long; the waiting jobs of a key are counted without it', p_lock
    using hint = 'pg_locks names the session that holds it; end that session with pg_terminate_backend';
end $$;
