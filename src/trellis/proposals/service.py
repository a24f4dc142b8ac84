"""Proposals from outside a run's steps: over HTTP, and from the inbox (D22, D25, D51, AUTH-6).

The usual rules apply. The agent's file must list the action. A memory update of normal priority is approved
automatically; every other proposal waits for a person. Only the apply engine changes anything. A proposal equal to one
that waits is refused. One equal to a rejected proposal is accepted, because a caller asks for it explicitly. Ids are
random; a repeated idempotency key returns the first proposal.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trellis.agents import sources
from trellis.agents.catalog import AgentMissing, Catalog
from trellis.agents.definition import AgentDefinition, AgentMalformed
from trellis.agents.errors import AgentNotFound, DefinitionMalformed
from trellis.documents import ids
from trellis.documents.errors import (
    DuplicateProposal,
    OutputRefused,
    ProposalConflict,
    RunNotFound,
    RunOfAnother,
    TargetRefused,
)
from trellis.documents.run_documents import RunRequest
from trellis.engine.clock import Clock
from trellis.engine.errors import IdempotencyMismatch, QueueFull
from trellis.engine.jobs import Actor, JobId, Mismatch, NewJob, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, IdempotencyKey
from trellis.proposals import proposal as proposals
from trellis.proposals.apply import APPLYING, FAILED, ApplyEngine, apply_until_settled, update_of
from trellis.proposals.proposal import ProposalContent, ProposalSource
from trellis.storage.objects.canonical_json import sha256
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import ObjectStore

PATIENCE_S = 5.0
"""How long a caller waits for an automatically approved memory update. After that the answer is `pending`."""
NO_RUN = "RUN"
"""Stands for the run in the name of a run's note, for a proposal that names no run and so may write none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposalOffer:
    """A request to create a proposal: its content, source, priority and idempotency key."""

    agent_slug: str
    draft: ProposalContent
    source: ProposalSource
    priority: str = "normal"
    key: IdempotencyKey | None = None
    correlation_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedProposal:
    """The proposal, why it failed if it did, and whether this request created it."""

    id: JobId
    status: str
    created: bool
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProposalService:
    """Creates proposals in the gateway's name."""

    ledger: Ledger
    gateway: Actor
    objects: ObjectStore
    catalog: Catalog
    apply_engine: ApplyEngine
    clock: Clock
    random_text: Callable[[], str]

    async def make(self, offer: ProposalOffer) -> OfferedProposal:
        """Store the proposal, and wait for it to be applied if it needs no person.

        Raises AgentNotFound, OutputRefused, UpdatesRefused, IdempotencyMismatch, and DuplicateProposal while an equal
        proposal waits.
        """
        await self.check(offer)
        proposal = await self._store(offer)
        return await self._offered(proposal.job_id, created=proposal.created)

    async def make_first(self, offer: ProposalOffer, proposal: JobId) -> OfferedProposal:
        """Like `make`, under the given id.

        The id is the idempotency key: a repeated call returns the first proposal.
        """
        existing = await self.ledger.job(proposal)
        if existing is not None and existing.parent_id != offer.source.inbox_entry_id:
            raise ProposalConflict(proposal=proposal)
        if existing is not None:  # even if it could not be proposed any more
            return await self.again(proposal)
        await self.check(offer)
        answer = await self._submit(offer, proposal, id_is_given=True)
        return await self._offered(proposal, created=answer.created)

    async def again(self, proposal: JobId) -> OfferedProposal:
        """The answer to a repeated request; raises ProposalNotFound."""
        return await self._offered(proposal, created=False)

    async def check(self, offer: ProposalOffer) -> None:
        """Raise what `make` would raise if this cannot be proposed now.

        Updates that the memory cannot take are refused with UpdatesRefused, before a person is asked about them.
        """
        definition = await self.agent(offer.agent_slug)
        if offer.draft.action not in {output.value for output in definition.safe_outputs}:
            raise OutputRefused(slug=offer.agent_slug, action=offer.draft.action)
        if offer.draft.action != proposals.MEMORY_UPDATE:
            proposals.checked_target(offer.draft.action, offer.draft.target)
        if offer.source.run_id is not None:
            await self._check_run(offer.agent_slug, offer.source.run_id)
        if offer.draft.action == proposals.MEMORY_UPDATE:
            await self._check_updates(offer)

    async def agent(self, slug: str) -> AgentDefinition:
        """The agent; raises SlugInvalid, AgentNotFound, DefinitionMalformed."""
        definition = await self.catalog.load(slug)
        match definition:
            case AgentMissing():
                raise AgentNotFound(slug=slug)
            case AgentMalformed():
                raise DefinitionMalformed(problems=str(definition))
            case _:
                return definition

    async def about_file(self, slug: str, action: str, target: str, content: Mapping[str, Any]) -> ProposalContent:
        """Proposal content for a file of the agent as it is now.

        Raises TargetRefused if the change does not fit the file.
        """
        change = proposals.file_change(slug, {"action": action, "target": target, "content": content})
        there = await self.objects.get(object_key("agents", slug, *target.split("/")))
        needs_text = change.kind != "create" or action in sources.ANNOTATION_KINDS
        if action != proposals.LOGIC_UPDATE and (there is not None) is not needs_text:
            detail = "there is no such file" if there is None else "the file exists; use append or replace"
            raise TargetRefused(action=f"{action} ({change.kind})", target=target, detail=detail)
        known = None if there is None else sha256(there.body)
        return ProposalContent(action=action, target=target, content=content, target_hash=known)

    async def refuse_duplicate(self, offer: ProposalOffer) -> None:
        """Raise DuplicateProposal if an equal proposal waits."""
        body = json.loads(self._body(offer, JobId("")))
        equal = await proposals.find_equal(self.ledger, body, own=offer.source.inbox_entry_id, rejected_too=False)
        if equal is not None:
            raise DuplicateProposal(proposal=equal.id, status=equal.status)

    async def _check_run(self, slug: str, run_id: str) -> None:
        ids.run_date(run_id)
        job = await self.ledger.job(JobId(run_id))
        if job is None or job.payload is None:
            raise RunNotFound(run_id=run_id)
        agent = RunRequest.read(job.payload).agent_slug
        if agent != slug:
            raise RunOfAnother(run_id=run_id, found=agent, slug=slug)

    async def _check_updates(self, offer: ProposalOffer) -> None:
        updates = [update_of(one) for one in offer.draft.content["updates"]]
        memory, now = self.apply_engine.memory, await self.ledger.now()
        run_id = offer.source.run_id or NO_RUN
        await asyncio.to_thread(memory.preview, offer.agent_slug, updates, run_id=run_id, at=now)

    async def _store(self, offer: ProposalOffer) -> Submitted:
        proposal = ids.make_proposal_id(await self.ledger.now(), self.random_text())
        run = None if offer.source.run_id is None else await self.ledger.job(JobId(offer.source.run_id))
        if run is not None:  # a run's proposals carry the run's correlation id
            offer = replace(offer, correlation_id=run.correlation_id)
        return await self._submit(offer, proposal)

    async def _submit(self, offer: ProposalOffer, proposal: JobId, *, id_is_given: bool = False) -> Submitted:
        """Store the proposal unless an equal one waits. Of concurrent equal ones the ledger accepts one.

        Raises DuplicateProposal, IdempotencyMismatch.
        """
        for _ in range(proposals.STORE_TRIES_MAX):
            try:
                await self.refuse_duplicate(offer)
                (answer,) = await self.ledger.submit(self.gateway, [self._job(offer, proposal, given=id_is_given)])
            except DuplicateProposal:
                earlier = await self._earlier(offer)  # the same request, stored just before
                if earlier is None:
                    raise
                return earlier
            except QueueFull:  # an equal one was stored in between
                continue
            if isinstance(answer, Mismatch):
                raise IdempotencyMismatch(key=answer.key, job_id=answer.job_id)
            return answer
        raise DuplicateProposal(proposal=proposal, status="pending")

    async def _earlier(self, offer: ProposalOffer) -> Submitted | None:
        """The proposal that the same request created before; None if there is none. Raises IdempotencyMismatch."""
        key = offer.key
        earlier = (
            None if key is None else await self.ledger.find_by_idempotency_key(key.scope, key.key, key.fingerprint)
        )
        if isinstance(earlier, Mismatch):
            raise IdempotencyMismatch(key=earlier.key, job_id=earlier.job_id)
        return earlier

    def _job(self, offer: ProposalOffer, proposal: JobId, *, given: bool) -> NewJob:
        job = proposals.as_job(
            proposal,
            self._body(offer, proposal),
            parent_id=offer.source.run_id or offer.source.inbox_entry_id,
            correlation_id=offer.correlation_id or offer.source.run_id,
        )
        if offer.key is None:
            return replace(job, id_is_given=given)
        key, scope, fingerprint = offer.key.key, offer.key.scope, offer.key.fingerprint
        return replace(job, id_is_given=given, idempotency_key=key, idempotency_scope=scope, fingerprint=fingerprint)

    def _body(self, offer: ProposalOffer, proposal: JobId) -> bytes:
        return proposals.body_of(proposal, offer.agent_slug, offer.source, offer.draft, priority=offer.priority)

    async def _offered(self, proposal: JobId, *, created: bool) -> OfferedProposal:
        """The proposal after the first try to apply it, if it needs no person. Repeated calls return the same."""
        status, error = await self._outcome(proposal)
        return OfferedProposal(id=proposal, status=status, error=error, created=created)

    async def _outcome(self, proposal: JobId) -> tuple[str, str | None]:
        """`auto_applied`, `pending`, or `failed` and why if it was approved automatically and could not be applied."""
        body: dict[str, Any] = json.loads((await proposals.get_proposal_job(self.ledger, proposal)).payload or b"{}")
        if not proposals.may_auto_approve(body):
            return "pending", None
        await proposals.auto_approve(self.ledger, self.gateway, proposal, body)
        await apply_until_settled(self.ledger, self.apply_engine, self.clock, proposal, PATIENCE_S)
        return first_apply_outcome(await self.ledger.events(proposal))


def first_apply_outcome(events: Sequence[Event]) -> tuple[str, str | None]:
    """The outcome of the first try to apply an automatically approved proposal, and the error if it failed."""
    tries = [event for event in events if event.source == APPLYING and event.data is not None]
    if not tries or all(event.target != "auto_approved" for event in events):
        return "pending", None
    if tries[0].target != FAILED:
        return "auto_applied", None
    return FAILED, json.loads(tries[0].data or b"{}").get("error")
