"""One of everything that a route can be about, in a gateway of its own; and everything a request could have changed."""

import asyncio
import json
import sqlite3
from dataclasses import dataclass

from tests.agents.files import agent_file
from tests.artifacts.desk import BACKEND, ORCHESTRATOR, advance, call_nlm, complete, draft, queue_job
from tests.bus.safety.holding import held
from tests.gateway.conftest import VIOLIN, Gateway
from tests.gateway.serving import Served
from trellis.app.wiring import new_id
from trellis.artifacts.content import JobType
from trellis.documents.audit_log import ActRecorder
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.jobs import (
    Actor,
    CancelMode,
    DeadLetterReason,
    JobId,
    Move,
    Moved,
    NewJob,
    ReasonCode,
    RequestId,
    Stage,
    Submitted,
)
from trellis.lifecycles import Role
from trellis.proposals import proposal as proposals
from trellis.proposals.proposal import ProposalContent, ProposalSource
from trellis.runs.orchestration import TriggerKind

SOMEBODY = Actor(role=Role.SUBMITTER, name="somebody")
OPERATOR = Actor(role=Role.CONTROL_PLANE, name="operator")
PERSON = Actor(role=Role.OWNER, name="owner")
GATEWAY = Actor(role=Role.GATEWAY, name="gateway")
LOGICIAN = "logician"
"""An agent that may propose logic, too."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Ids of things in the ledger."""

    run: str
    own_job: str
    foreign_job: str
    dead: str
    also_dead: str
    pending: str
    approved: str
    waiting: str
    """A queue-job that waits for its artifact."""
    artifact: str
    staged: str
    """An artifact that its job does not wait for any more."""
    held: str
    """A job on a topic that waits for a person."""


async def job(gateway: Gateway, *, by: Actor = SOMEBODY, type_: str = "work") -> JobId:
    """A queued leased-job."""
    (answer,) = await gateway.instance.ledger.submit(
        by, [NewJob(job_id=JobId(new_id()), type=type_, payload=b'{"n":1}')]
    )
    assert isinstance(answer, Submitted)
    return answer.job_id


async def dead_job(gateway: Gateway, *, type_: str = "work") -> JobId:
    """A leased-job that an operator gave up."""
    job_id = await job(gateway, type_=type_)
    death = DeadLetterReason(reason_code=ReasonCode.POLICY_VIOLATION, stage=Stage.INPUT, last_error="no good")
    move = Move(job_id=job_id, target="dead_lettered", request_id=RequestId(new_id()), death=death)
    assert isinstance(await gateway.instance.ledger.move(OPERATOR, move), Moved)
    return job_id


async def dead_queue_job(
    gateway: Gateway,
    code: str = "NLM_UNAVAILABLE",
    *,
    stage: str = "NOTEBOOKLM_CALL",
    job_type: JobType = JobType.BRIEF,
) -> JobId:
    """A queue-job that failed in a stage with this error, for good, and that no operator requeued in time."""
    ledger = gateway.instance.ledger
    lease = await call_nlm(ledger, queue_job(new_id(), job_type))
    if stage == "ARTIFACT_WRITE":
        assert await advance(ledger, lease, "NOTEBOOKLM_CALL", "response_received")
    data = json.dumps({"error": {"code": code, "message": "no good"}}).encode()
    assert await advance(ledger, lease, stage, "retry", delay_s=3600.0, data=data)
    for target in ("FAILED", "DEAD"):
        move = Move(job_id=lease.job_id, target=target, request_id=RequestId(f"{target} {lease.job_id}"))
        assert isinstance(await ledger.move(ORCHESTRATOR, move), Moved), target
    return lease.job_id


async def proposal(
    gateway: Gateway | Served, *, approved: bool = False, text: str = "a note", **content: object
) -> JobId:
    """A note that somebody proposes for the violin's archivist; `content` is added to what it says."""
    ledger = gateway.instance.ledger
    id_ = JobId(f"prop_2026-01-01_{new_id()[:8]}")
    draft = ProposalContent(
        action="propose-note",
        target=f"notes/{id_}.md",
        content={"summary": text, "change": {"type": "create", "text": text}, **content},
    )
    source = ProposalSource(type="agent", identity=VIOLIN, run_id=None)
    body = proposals.body_of(id_, VIOLIN, source, draft, priority="normal")
    await ledger.submit(GATEWAY, [NewJob(job_id=id_, type=proposals.TYPE, lifecycle="proposal", payload=body)])
    if approved:
        await proposals.decide_proposal(ledger, PERSON, id_, approve=True, note=None, request_id=RequestId(new_id()))
    return id_


async def artifact(gateway: Gateway | Served, *, job_type: JobType = JobType.RESEARCH, **content: object) -> JobId:
    """A finalized artifact; `content` replaces parts of what it says."""
    instance = gateway.instance
    lease = await call_nlm(instance.ledger, queue_job(new_id(), job_type))
    waiting = await instance.ledger.job(lease.job_id)
    assert waiting is not None
    staged = await instance.artifacts.stage(BACKEND, draft(job_type, **content), job=waiting)
    assert await complete(instance.ledger, instance.artifacts, lease, staged.artifact_id)
    return staged.artifact_id


async def staged_artifact(gateway: Gateway) -> JobId:
    """An artifact whose job was cancelled before it became final."""
    ledger, artifacts = gateway.instance.ledger, gateway.instance.artifacts
    lease = await call_nlm(ledger, queue_job(new_id()))
    waiting = await ledger.job(lease.job_id)
    assert waiting is not None
    staged = await artifacts.stage(BACKEND, draft(), job=waiting)
    await ledger.cancel(OPERATOR, lease.job_id, CancelMode.HARD, RequestId(new_id()), grace_s=0, cause="test")
    return staged.artifact_id


async def make_world(gateway: Gateway, name: str) -> World:
    """One of everything; `own_job` was submitted under this name, or for an NLM backend is the job that waits for it."""
    instance = gateway.instance
    waiting = (await call_nlm(instance.ledger, queue_job(new_id()))).job_id
    given = name == f"a {Role.NLM_BACKEND}"
    await instance.objects.put(
        f"agents/{LOGICIAN}/_agent.md", agent_file(slug=LOGICIAN, safe_outputs="[logic-update, memory-update]")
    )
    return World(
        run=(await instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.MANUAL)).job_id,
        own_job=waiting if given else await job(gateway, by=Actor(role=Role.SUBMITTER, name=name)),
        foreign_job=await job(gateway),
        dead=await dead_job(gateway),
        also_dead=await dead_job(gateway),
        pending=await proposal(gateway),
        approved=await proposal(gateway, approved=True),
        waiting=waiting,
        artifact=await artifact(gateway),
        staged=await staged_artifact(gateway),
        held=await held(instance.ledger),
    )


async def everything(gateway: Gateway) -> dict[str, list[str]]:
    """Every row of every table, every object and every commit; but for the acts of refusals and who was refused."""
    found = await asyncio.to_thread(_rows, gateway.instance.places.ledger.removeprefix("sqlite:///"))
    objects = [item for item in await _objects(gateway) if "/refused-" not in item]
    commits = [
        str(entry.commit) for slug in (VIOLIN, LOGICIAN) for entry in gateway.instance.memory.history(slug).entries
    ]
    return {**found, "objects": objects, "commits": commits}


async def refusals(gateway: Gateway) -> list[dict[str, object]]:
    """The audit records of refusals, when the projector has published them."""
    instance = gateway.instance
    await ActRecorder(
        instance.ledger, instance.actor(Role.PROJECTOR), DocumentPublisher(instance.objects)
    ).publish_new()
    keys = [item.split(" ")[0] for item in await _objects(gateway, "audit/") if "/refused-" in item]
    bodies = [await gateway.instance.objects.get(key) for key in keys]
    return [json.loads(found.body) for found in bodies if found is not None]


async def _objects(gateway: Gateway, prefix: str = "") -> list[str]:
    found: list[str] = []
    after = None
    while True:
        page = await gateway.instance.objects.list(prefix, after=after)
        found += [f"{item.key} {item.etag}" for item in page.items]
        if not page.more:
            return found
        after = page.items[-1].key


def _rows(path: str) -> dict[str, list[str]]:
    connection = sqlite3.connect(path)
    try:
        tables = [
            row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        ]
        refused = "id NOT LIKE 'refused-%'"
        named = (
            "id IN (SELECT actor FROM trellis_event UNION SELECT actor FROM trellis_act WHERE id NOT LIKE 'refused-%')"
        )
        kept = {"trellis_act": refused, "trellis_actor": named, "sqlite_sequence": "name <> 'trellis_act'"}
        return {
            table: [repr(row) for row in connection.execute(f'SELECT * FROM "{table}" WHERE {kept.get(table, "true")}')]
            for table in tables
        }
    finally:
        connection.close()
