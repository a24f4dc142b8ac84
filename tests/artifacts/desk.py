"""A registry of artifacts on a real ledger and a real object store, with queue jobs that are taken as far as a test wants."""

import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trellis.app.wiring import new_id
from trellis.artifacts.content import ArtifactDraft, ArtifactType, JobType
from trellis.artifacts.registry import ArtifactCollector, ArtifactRegistry, StagedArtifact
from trellis.artifacts.rows import journal_entry, project_id
from trellis.documents.audit_chain import AuditSealer
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.jobs import (
    Actor,
    Advance,
    Claim,
    ClaimId,
    Epoch,
    JobId,
    Lease,
    LeaseLost,
    Move,
    Moved,
    NewJob,
    RequestId,
    StepApplied,
    Turn,
    TypeClaim,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, SweepOptions
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.runs.finalization import is_recorded
from trellis.runs.projector import Projector
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore
from trellis.testing import FakeClock

BACKEND = Actor(role=Role.NLM_BACKEND, name="nlm@test")
ORCHESTRATOR = Actor(role=Role.ORCHESTRATOR, name="orchestrator@test")
OPERATOR = Actor(role=Role.CONTROL_PLANE, name="operator@test")
SWEEPER = Actor(role=Role.SWEEPER, name="sweeper@test")
SLUG = "archivist-violin"
RUN_ID = "run_2026-02-24_080000_abc123"
PROJECT = "garden"
DAY_S = 24 * 3600.0

CONTENTS: dict[JobType, tuple[ArtifactType, dict[str, Any]]] = {
    JobType.RESEARCH: (
        ArtifactType.RESEARCH_BRIEF,
        {
            "title": "Research Brief: смичок",
            "summary": "A bow is strung with horsehair.",
            "sections": [{"heading": "Hair", "body": "Horsehair, rehaired in March.", "sources": ["sources/bows.md"]}],
            "conclusions": ["Rehair it each spring."],
            "open_questions": ["Who does it?"],
        },
    ),
    JobType.BRIEF: (
        ArtifactType.BRIEF,
        {"title": "Bows", "body": "A bow is strung.", "entity_map": {"bow": "Bow"}, "word_count": 4},
    ),
    JobType.PROPOSAL_PREPROCESS: (
        ArtifactType.PREPROCESSED_PROPOSAL,
        {
            "original": {"target": "bow"},
            "enriched": {"target": "bow", "tags": ["bow"]},
            "issues": [{"field": "target", "severity": "warning", "message": "It does not resolve."}],
            "entity_matches": [{"text": "bow", "entity_id": "bow", "confidence": 0.91}],
        },
    ),
}
SOURCES = [{"ref": "sources/bows.md", "excerpt": "A bow is strung with horsehair."}]


def draft(job_type: JobType = JobType.RESEARCH, **changed: Any) -> ArtifactDraft:
    """An artifact as the backend makes it; `changed` are fields of its content."""
    type_, content = CONTENTS[job_type]
    return ArtifactDraft.model_validate(
        {"type": type_, "entity_refs": ["bow"], "tags": ["test"], "content": content | changed, "sources": SOURCES}
    )


def queue_job(job_id: str, job_type: JobType = JobType.RESEARCH, **changed: Any) -> NewJob:
    """A job as the gateway submits it."""
    asked = {"run_id": RUN_ID, "job_type": job_type, "agent_slug": SLUG, "payload": {}, "entity_refs": ["bow"]}
    return NewJob(
        job_id=JobId(job_id),
        type=job_type.value,
        lifecycle=QUEUE_JOB.name,
        payload=json.dumps(asked | changed).encode(),
        max_attempts=3,
    )


async def call_nlm(ledger: Ledger, new: NewJob) -> Lease:
    """Submit a queue job and take it to where it waits for its artifact."""
    await ledger.submit(ORCHESTRATOR, [new])
    queued = await ledger.move(
        ORCHESTRATOR, Move(job_id=new.job_id, target="QUEUED", request_id=RequestId(f"queue {new.job_id}"))
    )
    assert isinstance(queued, Moved), queued
    return await call_again(ledger, new.job_id, new.type)


async def call_again(ledger: Ledger, job_id: JobId, type_: str) -> Lease:
    """Claim a queued job and take it to where it waits for its artifact."""
    claim = Claim(claim_id=ClaimId(new_id()), types=(TypeClaim(type=type_),), lifecycle=QUEUE_JOB.name)
    (claimed,) = (await ledger.turn(Turn(actor=ORCHESTRATOR, claim=claim))).claimed
    assert claimed.lease.job_id == job_id
    assert await advance(ledger, claimed.lease, "CONTEXT_ASSEMBLY", "snapshot_ready")
    return claimed.lease


async def advance(ledger: Ledger, lease: Lease, source: str, trigger: str, **options: Any) -> bool:
    """One step of the holder; whether it was made."""
    step = Advance(lease, source, trigger, **options)
    (outcome,) = (await ledger.turn(Turn(actor=ORCHESTRATOR, advances=(step,)))).outcomes
    assert isinstance(outcome, StepApplied | LeaseLost)
    return isinstance(outcome, StepApplied)


async def complete(ledger: Ledger, artifacts: ArtifactRegistry, lease: Lease, artifact_id: JobId) -> bool:
    """What the orchestration layer does with a staged artifact: keep its bytes, and complete the job with it; False without bytes."""
    body = await artifacts.staged_bytes(artifact_id)
    if body is None:
        return False
    await advance(ledger, lease, "NOTEBOOKLM_CALL", "response_received")
    await ledger.journal(lease, journal_entry(artifact_id), body)
    data = json.dumps({"artifact_id": artifact_id}).encode()
    return await advance(ledger, lease, "ARTIFACT_WRITE", "complete", finalizes=artifact_id, data=data, result=data)


@dataclass(kw_only=True)
class Desk:
    """What a test works with."""

    ledger: Ledger
    objects: ObjectStore
    clock: FakeClock
    keep_days: int = 90

    @property
    def artifacts(self) -> ArtifactRegistry:
        return ArtifactRegistry(
            ledger=self.ledger,
            objects=self.objects,
            cid=project_id(PROJECT),
            new_id=new_id,
            keep_days=self.keep_days,
        )

    def collector(self, batch: int = 100) -> ArtifactCollector:
        return ArtifactCollector(artifacts=self.artifacts, is_recorded=partial(is_recorded, self.objects), batch=batch)

    def projector(self, *, seals: bool = False) -> Projector:
        actor = Actor(role=Role.PROJECTOR, name=f"projector-{new_id()}@test")
        sealer = AuditSealer(ledger=self.ledger, actor=actor, objects=self.objects, clock=self.clock)
        return Projector(
            ledger=self.ledger,
            actor=actor,
            publisher=DocumentPublisher(self.objects),
            sealer=sealer if seals else None,
            clock=self.clock,
        )

    async def waiting(self, job_type: JobType = JobType.RESEARCH) -> Lease:
        """A job that waits for its artifact."""
        return await call_nlm(self.ledger, queue_job(new_id(), job_type))

    async def job(self, job_id: JobId) -> Job:
        found = await self.ledger.job(job_id)
        assert found is not None
        return found

    async def stage(
        self, lease: Lease, made: ArtifactDraft | None = None, epoch: Epoch | None = None
    ) -> StagedArtifact:
        job = await self.job(lease.job_id)
        return await self.artifacts.stage(
            BACKEND, made or draft(JobType(job.type)), job=job, epoch=epoch or lease.epoch
        )

    async def finalized(
        self, job_type: JobType = JobType.RESEARCH, made: ArtifactDraft | None = None
    ) -> StagedArtifact:
        """An artifact that is final and not published yet."""
        lease = await self.waiting(job_type)
        staged = await self.stage(lease, made or draft(job_type))
        assert await complete(self.ledger, self.artifacts, lease, staged.artifact_id)
        return staged

    async def retried(self, lease: Lease) -> Lease:
        """The next attempt of a job, with the next epoch, where it waits for its artifact again."""
        job = await self.job(lease.job_id)
        assert await advance(self.ledger, lease, job.state, "retry", delay_s=15.0)
        self.clock.advance(16.0)
        await self.sweep()
        return await call_again(self.ledger, lease.job_id, job.type)

    async def sweep(self) -> None:
        await self.ledger.sweep(SWEEPER, SweepOptions(elect=False))

    async def publish(self, *, seals: bool = False) -> None:
        """Publish everything, and let the place go."""
        projector = self.projector(seals=seals)
        while True:
            report = await projector.run_once()
            assert report.following
            if not report.events:
                break
        await projector.release()

    async def keys(self, prefix: str = "projects/") -> list[str]:
        return [info.key for info in (await self.objects.list(prefix)).items]

    async def body(self, key: str) -> bytes | None:
        found = await self.objects.get(key)
        return None if found is None else found.body


class Counted:
    """The same ledger or store; how often each of its methods was asked for."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.calls = inner, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._inner, name)


@asynccontextmanager
async def desk_in(
    folder: Path, objects_url: str | None = None, *, ledger_url: str | None = None, **options: Any
) -> AsyncGenerator[Desk]:
    """Everything open; what is left at the end verifies. An SQLite ledger has the desk's time, PostgreSQL its own."""
    clock = FakeClock()
    ledger = await open_ledger(ledger_url or f"sqlite:///{folder / 'ledger.db'}", clock=clock)
    objects = await open_objects(objects_url or (folder / "objects").as_uri(), **options)
    desk = Desk(ledger=ledger, objects=objects, clock=clock)
    yield desk
    report = await verify(desk.ledger)
    assert report.ok, "\n".join(map(str, report.violations[:20]))
    await desk.ledger.close()
    await objects.close()
