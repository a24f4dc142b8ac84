"""Mutants of PostgreSQL's own SQL: a twin for each mutant of SQLite's ledger, and rules that only SQL decides.

The changed program installs its schema from its changed files, migrations included.
"""

from tests.mutants.mutant import Mutant

LEDGER = "tests/ledgers/conformance"
SQL = "ledgers/postgres/functions"
TOGETHER = f"{LEDGER}/test_steps_together.py"

POSTGRES: dict[str, Mutant] = {
    # A job is COMPLETE and its artifact is not final.
    "JQ-5 postgres": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="if x.finalizes then perform _finalize(",
        new="if x.finalizes and o.finalizes is null then perform _finalize(",
        tests=(f"{LEDGER}/test_artifacts.py::test_a_job_completes_together_with_the_artifact_it_names[postgres]",),
    ),
    # A key lets one job more be held than its limit says.
    "JQ-7 postgres": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="select w.ckey, head.key_name, head.key_cap from (",
        new="select w.ckey, head.key_name, head.key_cap + 1 from (",
        tests=(f"{LEDGER}/test_keys.py::test_one_job_of_a_concurrency_key_is_claimed_at_a_time[postgres]",),
    ),
    # A job completes with a second artifact.
    "ART-7 postgres": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="into reason from _final_artifacts(by_job) o limit 1;",
        new="into reason from _final_artifacts(by_job) o where o.job_id is null limit 1;",
        tests=(
            (
                f"{LEDGER}/test_artifacts.py::"
                "test_job_has_exactly_one_finalized_artifact_after_completion_and_none_before[postgres]"
            ),
        ),
    ),
    # Every role administers.
    "AUTH-1 postgres": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="g.rule = 'ledger.' || p_verb and g.role = p_role and g.reach = 'yes'",
        new="g.rule = 'ledger.' || p_verb and g.reach = 'yes'",
        tests=(
            (
                "tests/ledgers/postgres/test_two_tenants.py::"
                "test_a_submitters_login_is_refused_what_operators_and_services_do"
            ),
        ),
    ),
    # An event that nobody declared is taken.
    "DJ-1 postgres": Mutant(
        file=f"{SQL}/20_events.sql",
        old="  select not trellis._declared(p_lifecycle, p_role, p_from, p_to)\n      or case",
        new="  select case",
        tests=("tests/ledgers/postgres/test_guards.py::test_an_event_that_does_not_follow_is_refused",),
    ),
    # A wrong first event is taken from a statement that says that it makes first events.
    "DJ-1 postgres first": Mutant(
        file=f"{SQL}/20_events.sql",
        old="     where n.version <> 1 or _is_refused(1, ",
        new="     where n.version <> 1 or false and _is_refused(1, ",
        tests=(
            (
                "tests/ledgers/postgres/test_guards.py::"
                "test_a_wrong_event_is_refused_whether_or_not_its_statement_says_that_it_makes_first_events"
            ),
        ),
    ),
    # Whoever knows the id of another worker's claim is given its leases.
    "DJ-2 postgres": Mutant(
        file=f"{SQL}/45_claim.sql",
        old=" and d.owner = p_actor",
        new="",
        tests=(f"{LEDGER}/test_parity.py::test_a_claim_id_is_one_claimers_own[postgres]",),
    ),
    # The database takes an event of an earlier attempt.
    "DJ-3 postgres": Mutant(
        file=f"{SQL}/20_events.sql",
        old="< (b_generation, b_attempt, trellis._rank(b_lifecycle, b_to)) end",
        new="< (p_generation, p_attempt, trellis._rank(b_lifecycle, b_to)) end",
        tests=("tests/ledgers/postgres/test_guards.py::test_an_event_that_does_not_follow_is_refused",),
    ),
    # The feed gives events in another order than that of the transitions.
    "DJ-4 postgres": Mutant(
        file="ledgers/postgres/read.sql",
        old=" order by e.pos, e.id, e.version",
        new=" order by e.pos desc, e.id, e.version",
        tests=(f"{LEDGER}/test_feed.py::test_the_feed_yields_every_event_once_in_order[postgres]",),
    ),
    # A key answers with its first job whatever is asked under it.
    "DJ-5 postgres": Mutant(
        file=f"{SQL}/40_submit.sql",
        old="case when old.fingerprint <> p_fingerprint then 'mismatch'",
        new="case when old.fingerprint is null then 'mismatch'",
        tests=(f"{LEDGER}/test_submit.py::test_the_same_key_with_another_request_is_refused[postgres]",),
    ),
    # An id that is used again under another key means the job that is there, whatever is asked.
    "DJ-5 postgres given": Mutant(
        file=f"{SQL}/40_submit.sql",
        old="if old.fingerprint = p_fingerprint then",
        new="if old.fingerprint is not null then",
        tests=(
            (
                f"{LEDGER}/test_submit.py::"
                "test_idempotency_key_is_checked_before_a_given_id_and_both_return_the_job[postgres]"
            ),
            (f"{LEDGER}/test_submit.py::test_free_idempotency_key_with_a_known_id_returns_the_job_of_the_same_request"),
        ),
    ),
    # A heartbeat does not prolong its lease.
    "DJ-6 postgres": Mutant(
        file=f"{SQL}/60_holder.sql",
        old="update lease d set until = now_at + _length(d.lease_ms, d.beat_ms)",
        new="update lease d set until = d.until",
        tests=(f"{LEDGER}/test_renew.py::test_a_renewed_lease_runs_on_from_now[postgres]",),
    ),
    # A job is completed whatever the epoch of the lease is.
    "DJ-7 postgres": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="d.epoch = p_done_epochs[width_bucket(d.id, p_done)] and d.state = p_done_source",
        new="d.state = p_done_source",
        tests=(f"{LEDGER}/test_fence.py::test_every_write_of_a_holder_that_lost_its_lease_is_refused",),
    ),
    # The rarer steps are made whatever the epoch of the lease is.
    "DJ-7 postgres others": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="delete from lease l where l.id = o.id and l.epoch = o.epoch and l.state",
        new="delete from lease l where l.id = o.id and l.state",
        tests=(f"{LEDGER}/test_fence.py::test_every_write_of_a_holder_that_lost_its_lease_is_refused",),
    ),
    # Steps of many jobs together are made whatever the epoch of the lease is.
    "DJ-7 postgres together": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="l.epoch = epochs[width_bucket(l.id, ids)] and l.state = source_state",
        new="l.state = source_state",
        tests=(f"{TOGETHER}::test_steps_of_many_runs_in_one_turn_leave_each_as_if_it_came_alone[postgres]",),
    ),
    # Jobs are completed together whatever the epoch of the lease is.
    "DJ-7 postgres completed together": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="l.epoch = epochs[width_bucket(l.id, ids)] and l.state = coalesce(",
        new="l.state = coalesce(",
        tests=(f"{TOGETHER}::test_completions_of_many_runs_in_one_turn_leave_each_as_if_it_came_alone[postgres]",),
    ),
    # A lease is renewed whatever its epoch is.
    "DJ-7 postgres renew": Mutant(
        file=f"{SQL}/60_holder.sql",
        old="where d.id = any(p_ids) and d.epoch = p_epochs[width_bucket(d.id, p_ids)]",
        new="where d.id = any(p_ids)",
        tests=(f"{LEDGER}/test_fence.py::test_every_write_of_a_holder_that_lost_its_lease_is_refused",),
    ),
    # A lost lease opens another attempt although the attempts are spent.
    "DJ-8 postgres": Mutant(
        file=f"{SQL}/80_sweep.sql",
        old="attempts_left => t.attempt + 1 < t.max_attempts, first_death",
        new="attempts_left => true, first_death",
        tests=(f"{LEDGER}/test_sweep.py::test_a_lost_lease_without_attempts_left_is_dead_lettered[postgres]",),
    ),
    # The holder of a job is not told that it shall stop.
    "DJ-11 postgres": Mutant(
        file=f"{SQL}/60_holder.sql",
        old="returning d.id, d.epoch, d.cancel_at is not null as cancel",
        new="returning d.id, d.epoch, false as cancel",
        tests=(f"{LEDGER}/test_renew.py::test_renewals_return_the_cancel_request_until_the_holder_settles[postgres]",),
    ),
    # A dead letter does not say who held the job last, and until when.
    "DJ-12 postgres": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="         t.owner, t.until, coalesce(",
        new="         null, null, coalesce(",
        tests=(f"{LEDGER}/test_advance.py::test_a_rejected_job_leaves_a_complete_dead_letter",),
    ),
    # Events are not looked up by time.
    "DJ-13 postgres": Mutant(
        file="ledgers/postgres/read.sql",
        old="o.at < coalesce($4::timestamptz, 'infinity') and o.at >= coalesce($2::timestamptz, '-infinity')",
        new="o.at < coalesce($4::timestamptz, 'infinity') and ($2::timestamptz is null or $2 is not null)",
        tests=(f"{LEDGER}/test_feed.py::test_events_are_found_by_type_correlation_and_time[postgres]",),
    ),
    # A claim that is asked for again gets nothing.
    "DJ-14 postgres": Mutant(
        file=f"{SQL}/45_claim.sql",
        old="if claim_no is not null then return _claimed_before(claim_no, p_actor, l.lifecycle, p_types); end if;",
        new="if claim_no is not null then return null; end if;",
        tests=(
            f"{LEDGER}/test_claim.py::test_the_same_claim_id_returns_the_same_jobs_while_their_leases_live[postgres]",
        ),
    ),
    # Why a step was made is not recorded.
    "DJ-15 postgres": Mutant(
        file=f"{SQL}/30_steps.sql",
        old="p_role, p_cause, p_request, p_data, case when",
        new="p_role, null, p_request, p_data, case when",
        tests=(
            f"{LEDGER}/test_cancel.py::test_hard_cancel_records_its_own_actor_after_a_soft_cancel_by_another[postgres]",
        ),
    ),
    # A compensation that succeeds leaves no record on the job that it undid.
    "DJ-17 postgres": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="array_agg(x.id) filter (where x.flags & 1 = 1)",
        new="array_agg(x.id) filter (where x.flags & 1 = 2)",
        tests=(f"{LEDGER}/test_compensation.py::test_a_finished_compensation_is_recorded_on_its_original[postgres]",),
    ),
    # A payload kills as many workers as there are.
    "DJ-18 postgres": Mutant(
        file=f"{SQL}/80_sweep.sql",
        old="last_death => deaths_max between 1 and t.deaths + 1",
        new="last_death => deaths_max between 1 and t.deaths - 8",
        tests=(f"{LEDGER}/test_sweep.py::test_a_payload_that_kills_its_worker_twice_is_dead_lettered[postgres]",),
    ),
    # User code begins under a lease whose time is over.
    "DJ-19 postgres": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="and (d.until > now_at or l.start_roles[d.state] & l.claim_roles = 0)",
        new="",
        tests=(f"{LEDGER}/test_parity.py::test_a_start_after_the_lease_ran_out_is_refused",),
    ),
    # A job succeeds without its result.
    "DJ-20 postgres": Mutant(
        file=f"{SQL}/50_turn.sql",
        old="from x where x.body is not null",
        new="from x where x.body is not null and x.id is null",
        tests=(f"{LEDGER}/test_advance.py::test_completing_stores_the_result_with_the_event[postgres]",),
    ),
    # The checkpoint of a holder that lost its lease reaches the next one.
    "DJ-21 postgres": Mutant(
        file=f"{SQL}/60_holder.sql",
        old=(
            "declare held int;\nbegin\n"
            "  select d.version into held from lease d where d.id = p_id and d.epoch = p_epoch\n"
            "     and exists (select from actor o where o.id = d.owner and o.db_role = session_user) for update;"
        ),
        new="declare held int;\nbegin\n  select 1 into held from job d where d.id = p_id for update;",
        tests=(f"{LEDGER}/test_fence.py::test_the_losers_checkpoint_does_not_reach_the_next_holder[postgres]",),
    ),
    # Jobs of a paused type are handed out on the bus.
    "BUS-3 postgres": Mutant(
        file=f"{SQL}/47_heads.sql",
        old="where not t.paused order by",
        new="where t.paused is not null order by",
        tests=(f"{LEDGER}/test_bus_reads.py::test_types_that_are_paused_have_no_heads[postgres]",),
    ),
    # An id that is used again means the job that is there, whatever is asked.
    "BUS-11 postgres": Mutant(
        file=f"{SQL}/40_submit.sql",
        old="case when old.fingerprint <> p_fingerprint then 'mismatch'",
        new="case when old.fingerprint is null then 'mismatch'",
        tests=(
            f"{LEDGER}/test_submit.py::test_a_given_id_submitted_again_is_the_existing_job[postgres]",
            f"{LEDGER}/test_submit.py::test_ids_are_unique_over_all_lifecycles[postgres]",
        ),
    ),
}
