"""Callers of the gateway: who asks, by which rule, which agent they reach, and how a refusal is answered and recorded."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Security
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials

from trellis.app.instance import Instance
from trellis.auth.matrices import permit
from trellis.auth.ownership import within_agent
from trellis.auth.principals import Principal
from trellis.auth.tokens import Identity, TrustedKey
from trellis.engine.admin_acts import NewAct
from trellis.engine.errors import NotAllowed, TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.logs import log_of
from trellis.http_server.limits import RateLimits, RefusalBounds
from trellis.http_server.problems import Problem, correlation_of, problem_response
from trellis.http_server.tokens import VerifiedTokens, bearer
from trellis.lifecycles import Role
from trellis.runs.memory_access import agent_of, check_reach, only_agent

# Who asks: a bearer token becomes a principal, and a route's rule is asked before anything is looked up (AUTH-5, D27).
#
# Authority comes before existence: a role without the right learns nothing, not even whether a thing is there.

KEY_CHARS_MAX = 200
CALLER_STATE_KEY = "trellis.who"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayState:
    """What every route works with; in the app's state."""

    instance: Instance
    keys: Sequence[TrustedKey]
    limits: RateLimits
    inbox_limits: RateLimits
    """Of entries; beside the limit of all requests (D51)."""
    refusals: RefusalBounds
    new_id: Callable[[], str]
    tokens: VerifiedTokens = field(default_factory=VerifiedTokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Somebody who may do what this route does."""

    principal: Principal
    identity: Identity
    actor: Actor
    """The principal in the role that gives the right."""
    correlation_id: str
    """The request's own: as its header says, else made for it."""
    given_correlation_id: str | None = None
    """The same where the caller chose it; None for one that was made."""

    def may(self, rule: str) -> bool:
        """Whether another rule lets the caller, too."""
        try:
            self.permit(rule)
        except NotAllowed:
            return False
        return True

    def permit(self, rule: str, *, own: bool | None = None) -> Actor:
        """Ask another rule, or the same one now that the thing is known."""
        return permit(self.principal, rule, own=own)


def gateway_of(request: Request) -> GatewayState:
    """What this app works with."""
    return request.app.state.gateway


async def authenticate(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)]
) -> tuple[Principal, Identity]:
    """The principal of the token, looked at once for each request; raises Problem 401, TokenRefused, Problem 429."""
    known: tuple[Principal, Identity] | None = request.scope.get(CALLER_STATE_KEY)
    if known is not None:
        return known
    if len(request.headers.getlist("authorization")) > 1:
        raise Problem("AUTH_REQUIRED", "Two Authorization headers were sent; send one token.")
    if credentials is None:
        detail = "No token was sent; put `Authorization: Bearer TOKEN`, a token of `trellis token issue`."
        raise Problem("AUTH_REQUIRED", detail)
    gateway = gateway_of(request)
    identity = gateway.tokens.verify(credentials.credentials, gateway.keys, now=time.time())
    principal = identity.principal()
    request.scope["trellis.principal"] = principal
    gateway.limits.take(request, principal)
    request.scope[CALLER_STATE_KEY] = (principal, identity)
    return principal, identity


class RequiresRule:
    """A dependency: the caller, if rule `name` lets it. Tests read the rule of each route from here."""

    def __init__(self, rule: str) -> None:
        self.rule = rule

    async def __call__(
        self, request: Request, who: Annotated[tuple[Principal, Identity], Depends(authenticate)]
    ) -> Caller:
        """The caller; raises NotAllowed, which is answered, logged and audited in one place (`refusals`)."""
        principal, identity = who
        actor = permit(principal, self.rule)
        correlation_id = correlation_of(request) or ""
        return Caller(
            principal=principal,
            identity=identity,
            actor=actor,
            correlation_id=correlation_id,
            given_correlation_id=correlation_id if request.scope.get("trellis.correlation_given") else None,
        )

    async def admit(self, request: Request) -> None:
        """Raise what asking would raise, before anything of the body is read."""
        await self(request, await authenticate(request, await bearer(request)))


def requires(rule: str) -> Any:
    """For a parameter of a route: the caller, if this rule lets it."""
    return Depends(RequiresRule(rule))


async def idempotency_key(
    value: Annotated[str | None, Header(alias="Idempotency-Key", description="Repeat a request safely.")] = None,
) -> str | None:
    """The key of a request that may come twice, bare or in quotes; raises Problem."""
    if value is None:
        return None
    key = value[1:-1] if len(value) >= 2 and value[0] == value[-1] == '"' else value
    if not 1 <= len(key) <= KEY_CHARS_MAX or not key.isprintable() or not key.isascii():
        detail = f"Idempotency-Key must be 1 to {KEY_CHARS_MAX} printable ASCII characters."
        raise Problem("VALIDATION_FAILED", detail)
    return key


KeyHeader = Annotated[str | None, Depends(idempotency_key)]


async def instance_of(request: Request) -> Instance:
    """What this app serves. A coroutine, as every dependency here: FastAPI would send a function to a thread."""
    return gateway_of(request).instance


InstanceOf = Annotated[Instance, Depends(instance_of)]


# Which agent the caller of a route reaches; the rule itself is in `runs.agent_reach` (D62, AUTH-3).


async def agent_within_reach(instance: Instance, caller: Caller, rule: str) -> str | None:
    """The one agent that this caller reaches by this rule; None when it reaches all. Raises NotAllowed when it reaches none."""
    return await only_agent(instance.ledger, caller.principal, rule)


async def within_job_agent(instance: Instance, caller: Caller, rule: str, job_id: str) -> None:
    """Raise NotAllowed when the token is bound to an agent and this job works for another, or for none."""
    if caller.principal.agent is not None:
        within_agent(caller.principal, rule, await agent_of(instance.ledger, job_id) or "")


async def within_reach(instance: Instance, caller: Caller, rule: str, agent: str | None) -> None:
    """Raise NotAllowed for what belongs to an agent that this caller does not reach; `agent` is None for what is not there."""
    await check_reach(instance.ledger, caller.principal, rule, agent)


# Refusals are answered with the rule that refused, logged, and recorded: one act each in the ledger, with a bound (OBS-1).
#
# A record of a refusal changes nothing else. One caller can make only so many a minute; the others are counted, and the next record says
# how many. A ledger that does not answer costs the record and never the answer; the log line is there in any case.

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
