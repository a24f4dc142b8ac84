"""Final artifacts for the tests of the console, made as the orchestration layer makes them, with a real context."""

import json
from typing import Any

from tests.artifacts.desk import BACKEND, ORCHESTRATOR, SLUG, advance, complete, draft, queue_job
from tests.console.conftest import ConsoleServer
from trellis.app.wiring import new_id
from trellis.artifacts.content import ArtifactDraft, ArtifactSource, JobType
from trellis.engine.jobs import Claim, ClaimId, JobId, Move, RequestId, Turn, TypeClaim
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.research.context import ContextAssembler
from trellis.research.queue_job import QueueRequest, snapshot_url

BOWS = "sources/07-bows.md"
FOUND = "Carbon fibre, 61 g, bought in 2016 for visitors, so that they need not borrow anything old."
"""Word for word in that source."""
PAYLOADS: dict[JobType, dict[str, Any]] = {
    JobType.RESEARCH: {"query": "What does a bow weigh?"},
    JobType.BRIEF: {"vision_text": "Bows", "entity_refs": []},
    JobType.PROPOSAL_PREPROCESS: {"proposal_draft": {"target": "bow"}},
}


def brief(summary: str, body: str, excerpts: list[str]) -> ArtifactDraft:
    """A research brief that cites these passages of the source about bows."""
    made = draft(
        title="What a bow weighs",
        summary=summary,
        sections=[{"heading": "Length and weight", "body": body, "sources": [BOWS]}],
        conclusions=["TB-01 without its hair is lighter than a modern bow."],
        open_questions=["What did TB-01 weigh with its hair?"],
    )
    return made.model_copy(update={"sources": tuple(ArtifactSource(ref=BOWS, excerpt=one) for one in excerpts)})


def finalized(server: ConsoleServer, made: ArtifactDraft, job_type: JobType = JobType.RESEARCH) -> str:
    """The id of a final artifact of the violin's archivist, whose job was answered from the agent's sources."""
    return server.run(_finalized(server, made, job_type))


async def _finalized(server: ConsoleServer, made: ArtifactDraft, job_type: JobType) -> JobId:
    assert server.served is not None
    instance = server.served.instance
    ledger, job_id = instance.ledger, JobId(new_id())
    payload = PAYLOADS[job_type]
    new = queue_job(job_id, job_type, payload=payload, run_id=server.run_id, entity_refs=[])
    await ledger.submit(ORCHESTRATOR, [new])
    await ledger.move(ORCHESTRATOR, Move(job_id=job_id, target="QUEUED", request_id=RequestId(f"queue {job_id}")))
    claim = Claim(claim_id=ClaimId(new_id()), types=(TypeClaim(type=new.type),), lifecycle=QUEUE_JOB.name)
    (claimed,) = (await ledger.turn(Turn(actor=ORCHESTRATOR, claim=claim))).claimed
    lease = claimed.lease
    assembler = ContextAssembler(objects=instance.objects, memory=instance.memory_reader, cid=instance.artifacts.cid)
    request = QueueRequest.read(job_id, new.payload or b"")
    assert request.agent_slug == SLUG
    digest = await assembler.assemble(request, job_id, lease.epoch)
    facts = {"snapshot_url": snapshot_url(server.url, job_id, lease.epoch), "sha256": digest, "run_id": server.run_id}
    assert await advance(ledger, lease, "CONTEXT_ASSEMBLY", "snapshot_ready", data=json.dumps(facts).encode())
    job = await ledger.job(job_id)
    assert job is not None
    staged = await instance.artifacts.stage(BACKEND, made, job=job)
    assert await complete(ledger, instance.artifacts, lease, staged.artifact_id)
    return staged.artifact_id
