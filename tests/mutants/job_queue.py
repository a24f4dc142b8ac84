"""Mutants of the requirements JQ: the job queue."""

from tests.mutants.mutant import Mutant

LEDGER = "tests/ledgers/conformance"
TABLE = "tests/lifecycles/test_tables.py::test_every_pair_of_states_and_every_role_passes_exactly_as_documented"

JOB_QUEUE: dict[str, Mutant] = {
    # A new job is QUEUED at once: there is no PENDING.
    "JQ-1": Mutant(
        file="lifecycles/queue_job.py",
        old='arrow(None, "PENDING", Trigger.SUBMIT,',
        new='arrow(None, "QUEUED", Trigger.SUBMIT,',
        tests=(f"{TABLE}[queue-job]",),
    ),
    # The gateway validates jobs as well.
    "JQ-2": Mutant(
        file="lifecycles/queue_job.py",
        old='_by_orchestrator("PENDING", "QUEUED", "validate",',
        new='arrow("PENDING", "QUEUED", "validate", SUBMITTERS,',
        tests=(f"{TABLE}[queue-job]",),
    ),
    # A job that is COMPLETE can be requeued.
    "JQ-3": Mutant(
        file="lifecycles/queue_job.py",
        old='_requeue("FAILED"),',
        new='_requeue("FAILED"),\n        _requeue("COMPLETE", extension=True),',
        tests=("tests/lifecycles/test_tables.py::test_queue_job_has_no_transition_out_of_complete",),
    ),
    # What is DEAD stays dead, whoever asks.
    "JQ-4": Mutant(
        file="lifecycles/queue_job.py",
        old='_requeue("DEAD", extension=True),',
        new="",
        tests=(
            (
                "tests/research/test_retry_policy.py::"
                "test_a_person_with_the_right_requeues_from_failed_and_from_dead_with_fresh_attempts"
            ),
        ),
    ),
    # A job is COMPLETE and its artifact is not final.
    "JQ-5": Mutant(
        file="ledgers/sqlite/migrations/0026_one_look_per_event.sql",
        old="WHERE n.job = new.job AND NOT EXISTS (SELECT 1 FROM trellis_restoring WHERE job = new.job);",
        new="WHERE n.job = 0 AND NOT EXISTS (SELECT 1 FROM trellis_restoring WHERE job = new.job);",
        tests=(f"{LEDGER}/test_artifacts.py::test_a_job_completes_together_with_the_artifact_it_names[sqlite]",),
    ),
    # The NLM backend writes the status of jobs itself.
    "JQ-6": Mutant(
        file="lifecycles/queue_job.py",
        old="_by_orchestrator = partial(arrow, actors=Role.ORCHESTRATOR)",
        new="_by_orchestrator = partial(arrow, actors=frozenset({Role.ORCHESTRATOR, Role.NLM_BACKEND}))",
        tests=(f"{TABLE}[queue-job]",),
    ),
    # An agent's jobs run beside each other if they belong to different runs.
    "JQ-7": Mutant(
        file="research/queue_job.py",
        old='concurrency_key=f"{KEY_NAMESPACE}{request.agent_slug}"',
        new='concurrency_key=f"{KEY_NAMESPACE}{request.run_id}"',
        tests=(
            (
                "tests/research/test_gate.py::"
                "test_one_queue_job_of_an_agent_is_leased_at_a_time_and_other_agents_do_not_wait"
            ),
        ),
    ),
    # Every wait is as long as the first.
    "JQ-8": Mutant(
        file="research/retry_policy.py",
        old="BACKOFF_S[min(attempt, RETRIES - 1)]",
        new="BACKOFF_S[0]",
        tests=(
            "tests/research/test_retry_policy.py::test_the_policy_waits_at_least_the_floor_and_at_most_a_fifth_more",
        ),
    ),
    # A backend that is busy fails the job for good.
    "JQ-9": Mutant(
        file="research/errors.py",
        old='code = "RATE_LIMIT"',
        new='code = "RATE_LIMIT"\n    retries = False',
        tests=("tests/research/test_nlm_answers.py::test_an_answer_that_is_no_result_takes_the_path_of_the_table",),
    ),
    # The document counts executions where the schema counts retries.
    "JQ-10": Mutant(
        file="research/queue_job.py",
        old='"max_attempts": retries_of(job),',
        new='"max_attempts": job.max_attempts,',
        tests=("tests/research/test_documents.py::test_a_job_shows_its_document_from_pending_to_complete",),
    ),
    # A job for an agent that is not there is taken.
    "JQ-11": Mutant(
        file="worker/kinds.py",
        old="raise AgentUnknown(slug=request.agent_slug, hint=await _similar_agent(request.agent_slug, making))",
        new="return",
        tests=("tests/research/test_gate.py::test_invalid_queue_job_is_refused_with_a_reason_and_stores_no_row",),
    ),
    # The job that an inbox entry makes does not name the entry.
    "JQ-12": Mutant(
        file="inbox.py",
        old='parent_id=JobId(entry["id"]),',
        new="parent_id=None,",
        tests=("tests/research/test_gate.py::test_an_entry_that_asks_for_a_job_makes_one_pending_job_linked_to_it",),
    ),
    # A BRIEF job yields a research brief.
    "JQ-13": Mutant(
        file="artifacts/content.py",
        old="JobType.BRIEF: ArtifactType.BRIEF,",
        new="JobType.BRIEF: ArtifactType.RESEARCH_BRIEF,",
        tests=("tests/artifacts/test_content.py::test_each_job_type_yields_one_artifact_type_with_unchanged_content",),
    ),
}
