-- The audit chain: its newest block, and which acts are in a block.

-- Replaces the newest block if it is still the expected one, so that the chain cannot fork. True also if the new head is
-- stored already.
create or replace function extend_audit_chain(
  p_actor int, p_number bigint, p_sha256 text, p_place text, p_feed int,
  p_after_number bigint, p_after_sha256 text, p_after_place text, p_after_feed int, p_acts bigint[])
returns boolean language plpgsql security definer set search_path from current as $$
declare
  a record := _actor(p_actor);
  stored record;
begin
  perform _require(a.role, 'seal');
  if _is_limited() then
    raise exception 'the audit chain is of the whole ledger: only a member of trellis_app may extend it, and % is none', session_user
      using errcode = 'TR002';
  end if;
  if p_number not in (coalesce(p_after_number, p_number), coalesce(p_after_number, 0) + 1) or p_sha256 !~ '^[0-9a-f]{64}$'
     or p_place !~ '^\d{1,20}\.\d{1,20}\.\d{1,10}$' then
    raise exception 'the next block of the audit chain has the next number, a SHA-256 and a feed position' using errcode = 'TR004';
  end if;
  insert into audit_head (number, sha256, place, feed, at)
  select p_number, p_sha256, p_place, p_feed, trellis.now() where p_after_number is null on conflict do nothing;
  if not found then
    select h.number, h.sha256, h.place, h.feed into stored from audit_head h for update;
    if (stored.number, stored.sha256, stored.feed) = (p_number, p_sha256, p_feed) and stored.place is not distinct from p_place then
      return true;
    end if;
    update audit_head h set number = p_number, sha256 = p_sha256, place = p_place, feed = p_feed, at = trellis.now()
     where (h.number, h.sha256, h.feed) = (p_after_number, p_after_sha256, p_after_feed) and h.place is not distinct from p_after_place;
    if not found then return false; end if;
  end if;
  update act c set sealed = true where c.no = any(p_acts) and not c.sealed;
  return true;
end $$;
