"""Callers of the gateway: authentication, authorization by rule, reachable agents, and refusals."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Security
from fastapi.responses import Response

from trellis.api.context import ApiContext
from trellis.api.local import LocalApi
from trellis.api.requests import IdempotentRequest
from trellis.app.fleet import bus_problem
from trellis.app.instance import Instance
from trellis.auth.matrices import permit
from trellis.auth.ownership import within_agent
from trellis.auth.principals import Principal
from trellis.auth.tokens import Identity, TrustedKey
from trellis.bus.pointers import Pointers
from trellis.engine.admin_acts import NewAct
from trellis.engine.errors import NotAllowed, TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.logs import log_of
from trellis.http_server.limits import RateLimits, RefusalBounds
from trellis.http_server.problems import Problem, correlation_of, problem_response
from trellis.http_server.request_plan import FromState
from trellis.http_server.tokens import VerifiedTokens, bearer
from trellis.lifecycles import Role
from trellis.runs.memory_access import agent_of, check_reach

# Authentication and authorization: a bearer token becomes a principal, and the route's rule is checked before anything
# is looked up (AUTH-5, D27). A caller without permission does not even learn whether a thing exists.

KEY_CHARS_MAX = 200
CALLER_STATE_KEY = "trellis.who"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayState:
    """What every route works with. Kept in the app's state."""

    instance: Instance
    keys: Sequence[TrustedKey]
    limits: RateLimits
    inbox_limits: RateLimits
    """Limits inbox entries, in addition to the limit on all requests (D51)."""
    refusals: RefusalBounds
    new_id: Callable[[], str]
    tokens: VerifiedTokens = field(default_factory=VerifiedTokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """An authenticated caller that the route's rule allows."""

    principal: Principal
    instance: Instance
    """The instance that the application of the request serves."""
    actor: Actor
    """The principal in the role that the rule allows."""
    correlation_id: str
    """The request's correlation id: from its header, otherwise generated."""
    given_correlation_id: str | None = None
    """The correlation id if the caller sent one; None if it was generated."""

    def may(self, rule: str) -> bool:
        """Whether another rule allows the caller, too."""
        try:
            self.permit(rule)
        except NotAllowed:
            return False
        return True

    def permit(self, rule: str, *, own: bool | None = None) -> Actor:
        """Check another rule, or the same one again with `own` now known."""
        return permit(self.principal, rule, own=own)

    @property
    def api(self) -> LocalApi:
        """The application for this caller."""
        return self.api_for(None)

    def api_for(self, request: IdempotentRequest | None) -> LocalApi:
        """The application for this caller, with the request that changes something."""
        instance = self.instance

        async def opened() -> Instance:
            return instance

        async def pointers() -> Pointers:
            return instance.pointers

        def acting(*, operator: bool) -> Principal:  # noqa: ARG001 - the token says who is an operator
            return self.principal

        return LocalApi(
            ApiContext(
                ledger=instance.ledger,
                changes=instance.ledger,
                reader=self.principal,
                acting=acting,
                permit=self.permit,
                instance=opened,
                pointers=pointers,
                topics=lambda: instance.topics,
                bus_problem=partial(bus_problem, instance.settings),
                cancel_grace_s=instance.settings.cancel_grace_s,
                request=request,
            )
        )


def gateway_of(request: Request) -> GatewayState:
    """The gateway state of this app."""
    return request.scope["app"].state.gateway


async def authenticate(request: Request, token: Annotated[str | None, Security(bearer)]) -> tuple[Principal, Identity]:
    """Authenticate the token once per request, and count the request; raises Problem 401, TokenRefused, Problem 429."""
    known: tuple[Principal, Identity] | None = request.scope.get(CALLER_STATE_KEY)
    if known is not None:
        return known
    gateway = gateway_of(request)
    who = gateway.tokens.caller(token, gateway.keys, now=time.time())
    request.scope["trellis.principal"] = who[0]
    gateway.limits.take(request, who[0])
    request.scope[CALLER_STATE_KEY] = who
    return who


Authenticated = Annotated[tuple[Principal, Identity], Depends(authenticate)]


class RequiresRule:
    """A route dependency that yields the caller if `rule` allows it. Tests read the rule of each route from here."""

    def __init__(self, rule: str) -> None:
        self.rule = rule

    async def __call__(self, request: Request, who: Authenticated) -> Caller:
        """The caller; raises NotAllowed, which `refusal_answer` answers, logs and records."""
        known: tuple[RequiresRule, Any, Caller] | None = request.scope.get("trellis.caller")
        if known is not None and known[0] is self and known[1] is who:
            return known[2]
        principal = who[0]
        actor = permit(principal, self.rule)
        correlation_id = correlation_of(request) or ""
        caller = Caller(
            principal=principal,
            instance=gateway_of(request).instance,
            actor=actor,
            correlation_id=correlation_id,
            given_correlation_id=correlation_id if request.scope.get("trellis.correlation_given") else None,
        )
        request.scope["trellis.caller"] = (self, who, caller)
        return caller

    async def admit(self, request: Request) -> None:
        """Raise the error that calling the dependency would raise, before the body is read."""
        await self(request, await authenticate(request, await bearer(request)))


def requires(rule: str) -> Any:
    """A route parameter: the caller, if this rule allows it."""
    return Depends(RequiresRule(rule))


async def idempotency_key(
    value: Annotated[str | None, Header(alias="Idempotency-Key", description="Repeat a request safely.")] = None,
) -> str | None:
    """The request's idempotency key, with or without quotes; raises Problem."""
    if value is None:
        return None
    key = value[1:-1] if len(value) >= 2 and value[0] == value[-1] == '"' else value
    if not 1 <= len(key) <= KEY_CHARS_MAX or not key.isprintable() or not key.isascii():
        detail = f"Idempotency-Key must be 1 to {KEY_CHARS_MAX} printable ASCII characters."
        raise Problem("VALIDATION_FAILED", detail)
    return key


KeyHeader = Annotated[str | None, Depends(idempotency_key)]


InstanceOf = Annotated[Instance, Depends(FromState("gateway.instance"))]
"""The instance that this app serves."""


# Which agent a caller may reach; the rule itself is in `runs.memory_access` (D62, AUTH-3).


async def within_job_agent(caller: Caller, rule: str, job_id: str) -> None:
    """Raise NotAllowed if the token is bound to an agent and this job works for another agent, or for none."""
    if caller.principal.agent is not None:
        within_agent(caller.principal, rule, await agent_of(caller.instance.ledger, job_id) or "")


async def within_reach(caller: Caller, rule: str, agent: str | None) -> None:
    """Raise NotAllowed for an agent that this caller may not reach.

    `agent` is None for a thing that does not exist.
    """
    await check_reach(caller.instance.ledger, caller.principal, rule, agent)


# Refusals: each is answered with the rule that refused, logged, and recorded as one act in the ledger (OBS-1).
# The number of records per caller and minute is limited; the others are counted, and the next record reports the count.
# If the ledger does not answer, only the record is lost: the response and the log line are still there.

EVENT = "access.refused"
PATH_CHARS_MAX = 300
REASON_CHARS_MAX = 500

_log = log_of("trellis.gateway")


async def refusal_answer(request: Request, error: NotAllowed) -> Response:
    """Log and record a NotAllowed error, and return the response to the caller."""
    rule = error.data.get("rule")
    principal: Principal | None = request.scope.get("trellis.principal")
    path, cause = request.url.path[:PATH_CHARS_MAX], str(error)[:REASON_CHARS_MAX]
    refused = {"rule": rule, "method": request.method, "path": path}
    caller = None if principal is None else principal.name
    _log.warning("refused", caller=caller, correlation_id=correlation_of(request), cause=cause, **refused)
    if principal is not None:
        await record_refusal(
            request, principal, event=EVENT, subject=f"{request.method} {path}", cause=cause, facts=refused
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
    sender: str | None = None,
    authenticated: bool = True,
) -> None:
    """Record a refusal as an act in the ledger, unless this caller has reached its limit.

    The act is recorded by role gateway under the caller's name; `roles` lists the caller's roles. `sender` is the
    address of a sender that has no name of its own: the limit is then the address's. If the ledger fails, the failure
    is logged and not raised.
    """
    gateway = gateway_of(request)
    limited = principal.name if sender is None else f"{principal.name} from {sender}"
    left_out = gateway.refusals.take(limited, authenticated=authenticated)
    if left_out is None:
        return
    roles = ",".join(sorted(role.value for role in principal.roles))
    act = NewAct(
        event=event,
        subject=subject,
        cause=cause,
        correlation_id=correlation_of(request),
        job_id=job_id,
        facts={**(facts or {}), **({} if sender is None else {"sender": sender}), "roles": roles, "left_out": left_out},
        id=f"refused-{gateway.new_id()}",
    )
    try:
        await gateway.instance.ledger.record_act(Actor(role=Role.GATEWAY, name=principal.name), act)
    except TrellisError as error:
        _log.error("refusal_not_recorded", caller=principal.name, error=str(error))
