"""Refusals are answered with the rule that refused, logged, and recorded: one act each in the ledger, with a bound (OBS-1).

A record of a refusal changes nothing else. One caller can make only so many a minute; the others are counted, and the next record says
how many. A ledger that does not answer costs the record and never the answer; the log line is there in any case.
"""

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from trellis.engine.admin_acts import NewAct
from trellis.engine.authority import Principal
from trellis.engine.errors import NotAllowed, TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.logs import log_of
from trellis.gateway.callers import gateway_of
from trellis.lifecycles import Role
from trellis.web.problems import Problem, correlation_of, problem_response

EVENT = "access.refused"
PATH_CHARS_MAX = 300
REASON_CHARS_MAX = 500

_log = log_of("trellis.gateway")


async def refusal_answer(request: Request, error: NotAllowed) -> Response:
    """The answer to whoever may not, when it has been recorded."""
    rule = error.data.get("rule")
    principal: Principal | None = request.scope.get("trellis.principal")
    path, cause = request.url.path[:PATH_CHARS_MAX], str(error)[:REASON_CHARS_MAX]
    asked = {"rule": rule, "method": request.method, "path": path}
    caller = None if principal is None else principal.name
    _log.warning("refused", caller=caller, correlation_id=correlation_of(request), cause=cause, **asked)
    if principal is not None:
        await record_refusal(
            request, principal, event=EVENT, subject=f"{request.method} {path}", cause=cause, facts=asked
        )
    return problem_response(request, Problem("FORBIDDEN", str(error), rule=rule))


async def record_refusal(
    request: Request,
    principal: Principal,
    *,
    event: str,
    subject: str,
    cause: str,
    job_id: str | None = None,
    facts: dict[str, Any] | None = None,
) -> None:
    """Record what was refused as an act, while this caller may still have one; what the ledger cannot take is in the log.

    The gateway writes it, in the name of whoever asked; `roles` says which roles that was.
    """
    gateway = gateway_of(request)
    left_out = gateway.refusals.take(principal.name)
    if left_out is None:
        return
    roles = ",".join(sorted(role.value for role in principal.roles))
    act = NewAct(
        event=event,
        subject=subject,
        cause=cause,
        correlation_id=correlation_of(request),
        job_id=job_id,
        facts={**(facts or {}), "roles": roles, "left_out": left_out},
        id=f"refused-{gateway.new_id()}",
    )
    try:
        await gateway.instance.ledger.record_act(Actor(role=Role.GATEWAY, name=principal.name), act)
    except TrellisError as error:
        _log.error("refusal_not_recorded", caller=principal.name, error=str(error))
