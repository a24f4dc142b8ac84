"""Proposals: their content, the decisions on them, and what they may change."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

from trellis.agents.sources import CHANGEABLE_EXPECTED, is_changeable
from trellis.documents import ids
from trellis.documents.errors import DuplicateProposal, NoteTooShort, ProposalConflict, ProposalNotFound, TargetRefused
from trellis.documents.run_documents import Publication
from trellis.engine import tracing
from trellis.engine.errors import NotAllowed, QueueFull
from trellis.engine.event_data import data_of
from trellis.engine.jobs import Actor, JobId, Mismatch, Move, Moved, NewJob, NotMoved, RequestId, RequestKey
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job, JobFilter
from trellis.lifecycles import Role
from trellis.lifecycles.proposal import PROPOSAL
from trellis.storage.memory.updates import Operation
from trellis.storage.objects.canonical_json import encode, timestamp
from trellis.storage.objects.keys import object_key

# Proposals and the decisions on them (D21, D22, PIPE-7, AUTH-6).
#
# A proposal is a job of lifecycle `proposal`. Its body is the job's payload and never changes; its state follows from
# its events. Whether a person must review it follows from its action and priority, never from text that a model wrote.
#
# A person is not asked twice about the same change. Equal proposals share a concurrency key behind which only one may
# wait, so the ledger accepts one of them. This holds for runs, HTTP and the inbox, also for concurrent requests. A run
# does not propose a rejected change again until the sources it rests on have changed.

TYPE = "proposal"
MEMORY_UPDATE = "memory-update"
LOGIC_UPDATE = "logic-update"
NEVER_AUTOMATIC = frozenset({LOGIC_UPDATE, "logic-rollback"})
NOTE_CHARS_MIN = 10
NOTE_CHARS_MAX = 2_000
UNDECIDED = frozenset({"pending", "approved", "auto_approved", "applying", "failed"})
"""States of proposals that a person or the apply engine still has to handle."""
REJECTED = "rejected"
EQUALS_MAX = 20
"""Number of earlier equal proposals that are checked, newest first."""
STORE_TRIES_MAX = 5
"""Tries to store a proposal while equal ones are stored and decided concurrently."""
TTL_S = next(state.timer_s for state in PROPOSAL.states if state.name == "pending") or 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposalContent:
    """The content of a proposal.

    `content` is the agent's own text; `action` was checked against the agent's safe outputs.
    """

    action: str
    target: str
    content: Mapping[str, Any]
    target_hash: str | None = None
    """The sha256 of the target as the agent saw it; None for a new file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposalSource:
    """Where a proposal comes from: an agent's run, an inbox entry or a caller."""

    type: str
    identity: str
    run_id: str | None
    inbox_entry_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form in a proposal's body. `inbox_entry_id` is left out if there is none."""
        source: dict[str, Any] = {"type": self.type, "identity": self.identity, "run_id": self.run_id}
        return source if self.inbox_entry_id is None else {**source, "inbox_entry_id": self.inbox_entry_id}


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The body of one proposal, with its id."""

    id: JobId
    run_id: str
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualProposal:
    """An existing proposal for the same change, because of which a new one is not created."""

    id: JobId
    status: str


def grounds_of(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The reasons of a proposal, each with its citations and flags.

    Whoever may propose may write anything into the content: what is no object is left out.
    """
    several: Any = content.get("grounds")
    listed = cast("list[Any]", several) if isinstance(several, list) and several else [content]
    return [cast("Mapping[str, Any]", one) for one in listed if isinstance(one, Mapping)]


def quotations_of(ground: Mapping[str, Any], field: str) -> list[Mapping[str, str]]:
    """The quotations in a field of a proposal's reasons, without what is none."""
    listed: Any = ground.get(field)
    quotations = cast("list[Any]", listed) if isinstance(listed, list) else []
    return [
        cast("Mapping[str, str]", one)
        for one in quotations
        if isinstance(one, Mapping)
        and isinstance(cast("Any", one).get("ref"), str)
        and isinstance(cast("Any", one).get("excerpt"), str)
    ]


def make_proposal(
    run_id: str,
    agent_slug: str,
    ordinal: int,
    draft: ProposalContent,
    *,
    priority: str = "normal",
    sources: Mapping[str, str] | None = None,
) -> Proposal:
    """The proposal for a draft. The same draft in the same run always gives the same proposal.

    `sources` are the sources that the run read, with their sha256.
    """
    content = json.dumps(draft.content, ensure_ascii=False, sort_keys=True).encode()
    proposal = ids.proposal_id(run_id, ordinal, draft.action, draft.target, content)
    source = ProposalSource(type="agent", identity=f"agent:{agent_slug}", run_id=run_id)
    body = body_of(proposal, agent_slug, source, draft, priority=priority, sources=sources)
    return Proposal(id=proposal, run_id=run_id, body=body)


def body_of(
    proposal: JobId,
    agent_slug: str,
    source: ProposalSource,
    draft: ProposalContent,
    *,
    priority: str,
    sources: Mapping[str, str] | None = None,
) -> bytes:
    """The body of a proposal. Whether a person must review it follows from its action and priority."""
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
    return encode(body if sources is None else {**body, "sources_read": dict(sources)})


def may_auto_approve(body: Mapping[str, Any]) -> bool:
    """Whether the proposal needs no person: only memory updates of normal priority."""
    return body["action"] == MEMORY_UPDATE and body["priority"] == "normal" and not body["requiresHumanReview"]


def version_needed(operations: Iterable[str], *, priority: str, seen: int) -> int | None:
    """The version that a memory must have for an update made when it was at version `seen`; None for any.

    A text that replaces another was written for one version, and a person decides about the change of one version.
    Lines that approve themselves fit every version, as does the end of a loop: what somebody else changed meanwhile, in
    whatever file of the memory, is no reason to lose them.
    """
    return seen if priority != "normal" or Operation.REPLACE in set(operations) else None


# --- equal proposals -------------------------------------------------------------------------------------------------


def duplicate_digest(body: Mapping[str, Any]) -> str:
    """Identifies a change of one version of a target: equal for proposals of an agent that would do the same.

    Reasons and wording do not matter. A proposal for another version of the target is a different one: the earlier one
    can no longer be applied.
    """
    content: Mapping[str, Any] = body["content"]
    does = content.get("change") or content.get("updates") or content
    seen = [body["target_hash"], content.get("expected_version")]
    change = json.dumps(
        [body["agent_slug"], body["action"], body["target"], does, seen],
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    )
    return f"proposal:{hashlib.sha256(change.encode('utf-8', 'surrogatepass')).hexdigest()}"


async def find_equal(
    ledger: Ledger, body: Mapping[str, Any], *, own: str | None, rejected_too: bool
) -> EqualProposal | None:
    """The equal proposal that prevents this one: one that is undecided or, with `rejected_too`, was rejected.

    `own` is the id of the proposal itself, or of its parent. If one of the equal proposals has it, nothing is
    prevented.
    """
    if may_auto_approve(body):  # it needs no review
        return None
    where = JobFilter(lifecycle=PROPOSAL.name, concurrency_key=duplicate_digest(body))
    equals = (await ledger.jobs(where, limit=EQUALS_MAX)).jobs
    if any(own is not None and own in {job.job_id, job.parent_id} for job in equals):
        return None
    for job in equals:
        if job.state in UNDECIDED or (
            rejected_too and job.state == REJECTED and await _still_rejected(ledger, job, body)
        ):
            return EqualProposal(id=job.job_id, status=job.state)
    return None


async def find_applied_equal(ledger: Ledger, body: Mapping[str, Any]) -> EqualProposal:
    """The applied proposal that made this change, of whatever version of the target.

    Its id is empty if the ledger knows none: it looks for the one that created the file, then at the newest applied
    proposals.
    """
    created = JobFilter(
        lifecycle=PROPOSAL.name, state="applied", concurrency_key=duplicate_digest({**body, "target_hash": None})
    )
    equal = [job.job_id for job in (await ledger.jobs(created, limit=1)).jobs]
    if not equal:
        where = JobFilter(lifecycle=PROPOSAL.name, state="applied")
        newest = [job.job_id for job in (await ledger.jobs(where, limit=EQUALS_MAX)).jobs]
        payloads, change = await ledger.payloads(newest), _change_digest(body)
        equal = [one for one in newest if one in payloads and _change_digest(json.loads(payloads[one])) == change]
    return EqualProposal(id=equal[0] if equal else JobId(""), status="applied")


def _change_digest(body: Mapping[str, Any]) -> str:
    """Like `duplicate_digest`, and the same for every version of the target."""
    return duplicate_digest({**body, "target_hash": None, "content": {**body["content"], "expected_version": None}})


async def _still_rejected(ledger: Ledger, rejected: Job, body: Mapping[str, Any]) -> bool:
    """Whether this proposal rests on the same sources as the rejected one."""
    whole = await ledger.job(rejected.job_id)
    before: dict[str, Any] = json.loads(whole.payload) if whole is not None and whole.payload is not None else {}
    return bool(before) and not sources_changed(before, body)


def sources_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a source cited by one of two equal proposals has changed, is new or is gone.

    Without citations, any source.

    A proposal that was not made by a run names no sources: then nothing counts as changed.
    """
    seen, sees = before.get("sources_read"), now.get("sources_read")
    if seen is None or sees is None:
        return False
    cited = _cited(before) | _cited(now) or {*seen, *sees}
    return any(seen.get(ref) != sees.get(ref) for ref in cited)


def _cited(body: Mapping[str, Any]) -> set[str]:
    content: Mapping[str, Any] = body["content"]
    grounds: Sequence[Mapping[str, Any]] = content.get("grounds") or [content]
    return {citation["ref"] for ground in grounds for citation in ground.get("citations") or ()}


def as_job(proposal: JobId, body: bytes, *, parent_id: str | None, correlation_id: str | None) -> NewJob:
    """The proposal as a job. Submitting it raises QueueFull if an equal proposal waits for a person."""
    fields: dict[str, Any] = json.loads(body)
    return NewJob(
        job_id=proposal,
        type=TYPE,
        lifecycle=PROPOSAL.name,
        payload=body,
        # Finds equal proposals, and makes them be applied one after the other.
        concurrency_key=duplicate_digest(fields),
        waiting_max=None if may_auto_approve(fields) else 1,
        parent_id=None if parent_id is None else JobId(parent_id),
        correlation_id=correlation_id,
        trace=tracing.here(),
    )


async def store_proposals(
    ledger: Ledger, actor: Actor, proposals: Sequence[Proposal], *, correlation_id: str | None = None
) -> list[JobId | EqualProposal]:
    """Store a run's proposals as pending, all or none. Returns for each its id, or the equal proposal that replaces it.

    Proposals that are already stored stay unchanged. `correlation_id` is the run's; by default the run's id.
    """
    jobs = {proposal.id: _run_job(proposal, correlation_id) for proposal in proposals}
    for _ in range(STORE_TRIES_MAX):
        answers = await _without_equals(ledger, proposals)
        try:
            await _submit(ledger, actor, [jobs[answer] for answer in answers if isinstance(answer, str)])
        except QueueFull:  # an equal one was stored in between
            continue
        return answers
    raise DuplicateProposal(proposal=proposals[0].id, status="pending")


async def _without_equals(ledger: Ledger, proposals: Sequence[Proposal]) -> list[JobId | EqualProposal]:
    """For each proposal its id, or the equal one that replaces it: in the ledger, or an earlier one of these."""
    answers: list[JobId | EqualProposal] = []
    first: dict[str, EqualProposal] = {}
    for proposal in proposals:
        body = json.loads(proposal.body)
        change = duplicate_digest(body)
        equal = first.get(change) or await find_equal(ledger, body, own=proposal.id, rejected_too=True)
        answers.append(equal or proposal.id)
        if not may_auto_approve(body):
            first.setdefault(change, equal or EqualProposal(id=proposal.id, status="pending"))
    return answers


def _run_job(proposal: Proposal, correlation_id: str | None) -> NewJob:
    job = as_job(
        proposal.id, proposal.body, parent_id=proposal.run_id, correlation_id=correlation_id or proposal.run_id
    )
    return replace(job, id_is_given=True, fingerprint=hashlib.sha256(proposal.body).digest())


async def _submit(ledger: Ledger, actor: Actor, jobs: Sequence[NewJob]) -> None:
    for answer in await ledger.submit(actor, jobs) if jobs else []:
        if isinstance(answer, Mismatch):
            raise ProposalConflict(proposal=answer.job_id)


# --- decisions -------------------------------------------------------------------------------------------------------


async def auto_approve(ledger: Ledger, actor: Actor, proposal: JobId, body: Mapping[str, Any]) -> bool:
    """Approve a proposal that needs no person.

    Returns False if it needs one, or if another process changed its state first.
    """
    if not may_auto_approve(body):
        return False
    move = Move(job_id=proposal, target="auto_approved", request_id=RequestId(f"auto:{proposal}"))
    return isinstance(await ledger.move(actor, move), Moved)


async def decide_proposal(
    ledger: Ledger,
    actor: Actor,
    proposal: JobId,
    *,
    approve: bool,
    note: str | None,
    request_id: RequestId,
    version: int | None = None,
    key: RequestKey | None = None,
) -> Moved | NotMoved:
    """Record a person's decision, on this version if one is given.

    A rejection needs a note. Repeated decisions return the first answer.
    """
    if actor.role is not Role.OWNER:
        raise NotAllowed(role=actor.role.value, action="decide about a proposal", reason="a person does that")
    note = note.strip() if note else None
    if not approve and (note is None or len(note) < NOTE_CHARS_MIN):
        raise NoteTooShort(least=NOTE_CHARS_MIN)
    await get_proposal_job(ledger, proposal)
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
            key=key,
        ),
    )


async def get_proposal_job(ledger: Ledger, proposal: str) -> Job:
    """The proposal's job; raises ProposalNotFound."""
    job = await ledger.job(JobId(proposal))
    if job is None or job.lifecycle != PROPOSAL.name or job.payload is None:
        raise ProposalNotFound(proposal=proposal)
    return job


def document(body: bytes, events: Sequence[Event]) -> bytes:
    """The published proposal document after the last of these events."""
    fields, first, last = json.loads(body), events[0], events[-1]
    return encode(
        {
            "id": fields["id"],
            "status": last.target,
            "created_at": timestamp(first.ts),
            "updated_at": timestamp(last.ts),
            "expires_at": timestamp(first.ts + timedelta(seconds=TTL_S)),
            "agent_slug": fields["agent_slug"],
            "source": fields["source"],
            "action": fields["action"],
            "target": fields["target"],
            "content": fields["content"],
            "target_hash": fields["target_hash"],
            "priority": fields["priority"],
            "requiresHumanReview": fields["requiresHumanReview"],
            "approval": _approval(events),
            "apply_result": _applied(events),
            "version": last.version,
        }
    )


def publication(body: bytes, events: Sequence[Event]) -> Publication:
    """The document to publish for the last of these events."""
    fields = json.loads(body)
    key = ids.proposal_key(fields["agent_slug"], fields["id"])
    return Publication(key, document(body, events), events[-1].version)


def _approval(events: Sequence[Event]) -> dict[str, Any] | None:
    decisions = [event for event in events if event.target in {"approved", "auto_approved", "rejected"}]
    if not decisions:
        return None
    last = decisions[-1]
    by = "auto" if last.target == "auto_approved" else last.actor
    return {"decided_by": by, "decided_at": timestamp(last.ts), "decision_note": data_of(last).get("note")}


def _applied(events: Sequence[Event]) -> dict[str, Any] | None:
    tries = [event for event in events if event.target in {"applied", "failed"}]
    if not tries:
        return None
    data = data_of(tries[-1])
    return {name: data.get(name) for name in ("git_commit", "object_key", "error")}


# What a proposal may change, and how. Pure functions.
#
# A proposal changes a memory, the agent's logic, or a text in the agent's own folder. It never changes the agent's
# definition, a run, another proposal or another agent.

LOGIC_FILE = "pseudocode.md"
TEXT_BYTES_MAX = 1024 * 1024
CONTENT_ACTIONS = frozenset(
    {"propose-edit", "propose-summary", "propose-tag", "propose-artifact", "propose-note", "propose-comment"}
)
NEWLINES_MAX = 100
"""A text that ended in more newlines than this is not recognized as the beginning of an appended file."""
CHANGES = frozenset({"create", "append", "replace"})
CHANGE_EXPECTED = f"say what to do: `change` with a `type` ({', '.join(sorted(CHANGES))}) and a `text` of at most {TEXT_BYTES_MAX} bytes"
_EMPTY = hashlib.sha256().hexdigest()


@dataclass(frozen=True, slots=True)
class AgentFileChange:
    """A change of one text in an agent's folder."""

    key: str
    kind: str
    text: str


def checked_target(action: str, target: str) -> str:
    """The target, if this action may change it; raises TargetRefused."""
    if action == MEMORY_UPDATE:
        return target
    if action == LOGIC_UPDATE:
        fits, allowed = target == LOGIC_FILE, LOGIC_FILE
    else:
        fits, allowed = action in CONTENT_ACTIONS and is_changeable(target), CHANGEABLE_EXPECTED
    if not fits:
        raise TargetRefused(action=action, target=target, detail=f"it may change {allowed}")
    return target


def file_change(slug: str, body: Mapping[str, Any]) -> AgentFileChange:
    """The change that a proposal about a file asks for; raises TargetRefused."""
    target = checked_target(body["action"], body["target"])
    change: dict[str, Any] = body["content"].get("change") or {}
    kind, text = change.get("type"), change.get("text")
    if kind not in CHANGES or not isinstance(text, str) or len(text.encode()) > TEXT_BYTES_MAX:
        raise TargetRefused(action=body["action"], target=target, detail=CHANGE_EXPECTED)
    return AgentFileChange(object_key("agents", slug, *target.split("/")), kind, text)


def apply_change(change: AgentFileChange, before: bytes | None) -> bytes:
    """The file's bytes after the change."""
    if change.kind != "append" or not before:
        return _change_bytes(change)
    return before.rstrip(b"\n") + b"\n\n" + _change_bytes(change)


def is_changed(change: AgentFileChange, expected: str | None, there: bytes) -> bool:
    """Whether the file already is the result of the change.

    `expected` is the sha256 of the file that the change applies to; None for no file.
    """
    end = b"\n\n" + _change_bytes(change)
    if change.kind != "append" or expected in {None, _EMPTY}:
        return there == _change_bytes(change)
    if not there.endswith(end):
        return False
    # The text before the appended part may have ended in any number of newlines. Only the digest shows how many.
    before = hashlib.sha256(there.removesuffix(end))
    for _ in range(NEWLINES_MAX):
        if before.hexdigest() == expected:
            return True
        before.update(b"\n")
    return False


def changes_nothing(change: AgentFileChange, there: str | None, text: str) -> bool:
    """Whether the file already has the proposed content. `there` is its sha256 (None for no file), `text` its text."""
    if change.kind == "append":
        return has_lines(text, change.text)
    return there == hashlib.sha256(_change_bytes(change)).hexdigest()


def has_lines(text: str, block: str) -> bool:
    """Whether a text has these lines, complete and one after the other."""
    lines, there = block.replace("\r\n", "\n").strip("\n"), "\n{}\n".format(text.replace("\r\n", "\n"))
    return any(f"\n{one}\n" in there for one in (lines, lines.strip()) if one.strip())


def _change_bytes(change: AgentFileChange) -> bytes:
    return (change.text if change.text.endswith("\n") else change.text + "\n").encode()
