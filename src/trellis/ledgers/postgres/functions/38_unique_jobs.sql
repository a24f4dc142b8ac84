-- Unique jobs (engine/uniqueness.py): who holds a unique key, and what a submit or a requeue does about it. A holder's row stays locked
-- until the transaction ends, so that submits and requeues with one key come one after the other; the unique index refuses a second holder.

-- The unique key of a payload. engine/uniqueness.py makes the same one.
create or replace function _args_key(p_payload bytea) returns text language plpgsql immutable as $$
begin
  return 'args:' || encode(sha256(convert_to(convert_from(p_payload, 'UTF8')::jsonb::text, 'UTF8')), 'hex');
exception when data_exception or statement_too_complex then
  return 'bytes:' || encode(sha256(p_payload), 'hex');
end $$;

-- Refuses a rule. Python explains it again from the detail; what is said here is for callers in SQL.
create or replace function _refuse_rule(p_type int, p_rule jsonb, p_option text, p_expected text) returns void language plpgsql
set search_path from current as $$
begin
  raise exception '% is not accepted: %', p_option, p_expected using errcode = 'TR012',
    detail = json_build_object('type', (select t.name from job_type t where t.id = p_type), 'rule', p_rule, 'option', p_option,
                               'expected', p_expected)::text;
end $$;

-- What holds for one job: the rule of its submit, and what its type declares for the values that it leaves out.
create or replace function _resolve_rule(p_rule jsonb, p_declared jsonb, p_type int, p_payload bytea, out key text, out on_conflict text,
  out unfinished boolean, out window_s float8, out debounce_s float8, out debounce_max_s float8)
language plpgsql stable set search_path from current as $$
declare
  r jsonb := coalesce(p_declared, '{}') || coalesce(p_rule, '{}');
  of_key text := r ->> 'key';
begin
  on_conflict := coalesce(r ->> 'on_conflict', case when r ? 'debounce_s' then 'replace' else 'return' end);
  unfinished := coalesce(r ->> 'while_', case on_conflict when 'replace' then 'waiting' else 'unfinished' end) = 'unfinished';
  window_s := (r ->> 'window_s')::float8;
  debounce_s := (r ->> 'debounce_s')::float8;
  debounce_max_s := coalesce((r ->> 'debounce_max_s')::float8, 10 * debounce_s);
  if of_key is null then
    perform _refuse_rule(p_type, r, 'unique', case when r ? 'computed' then 'the application computes the key: give the key'
                                                   else 'give a key or args: the type declares none, and the other options need one' end);
  elsif on_conflict not in ('return', 'replace', 'raise') then
    perform _refuse_rule(p_type, r, 'on_conflict', 'choose one of return, replace, raise');
  elsif r ->> 'while_' not in ('waiting', 'unfinished') then
    perform _refuse_rule(p_type, r, 'while_', 'choose one of waiting, unfinished');
  elsif length(of_key) not between 1 and 200 then
    perform _refuse_rule(p_type, r, 'unique', 'it must have 1 to 200 characters');
  elsif not (window_s > 0 and window_s <= 31622400 and debounce_s > 0 and debounce_s <= 31622400 and debounce_max_s > 0
             and debounce_max_s <= 316224000) then
    perform _refuse_rule(p_type, r, 'window_s', 'times are more than 0 and at most 366 days');
  elsif debounce_s is not null and on_conflict <> 'replace' then
    perform _refuse_rule(p_type, r, 'on_conflict', 'leave it out: a debounced job replaces the waiting one');
  elsif r ? 'debounce_max_s' and debounce_s is null or debounce_max_s < debounce_s then
    perform _refuse_rule(p_type, r, 'debounce_max_s', 'it bounds debounce_s: give that too, and no more than this');
  elsif on_conflict = 'replace' and unfinished then
    perform _refuse_rule(p_type, r, 'while_', 'only a waiting job is replaced, never a running one: leave it out, or say waiting');
  elsif on_conflict = 'replace' and window_s is not null then
    perform _refuse_rule(p_type, r, 'window_s', 'only a waiting job is replaced, and the window is about jobs that began: leave it out');
  end if;
  key := case of_key when 'args' then _args_key(p_payload) else 'key:' || of_key end;
end $$;

-- Whether the job waits to begin: it is in the first state of its lifecycle, and nobody holds it.
create or replace function _waits_to_begin(p_id bigint) returns boolean language sql stable set search_path from current as $$
  select exists (
    select from (select state, lifecycle from ready where id = p_id union all select state, lifecycle from resting where id = p_id
                 union all select state, lifecycle from parked where id = p_id) w
      join lifecycle l on l.lifecycle = w.lifecycle and l.initial = w.state)
$$;

-- Whether the job with this row still holds its key.
create or replace function _holds_key(u unique_job, p_now timestamptz) returns boolean language sql stable set search_path from current as $$
  select case when not exists (select from job j where j.id = u.id) then false
              when u.until > p_now then true
              when u.unfinished then not exists (select from ended n where n.id = u.id)
              else _waits_to_begin(u.id) end
$$;

-- Lets a new job take a unique key. `keeper` is set, and nothing is taken, when another job keeps it.
create or replace function _take_unique_key(
  p_actor int, p_now timestamptz, p_batch bigint, p_id bigint, p_job_id text, p_type int, p_scope text, p_key text, p_on_conflict text,
  p_unfinished boolean, p_window_s float8, out keeper bigint, out keeper_job text, out replaced text, out first_at timestamptz)
language plpgsql set search_path from current as $$
declare
  u unique_job;
  k record;
begin
  for n in 1..10 loop
    replaced := null;
    first_at := p_now;
    select o.* into u from unique_job o where o.type = p_type and o.scope = p_scope and o.key = p_key and o.holds for update;
    if found then
      if p_on_conflict = 'replace' and _holds_key(u, p_now) then
        k := _find(u.id);
        if k.place in ('ready', 'resting', 'parked') and _waits_to_begin(u.id) then
          replaced := (select j.job_id from job j where j.id = u.id);
          first_at := u.first_at;
          perform _cancel_now(u.id, p_actor, p_now, p_batch, format(_cause('replaced'), p_job_id));
        end if;
      end if;
      if replaced is null and _holds_key(u, p_now) then
        keeper := u.id;
        select j.job_id into keeper_job from job j where j.id = u.id for key share;
        return;
      end if;
      update unique_job o set holds = false where o.id = u.id;
    end if;
    insert into unique_job (id, type, scope, key, holds, unfinished, until, first_at, replaced)
    values (p_id, p_type, p_scope, p_key, true, p_unfinished, p_now + p_window_s * interval '1 s', first_at, replaced)
    on conflict (type, scope, key) where holds do nothing;
    if found then return; end if;
  end loop;
  raise exception 'unique key % changes hands all the time', p_key using errcode = '40001';
end $$;

-- Lets a job that begins a new generation take its unique key back. The job that holds the key now; null if it was free or there is none.
create or replace function _take_unique_key_back(p_id bigint, p_now timestamptz) returns text language plpgsql set search_path from current as $$
declare
  mine unique_job;
  u unique_job;
begin
  select o.* into mine from unique_job o where o.id = p_id for update;
  if not found or mine.holds then return null; end if;
  select o.* into u from unique_job o where o.type = mine.type and o.scope = mine.scope and o.key = mine.key and o.holds for update;
  if found and _holds_key(u, p_now) then return (select j.job_id from job j where j.id = u.id); end if;
  update unique_job o set holds = false where o.id = u.id;
  update unique_job o set holds = true where o.id = p_id;
  return null;
end $$;

-- A submit without keys cannot tell that a unique job was returned or replaced: whoever made it does it again as one with keys.
create or replace function _refuse_plain(p_type int) returns boolean language plpgsql stable set search_path from current as $$
declare of_type text := (select t.name from job_type t where t.id = p_type);
begin
  raise exception 'jobs of type % are unique, and this program is too old to submit them: upgrade it', of_type
    using errcode = 'TR013', detail = of_type;
end $$;

-- Gives a restored job its unique key. One that has ended holds it for its window alone; a key that another job holds stays with that job.
create or replace function _restore_unique_key(
  p_id bigint, p_type int, p_scope text, p_key text, p_unfinished boolean, p_until timestamptz, p_first_at timestamptz, p_now timestamptz)
returns void language plpgsql set search_path from current as $$
begin
  insert into unique_job (id, type, scope, key, holds, unfinished, until, first_at)
  values (p_id, p_type, p_scope, p_key, coalesce(p_until > p_now, false) or not exists (select from ended n where n.id = p_id), p_unfinished,
          p_until, p_first_at)
  on conflict (type, scope, key) where holds do nothing;
  if not found then
    insert into unique_job (id, type, scope, key, holds, unfinished, until, first_at)
    values (p_id, p_type, p_scope, p_key, false, p_unfinished, p_until, p_first_at);
  end if;
end $$;
