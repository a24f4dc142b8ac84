"""Proposals: what an agent wants changed, and what a person decided (D21, D22, PIPE-7, AUTH-6).

A proposal is a job of lifecycle `proposal`. Its body is the job's payload and never changes; everything else about it follows from
its events. What kind of proposal it is, and whether a person must look at it, is decided here from its action and by nothing that a
model wrote.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trellis.engine import tracing
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import Actor, JobId, Mismatch, Move, Moved, NewJob, NotMoved, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job
from trellis.lifecycles import Role
from trellis.lifecycles.proposal import PROPOSAL
from trellis.runs import ids
from trellis.runs.documents import Publication, encode, timestamp
from trellis.runs.errors import NoteTooShort, ProposalConflict, ProposalNotFound

TYPE = "proposal"
MEMORY_UPDATE = "memory-update"
LOGIC_UPDATE = "logic-update"
NEVER_AUTOMATIC = frozenset({LOGIC_UPDATE, "logic-rollback"})
NOTE_CHARS_MIN = 10
NOTE_CHARS_MAX = 2_000
TTL_S = next(state.timer_s for state in PROPOSAL.states if state.name == "pending") or 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """What an agent asked for. `content` is its own words; `action` was checked against the agent's safe outputs."""

    action: str
    target: str
    content: Mapping[str, Any]
    target_hash: str | None = None
    """The sha256 of the target as the agent saw it; None for what is made new."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a proposal comes from."""

    type: str
    identity: str
    run_id: str | None
    inbox_entry_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the body has it; an entry only where there is one."""
        told: dict[str, Any] = {"type": self.type, "identity": self.identity, "run_id": self.run_id}
        return told if self.inbox_entry_id is None else {**told, "inbox_entry_id": self.inbox_entry_id}


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The body of one proposal, with the id that follows from it."""

    id: JobId
    agent_slug: str
    run_id: str
    body: bytes

    @property
    def action(self) -> str:
        """What it would do."""
        return json.loads(self.body)["action"]


def make(run_id: str, agent_slug: str, ordinal: int, draft: Draft, *, priority: str = "normal") -> Proposal:
    """The proposal of a draft; the same draft of the same run is always the same proposal."""
    content = json.dumps(draft.content, ensure_ascii=False, sort_keys=True).encode()
    proposal = ids.proposal_id(run_id, ordinal, draft.action, draft.target, content)
    source = Source(type="agent", identity=f"agent:{agent_slug}", run_id=run_id)
    body = body_of(proposal, agent_slug, source, draft, priority=priority)
    return Proposal(id=proposal, agent_slug=agent_slug, run_id=run_id, body=body)


def body_of(proposal: JobId, agent_slug: str, source: Source, draft: Draft, *, priority: str) -> bytes:
    """The body under this id; whether a person must look at it follows from its action and its priority."""
    body = {
        "id": proposal,
        "agent_slug": agent_slug,
        "source": source.to_dict(),
        "action": draft.action,
        "target": draft.target,
        "content": dict(draft.content),
        "target_hash": draft.target_hash,
        "priority": priority,
        "requiresHumanReview": draft.action in NEVER_AUTOMATIC or priority != "normal",
    }
    return encode(body)


def may_approve_itself(body: Mapping[str, Any]) -> bool:
    """Memory updates at normal priority, and nothing else, need no person."""
    return body["action"] == MEMORY_UPDATE and body["priority"] == "normal" and not body["requiresHumanReview"]


async def store(
    ledger: Ledger, actor: Actor, proposals: Sequence[Proposal], *, correlation_id: str | None = None
) -> list[JobId]:
    """Put proposals into the ledger as pending, all or none; those already there stay as they are.

    `correlation_id` is that of their run; by default the run's id.
    """
    jobs = [
        NewJob(
            job_id=proposal.id,
            type=TYPE,
            lifecycle=PROPOSAL.name,
            payload=proposal.body,
            id_is_given=True,
            fingerprint=hashlib.sha256(proposal.body).digest(),
            parent_id=JobId(proposal.run_id),
            correlation_id=correlation_id or proposal.run_id,
            trace=tracing.here(),
        )
        for proposal in proposals
    ]
    for answer in await ledger.submit(actor, jobs) if jobs else []:
        if isinstance(answer, Mismatch):
            raise ProposalConflict(proposal=answer.job_id)
    return [proposal.id for proposal in proposals]


async def approve_itself(ledger: Ledger, actor: Actor, proposal: JobId, body: Mapping[str, Any]) -> bool:
    """Let a proposal through that needs no person; False when it does need one, or somebody was faster."""
    if not may_approve_itself(body):
        return False
    move = Move(job_id=proposal, target="auto_approved", request_id=RequestId(f"auto:{proposal}"))
    return isinstance(await ledger.move(actor, move), Moved)


async def decide(
    ledger: Ledger,
    actor: Actor,
    proposal: JobId,
    *,
    approve: bool,
    note: str | None,
    request_id: RequestId,
    version: int | None = None,
) -> Moved | NotMoved:
    """A person's decision, about this version if one is given. Rejecting says why. The same decision again is answered as the first."""
    if actor.role is not Role.OWNER:
        raise NotAllowed(role=actor.role.value, action="decide about a proposal", reason="a person does that")
    note = note.strip() if note else None
    if not approve and (note is None or len(note) < NOTE_CHARS_MIN):
        raise NoteTooShort(least=NOTE_CHARS_MIN)
    await found(ledger, proposal)
    data = json.dumps({"note": note[:NOTE_CHARS_MAX]}, ensure_ascii=False).encode() if note else None
    target = "approved" if approve else "rejected"
    return await ledger.move(
        actor,
        Move(
            job_id=proposal,
            target=target,
            request_id=request_id,
            version=version,
            data=data,
            cause=note and note[:200],
        ),
    )


async def found(ledger: Ledger, proposal: str) -> Job:
    """The proposal's job; raises ProposalNotFound."""
    job = await ledger.job(JobId(proposal))
    if job is None or job.lifecycle != PROPOSAL.name or job.payload is None:
        raise ProposalNotFound(proposal=proposal)
    return job


def document(body: bytes, events: Sequence[Event]) -> bytes:
    """The published proposal after the last of these events."""
    told, first, last = json.loads(body), events[0], events[-1]
    return encode(
        {
            "id": told["id"],
            "status": last.target,
            "created_at": timestamp(first.ts),
            "updated_at": timestamp(last.ts),
            "expires_at": timestamp(first.ts + timedelta(seconds=TTL_S)),
            "agent_slug": told["agent_slug"],
            "source": told["source"],
            "action": told["action"],
            "target": told["target"],
            "content": told["content"],
            "target_hash": told["target_hash"],
            "priority": told["priority"],
            "requiresHumanReview": told["requiresHumanReview"],
            "approval": _approval(events),
            "apply_result": _applied(events),
            "version": last.version,
        }
    )


def publication(body: bytes, events: Sequence[Event]) -> Publication:
    """What the last of these events publishes."""
    told = json.loads(body)
    key = ids.proposal_key(told["agent_slug"], told["id"])
    return Publication(key, document(body, events), events[-1].version)


def _approval(events: Sequence[Event]) -> dict[str, Any] | None:
    decisions = [event for event in events if event.target in {"approved", "auto_approved", "rejected"}]
    if not decisions:
        return None
    last = decisions[-1]
    by = "auto" if last.target == "auto_approved" else last.actor
    return {"decided_by": by, "decided_at": timestamp(last.ts), "decision_note": _data(last).get("note")}


def _applied(events: Sequence[Event]) -> dict[str, Any] | None:
    tries = [event for event in events if event.target in {"applied", "failed"}]
    if not tries:
        return None
    told = _data(tries[-1])
    return {name: told.get(name) for name in ("git_commit", "object_key", "error")}


def _data(event: Event) -> dict[str, Any]:
    return json.loads(event.data) if event.data is not None else {}
