"""Who asks the NLM backend: a bearer token becomes a principal, and a route's rule is asked before anything is read (AUTH-5)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.responses import Response
from fastapi.security import HTTPAuthorizationCredentials

from trellis.engine.authority import Principal
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import Actor
from trellis.engine.logs import log_of
from trellis.engine.matrices import permit
from trellis.identity import TrustedKey
from trellis.web.limits import RateLimits
from trellis.web.problems import Problem, correlation_of, problem_response
from trellis.web.tokens import VerifiedTokens, bearer

CALLER_STATE_KEY = "trellis.who"

_log = log_of("trellis.nlm_backend")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendAccess:
    """Who is let in; in the app's state."""

    keys: Sequence[TrustedKey]
    limits: RateLimits
    now: Callable[[], float]
    """Seconds since 1970, for tokens."""
    tokens: VerifiedTokens = field(default_factory=VerifiedTokens)


async def authenticate(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)]
) -> Principal:
    """The principal of the token, looked at once for each request; raises Problem 401, TokenRefused, Problem 429."""
    known: Principal | None = request.scope.get(CALLER_STATE_KEY)
    if known is not None:
        return known
    if len(request.headers.getlist("authorization")) > 1:
        raise Problem("AUTH_REQUIRED", "Two Authorization headers were sent; send one token.")
    if credentials is None:
        detail = "No token was sent; put `Authorization: Bearer TOKEN`, a token of `trellis token issue`."
        raise Problem("AUTH_REQUIRED", detail)
    door: BackendAccess = request.app.state.door
    identity = door.tokens.verify(credentials.credentials, door.keys, now=door.now())
    principal = identity.principal()
    door.limits.take(request, principal)
    request.scope[CALLER_STATE_KEY] = principal
    return principal


class RequiresBackendRule:
    """A dependency: the caller in the role that may, if rule `name` lets it."""

    def __init__(self, rule: str) -> None:
        self.rule = rule

    async def __call__(self, who: Annotated[Principal, Depends(authenticate)]) -> Actor:
        """The caller; raises NotAllowed."""
        return permit(who, self.rule)

    async def admit(self, request: Request) -> None:
        """Raise what asking would raise, before anything of the body is read."""
        await self(await authenticate(request, await bearer(request)))


def requires(rule: str) -> Any:
    """For a parameter of a route: the caller, if this rule lets it."""
    return Depends(RequiresBackendRule(rule))


async def refusal_answer(request: Request, error: NotAllowed) -> Response:
    """The answer to whoever may not; the log has it."""
    principal: Principal | None = request.scope.get(CALLER_STATE_KEY)
    caller = None if principal is None else principal.name
    rule = error.data.get("rule")
    _log.warning("refused", caller=caller, rule=rule, path=request.url.path, correlation_id=correlation_of(request))
    return problem_response(request, Problem("FORBIDDEN", str(error), rule=rule))
