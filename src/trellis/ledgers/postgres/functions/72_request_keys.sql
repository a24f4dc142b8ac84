-- Idempotency keys of requests (engine/request_keys.py). The verbs submit_keyed, moves, cancel and requeue store a key in
-- the transaction of their change, and nothing else does. A limited login reaches keys of its own only.

-- Stores a new key, or returns the answer that is stored with it. p_request holds the scope, the key, the fingerprint in
-- hexadecimal digits, what the request is about, and the key as the caller sent it. Refuses another request under the
-- key. The row stays locked until the transaction ends, so that requests with one key come one after the other.
create or replace function _take_request_key(p_request text[]) returns bytea language plpgsql set search_path from current as $$
declare
  own_scope text := _of_login(p_request[1]);
  print bytea := decode(p_request[3], 'hex');
  stored request_key;
begin
  if length(p_request[1]) > 500 or length(p_request[2]) > 200 or length(print) > 64 or length(p_request[4]) > 200 then
    raise exception 'the key of a request has a scope of at most 500 characters, a key of 200, a fingerprint of 64 bytes, and 200 characters '
      'that say what the request is about' using errcode = 'TR004';
  end if;
  for n in 1..10 loop
    insert into request_key (scope, key, at, fingerprint, about) values (own_scope, p_request[2], trellis.now(), print, p_request[4])
      on conflict do nothing;
    if found then return null; end if;
    select k.* into stored from request_key k where k.scope = own_scope and k.key = p_request[2] for update;
    if found and stored.fingerprint <> print then
      raise exception 'key % was used before for another request', p_request[5]
        using errcode = 'TR010', detail = json_build_object('key', p_request[5], 'job_id', stored.about)::text;
    elsif found then
      return stored.answer;
    end if;
  end loop;
  raise exception 'key % changes hands all the time', p_request[5] using errcode = '40001';
end $$;

create or replace function find_request_key(p_scope text, p_key text) returns table (fingerprint bytea, about text, answer bytea)
language sql stable security definer set search_path from current as $$
  select k.fingerprint, k.about, k.answer from request_key k where k.scope = _of_login(p_scope) and k.key = p_key
$$;

-- The first answer stays.
create or replace function store_request_answer(p_scope text, p_key text, p_answer bytea) returns void
language sql security definer set search_path from current as $$
  update request_key k set answer = p_answer where k.scope = _of_login(p_scope) and k.key = p_key and k.answer is null
$$;
