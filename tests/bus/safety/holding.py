"""Jobs that the safety kernel holds, made as the scheduler makes them."""

import json
from typing import Any

from tests.bus.safety.policies import policy, rule
from trellis.app.wiring import new_id
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.safety.evaluation import decide
from trellis.bus.safety.policy import SafetyDecision, SafetyPolicy
from trellis.bus.scheduling.dispatch_policy import HOLD_S
from trellis.bus.topics import Topics
from trellis.engine.jobs import Actor, JobId, Move, Moved, RequestId
from trellis.engine.ledger import Ledger
from trellis.lifecycles import Role

GATEWAY = Actor(role=Role.GATEWAY, name="gateway@test")
SCHEDULER = Actor(role=Role.SCHEDULER, name="scheduler@test")
KERNEL = Actor(role=Role.SAFETY_KERNEL, name="kernel@test")
PEOPLE = policy(rule("people-first", "require_human", reason="somebody looks first"))


async def scheduled(
    ledger: Ledger, *, topic: str = "job.files.delete", job_id: str | None = None, **fields: Any
) -> JobId:
    """A job that waits to be handed out."""
    request = JobRequest.model_validate({"job_id": job_id or new_id(), "topic": topic, **fields})
    await ledger.submit(GATEWAY, [new_bus_job(request, Topics(), trace_id="trace-1")])
    await moved(ledger, SCHEDULER, request.job_id, target="SCHEDULED")
    return JobId(request.job_id)


async def held(ledger: Ledger, *, under: SafetyPolicy = PEOPLE, **fields: Any) -> JobId:
    """A job that waits for a person."""
    job_id = await scheduled(ledger, **fields)
    await hold(ledger, job_id, under=under)
    return job_id


async def hold(ledger: Ledger, job_id: JobId, *, under: SafetyPolicy = PEOPLE) -> SafetyDecision:
    job = await ledger.job(job_id)
    assert job is not None
    decision = decide(under, JobRequest.read(job.payload or b""))
    data = {"hold": "human", "decision": decision.to_dict()}
    await moved(ledger, KERNEL, job_id, target="SCHEDULED", delay_s=HOLD_S, data=json.dumps(data).encode())
    return decision


async def moved(ledger: Ledger, actor: Actor, job_id: str, **move: Any) -> None:
    answer = await ledger.move(actor, Move(job_id=JobId(job_id), request_id=RequestId(new_id()), **move))
    assert isinstance(answer, Moved), answer
