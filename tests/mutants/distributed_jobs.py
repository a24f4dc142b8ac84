"""Mutants of the requirements DJ: distributed jobs."""

from tests.mutants.mutant import Mutant

LEDGER = "tests/ledgers/conformance"

DISTRIBUTED_JOBS: dict[str, Mutant] = {
    # A running job cannot be cancelled any more.
    "DJ-1": Mutant(
        file="lifecycles/leased_job.py",
        old='*(_cancel(source) for source in ("queued", "assigned", "running"))',
        new='*(_cancel(source) for source in ("queued", "assigned"))',
        tests=(
            (
                "tests/lifecycles/test_tables.py::"
                "test_every_pair_of_states_and_every_role_passes_exactly_as_documented[leased-job]"
            ),
        ),
    ),
    # Whoever knows the id of another worker's claim is given its leases.
    "DJ-2": Mutant(
        file="ledgers/sqlite/claims.py",
        old=" and row.owner == who.actor",
        new="",
        tests=(f"{LEDGER}/test_parity.py::test_a_claim_id_is_one_claimers_own[sqlite]",),
    ),
    # A history that goes backward within an attempt is accepted.
    "DJ-3": Mutant(
        file="lifecycles/replay.py",
        old="if before and progress(",
        new="if before is step and progress(",
        tests=("tests/lifecycles/test_replay.py::test_progress_never_falls",),
    ),
    # The feed gives events in another order than that of the transitions.
    "DJ-4": Mutant(
        file="ledgers/sqlite/queries/read.sql",
        old="json_each(:types)))\nORDER BY e.seq LIMIT :limit;",
        new="json_each(:types)))\nORDER BY e.seq DESC LIMIT :limit;",
        tests=(f"{LEDGER}/test_feed.py::test_the_feed_yields_every_event_once_in_order[sqlite]",),
    ),
    # A key answers with its first job whatever is asked under it.
    "DJ-5": Mutant(
        file="ledgers/sqlite/submit.py",
        old="if earlier[0] != fingerprint:",
        new="if not earlier[1]:",
        tests=(f"{LEDGER}/test_submit.py::test_the_same_key_with_another_request_is_refused[sqlite]",),
    ),
    # A heartbeat does not prolong its lease.
    "DJ-6": Mutant(
        file="ledgers/sqlite/queries/holder.sql",
        old="SET until = :now + length WHERE",
        new="SET until = until + 0 * :now WHERE",
        tests=(f"{LEDGER}/test_renew.py::test_a_renewed_lease_runs_on_from_now[sqlite]",),
    ),
    # Steps are made whatever the epoch of the lease is.
    "DJ-7": Mutant(
        file="ledgers/sqlite/turn.py",
        old="row.epoch == advance.lease.epoch\n        and row.place == HELD",
        new="row.place == HELD",
        tests=(f"{LEDGER}/test_fence.py::test_every_write_of_a_holder_that_lost_its_lease_is_refused",),
    ),
    # A lost lease opens another attempt although the attempts are spent.
    "DJ-8": Mutant(
        file="ledgers/sqlite/sweep.py",
        old="    if row.attempts_left:\n        facts |= Fact.ATTEMPTS_LEFT\n    if not row.deaths:",
        new="    facts |= Fact.ATTEMPTS_LEFT\n    if not row.deaths:",
        tests=(f"{LEDGER}/test_sweep.py::test_a_lost_lease_without_attempts_left_is_dead_lettered[sqlite]",),
    ),
    # Every wait is as long as the first.
    "DJ-9": Mutant(
        file="engine/retry_policy.py",
        old="self.base_s * self.factor ** min(attempt, 64)",
        new="self.base_s",
        tests=("tests/worker/test_retries.py::test_the_wait_doubles_from_half_a_second_to_a_minute",),
    ),
    # Attempts have no end.
    "DJ-10": Mutant(
        file="engine/retry_policy.py",
        old="return self.attempt + 1 < self.max_attempts",
        new="return self.max_attempts > 0",
        tests=("tests/worker/test_retries.py::test_the_last_attempt_is_dead_lettered_by_default",),
    ),
    # The holder of a job is not told that it shall stop.
    "DJ-11": Mutant(
        file="ledgers/sqlite/queries/holder.sql",
        old="RETURNING cancel_at IS NOT NULL;",
        new="RETURNING 0;",
        tests=(f"{LEDGER}/test_renew.py::test_renewals_return_the_cancel_request_until_the_holder_settles[sqlite]",),
    ),
    # A dead letter does not say who held the job last, and until when.
    "DJ-12": Mutant(
        file="ledgers/sqlite/queries/steps.sql",
        old="a.name, iif(a.id IS NULL, NULL, j.until), :at",
        new="NULL, NULL, :at",
        tests=(f"{LEDGER}/test_advance.py::test_a_rejected_job_leaves_a_complete_dead_letter",),
    ),
    # Events are not looked up by time.
    "DJ-13": Mutant(
        file="ledgers/sqlite/queries/read.sql",
        old="WHERE e.type = :type AND e.at >= :since ORDER BY",
        new="WHERE e.type = :type AND :since IS NOT NULL ORDER BY",
        tests=(f"{LEDGER}/test_feed.py::test_events_are_found_by_type_correlation_and_time[sqlite]",),
    ),
    # A claim that is asked for again gets nothing.
    "DJ-14": Mutant(
        file="ledgers/sqlite/claims.py",
        old="if before is not None:\n        return before",
        new="if before is not None:\n        return []",
        tests=(
            f"{LEDGER}/test_claim.py::test_the_same_claim_id_returns_the_same_jobs_while_their_leases_live[sqlite]",
        ),
    ),
    # Why a step was made is not recorded.
    "DJ-15": Mutant(
        file="ledgers/sqlite/plan.py",
        old="storable(self.cause),",
        new="storable(None),",
        tests=(f"{LEDGER}/test_move.py::test_a_move_is_one_transition_with_its_event[sqlite]",),
    ),
    # An error that another attempt cannot mend is tried again.
    "DJ-16": Mutant(
        file="engine/retry_policy.py",
        old="if isinstance(error, PermanentError):",
        new="if isinstance(error, PermanentError) and not job.attempts_left:",
        tests=("tests/worker/test_retries.py::test_a_permanent_error_fails_at_once",),
    ),
    # A compensation that succeeds leaves no record on the job that it undid.
    "DJ-17": Mutant(
        file="ledgers/sqlite/steps.py",
        old="if row.compensates is not None and step.success:",
        new="if row.compensates is not None and step.dead_letter:",
        tests=(f"{LEDGER}/test_compensation.py::test_a_finished_compensation_is_recorded_on_its_original[sqlite]",),
    ),
    # A payload that its handler refuses is tried again.
    "DJ-18": Mutant(
        file="engine/retry_policy.py",
        old="if isinstance(error, ValidationError):",
        new="if isinstance(error, ValidationError) and not job.attempts_left:",
        tests=("tests/worker/test_retries.py::test_a_validation_error_is_dead_lettered_with_attempts_left",),
    ),
    # User code is given a payload that could not be read.
    "DJ-19": Mutant(
        file="worker/runners.py",
        old="if isinstance(payload, UnreadablePayload):",
        new="if isinstance(payload, UnreadablePayload) and held.finished:",
        tests=("tests/worker/test_running.py::test_a_payload_that_does_not_fit_never_reaches_user_code",),
    ),
    # A job succeeds without its result.
    "DJ-20": Mutant(
        file="ledgers/sqlite/steps.py",
        old="if self.results:",
        new="if self.results and self.deaths:",
        tests=(f"{LEDGER}/test_advance.py::test_completing_stores_the_result_with_the_event[sqlite]",),
    ),
    # A later attempt has another key for what it calls.
    "DJ-21": Mutant(
        file="worker/context.py",
        old='pass it to whatever this handler calls."""\n        return self._held.lease.job_id',
        new='pass it to whatever this handler calls."""\n        return f"{self._held.lease.job_id}-{self.attempt}"',
        tests=(
            "tests/worker/test_running.py::test_a_later_attempt_gets_the_same_key_the_last_checkpoint_and_the_journal",
        ),
    ),
    # Stored events get another meaning.
    "DJ-22": Mutant(
        file="lifecycles/events.py",
        old='"job_queued",\n    "job_claimed",',
        new='"job_claimed",\n    "job_queued",',
        tests=("tests/lifecycles/test_v1.py::test_lifecycles_keep_everything_of_v1",),
    ),
}
