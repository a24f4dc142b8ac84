"""Nothing is handed out without a decision about this very job, whatever a kernel does; and nobody but the policy says what it allows."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.bus.conftest import Opens
from tests.bus.holding_parts import Held, parts_of
from tests.bus.rig import TOPIC, Rig, decision
from tests.bus.safety.policies import policy, rule
from trellis.bus.approvals import decide, inbox_document, list_waiting
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.requests import CALLER_ENV_MAX, ENTRIES_MAX, JobRequest
from trellis.bus.safety.kernel import PolicyKernel
from trellis.bus.safety.policy import CONSTRAINTS_CHARS_MAX, DecisionKind, SafetyDecision
from trellis.bus.scheduling.dispatch_policy import HOLD_S, approval_bindings
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Actor, JobId, NewJob, RequestId
from trellis.engine.records import JobPlace
from trellis.lifecycles import Role
from trellis.worker.requests import new_job


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("error", [ValueError("odd"), AttributeError("None"), RuntimeError("event loop"), OSError(5)])
async def test_error_of_the_safety_kernel_is_no_permission_and_blocks_no_other_job(rig: Rig, error: Exception):
    worker = await rig.worker("w1", TOPIC)

    def answer(request: JobRequest) -> SafetyDecision:
        if "odd" in request.labels:
            raise error
        return decision(request)

    rig.kernel.answer = answer
    odd = [await rig.submit(labels={"odd": str(number)}, priority="critical") for number in range(20)]
    good = await rig.submit()
    for _ in range(3):
        await rig.run()
    assert worker.jobs == [good]
    for job_id in odd:
        assert (await rig.said(job_id, "job_deferred"))["hold"] == "kernel"
    rig.kernel.answer = decision
    await rig.advance(31)
    await rig.run()
    assert set(worker.jobs) == {good, *odd}


@pytest.mark.requirement("BUS-4", "D45")
async def test_an_answer_about_another_job_lets_nothing_go(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    other = JobRequest.model_validate({"job_id": "other", "topic": TOPIC})
    rig.kernel.answer = lambda _: decision(other)
    job_id = await rig.submit()
    await rig.run()
    assert (worker.orders, await rig.state(job_id)) == ([], "SCHEDULED")


@pytest.mark.requirement("BUS-4")
async def test_client_cannot_forge_policy_constraints_for_its_worker(rig: Rig):
    """What the control plane itself says in env cannot be said by a client; a client's own `job_id` there stays."""
    worker = await rig.worker("w1", TOPIC)
    told = {"trellis.job_id": "another", "job_id": "the client's", "A": "1"}
    forged = {"TRELLIS_POLICY_CONSTRAINTS": json.dumps({"network_allowlist": ["*"]}), **told}
    job_id = await rig.submit(env=forged)
    await rig.run()
    (order,) = worker.orders
    assert "TRELLIS_POLICY_CONSTRAINTS" not in order.request.env
    assert {name: order.request.env[name] for name in told} == {**told, "trellis.job_id": job_id}


@pytest.mark.requirement("BUS-4", "D45")
async def test_constraints_of_a_decision_that_needs_a_person_hold_after_the_approval(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN, constraints={"max_runtime_ms": 5_000})
    job_id = await rig.submit()
    await rig.run()
    held = await rig.said(job_id, "job_held")
    assert held["decision"]["constraints"] == {"max_runtime_ms": 5_000}
    shown = inbox_document(await rig.job(job_id), await rig.events(job_id))
    assert shown is not None
    assert shown["content"]["constraints"] == {"max_runtime_ms": 5_000}
    owner = Actor(role=Role.OWNER, name="iryna")
    await decide(rig.ledger, owner, JobId(job_id), approve=True, note=None, request_id=RequestId("yes"))
    await rig.run()
    (order,) = worker.orders
    assert json.loads(order.request.env["TRELLIS_POLICY_CONSTRAINTS"]) == {"max_runtime_ms": 5_000}
    assert order.request.budget is not None
    assert order.request.budget.deadline_ms == 5_000


WHOLE: dict[str, Any] = {
    "priority": "critical",
    "context_ptr": "redis://ctx:order-7",
    "adapter_id": "adapter",
    "env": {"REGION": "eu", "job_id": "mine", "trellis.lease_s": "forged"},
    "parent_job_id": "order-6",
    "workflow_id": "flow",
    "step_index": 7,
    "memory_id": "memory-of-somebody",
    "context_hints": {"max_input_tokens": 5, "allow_summarization": True, "allow_retrieval": True, "tags": ["t"]},
    "budget": {"max_input_tokens": 1, "max_output_tokens": 2, "max_total_tokens": 3, "deadline_ms": 9_000_000},
    "tenant_id": "acme",
    "principal_id": "ann",
    "labels": {"color": "red"},
    "meta": {
        "tenant_id": "acme",
        "actor_id": "bot",
        "actor_type": "service",
        "idempotency_key": "key",
        "capability": "review",
        "risk_tags": ["write"],
        "pack_id": "pack",
        "labels": {"x": "y"},
    },
    "compensation": {"topic": "job.undo", "env": {"c": "3"}, "context_ptr": "redis://ctx:undo", "memory_id": "m2"},
    "identity": {"tenant_id": "acme", "principal_id": "ann", "actor_id": "bot", "delegation_id": "d-1"},
    "context_ref": {"uri": "redis://ctx:order-7", "media_type": "text/plain", "size_bytes": 12},
}
"""A request with every field; the test says so."""
ONLY_AT_DISPATCH = {"trellis.job_id", "trellis.start", "trellis.lease_s", "TRACEPARENT"}
"""Names in env that no approval can know."""


async def _held(rig: Rig, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A job that waits for a person, and what the person is shown."""
    job_id = await rig.submit(**fields)
    await rig.run()
    shown = inbox_document(await rig.job(job_id), await rig.events(job_id))
    assert shown is not None
    return job_id, shown["content"]


async def _approve(rig: Rig, job_id: str) -> None:
    owner = Actor(role=Role.OWNER, name="iryna")
    await decide(rig.ledger, owner, JobId(job_id), approve=True, note=None, request_id=RequestId(f"yes:{job_id}"))


@pytest.mark.on_both
@pytest.mark.requirement("D45", "BUS-4")
async def test_an_approval_shows_every_field_that_the_worker_receives(rig: Rig):
    assert WHOLE.keys() == JobRequest.model_fields.keys() - {"job_id", "topic"}, "a new field belongs into this test"
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.says(
        DecisionKind.REQUIRE_HUMAN, constraints={"max_runtime_ms": 5_000, "network_allowlist": ["eu.example"]}
    )
    job_id, shown = await _held(rig, **WHOLE)
    assert shown["payload_sha256"] is None, "whoever may write at that key can change it"
    await _approve(rig, job_id)
    await rig.run()
    (order,) = worker.orders
    sent = order.request.model_dump(mode="json", exclude_defaults=True)
    assert (sent.pop("job_id"), shown["order"].pop("job_id")) == (f"{job_id}@1", job_id)
    sent["env"] = {name: value for name, value in sent["env"].items() if name not in ONLY_AT_DISPATCH}
    assert shown["order"] == sent
    assert json.loads(shown["order"]["env"]["TRELLIS_POLICY_CONSTRAINTS"])["network_allowlist"] == ["eu.example"]
    assert shown["order"]["budget"]["deadline_ms"] == 5_000


def _changed(value: Any) -> Iterator[Any]:
    """The same value with one leaf changed, for every leaf."""
    match value:
        case dict():
            for name, part in value.items():
                yield from ({**value, name: other} for other in _changed(part))
        case list():
            yield [*value, "more"]
        case bool():
            yield not value
        case int():
            yield value + 1
        case "critical":
            yield "batch"
        case "service":
            yield "human"
        case _:
            yield f"{value}-x"


@pytest.mark.requirement("D45")
def test_an_approval_is_void_when_any_field_of_the_request_or_of_the_constraints_changes():
    request = JobRequest.checked({"job_id": "order-7", "topic": TOPIC, **WHOLE})
    said = {"policy_hash": "p", "constraints": {"max_runtime_ms": 5_000, "budgets": {"tokens": 7}}}
    bound = approval_bindings(request, said)
    others = [JobRequest.read(json.dumps(one).encode()) for one in _changed(json.loads(request.body))]
    assert len(others) > 30
    for other in others:
        assert approval_bindings(other, said)["job_hash"] != bound["job_hash"]
    for constraints in _changed(said["constraints"]):
        assert approval_bindings(request, {**said, "constraints": constraints})["order_hash"] != bound["order_hash"]


@pytest.mark.on_both
@pytest.mark.requirement("D45", "BUS-4")
async def test_an_approval_is_void_when_the_kernel_allows_something_else_under_the_same_policy(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN, constraints={"network_allowlist": ["eu.example"]})
    job_id, _ = await _held(rig)
    await _approve(rig, job_id)
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN, constraints={"network_allowlist": ["*"]})
    await rig.run()
    assert (worker.orders, (await rig.path(job_id))[-1]) == ([], "job_held")


@pytest.mark.on_both
@pytest.mark.requirement("D45", "BUS-4")
async def test_an_approval_shows_and_binds_the_redacted_context(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    clean = f"objects://ctx/{'c' * 64}"
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN, redacted={"context_ptr": clean})
    job_id, shown = await _held(rig, context_ptr="redis://ctx:secret")
    assert (shown["context_ptr"], shown["order"]["context_ptr"], shown["payload_sha256"]) == (clean, clean, "c" * 64)
    await _approve(rig, job_id)
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN)
    await rig.run()
    assert (worker.orders, (await rig.path(job_id))[-1]) == ([], "job_held"), "another context would go out"
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN, redacted={"context_ref": {"uri": clean}})
    await _approve(rig, job_id)
    await rig.run()
    assert worker.orders == []
    rig.kernel.says(DecisionKind.ALLOW, redacted={"context_ref": {"uri": clean}})
    await rig.advance(80 * 3600)
    await rig.run()
    assert [(order.request.context_ptr, order.request.context) for order in worker.orders] == [("", clean)]


@pytest.mark.requirement("D45", "BUS-9")
async def test_a_document_says_which_bytes_are_approved(rig: Rig):
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN)
    _, shown = await _held(rig, context_ptr=f"objects://ctx/{'a' * 64}")
    assert shown["payload_sha256"] == "a" * 64


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize(
    "constraints",
    [{"max_runtime_ms": 2**53 - 1}, {"allowed_tools": ["t" * 100] * 19 + ["u" * (CONSTRAINTS_CHARS_MAX - 1_999)]}],
    ids=["longest", "most"],
)
async def test_job_is_dispatched_with_any_constraints_of_the_policy(rig: Rig, constraints: dict[str, Any]):
    worker = await rig.worker("w1", TOPIC)
    rig.scheduler.kernel = PolicyKernel(policy(rule("a", "allow_with_constraints", constraints=constraints)))
    await rig.submit()
    await rig.run()
    (order,) = worker.orders
    assert json.loads(order.request.env["TRELLIS_POLICY_CONSTRAINTS"]) == constraints


@pytest.mark.requirement("BUS-2")
async def test_oversized_env_is_refused_and_its_job_is_not_cancelled(rig: Rig):
    worker = await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.ALLOW_WITH_CONSTRAINTS, constraints={"max_runtime_ms": 5_000})
    full = {f"n{number}": "x" for number in range(CALLER_ENV_MAX)}
    request = JobRequest.checked({"job_id": "a", "topic": TOPIC, "env": full})
    await rig.put(request, trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    await rig.run()
    assert worker.jobs == ["a"]
    assert len(worker.orders[0].request.env) == ENTRIES_MAX
    more = full | {"more": "x"}
    for place, said in (("env", {"env": more}), ("compensation/env", {"compensation": {"env": more}})):
        with pytest.raises(BusRequestInvalid, match=f": {place}: at most {CALLER_ENV_MAX} entries"):
            JobRequest.checked({"job_id": "b", "topic": TOPIC, **said})


@pytest.mark.on_both
@pytest.mark.requirement("D45")
async def test_inbox_shows_a_job_with_an_expired_hold_while_the_kernel_is_down(rig: Rig):
    await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN)
    first, second = await rig.submit(budget={"deadline_ms": 10**9}), await rig.submit(budget={"deadline_ms": 10**9})
    await rig.run()
    rig.kernel.away = True
    await rig.advance(HOLD_S + 60)
    young = await rig.submit()
    await rig.run()
    seen, cursor = list[str](), None
    for _ in range(5):
        page = await list_waiting(rig.ledger, limit=1, cursor=cursor)
        seen += [job.job_id for job, _ in page.items]
        cursor = page.cursor
        if cursor is None:
            break
    assert (cursor, seen) == (None, [first, second])
    rig.kernel.away = False
    await rig.run()
    assert {job.job_id for job, _ in (await list_waiting(rig.ledger, limit=9)).items} == {first, second, young}


@pytest.mark.on_both
@pytest.mark.requirement("D45")
async def test_the_inbox_shows_a_job_whose_hold_is_over_while_it_waits_for_its_tenant(rig_of: Opens):
    async with rig_of(topics={TOPIC: {"lease_s": 3600.0}}, tenants={"acme": {"held_max": 1}}) as rig:
        rig.kernel.says(DecisionKind.REQUIRE_HUMAN)
        worker = await rig.worker("w1", TOPIC)
        mine = await rig.submit(tenant_id="acme", budget={"deadline_ms": 10**9})
        await rig.run()
        rig.kernel.says(DecisionKind.ALLOW)
        await rig.advance(HOLD_S - 60)
        await worker.shake(TOPIC)
        other = await rig.submit(tenant_id="acme")
        await rig.run()
        await rig.advance(120)
        await rig.run()
        assert (worker.jobs, (await rig.job(mine)).place) == ([other], JobPlace.BLOCKED)
        assert [job.job_id for job, _ in (await list_waiting(rig.ledger, limit=9)).items] == [mine]


@pytest.mark.on_both
@pytest.mark.requirement("D45")
async def test_inbox_reads_a_bounded_number_of_jobs_after_a_long_kernel_outage(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    await rig.worker("w1", TOPIC)
    rig.kernel.says(DecisionKind.REQUIRE_HUMAN)
    first = await rig.submit(budget={"deadline_ms": 10**9})
    await rig.run()
    rig.kernel.away = True
    await rig.submit_many(20, budget={"deadline_ms": 10**9})
    await rig.run()
    await rig.advance(HOLD_S + 60)
    events, read = rig.ledger.events, list[str]()

    async def noting(job_id: JobId) -> Any:
        read.append(job_id)
        return await events(job_id)

    monkeypatch.setattr(rig.ledger, "events", noting)
    page = await list_waiting(rig.ledger, limit=5)
    assert ([job.job_id for job, _ in page.items], page.cursor, read) == ([first], None, [first])


@pytest.mark.requirement("BUS-4")
async def test_an_attempt_is_kept_alive_no_longer_than_the_policy_lets_it_take(rig_of: Opens):
    """Its worker lives and says so, and knows nothing of constraints; one that speaks for the job itself is told."""
    async with rig_of(topics={TOPIC: {"lease_s": 9.0}}) as rig:
        parts = parts_of(rig)
        worker = await rig.worker("w1", TOPIC, beats={"max_parallel_jobs": 4})
        await worker.shake(TOPIC)
        rig.kernel.says(DecisionKind.ALLOW_WITH_CONSTRAINTS, constraints={"max_runtime_ms": 20_000})
        silent, speaking = await rig.submit(), await rig.submit()
        await rig.run()
        orders = {order.request.env["job_id"]: order.request for order in worker.orders}
        held = Held(job_id=speaking, wire_id=orders[speaking].job_id, dispatch_id="")
        states, answers = list[str](), list[str]()
        for _ in range(8):
            await parts.renewals.run_once()
            await parts.pass_time(4)
            await worker.beat(active_jobs=2, max_parallel_jobs=4)
            answers.append((await parts.progress(held, "w1", message="at it")).message)
            states.append(await rig.state(silent))
        assert (states[4], answers[4]) == ("DISPATCHED", "accepted")
        assert "refused: an attempt may take 20 s" in answers
        assert [await rig.state(job_id) for job_id in (silent, speaking)] == ["TIMEOUT", "TIMEOUT"]


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("said", [{"job_id": "other"}, {"topic": "job.harmless"}])
async def test_job_with_the_request_of_another_job_is_cancelled_without_evaluation(rig: Rig, said: dict[str, str]):
    worker = await rig.worker("w1", TOPIC)
    body = JobRequest.model_validate({"job_id": "mine", "topic": TOPIC, **said}).body
    forged = NewJob(job_id=JobId("mine"), type=TOPIC, lifecycle="bus-job", payload=body)
    await rig.ledger.submit(Actor(role=Role.GATEWAY, name="somebody"), [forged])
    await rig.run()
    assert (rig.kernel.asked, worker.orders, await rig.state("mine")) == ([], [], "CANCELLED")


@pytest.mark.requirement("BUS-2", "BUS-4")
def test_no_job_on_a_topic_bypasses_the_checks_of_requests():
    spoofed = {"job_id": "a", "topic": "job.x", "principal_id": "root", "labels": {"retry_of": "z"}}
    with pytest.raises(OptionInvalid, match="use submit_topic"):
        new_job("job.x", spoofed, {"lifecycle": "bus-job"}, app=None, new_id=lambda: "a")
