"""The reconciler of ended jobs: linked retries, cancel cascades, release of next steps, and compensations.

It follows the feed and writes to the ledger only. Each action is decided from the current state of the jobs and has an
id of its own. So after a crash the same page is handled again, and nothing happens twice. One process at a time follows
the feed; if two do for a moment, they do the same. The workflow cache is kept up to date by the feed, and cleared when
another process may have followed it meanwhile.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trellis.bus.outcomes.job_tree import (
    CANCELLED,
    DescendantJobs,
    EffectiveJob,
    JobTree,
    StepState,
    Workflow,
    WorkflowKey,
    WorkflowStep,
)
from trellis.bus.outcomes.linked_jobs import RETRY_ID, compensation_of, is_retry_due, retry_of, submit_under_free_id
from trellis.bus.outcomes.publisher import END_EVENTS, FOLLOW_DEFAULT
from trellis.bus.outcomes.workflows import WorkflowReader, gather_all
from trellis.bus.requests import COMPENSATES, JobRequest
from trellis.bus.topics import Topics
from trellis.engine.event_data import data_of
from trellis.engine.jobs import Actor, CancelMode, JobId, Move, Moved, RequestId
from trellis.engine.logs import log_of
from trellis.engine.records import Event, JobPlace
from trellis.engine.subscription import FeedReport, FeedSubscriber, SubscriptionOptions
from trellis.lifecycles import Role
from trellis.lifecycles.bus_job import BUS_JOB

SUBSCRIBER_NAME = "bus-aftermath"
CONCURRENCY = 16
"""Families handled concurrently."""
TREE_MAX = 100_000
"""Maximum number of jobs of one tree that a cancel cascade visits."""
ANCESTORS_MAX = 16
"""Maximum number of ended ancestors of a new job that are checked for a cancel."""

RECONCILED_EVENTS = END_EVENTS | {"job_accepted"}
"""Events that may have consequences: ends, and the first event of a job, which may be a step or a child."""

_log = log_of("trellis.bus.outcomes.reconciler")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeReport(FeedReport):
    """Result of one pass."""

    made: int = 0
    """Actions taken: jobs submitted, cancelled or released."""


@dataclass(kw_only=True)
class OutcomeReconciler(FeedSubscriber[SubscriptionOptions]):
    """The service. A pass reads a page of the feed, acts on it, and saves the position."""

    topics: Topics
    wake: Callable[[], None] | None = None
    """Called when a job may have become ready."""
    options: SubscriptionOptions = FOLLOW_DEFAULT
    name: str = SUBSCRIBER_NAME
    follows_as: str = SUBSCRIBER_NAME
    lifecycle: str | frozenset[str] | None = BUS_JOB.name
    types: frozenset[str] | None = RECONCILED_EVENTS
    _tree: JobTree = field(init=False)
    _workflows: WorkflowReader = field(init=False)
    _above: dict[tuple[str, str], str | None] = field(default_factory=dict[tuple[str, str], str | None])
    """Cache for one page, by parent and party of its children: the cancelled job above them.

    A cancel that comes later finds the children itself.
    """
    _learned_in: int = 0
    """The value of `begun` for which the workflow cache was filled."""
    _made: int = 0
    _had_consequences: bool = False

    def __post_init__(self) -> None:
        self._tree = JobTree(ledger=self.ledger, topics=self.topics)
        self._workflows = WorkflowReader(tree=self._tree, between=self.keep)

    async def run_once(self) -> OutcomeReport:
        self._made, self._had_consequences = 0, False
        done = await self.take(self._reconcile)
        if done.following and self._made and self.wake is not None:
            self.wake()
        return OutcomeReport(
            following=done.following,
            events=done.events,
            made=self._made,
            needed_nothing=done.events > 0 and not self._had_consequences,
        )

    # --- one page -------------------------------------------------------------------------------------------------

    async def _reconcile(self, events: Sequence[Event]) -> None:
        if self._learned_in != self.begun:
            self._tree.remembered.clear()
            self._learned_in = self.begun
        self._above.clear()
        accepted = [event for event in events if event.source is None]
        for event in accepted:
            self._tree.learn_party(event)
        payloads = await self.ledger.payloads([event.job_id for event in accepted]) if accepted else {}
        for job_id, payload in payloads.items():
            self._tree.learn(job_id, payload)
        by_family: dict[str, list[tuple[Event, JobRequest]]] = {}
        for event in events:
            request = await self._tree.request(event.job_id)
            if request is not None and _has_consequences(event, request):
                by_family.setdefault(await self._family(event, request), []).append((event, request))
            await self.keep()
        self._had_consequences = bool(by_family)
        room = asyncio.Semaphore(CONCURRENCY)
        await gather_all(self._reconcile_family(family, room) for family in by_family.values())

    async def _family(self, event: Event, request: JobRequest) -> str:
        """The group of jobs that is handled in order: the steps of one parent, and their compensations."""
        step = await self._step(request)
        return (step.step_of if step is not None else "") or request.labels.get(COMPENSATES) or event.job_id

    async def _reconcile_family(self, family: Sequence[tuple[Event, JobRequest]], room: asyncio.Semaphore) -> None:
        """Handle each event, then each affected workflow once."""
        affected: dict[WorkflowKey, set[WorkflowStep]] = {}
        async with room:
            for event, request in family:
                await self._follow_up(event, request, affected)
                await self.keep()
            for key, ended in affected.items():
                await self._reconcile_workflow(key, ended)
                await self.keep()

    async def _follow_up(
        self, event: Event, request: JobRequest, affected: dict[WorkflowKey, set[WorkflowStep]]
    ) -> None:
        key = await self._workflow_of(request)
        if event.source is None:
            if key is not None and request.is_retry:
                await self._workflows.again(key, request)
            await self._not_after_cancel(event, request)
            return
        if event.type in {"job_failed", "job_timed_out"}:
            await self._retry(event, request)
        if event.type == "job_cancelled":
            await self._cascade(event, request)
        if key is not None:
            ended = affected.setdefault(key, set())
            if COMPENSATES not in request.labels:
                first = (await self._tree.incarnations(event.job_id, request))[-1]
                ended.add(WorkflowStep(request.step_index, JobId(first)))

    async def _workflow_of(self, request: JobRequest) -> WorkflowKey | None:
        """The workflow that a job is a step of, or compensates a step of; None if there is none."""
        step = await self._step(request)
        if step is None or not step.step_of or not step.workflow_id:
            return None
        return await self._tree.key_of(step)

    async def _step(self, request: JobRequest) -> JobRequest | None:
        """The request of this job or, for a compensation, of the job that it compensates."""
        original = request.labels.get(COMPENSATES)
        return request if original is None else await self._tree.request(original)

    # --- retries --------------------------------------------------------------------------------------------------

    async def _retry(self, event: Event, request: JobRequest) -> None:
        topic = self.topics.of(request.topic)
        job, events = await self.ledger.job(event.job_id), await self.ledger.events(event.job_id)
        if job is None or not is_retry_due(job, request, events, topic):
            return
        if await self._tree.is_cancelled(request, request.step_of):
            return
        retry = await submit_under_free_id(self.ledger, self._reconciler, retry_of(job, request, event, self.topics))
        if retry is None:
            return
        name = retry.job_id
        if retry.created:
            self._made += 1
            _log.info("retried_as", job_id=event.job_id, retry=name, state=event.target)
        if topic.backoff_s:
            pause = Move(
                job_id=name, target="SCHEDULED", request_id=RequestId(f"validate:{name}"), delay_s=topic.backoff_s
            )
            await self.ledger.move(self._scheduler, pause)

    # --- cancellation ---------------------------------------------------------------------------------------------

    async def _cascade(self, event: Event, request: JobRequest) -> None:
        """Cancel everything below a cancelled job, also below earlier jobs that it retries.

        Each cancelled child cascades to its own children.
        """
        waiting = await self._tree.incarnations(event.job_id, request)
        before = set(waiting[1:])
        seen = set(waiting)
        descendants = DescendantJobs(tree=self._tree, roots=frozenset(waiting))
        while waiting and len(seen) < TREE_MAX:
            parent = waiting.pop()
            for child in await self._tree.children(parent):
                if child.job_id in seen or child.compensates is not None:
                    continue
                seen.add(child.job_id)
                descendants.add(child.job_id, parent)
                if parent in before and await self._is_retry(child.job_id):
                    continue  # another retry of the same job, which goes on
                if child.place is JobPlace.ENDED:
                    waiting.append(child.job_id)
                elif await descendants.is_whole_to(child.job_id):
                    await self._cancel(child.job_id, f"cascade:{event.job_id}", f"{event.job_id} was cancelled")
                    await self.keep()
            await self.keep()
        if waiting:
            _log.error("tree_too_large", job_id=event.job_id, looked_at=len(seen))

    async def _is_retry(self, job_id: JobId) -> bool:
        request = await self._tree.request(job_id) if RETRY_ID.search(job_id) else None
        return request is not None and request.is_retry

    async def _not_after_cancel(self, event: Event, request: JobRequest) -> None:
        """Cancel a new child of a job that is already cancelled."""
        if COMPENSATES in request.labels:
            return
        place = request.step_of, await self._tree.party(request)
        if place not in self._above:
            self._above[place] = await self._cancelled_above(request)
        cancelled = self._above[place]
        if cancelled is not None:
            await self._cancel(event.job_id, f"cascade:{cancelled}", f"{cancelled} was cancelled")

    async def _cancelled_above(self, request: JobRequest) -> str | None:
        """The nearest cancelled job whose cascade would have reached this one; None if there is none.

        That is its parent or the parent's retry, or a job above them if they ended otherwise.
        """
        for _ in range(ANCESTORS_MAX):
            if not request.step_of or COMPENSATES in request.labels:
                break
            job = await self.ledger.job(JobId(request.step_of))
            above = None if job is None else self._tree.request_in(job)
            if job is None or above is None or not await self._tree.is_linked(job, request):
                break
            last = await self._tree.effective_step(job, above, step_of=above.step_of)
            if last.job.state == CANCELLED:
                return last.job.job_id
            if last.open:
                break
            request = above
        return None

    async def _cancel(self, job_id: JobId, request_id: str, cause: str) -> bool:
        answer = await self.ledger.cancel(
            self._reconciler, job_id, CancelMode.HARD, RequestId(f"{request_id}:{job_id}"), grace_s=0.0, cause=cause
        )
        self._made += isinstance(answer, Moved) and not answer.repeated
        return isinstance(answer, Moved)

    # --- workflows ------------------------------------------------------------------------------------------------

    async def _reconcile_workflow(self, key: WorkflowKey, ended: set[WorkflowStep]) -> None:
        """Release, end or compensate steps of a workflow, now that these steps or a compensation have ended."""
        workflow = await self._workflows.workflow(key)
        await self._workflows.ended(workflow, ended)
        first = await self._workflows.first_open(workflow)
        failed = workflow.lowest_failed()
        if failed is not None and first is not None:
            await self._end_doomed(workflow, failed)
            first = await self._workflows.first_open(workflow)
        if first is None:
            if failed is not None:
                await self._undo_next(workflow)
        elif any(step.index < first.index for step in ended):
            await self._release_steps(workflow, first)

    async def _release_steps(self, workflow: Workflow, first: StepState) -> None:
        """Release the deferred steps at the lowest open index. Steps of one index run together.

        Needed only after a step with a lower index has ended: no step waits for one of the same or a higher index.
        """
        for step in workflow.at(first.index):
            effective = await self._workflows.look(workflow, step)
            if effective is not None and effective.resting:
                await self._release_step(effective)
            await self.keep()

    async def _release_step(self, step: EffectiveJob) -> None:
        """Release a step that was deferred because of its order.

        Steps that wait for a person or a time keep waiting.
        """
        last = (await self.ledger.events(step.job.job_id))[-1]
        if last.type != "job_deferred" or data_of(last).get("hold") != "order":
            return
        data = {"hold": "none", "reason": "the steps before it have ended"}
        move = Move(
            job_id=step.job.job_id,
            target="SCHEDULED",
            request_id=RequestId(f"turn:{last.id}"),
            version=last.version,
            delay_s=0.0,
            cause=data["reason"],
            data=json.dumps(data).encode(),
        )
        moved = await self.ledger.move(self._scheduler, move)
        self._made += isinstance(moved, Moved) and not moved.repeated

    async def _end_doomed(self, workflow: Workflow, failed: StepState) -> None:
        """Cancel the later steps of a failed one that no worker has."""
        cause = f"step {failed.index} did not succeed"
        for step in workflow.after(failed.index):
            effective = await self._workflows.look(workflow, step)
            if effective is not None and effective.waiting:
                job_id = effective.job.job_id
                cancelled = await self._cancel(job_id, f"doomed:{failed.job_id}", cause)
                if cancelled and job_id == step.job_id:
                    workflow.drop(step)
                    workflow.fail(StepState(index=step.index, job_id=job_id, state=CANCELLED))
            await self.keep()

    async def _undo_next(self, workflow: Workflow) -> None:
        """Submit the next compensation. Nothing is submitted while one is running."""
        for step in await self._workflows.to_undo(workflow):
            undoing = await self._tree.compensation(step.job_id)
            if undoing is None:
                if await self._undo(step.job_id):
                    workflow.undoing.add(step.job_id)
                    return
            elif undoing.open:
                return
            else:
                if undoing.failed:
                    ended = undoing.job
                    _log.error("not_undone", job_id=step.job_id, compensation=ended.job_id, state=ended.state)
                workflow.has_undone(step)
            await self.keep()

    async def _undo(self, job_id: JobId) -> bool:
        """Submit the compensation of a job. Returns whether that was possible."""
        job = await self.ledger.job(job_id)
        request = None if job is None else self._tree.request_in(job)
        if job is None or request is None:
            return False
        compensation = await submit_under_free_id(
            self.ledger, self._reconciler, compensation_of(job, request, self.topics)
        )
        if compensation is None:
            return False
        self._made += compensation.created
        _log.info("undone_by", job_id=job_id, compensation=compensation.job_id)
        return True

    @property
    def _reconciler(self) -> Actor:
        return Actor(role=Role.RECONCILER, name=self.actor.name)

    @property
    def _scheduler(self) -> Actor:
        return Actor(role=Role.SCHEDULER, name=self.actor.name)


def _has_consequences(event: Event, request: JobRequest) -> bool:
    """Whether an event can have consequences. The success of a job that is not a step has none."""
    if event.source is None:
        return bool(request.step_of)
    return event.type not in {"job_succeeded", "job_denied"} or bool(request.step_of) or COMPENSATES in request.labels
