"""Builds bus jobs submitted over HTTP or the command line, with a payload or a pointer to one.

A payload is stored where the topic's workers look for it, and the request gets its pointer. So the ledger holds a
pointer, as for every request that arrives over the bus. All checks, including the backlog limit, run before the payload
is stored. Storing it twice is harmless.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trellis.auth.ownership import owner_name, scoped_key, within_tenant
from trellis.auth.principals import Principal
from trellis.bus.backlog import BacklogLimit
from trellis.bus.errors import BusRequestInvalid, PointerTooLarge
from trellis.bus.pointers import BYTES_MAX, KEPT_S_DEFAULT, PointerPart, Pointers
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.topics import Topics
from trellis.engine import tracing
from trellis.engine.errors import PayloadInvalid, PayloadTooLarge
from trellis.engine.jobs import NewJob

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
        said: Mapping[str, Any],
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
        whole = {"job_id": self.new_id(), **said, "principal_id": owner}
        if principal.tenant is not None:
            whole |= _tenant(principal, JobRequest.checked(whole))
        if payload is None:
            made = await self._made(JobRequest.checked(whole), correlation_id, owner)
            return await self._let_in(made, asked_as)
        if whole.get("context_ptr") or whole.get("context_ref"):
            raise BusRequestInvalid(detail="payload and context_ptr or context_ref exclude each other; give one")
        topic = JobRequest.checked(whole).topic
        body, scheme = _body(payload, topic), self.topics.of(topic).context
        try:
            pointer = self.pointers.pointer_to(body, part=PointerPart.CONTEXT, scheme=scheme)
        except PointerTooLarge:
            raise PayloadTooLarge(size=len(body), limit=BYTES_MAX) from None
        made = await self._made(JobRequest.checked(whole | {"context_ptr": pointer}), correlation_id, owner)
        await self._let_in(made, asked_as)
        keep_s = KEPT_S_DEFAULT + (made.deadline_s or 0)
        await self.pointers.put(body, part=PointerPart.CONTEXT, scheme=scheme, keep_s=keep_s)
        return made

    async def _let_in(self, job: NewJob, asked_as: IdempotencyScopeAndKey | None) -> NewJob:
        named = job
        if asked_as is not None and job.idempotency_key is None:
            scope, key = asked_as
            named = replace(job, idempotency_scope=scope, idempotency_key=key)
        await self.room.admit(named, self.topics)
        return job

    async def _made(self, request: JobRequest, correlation_id: str | None, owner: str) -> NewJob:
        made = new_bus_job(request, self.topics, trace_id=correlation_id or "", trace=tracing.here())
        return await scoped_key(self.room.ledger, replace(made, correlation_id=correlation_id), owner)


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
