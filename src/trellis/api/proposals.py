"""Proposals of agents, and jobs that the safety kernel held for a person: read them and decide about them.

A held job has the shape of a proposal, so that a person finds everything that waits in one list (D22, AUTH-6).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trellis.api.context import LIMIT_DEFAULT, ApiPart
from trellis.api.memory import READ as READ_MEMORY
from trellis.app.system import SystemClock
from trellis.bus import approvals
from trellis.documents.errors import ProposalDecided, ProposalNotFound, ProposalOutdated
from trellis.engine.errors import InvalidTransition, Refused
from trellis.engine.job_changes import refusal_facts
from trellis.engine.jobs import Actor, JobId, NotMoved
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter
from trellis.http.pages import read_pages
from trellis.http.shapes import Page, ProposalDiff, ProposalShape
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.proposal import PROPOSAL
from trellis.proposals import proposal as proposals
from trellis.proposals.apply import (
    APPLYING,
    ENDED,
    FAILED,
    Exclusions,
    apply_until_settled,
    approved_rival,
    conflict_of,
    conflicts_of,
    diff_of,
    exclusions_of,
    has_target,
    source_warnings,
)
from trellis.runs.memory_access import check_reach
from trellis.storage.objects.store import StoreUnavailable

DECIDE = "proposals.decide"
"""The rule for those who decide about proposals."""
APPLY_PATIENCE_S = 5.0
"""How long a call waits for the apply, in seconds. Shorter than the timeout of any client; clients may ask again."""
HELD_FIRST, PROPOSALS_NEXT = "held:", "proposals:"
"""Cursor prefixes: among held jobs, or at the first proposal. A cursor without a prefix is one of proposals."""
OPEN = frozenset({"approved", "auto_approved", APPLYING})
APPLICABLE = OPEN - {APPLYING} | {FAILED}
"""States of a proposal that no engine is applying, from which a person may have it applied."""


class ProposalHasOtherVersion(Refused):
    """{proposal} has version {version} and not {expected}: look at it again."""

    code = "PRECONDITION_FAILED"


class ProposalNotApproved(InvalidTransition):
    """{job_id} is {source}; only an approved proposal is applied."""


class LocalProposals(ApiPart):
    """Proposals on a ledger and its stores, with the calls of `client.proposals`."""

    async def list(
        self,
        *,
        status: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
        conflicts: bool = False,
    ) -> Page[ProposalShape]:
        """Proposals, newest first; before them held jobs. With `conflicts`, with why one can no longer be applied."""
        return await read_pages(
            lambda size, after: self.page(status=status, limit=size, cursor=after, conflicts=conflicts), limit, cursor
        )

    async def page(
        self, *, status: str | None, limit: int, cursor: str | None, conflicts: bool = False
    ) -> Page[ProposalShape]:
        """One page, which may be short although another one follows, so that reading it takes a bounded time."""
        self._context.check_read("proposals.read")
        items, after = await proposal_page(self._context.ledger, status, limit, cursor)
        if conflicts and (open_ := [one for one in items if has_target(one)]):
            instance = await self._context.instance()
            reasons = await conflicts_of(open_, objects=instance.objects, memory=instance.memory)
            items = [{**one, "conflict": reasons.get(one["id"])} for one in items]
        return Page[ProposalShape](items=[ProposalShape.model_validate(one) for one in items], next_cursor=after)

    async def get(self, proposal_id: str) -> ProposalShape:
        """One proposal, or one held job; raises ProposalNotFound."""
        self._context.check_read("proposals.read")
        return ProposalShape.model_validate(await proposal_document(self._context.ledger, proposal_id))

    async def diff(self, proposal_id: str) -> ProposalDiff:
        """What applying it would change now, as a unified diff, for those who may read the proposal.

        A change of memory shows the present memory, so it also needs the right to read that (D44). A change of logic shows
        the present logic, which is shown only to those who decide.
        """
        self._context.check_read("proposals.read")
        document = await proposal_document(self._context.ledger, proposal_id)
        if document["action"] == proposals.LOGIC_UPDATE:
            self._context.check_read(DECIDE)
        if document["action"] == proposals.MEMORY_UPDATE:
            self._context.check_read(READ_MEMORY)
            await check_reach(self._context.ledger, self._context.reader, READ_MEMORY, document["agent_slug"])
        shown, conflict, related, warnings = None, None, Exclusions(), list[str]()
        if document["status"] not in ENDED and approvals.job_id_of_inbox_id(proposal_id) is None:
            instance, now = await self._context.instance(), await self._context.now()
            shown = await diff_of(document, objects=instance.objects, memory=instance.memory, now=now)
            conflict = await conflict_of(document, objects=instance.objects, memory=instance.memory)
            related = await exclusions_of(self._context.ledger, document)
            warnings = await source_warnings(document, objects=instance.objects)
            if conflict is None and document["status"] == "pending":
                conflict = await approved_rival(self._context.ledger, document)
        return ProposalDiff(
            id=document["id"],
            version=document["version"],
            diff=shown,
            conflict=conflict,
            rules_out=list(related.rules_out),
            ruled_out_by=list(related.ruled_out_by),
            source_warnings=warnings,
        )

    async def approve(
        self,
        proposal_id: str,
        note: str | None = None,
        *,
        version: int | None = None,
        idempotency_key: str | None = None,
    ) -> ProposalShape:
        """Approve a proposal, which is then applied, or let a held job go."""
        return await self._decide(proposal_id, note, version, idempotency_key, approve=True)

    async def reject(
        self, proposal_id: str, note: str, *, version: int | None = None, idempotency_key: str | None = None
    ) -> ProposalShape:
        """Reject a proposal, or a held job, and say why."""
        return await self._decide(proposal_id, note, version, idempotency_key, approve=False)

    async def _decide(
        self, proposal_id: str, note: str | None, version: int | None, idempotency_key: str | None, *, approve: bool
    ) -> ProposalShape:
        """Raises ProposalHasOtherVersion, InvalidTransition, NotHeld, NoteTooShort.

        Raises ProposalOutdated instead of approving a pending proposal that can no longer be applied; it stays pending.
        The answer is the proposal right after the decision, also when it has been applied since.
        """
        request, held = self._context.request_of(idempotency_key), approvals.job_id_of_inbox_id(proposal_id)
        actor = self._context.permit(DECIDE if held is None else "jobs.approve")
        document, ledger = await proposal_document(self._context.ledger, proposal_id), self._context.changes
        job_id = held or JobId(document["id"])
        await request.changed_before(ledger)
        replayed = await request.moved(ledger, job_id)
        decide = approvals.decide if held is not None else proposals.decide_proposal
        stale = version is not None and document["version"] != version
        if stale and not replayed:
            raise _other_version(document, version)
        if approve and held is None and not replayed:
            await self._check_fits(document)
        answer = await decide(
            ledger,
            actor,
            job_id,
            approve=approve,
            note=note,
            request_id=request.request_id,
            version=version,
            key=request.change(job_id),
        )
        if isinstance(answer, NotMoved):
            now = await proposal_document(self._context.ledger, proposal_id)
            stale = version is not None and now["version"] != version
            raise _other_version(now, version) if stale else refused_decision(answer, actor, now)
        decided = await proposal_document(self._context.ledger, proposal_id, version=answer.version)
        request.note(replayed=replayed or answer.repeated)
        return ProposalShape.model_validate(decided)

    async def _check_fits(self, document: Mapping[str, Any]) -> None:
        """Raise ProposalOutdated if a pending proposal can no longer be applied.

        If a store does not answer, that is not known: the approval is recorded, and applying it is tried later.
        """
        if document["status"] != "pending":
            return
        instance = await self._context.instance()
        try:
            conflicts = await conflicts_of([document], objects=instance.objects, memory=instance.memory)
        except StoreUnavailable:
            conflicts = {}
        conflict = conflicts.get(document["id"]) or await approved_rival(self._context.ledger, document)
        if conflict is not None:
            raise ProposalOutdated(proposal=document["id"], conflict=conflict)

    async def apply(self, proposal_id: str, *, idempotency_key: str | None = None) -> ProposalShape:
        """Have an approved proposal applied now, or once more if it failed. Raises ProposalNotApproved.

        An approved job goes by itself. The answer is the proposal as it is now.
        """
        request = self._context.request_of(idempotency_key)
        document = await proposal_document(self._context.ledger, proposal_id)
        proposal, state, ledger = JobId(proposal_id), document["status"], self._context.changes
        if approvals.job_id_of_inbox_id(proposal_id) is not None and state == "approved":
            return ProposalShape.model_validate(document)
        actor = self._context.permit("proposals.apply")
        await request.changed_before(ledger)
        replayed = request.key is not None and await request.moved(ledger, proposal)
        engine = (await self._context.instance()).apply_engine()
        # The step with which this request begins to apply the proposal stores its key.
        if state in APPLICABLE and not replayed:
            state = await engine.apply_now(proposal, request.request_id, key=request.change(proposal))
        if state in OPEN:
            await apply_until_settled(engine.ledger, engine, SystemClock(), proposal, APPLY_PATIENCE_S)
        elif state not in {"applied", FAILED} and not replayed:
            raise ProposalNotApproved(job_id=proposal_id, source=state, target=APPLYING, actor=actor.role.value)
        now = await proposal_document(self._context.ledger, proposal_id)
        request.note(replayed=replayed)
        return ProposalShape.model_validate(now)


def _other_version(document: dict[str, Any], expected: int | None) -> ProposalHasOtherVersion:
    return ProposalHasOtherVersion(proposal=document["id"], version=document["version"], expected=expected)


def refused_decision(answer: NotMoved, actor: Actor, document: Mapping[str, Any]) -> InvalidTransition:
    """The error for a proposal whose state does not allow the decision: who decided about it, and when."""
    facts = refusal_facts(answer, actor)
    if answer.state == "pending":
        return InvalidTransition(**facts)
    approval: Mapping[str, Any] | None = document.get("approval")
    decided = f", decided by {approval['decided_by']} at {approval['decided_at']}" if approval else ""
    return ProposalDecided(**facts, decided=decided)


async def proposal_page(
    ledger: Ledger, state: str | None, limit: int, cursor: str | None
) -> tuple[list[dict[str, Any]], str | None]:
    """Held jobs, then proposals, because work waits for held jobs; and the cursor, which says which list continues."""
    items = list[dict[str, Any]]()
    if state in {None, "pending"} and (cursor is None or cursor.startswith(HELD_FIRST)):
        after = cursor.removeprefix(HELD_FIRST) if cursor else None
        held = await approvals.list_waiting(ledger, limit=limit, cursor=after)
        items = [document for job, events in held.items if (document := approvals.inbox_document(job, events))]
        cursor = None
        if held.cursor is not None:
            return items, f"{HELD_FIRST}{held.cursor}"
        if len(items) == limit:
            return items, PROPOSALS_NEXT
    where = JobFilter(lifecycle=PROPOSAL.name, state=state)
    after = None if cursor == PROPOSALS_NEXT else cursor
    jobs = await ledger.jobs(where, limit=limit - len(items), cursor=after)
    return [*items, *await _documents(ledger, [job.job_id for job in jobs.jobs])], jobs.cursor


async def _documents(ledger: Ledger, proposal_ids: Sequence[JobId]) -> list[dict[str, Any]]:
    """Several proposals as they are now, with one query. Proposals deleted meanwhile are left out."""
    contents = await ledger.contents_of(proposal_ids)
    return [json.loads(proposals.document(*contents[one])) for one in proposal_ids if one in contents]


async def proposal_document(ledger: Ledger, proposal_id: str, *, version: int | None = None) -> dict[str, Any]:
    """A proposal or a held job as it is now, or was at this version; raises ProposalNotFound."""
    if (held := approvals.job_id_of_inbox_id(proposal_id)) is not None:
        return await _held_document(ledger, held, version=version)
    job = await proposals.get_proposal_job(ledger, proposal_id)
    events = [event for event in await ledger.events(job.job_id) if version is None or event.version <= version]
    return json.loads(proposals.document(job.payload or b"", events))


async def _held_document(ledger: Ledger, job_id: JobId, *, version: int | None) -> dict[str, Any]:
    """A job that was held at least once; raises ProposalNotFound."""
    job = await ledger.job(job_id)
    events = [event for event in await ledger.events(job_id) if version is None or event.version <= version]
    is_of_bus = job is not None and job.lifecycle == BUS_JOB.name
    document = approvals.inbox_document(job, events) if job is not None and is_of_bus else None
    if document is None:
        raise ProposalNotFound(proposal=approvals.inbox_id(job_id))
    return document
