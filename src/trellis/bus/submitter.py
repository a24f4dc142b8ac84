"""Admits and builds new bus jobs: the backlog limit of every topic, and jobs submitted over HTTP or the command line.

The backlog limit says how many jobs may wait per topic and on all topics together. A request beyond the limit is refused
before anything of it is stored. A job waits when no worker has it and it has not ended. The ledger counts waiting jobs,
for all topics at once. A count is valid for one second, or longer where counting is slow. It stays valid for up to ten
seconds while this process has admitted no more than an eighth of the room that the count found. So a submit does not pay
for a count, and several processes together exceed the limit only slightly. A job that was accepted once is never refused:
a repeated request goes on to the ledger, which answers with the existing job. Retries and compensations of accepted jobs
are not limited.

A payload is stored where the topic's workers look for it, and the request gets its pointer. So the ledger holds a
pointer, as for every request that arrives over the bus. All checks, including the backlog limit, run before the payload
is stored. Storing it twice is harmless.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trellis.auth.ownership import owner_name, scoped_key, within_tenant
from trellis.auth.principals import Principal
from trellis.bus.errors import BusRequestInvalid, PointerTooLarge, TopicFull
from trellis.bus.pointers import BYTES_MAX, KEPT_S_DEFAULT, PointerPart, Pointers
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.topics import Topics
from trellis.engine import tracing
from trellis.engine.clock import Clock
from trellis.engine.errors import LedgerError, PayloadInvalid, PayloadTooLarge
from trellis.engine.jobs import NewJob
from trellis.engine.ledger import Ledger
from trellis.engine.records import QueueDepth
from trellis.lifecycles.bus_job import BUS_JOB

# The backlog limit.

COUNT_FRESH_S = 1.0
"""Minimum validity of a count, in seconds, whatever room it found."""
COUNT_COST_FACTOR = 20
"""Recount at most once per 20x the time the last count took."""
COUNT_FRESH_S_MAX = 10.0
"""Maximum validity of a count, in seconds."""
STALE_COUNT_SHARE = 8
"""A count older than its validity may still admit jobs up to 1/8 of the room that it found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _BacklogCount:
    """The number of waiting jobs at one moment."""

    at: float
    good_s: float
    waiting: Counter[str]
    total: int


_EMPTY_COUNT = _BacklogCount(at=0.0, good_s=0.0, waiting=Counter(), total=0)


@dataclass(kw_only=True)
class BacklogLimit:
    """Admits or refuses new jobs. One per process that takes requests in."""

    ledger: Ledger
    clock: Clock
    _last: _BacklogCount | None = None
    _admitted: Counter[str] = field(default_factory=Counter[str])
    """Jobs admitted since the last count, by topic."""
    _count_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _counts: int = 0
    """Number of finished counts, successful or not."""
    _failed: LedgerError | None = None
    """The error of the last count, if it failed."""

    async def admit(self, job: NewJob, topics: Topics) -> None:
        """Admit a job. Raises TopicFull when too many jobs wait, unless the job is already in the ledger.

        Also raises LedgerError.
        """
        full = await self._full(job.type, topics)
        if full is not None:
            if await self._is_known(job):
                return
            raise full
        self._admitted[job.type] += 1

    async def _full(self, topic: str, topics: Topics) -> TopicFull | None:
        if self._is_count_fresh_for(topic, topics):
            return self._full_or_none(topic, topics)
        counts = self._counts
        async with self._count_lock:  # concurrent callers share one count, and its failure
            if not self._is_count_fresh_for(topic, topics):
                if self._failed is not None and self._counts > counts:
                    raise self._failed
                await self._count()
        return self._full_or_none(topic, topics)

    def _is_count_fresh_for(self, topic: str, topics: Topics) -> bool:
        """Whether the last count is recent enough for this topic."""
        if self._last is None:
            return False
        age_s = self.clock.monotonic() - self._last.at
        if age_s < self._last.good_s:
            return True
        return age_s < COUNT_FRESH_S_MAX and all(
            used < (limit - waiting) // STALE_COUNT_SHARE for waiting, used, limit in self._measures(topic, topics)
        )

    def _full_or_none(self, topic: str, topics: Topics) -> TopicFull | None:
        of_topic, of_all = self._measures(topic, topics)
        for (waiting, used, limit), named in ((of_topic, f"on {topic}"), (of_all, "on all topics")):
            if waiting + used >= limit:
                return TopicFull(place=named, waiting=waiting + used, limit=limit)
        return None

    def _measures(self, topic: str, topics: Topics) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Waiting jobs, jobs admitted since the count, and the limit: for the topic, and for all topics."""
        last = self._last or _EMPTY_COUNT
        of_topic = last.waiting[topic], self._admitted[topic], topics.of(topic).waiting_max
        return of_topic, (last.total, self._admitted.total(), topics.waiting_max)

    async def _count(self) -> None:
        # Jobs admitted while the ledger counts may be counted twice. Jobs admitted before that are not yet in the
        # ledger are not counted at all.
        before, began = Counter(self._admitted), self.clock.monotonic()
        waiting: Counter[str] = Counter()
        for depth in await self._depths():
            if depth.lifecycle == BUS_JOB.name:
                waiting[depth.type] += depth.ready + depth.scheduled + depth.blocked
        at = self.clock.monotonic()
        good_s = min(COUNT_FRESH_S_MAX, max(COUNT_FRESH_S, COUNT_COST_FACTOR * (at - began)))
        self._last = _BacklogCount(at=at, good_s=good_s, waiting=waiting, total=waiting.total())
        self._admitted -= before

    async def _depths(self) -> Sequence[QueueDepth]:
        self._failed = None
        try:
            return await self.ledger.queues(exact=True)
        except LedgerError as error:
            self._failed = error
            raise
        finally:
            self._counts += 1

    async def _is_known(self, job: NewJob) -> bool:
        """Whether an earlier request already created the job, by its id or its idempotency key."""
        if await self.ledger.job(job.job_id) is not None:
            return True
        if job.idempotency_key is None:
            return False
        return (
            await self.ledger.find_by_idempotency_key(job.idempotency_scope, job.idempotency_key, job.fingerprint)
            is not None
        )


# Submissions over HTTP, the command line and Python.

IdempotencyScopeAndKey = tuple[str, str]
"""The scope and the idempotency key under which a caller submits the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BusSubmitter:
    """Validates submissions and turns them into jobs."""

    topics: Topics
    pointers: Pointers
    room: BacklogLimit
    new_id: Callable[[], str]

    async def job(
        self,
        fields: Mapping[str, Any],
        *,
        payload: Any = None,
        principal: Principal,
        correlation_id: str | None = None,
        asked_as: IdempotencyScopeAndKey | None = None,
    ) -> NewJob:
        """The job for these fields of a JobRequest. Raises an InputError that says what to change.

        A principal that is bound to a tenant submits for that tenant only; another tenant raises NotAllowed. Raises
        TopicFull, unless the same job was submitted before: under its id, its idempotency key, or `asked_as`, the
        caller's scope and key.
        """
        owner = owner_name(principal)
        whole = {"job_id": self.new_id(), **fields, "principal_id": owner}
        if principal.tenant is not None:
            whole |= _tenant(principal, JobRequest.checked(whole))
        if payload is None:
            new_job = await self._made(JobRequest.checked(whole), correlation_id, owner)
            return await self._let_in(new_job, asked_as)
        if whole.get("context_ptr") or whole.get("context_ref"):
            raise BusRequestInvalid(detail="payload and context_ptr or context_ref exclude each other; give one")
        topic = JobRequest.checked(whole).topic
        body, scheme = _body(payload, topic), self.topics.of(topic).context
        try:
            pointer = self.pointers.pointer_to(body, part=PointerPart.CONTEXT, scheme=scheme)
        except PointerTooLarge:
            raise PayloadTooLarge(size=len(body), limit=BYTES_MAX) from None
        new_job = await self._made(JobRequest.checked(whole | {"context_ptr": pointer}), correlation_id, owner)
        await self._let_in(new_job, asked_as)
        keep_s = KEPT_S_DEFAULT + (new_job.deadline_s or 0)
        await self.pointers.put(body, part=PointerPart.CONTEXT, scheme=scheme, keep_s=keep_s)
        return new_job

    async def _let_in(self, job: NewJob, asked_as: IdempotencyScopeAndKey | None) -> NewJob:
        named = job
        if asked_as is not None and job.idempotency_key is None:
            scope, key = asked_as
            named = replace(job, idempotency_scope=scope, idempotency_key=key)
        await self.room.admit(named, self.topics)
        return job

    async def _made(self, request: JobRequest, correlation_id: str | None, owner: str) -> NewJob:
        bus_job = new_bus_job(request, self.topics, trace_id=correlation_id or "", trace=tracing.here())
        return await scoped_key(self.room.ledger, replace(bus_job, correlation_id=correlation_id), owner)


def _tenant(principal: Principal, request: JobRequest) -> dict[str, str]:
    """The tenant of the principal's token, as a field of the request.

    Raises NotAllowed when the request names another.
    """
    undo = request.compensation.meta if request.compensation else None
    places = (request, request.meta, request.identity, undo)
    named = tuple(place.tenant_id for place in places if place is not None)
    tenant = within_tenant(principal, "jobs.create", *named)
    return {} if tenant is None else {"tenant_id": tenant}


def _body(payload: Any, topic: str) -> bytes:
    """The payload as JSON that workers of any language can read; raises PayloadInvalid."""
    try:
        return json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        detail = "it holds half of a surrogate pair, which UTF-8 cannot hold"
    except (TypeError, ValueError) as error:
        detail = f"{error}; give what JSON can hold"
    except RecursionError:
        detail = "it is nested too deeply"
    raise PayloadInvalid(type=topic, detail=detail)
