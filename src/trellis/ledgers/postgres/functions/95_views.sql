-- Every job with its moving row, whichever table holds it.
create or replace view job_status with (security_invoker = true) as
  select m.id, m.place, m.version, m.epoch, m.generation, m.attempt, m.max_attempts, m.deaths, m.state, m.owner, m.until, m.due_at,
         m.cancel_at, m.ended_at, j.job_id, j.lifecycle, j.type, j.prio, j.created_at, j.deadline_at, j.ckey, j.key_name, j.correlation_id, j.trace,
         j.parent_id, j.compensates, j.max_attempts as asked_attempts
    from (
      select id, 'ready' as place, version, epoch, generation, attempt, max_attempts, deaths, state, null::int as owner,
             null::timestamptz as until, null::timestamptz as due_at, null::timestamptz as cancel_at, null::timestamptz as ended_at
        from ready
      union all
      select id, 'resting', version, epoch, generation, attempt, max_attempts, deaths, state, null, null, due_at, null, null from resting
      union all
      select id, 'parked', version, epoch, generation, attempt, max_attempts, deaths, state, null, null, null, null, null from parked
      union all
      select id, 'held', version, epoch, generation, attempt, max_attempts, deaths, state, owner, until, null, cancel_at, null from lease
      union all
      select id, 'ended', version, epoch, generation, attempt, max_attempts, deaths, state, owner, null, null, null, at from ended
    ) m join job j on j.id = m.id;
