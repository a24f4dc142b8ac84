-- Functions that only programs of version OLDEST_PROGRAM (migrate.py) to the one before this call, while a ledger is shared with them.
-- This program calls none of them; whoever cancels or submits in SQL may leave the key out. They replace the older functions in place: a
-- migration that drops a function breaks the calls that wait for it. For the same reason _claim and _pick without p_only stay where an
-- older version made them. When OLDEST_PROGRAM is raised past the last version that needs a function, a migration drops it.

-- Until version 23: without the only job that a claim takes.
create or replace function turn(
  p_actor int, p_lifecycle smallint,
  p_done bigint[], p_done_epochs int[], p_done_source smallint, p_results bytea[], p_ttls float8[],
  p_starts bigint[], p_start_epochs int[],
  p_others jsonb,
  p_claim text, p_types int[], p_lease_ms int[], p_beat_ms int[], p_prios smallint[], p_lows bigint[], p_start int, p_prefetch int,
  p_isolates boolean default false)
returns table (
  kind smallint, part smallint, id bigint, version int, ids bigint[], versions int[], epochs int[], states smallint[], types int[],
  attempts int[], generations smallint[], max_attempts int[], deaths smallint[], job_ids text[], payloads bytea[],
  correlations text[], prios smallint[], places bigint[], payload bytea, extra text)
language sql set search_path from current as $$
  select * from turn(p_actor, p_lifecycle, p_done, p_done_epochs, p_done_source, p_results, p_ttls, p_starts, p_start_epochs, p_others,
                     p_claim, p_types, p_lease_ms, p_beat_ms, p_prios, p_lows, p_start, p_prefetch, p_isolates, null)
$$;

-- Until version 24: without the key of a request.
create or replace function cancel(p_actor int, p_job_id text, p_soft boolean, p_request text, p_grace_s float8, p_cause text)
returns table (outcome text, id bigint, lifecycle smallint, source smallint, target smallint, version int, epoch int)
language sql set search_path from current as $$
  select * from cancel(p_actor, p_job_id, p_soft, p_request, p_grace_s, p_cause, null)
$$;

create or replace function requeue(p_actor int, p_job_ids text[], p_request text, p_cause text)
returns table (job_id text, outcome text, id bigint, lifecycle smallint, source smallint, target smallint, version int, epoch int)
language sql set search_path from current as $$
  select * from requeue(p_actor, p_job_ids, p_request, p_cause, null)
$$;

create or replace function moves(
  p_actors int[], p_job_ids text[], p_targets text[], p_requests text[], p_versions int[], p_delays float8[], p_lease_ms int[],
  p_beat_ms int[], p_causes text[], p_datas bytea[], p_reasons text[], p_stages text[], p_errors text[])
returns table (
  n bigint, outcome text, id bigint, lifecycle smallint, source smallint, target smallint, version int, epoch int)
language sql set search_path from current as $$
  select * from moves(p_actors, p_job_ids, p_targets, p_requests, p_versions, p_delays, p_lease_ms, p_beat_ms, p_causes, p_datas,
                      p_reasons, p_stages, p_errors, null)
$$;

create or replace function submit_keyed(
  p_actor int, p_lifecycles smallint[], p_job_ids text[], p_types int[], p_prios smallint[], p_payloads bytea[],
  p_max_attempts smallint[], p_max_deaths smallint[], p_delays float8[], p_run_ats timestamptz[], p_deadlines float8[],
  p_correlations text[], p_traces text[], p_parents text[], p_compensates text[], p_ckeys text[], p_caps int[], p_scopes text[],
  p_keys text[], p_fingerprints bytea[], p_repeat boolean, p_given boolean[], p_waiting_max int[], p_chosen smallint[])
returns table (outcome text, job_id text)
language sql set search_path from current as $$
  select s.outcome, s.job_id
    from submit_keyed(p_actor, p_lifecycles, p_job_ids, p_types, p_prios, p_payloads, p_max_attempts, p_max_deaths, p_delays, p_run_ats,
                      p_deadlines, p_correlations, p_traces, p_parents, p_compensates, p_ckeys, p_caps, p_scopes, p_keys, p_fingerprints,
                      p_repeat, p_given, p_waiting_max, p_chosen, null, null, null) s
$$;

-- Until version 33: without unique keys. What a type declares about them holds for these submits too.
create or replace function submit_keyed(
  p_actor int, p_lifecycles smallint[], p_job_ids text[], p_types int[], p_prios smallint[], p_payloads bytea[],
  p_max_attempts smallint[], p_max_deaths smallint[], p_delays float8[], p_run_ats timestamptz[], p_deadlines float8[],
  p_correlations text[], p_traces text[], p_parents text[], p_compensates text[], p_ckeys text[], p_caps int[], p_scopes text[],
  p_keys text[], p_fingerprints bytea[], p_repeat boolean, p_given boolean[], p_waiting_max int[], p_chosen smallint[],
  p_key text[])
returns table (outcome text, job_id text)
language sql set search_path from current as $$
  select s.outcome, s.job_id
    from submit_keyed(p_actor, p_lifecycles, p_job_ids, p_types, p_prios, p_payloads, p_max_attempts, p_max_deaths, p_delays, p_run_ats,
                      p_deadlines, p_correlations, p_traces, p_parents, p_compensates, p_ckeys, p_caps, p_scopes, p_keys, p_fingerprints,
                      p_repeat, p_given, p_waiting_max, p_chosen, p_key, null, null) s
$$;

-- Until version 34: the rates that a type declares for its keys stay as they are.
create or replace function declare_types(
  p_actor int, p_only_new boolean, p_lifecycles smallint[], p_types text[], p_prios smallint[], p_max_attempts int[],
  p_max_deaths smallint[], p_deadlines float8[], p_limits int[], p_keyed boolean[], p_compensations text[], p_uniques text[]) returns void
language sql set search_path from current as $$
  select declare_types(p_actor, p_only_new, p_lifecycles, p_types, p_prios, p_max_attempts, p_max_deaths, p_deadlines, p_limits, p_keyed,
                       p_compensations, p_uniques, array_agg(o.rate_per_key order by u.n), array_agg(o.burst_per_key order by u.n))
    from unnest(p_lifecycles, p_types) with ordinality u(lifecycle, name, n)
    left join job_type t on t.name = u.name left join type_options o on o.lifecycle = u.lifecycle and o.type = t.id
$$;

-- Until version 33: what a type declares about uniqueness stays as it is.
create or replace function declare_types(
  p_actor int, p_only_new boolean, p_lifecycles smallint[], p_types text[], p_prios smallint[], p_max_attempts int[],
  p_max_deaths smallint[], p_deadlines float8[], p_limits int[], p_keyed boolean[], p_compensations text[]) returns void
language sql set search_path from current as $$
  select declare_types(p_actor, p_only_new, p_lifecycles, p_types, p_prios, p_max_attempts, p_max_deaths, p_deadlines, p_limits, p_keyed,
                       p_compensations, array(
    select o.unique_rule from unnest(p_lifecycles, p_types) with ordinality u(lifecycle, name, n)
      left join job_type t on t.name = u.name left join type_options o on o.lifecycle = u.lifecycle and o.type = t.id order by u.n))
$$;

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

-- Until version 29: an evaluator that reports only what it raised and resolved itself. 180 s is the hold of this version.
create or replace function observe_alerts(p_actor int, p_mark bigint, p_ids text[], p_names text[], p_subjects text[],
                                          p_values float8[], p_texts text[], p_scope_names text[], p_scope_prefixes text[],
                                          p_unseen_s float8, p_keep_s float8)
returns table (change text, id text, name text, subject text, value float8, text text, raised_at timestamptz, last_seen_at timestamptz,
               resolved_at timestamptz)
language sql set search_path from current as $$
  select o.change, o.id, o.name, o.subject, o.value, o.text, o.raised_at, o.last_seen_at, o.resolved_at
    from observe_alerts(p_actor, p_mark, p_ids, p_names, p_subjects, p_values, p_texts, p_scope_names, p_scope_prefixes,
                        '{}', '{}', '{}', 180, p_unseen_s, p_keep_s, 3645) o
$$;

-- Until version 30: an evaluator that does not say when its round is out of date. It stores a round in which nothing holds once an hour, so
-- its round is out of date after an hour and three times the interval of 15 s: 3645 s, also in the function above.
create or replace function observe_alerts(p_actor int, p_mark bigint, p_ids text[], p_names text[], p_subjects text[],
                                          p_values float8[], p_texts text[], p_scope_names text[], p_scope_prefixes text[],
                                          p_unread_names text[], p_unread_prefixes text[], p_report_types text[],
                                          p_hold_s float8, p_unseen_s float8, p_keep_s float8)
returns table (change text, id text, name text, subject text, value float8, text text, raised_at timestamptz, last_seen_at timestamptz,
               resolved_at timestamptz, report_types text[])
language sql set search_path from current as $$
  select * from observe_alerts(p_actor, p_mark, p_ids, p_names, p_subjects, p_values, p_texts, p_scope_names, p_scope_prefixes,
                               p_unread_names, p_unread_prefixes, p_report_types, p_hold_s, p_unseen_s, p_keep_s, 3645)
$$;

-- Until version 31: without the position at which a subscriber begins that has read nothing.
create or replace function follow(p_actor int, p_name text, p_lease_s float8, p_reads boolean) returns table (epoch int, place text)
language sql set search_path from current as $$
  select * from follow(p_actor, p_name, p_lease_s, p_reads, null)
$$;
