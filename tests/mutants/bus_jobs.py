"""Mutants of the requirements BUS: jobs that travel over the bus."""

from tests.mutants.mutant import Mutant

BUS_JOBS: dict[str, Mutant] = {
    # A job that waits cannot be cancelled.
    "BUS-1": Mutant(
        file="lifecycles/bus_job.py",
        old="*(_cancel(source) for source in OPEN),",
        new="*(_cancel(source) for source in HELD),",
        tests=(
            (
                "tests/lifecycles/test_tables.py::"
                "test_every_pair_of_states_and_every_role_passes_exactly_as_documented[bus-job]"
            ),
        ),
    ),
    # The client is not told how long its job took.
    "BUS-2": Mutant(
        file="bus/outcomes/publisher.py",
        old="execution_ms=report.execution_ms if report else 0,",
        new="execution_ms=0,",
        tests=("tests/bus/test_publisher.py::test_a_client_receives_one_result_for_each_job_under_its_own_id",),
    ),
    # A worker that is full gets more.
    "BUS-3": Mutant(
        file="bus/scheduling/placement.py",
        old="return seen.free > 0 and seen.cpu < OVERLOADED_CPU",
        new="return seen.cpu < OVERLOADED_CPU",
        tests=("tests/bus/test_placement.py::test_full_and_overloaded_workers_get_nothing",),
    ),
    # What the safety kernel denies is dispatched.
    "BUS-4": Mutant(
        file="bus/scheduling/scheduler.py",
        old="if decision.lets_go:",
        new="if decision.lets_go or decision.kind is DecisionKind.DENY:",
        tests=("tests/bus/test_scheduler.py::test_a_denied_job_ends_and_is_never_sent",),
    ),
    # A job that nobody started is not done again.
    "BUS-5": Mutant(
        file="bus/outcomes/linked_jobs.py",
        old='RETRYABLE_STATES = frozenset({"FAILED", "TIMEOUT"})',
        new='RETRYABLE_STATES = frozenset({"FAILED"})',
        tests=("tests/bus/test_reconciler.py::test_a_job_that_never_started_ends_and_a_linked_one_is_made",),
    ),
    # A result that comes again leaves no trace.
    "BUS-6": Mutant(
        file="bus/outcomes/result_listener.py",
        old="if self._remarked.get(once):",
        new="if not self._remarked.get(once):",
        tests=(
            "tests/bus/test_result_listener.py::test_the_same_result_again_is_accepted_remarked_once_and_changes_nothing",
        ),
    ),
    # A job that must not be done twice has further attempts under its id.
    "BUS-7": Mutant(
        file="bus/requests.py",
        old="attempts = topic.max_attempts if topic.idempotent else 1",
        new="attempts = topic.max_attempts",
        tests=("tests/bus/test_reconciler.py::test_a_job_that_never_started_ends_and_a_linked_one_is_made",),
    ),
    # Steps do not wait for each other.
    "BUS-8": Mutant(
        file="bus/outcomes/workflows.py",
        old="if waits_for is not None and waits_for.index < step_index:",
        new="if waits_for is not None and waits_for.index < 0:",
        tests=("tests/bus/test_ordering.py::test_the_next_step_goes_when_the_one_before_it_has_succeeded",),
    ),
    # A pointer of a scheme that is not registered is followed into the object store.
    "BUS-9": Mutant(
        file="bus/pointers.py",
        old="raise PointerUnknown(scheme=scheme[:40], known=known)\n        return self._stores[scheme]",
        new='_log.info("scheme_unknown", known=known)\n        return self._stores.get(scheme, self._stores[OBJECTS])',
        tests=("tests/gateway/test_bus_jobs.py::test_a_result_that_points_elsewhere_is_not_followed",),
    ),
    # A result that the bus did not take counts as sent.
    "BUS-10": Mutant(
        file="bus/outcomes/publisher.py",
        old='_log.info("held_up", event_id=event.id, error=str(error))\n            return False',
        new='_log.info("held_up", event_id=event.id, error=str(error))\n            return True',
        tests=("tests/bus/test_publisher.py::test_a_bus_that_fails_in_the_middle_of_a_page_gets_the_rest_later",),
    ),
    # An id that is used again means the job that is there, whatever is asked.
    "BUS-11": Mutant(
        file="ledgers/sqlite/submit.py",
        old="same = rows[0][1] == job.fingerprint",
        new="same = bool(rows[0][1])",
        tests=("tests/bus/test_intake.py::test_the_same_request_again_is_the_same_job_and_another_body_is_refused",),
    ),
    # The client of a job that was denied hears nothing.
    "BUS-12": Mutant(
        file="bus/outcomes/publisher.py",
        old='"job_cancelled", "job_denied", "job_timed_out"})',
        new='"job_cancelled", "job_timed_out"})',
        tests=("tests/bus/test_publisher.py::test_a_client_receives_one_result_for_each_job_under_its_own_id",),
    ),
    # Every failure of a topic that declares a code is retried.
    "BUS-13": Mutant(
        file="bus/outcomes/attempts.py",
        old="report.error_code in topic.retry",
        new="bool(topic.retry)",
        tests=("tests/bus/test_result_listener.py::test_only_declared_error_codes_are_retried",),
    ),
}
