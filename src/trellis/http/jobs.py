"""Jobs of every lifecycle: submit, read, wait for, cancel and requeue them."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

from trellis.bus.requests import TopicSubmitOptions
from trellis.engine.job_changes import CHANGED_MAX
from trellis.http.calls import LIMIT_DEFAULT, GatewayRequest, GatewayResource, listed, path_of, read_shape
from trellis.http.operation_shapes import BatchSubmittedShape, JobExplained, JobListed, JobsChanged, JobsPreview
from trellis.http.shapes import (
    OUTCOME,
    REPLACED,
    REPLAYED,
    AnyJob,
    EventShape,
    JobShape,
    JobSubmitted,
    JobWhole,
    Page,
    SignalReceipt,
    SignalShape,
)
from trellis.http.streams import changes, follow, wait_for_last
from trellis.lifecycles import LIFECYCLES


class JobSubmitOptions(TypedDict, total=False):
    """What can be said about a new job beside its type and payload."""

    priority: str
    """`critical`, `interactive` or `batch`."""
    run_at: datetime
    """Not before this moment, which has a time zone."""
    delay_s: float
    """Not before so long from now."""
    deadline_s: float
    """From now to the latest end."""
    max_attempts: int
    """Maximum number of executions."""
    concurrency_key: str
    """Jobs with the same key wait for each other. The keys of a tenant are its own, apart from the application's."""
    concurrency_limit: int
    """How many of the key may be held at once."""
    correlation_id: str
    """What the job belongs to; by default the request's."""
    parent_id: str
    """The job that caused this one."""
    unique: str
    """The unique key: `args` for the payload, or a key. One job of a type and key may wait, or be unfinished."""
    while_: str
    """How long the job holds its unique key: while it is `waiting`, or `unfinished`."""
    window_s: float
    """The job holds its unique key at least so long after its submit, also when it has ended."""
    on_conflict: str
    """What happens when the unique key is taken: `return` that job, `replace` the waiting one, or `raise`."""
    debounce_s: float
    """Replace the waiting job with the same unique key, and start this long after the last submit."""
    debounce_max_s: float
    """Start at most this long after the first submit; by default 10 times `debounce_s`."""


class QueueSubmitOptions(TypedDict, total=False):
    """Options of a new job of the job queue, beside its agent, type and payload."""

    entity_refs: Sequence[str]
    """Slugs of the entities that the job is about."""
    run_id: str
    """The agent's run that the job belongs to; by default one is generated."""
    priority: str
    """`critical`, `interactive` or `batch`."""
    deadline_s: float
    """Seconds from now until the job must have ended."""
    correlation_id: str
    """Correlation id of the job; by default the request's."""
    parent_id: str
    """The job that caused this one."""


class JobChangeFilter(TypedDict, total=False):
    """Which jobs to change. A filter that names nothing is refused, unless `everything` says that all are meant."""

    type_: str | None
    """Only this job type."""
    lifecycle: str | None
    """`leased-job`, `queue-job` or `bus-job`."""
    status: str | None
    """Only jobs of this status."""
    correlation_id: str | None
    """Only jobs with this correlation id."""
    concurrency_key: str | None
    """Only jobs of this concurrency key."""
    parent_id: str | None
    """Only jobs that this one caused."""
    reason_code: str | None
    """Only leased-jobs with a dead letter for this reason."""
    priority: str | None
    """Only jobs of this priority: `critical`, `interactive` or `batch`."""
    submitted_before: datetime | None
    """Only jobs that were submitted before this moment, which has a time zone."""
    submitted_after: datetime | None
    """Only jobs that were submitted after this moment, which has a time zone."""
    everything: bool
    """All jobs are meant."""


class Jobs(GatewayResource):
    """Jobs: `client.jobs`."""

    async def submit(
        self,
        type_: str,
        payload: Any = None,
        *,
        idempotency_key: str | None = None,
        **options: Unpack[JobSubmitOptions],
    ) -> JobSubmitted:
        """Submit a job. The same key and request again is the same job, which then was not `created`."""
        body: dict[str, Any] = {"type": type_, "payload": payload, **options}
        if "run_at" in options:
            body["run_at"] = options["run_at"].isoformat()
        return await self.submit_asked(body, idempotency_key=idempotency_key)

    async def submit_for(
        self,
        agent_slug: str,
        job_type: str,
        payload: Mapping[str, Any],
        *,
        idempotency_key: str | None = None,
        **options: Unpack[QueueSubmitOptions],
    ) -> JobSubmitted:
        """Submit a job of the job queue (`RESEARCH`, `BRIEF` or `PROPOSAL_PREPROCESS`) for an agent."""
        body = {"job_type": job_type, "agent_slug": agent_slug, "payload": dict(payload), **options}
        return await self.submit_asked(body, idempotency_key=idempotency_key)

    async def submit_topic(
        self,
        topic: str,
        payload: Any = None,
        *,
        idempotency_key: str | None = None,
        correlation_id: str | None = None,
        **options: Unpack[TopicSubmitOptions],
    ) -> JobSubmitted:
        """Submit a job on a topic of the bus; its payload is kept where the topic's workers look for it."""
        body: dict[str, Any] = {"topic": topic, **options}
        body |= {} if payload is None else {"payload": payload}
        body |= {} if correlation_id is None else {"correlation_id": correlation_id}
        own = options.get("meta", {}).get("idempotency_key")  # the call's key and the request's key must be the same
        return await self.submit_asked(body, idempotency_key=idempotency_key or own or None)

    async def submit_asked(self, body: Mapping[str, Any], *, idempotency_key: str | None = None) -> JobSubmitted:
        """Submit what is written as `POST /jobs` takes it, of whichever kind."""
        ask = GatewayRequest(method="POST", path="/jobs", body=body, key=self._calls.key(idempotency_key))
        answer = await self._calls.ask(ask)
        created = answer.headers.get(REPLAYED) is None
        outcome = answer.headers.get(OUTCOME, "created" if created else "returned")
        about = {"created": created, "outcome": outcome, "replaced": answer.headers.get(REPLACED)}
        return read_shape(JobSubmitted, answer, ask).model_copy(update=about)

    async def submit_batch(
        self,
        jobs: Sequence[Mapping[str, Any]],
        *,
        on_complete: Mapping[str, Any],
        abandon: bool = False,
        idempotency_key: str | None = None,
    ) -> BatchSubmittedShape:
        """Submit jobs in one transaction, and the job that starts once all of them have ended.

        Each is written as `POST /jobs` takes it: its `type`, its `payload` and its settings. When `on_complete` is
        cancelled, the others are cancelled too, unless `abandon` is true.
        """
        body = {"jobs": list(jobs), "on_complete": on_complete, "abandon": abandon}
        ask = GatewayRequest(method="POST", path="/batches", body=body, key=self._calls.key(idempotency_key))
        answer = await self._calls.ask(ask)
        created = answer.headers.get(REPLAYED) is None
        return read_shape(BatchSubmittedShape, answer, ask).model_copy(update={"created": created})

    async def get(self, job_id: str) -> JobWhole:
        """One job, with its payload, its progress and its result; of the job queue a `QueueJob`, on a topic a `BusJob`."""
        return (await self._calls.get(AnyJob, path_of("jobs", job_id))).root

    async def result(self, job_id: str) -> bytes:
        """The result of a job: of one on a topic the bytes at its `result_ptr`, of any other its result as JSON. Raises NotFound."""
        return (await self._calls.ask(GatewayRequest(method="GET", path=path_of("jobs", job_id, "result")))).body

    async def context(self, job_id: str) -> bytes:
        """What the worker of a job on a topic is given: the bytes at its `context_ptr`. Raises NotFound, and Forbidden for what may be another's."""
        return (await self._calls.ask(GatewayRequest(method="GET", path=path_of("jobs", job_id, "context")))).body

    async def list(
        self,
        *,
        lifecycle: str | None = None,
        type_: str | None = None,
        status: str | None = None,
        correlation_id: str | None = None,
        parent_id: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> Page[JobListed]:
        """Jobs, newest first; with `parent_id` those that this one caused."""
        filters = {
            "lifecycle": lifecycle,
            "type": type_,
            "status": status,
            "correlation_id": correlation_id,
            "parent_id": parent_id,
        }
        return await listed(self._calls, JobListed, "/jobs", limit, cursor, **filters)

    async def events(self, job_id: str, *, limit: int = LIMIT_DEFAULT, cursor: str | None = None) -> Page[EventShape]:
        """What happened to it, oldest first."""
        return await listed(self._calls, EventShape, path_of("jobs", job_id, "events"), limit, cursor)

    async def explain(self, job_id: str) -> JobExplained:
        """Why it is where it is and what happens next, in sentences."""
        return await self._calls.get(JobExplained, path_of("jobs", job_id, "explanation"))

    async def signals(self, job_id: str) -> Sequence[SignalShape]:
        """The last log lines and signs of progress of a job, oldest first, as long as they are retained."""
        return (await self._calls.get(Page[SignalShape], path_of("jobs", job_id, "signals"))).items

    async def wait(self, job_id: str, timeout_s: float | None = None) -> JobWhole:
        """The job once it has ended, however it did; raises TimeoutError."""
        return await wait_for_last(self.watch(job_id), self._calls.clock, timeout_s, f"job {job_id}")

    def watch(self, job_id: str) -> AsyncGenerator[JobWhole]:
        """How the job stands, each time it has changed, until it has ended."""
        hints = follow(self._calls, {"job": job_id}, None)
        return changes(lambda _: self.get(job_id), hints, ended=has_ended, clock=self._calls.clock)

    async def cancel(
        self, job_id: str, *, mode: str = "soft", reason: str | None = None, idempotency_key: str | None = None
    ) -> JobShape:
        """End a job: soft asks its holder to stop, hard ends it now. Raises WrongState once it has ended."""
        body = {"mode": mode, "reason": reason}
        return await self._calls.post(JobShape, path_of("jobs", job_id, "cancel"), body, key=idempotency_key)

    async def signal(
        self, job_id: str, name: str, payload: Any = None, *, idempotency_key: str | None = None
    ) -> SignalReceipt:
        """Send a signal to a job, which `ctx.wait_signal` returns. Raises InvalidInput once the job has ended."""
        body = {"name": name, "payload": payload}
        return await self._calls.post(SignalReceipt, path_of("jobs", job_id, "signals"), body, key=idempotency_key)

    async def dead_letter(
        self,
        job_id: str,
        *,
        reason: str,
        reason_code: str = "policy_violation",
        idempotency_key: str | None = None,
    ) -> JobShape:
        """End a job that has not ended with a dead letter, without a retry; an operator's act."""
        body = {"reason_code": reason_code, "reason": reason}
        return await self._calls.post(JobShape, path_of("jobs", job_id, "dead-letter"), body, key=idempotency_key)

    async def requeue(self, job_id: str, *, reason: str | None = None, idempotency_key: str | None = None) -> JobShape:
        """Run a failed or dead-lettered job again; an operator's act."""
        body = {"reason": reason}
        return await self._calls.post(JobShape, path_of("jobs", job_id, "requeue"), body, key=idempotency_key)

    async def change(
        self,
        change: str,
        *,
        job_ids: Sequence[str] = (),
        limit: int = CHANGED_MAX,
        cursor: str | None = None,
        mode: str = "soft",
        to_priority: str | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        **where: "Unpack[JobChangeFilter]",
    ) -> JobsChanged:
        """`cancel`, `discard`, `run_now` or `prioritize` the named jobs, or the next ones of a filter, oldest first.

        At most 500 in one transaction. `next_cursor` of the answer asks for the next ones.
        """
        body = _change_body(change, where, mode=mode, to_priority=to_priority)
        body |= {"job_ids": list(job_ids)} if job_ids else {"limit": limit, "cursor": cursor}
        path = path_of("jobs", change.replace("_", "-"))
        return await self._calls.post(JobsChanged, path, {**body, "reason": reason}, key=idempotency_key)

    async def preview(
        self,
        change: str,
        *,
        mode: str = "soft",
        to_priority: str | None = None,
        **where: "Unpack[JobChangeFilter]",
    ) -> JobsPreview:
        """How many jobs such a change would concern, and the oldest of them. Changes nothing."""
        body = _change_body(change, where, mode=mode, to_priority=to_priority)
        path = path_of("jobs", change.replace("_", "-"))
        return await self._calls.post(JobsPreview, path, {**body, "dry_run": True})

    async def approve(
        self,
        job_id: str,
        note: str | None = None,
        *,
        policy_hash: str | None = None,
        idempotency_key: str | None = None,
    ) -> JobShape:
        """Let a job go that the safety kernel held; with `policy_hash` only while it is held under that policy. Raises WrongState."""
        body = {"decision": "approve", "note": note, "policy_hash": policy_hash}
        return await self._calls.post(JobShape, path_of("jobs", job_id, "approval"), body, key=idempotency_key)

    async def deny(
        self, job_id: str, note: str, *, policy_hash: str | None = None, idempotency_key: str | None = None
    ) -> JobShape:
        """Refuse a job that the safety kernel held, and say why; it is then DENIED. Raises WrongState."""
        body = {"decision": "reject", "note": note, "policy_hash": policy_hash}
        return await self._calls.post(JobShape, path_of("jobs", job_id, "approval"), body, key=idempotency_key)


def _change_body(change: str, where: JobChangeFilter, *, mode: str, to_priority: str | None) -> dict[str, Any]:
    """The body of a change without its jobs by name."""
    names = {"type_": "type", "everything": "all"}
    given = {names.get(name, name): value for name, value in where.items() if value not in (None, False)}
    moments = {name: value.isoformat() for name, value in given.items() if isinstance(value, datetime)}
    body: dict[str, Any] = {"filter": {**given, **moments}} if given else {}
    body |= {"mode": mode} if change == "cancel" else {}
    return body | ({} if to_priority is None else {"priority": to_priority})


def has_ended(job: JobShape) -> bool:
    """Whether the job has reached a final state, which only a requeue can leave."""
    return LIFECYCLES[job.lifecycle].is_settled(job.status)
