-- Spawn: a holder submits children and stores a journal entry that names them, in one transaction: `begin_spawn`, a
-- submit, `link_children`.

-- Whether a holder may spawn: 0 its lease is lost, 1 the entry is new and stored now, 2 it exists, because this call
-- repeats one whose answer was lost. The lease cannot end before the transaction does.
create or replace function begin_spawn(p_id bigint, p_epoch int, p_entry text, p_body bytea) returns int language plpgsql
security definer set search_path from current as $$
begin
  perform from lease d where d.id = p_id and d.epoch = p_epoch
     and exists (select from actor o where o.id = d.owner and o.db_role = session_user) for key share;
  if not found then return 0; end if;
  insert into journal (id, entry, at, epoch, body) values (p_id, p_entry, trellis.now(), p_epoch, p_body) on conflict do nothing;
  return case when found then 1 else 2 end;
end $$;

-- Notes children of a held job that have not ended. `p_cancels` says which of them are cancelled when the job ends
-- without success.
create or replace function link_children(p_id bigint, p_epoch int, p_job_ids text[], p_cancels boolean[]) returns void language plpgsql
security definer set search_path from current as $$
begin
  perform from lease d where d.id = p_id and d.epoch = p_epoch
     and exists (select from actor o where o.id = d.owner and o.db_role = session_user) for key share;
  if not found then
    raise exception 'job % is not held under epoch %', p_id, p_epoch using errcode = 'TR002';
  end if;
  insert into spawned (id, parent, cancels)
  select c.id, p_id, u.cancels from unnest(p_job_ids, p_cancels) u(job_id, cancels) join job c on c.job_id = u.job_id
   where c.parent_id = (select p.job_id from job p where p.id = p_id) and not exists (select from ended e where e.id = c.id)
   order by c.id on conflict do nothing;
end $$;
