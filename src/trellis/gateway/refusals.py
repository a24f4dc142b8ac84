"""Refusals are answered with the rule that refused, logged, and audited: one record each in the object store, with a bound.

A record of a refusal changes nothing else. One caller can make only so many a minute; the others are counted, and the next record says
how many. A store that does not answer costs the record and never the answer; the log line is there in any case.
"""

from datetime import datetime
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from trellis.engine.authority import Principal
from trellis.engine.errors import LedgerError, NotAllowed
from trellis.engine.logs import log_of
from trellis.gateway.callers import gateway_of
from trellis.runs import acts, ids
from trellis.storage.objects import CREATE, StoreError
from trellis.web.problems import Problem, answer, correlation_of

EVENT = "access.refused"
PATH_CHARS_MAX = 300
REASON_CHARS_MAX = 500

_log = log_of("trellis.gateway")


async def refused(request: Request, error: NotAllowed) -> Response:
    """The answer to whoever may not, when it has been recorded."""
    rule = error.data.get("rule")
    principal: Principal | None = request.scope.get("trellis.principal")
    facts = {
        "rule": rule,
        "method": request.method,
        "path": request.url.path[:PATH_CHARS_MAX],
        "correlation_id": correlation_of(request),
        "cause": str(error)[:REASON_CHARS_MAX],
    }
    _log.warning("refused", caller=None if principal is None else principal.name, **facts)
    if principal is not None:
        await record(request, principal, facts)
    return answer(request, Problem("FORBIDDEN", str(error), rule=rule))


async def record(request: Request, principal: Principal, facts: dict[str, Any], *, event: str = EVENT) -> None:
    """One audit record, while this caller may still have one; what the store cannot take is in the log."""
    gateway = gateway_of(request)
    left_out = gateway.refusals.take(principal.name)
    if left_out is None:
        return
    try:
        at = await gateway.instance.ledger.now()
        key, body = _document(at, gateway.new_id(), principal, {"event": event, **facts, "left_out": left_out})
        await gateway.instance.objects.put(key, body, when=CREATE)
    except (StoreError, LedgerError) as error:
        _log.error("refusal_not_recorded", caller=principal.name, error=str(error))


def _document(at: datetime, id_: str, principal: Principal, facts: dict[str, Any]) -> tuple[str, bytes]:
    """With the fields that every audit record has (OBS-1)."""
    event_id = f"refused-{id_}"
    roles = ",".join(sorted(role.value for role in principal.roles))
    body = acts.document(facts["event"], event_id, at, roles, principal.name, facts)
    return ids.audit_key(at, event_id), body
