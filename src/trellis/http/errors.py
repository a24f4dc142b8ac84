"""Errors between a client and its gateway. A problem's code determines the class, its detail is the message.

A refusal that the Python API also knows is a subclass of that error in `trellis.engine.errors`, so `except NotAllowed`
works for both.

GatewayError
├── GatewayUrlInvalid       not a gateway URL
├── TokenUnprotected        the token would go unencrypted to another machine
├── GatewayUnavailable      no response, or only 502, 503 and 504, until the timeout
│   └── GatewayNotThere     nothing listens at the address; nothing was sent
├── GatewayUntrusted        its certificate is not trusted here
├── AnswerInvalid           a response that this client cannot parse
└── GatewayRefused          the gateway refused; see `status`, `correlation_id` and `problem`
    ├── RequestInvalid      422, 405, 415, and any other 4xx
    ├── TokenNotTaken       401
    │   └── TokenIsOver     401, the token has expired
    ├── Forbidden           403
    ├── NotFound            404
    ├── Conflict            409
    │   ├── WrongState      the lifecycle does not allow this transition now
    │   ├── AlreadyThere
    │   └── LeaseGone
    ├── VersionDiffers      412
    ├── TooLarge            413
    ├── KeyTaken            422, the idempotency key was used for another request
    ├── TooFast             429 until the timeout
    └── GatewayFailed       500
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trellis.engine.errors import (
    IdempotencyMismatch,
    InputError,
    InvalidTransition,
    LeaseConflictError,
    NotAllowed,
    PayloadTooLarge,
    Refused,
    TokenExpired,
    TokenRefused,
    TrellisError,
)
from trellis.net.retry_after import retry_after_s


class GatewayError(TrellisError):
    """{detail}"""


class GatewayUrlInvalid(GatewayError, InputError):
    """{url!r} is no address of a gateway: {reason}. It looks like http://127.0.0.1:8420 or https://trellis.example."""

    code = "VALIDATION_FAILED"


class TokenUnprotected(GatewayError, InputError):
    """The token would go unencrypted to {url}. Use https://; where the network is yours, {allow} allows it."""

    code = "VALIDATION_FAILED"


class GatewayUnavailable(GatewayError):
    """The gateway at {url} did not answer {request} within {timeout_s:g} s and {attempts} attempts ({reason}){then}."""

    code = "UPSTREAM_UNAVAILABLE"


class GatewayNotThere(GatewayUnavailable):
    """No gateway listens at {url} ({reason}), so {request} was not sent."""


class GatewayUntrusted(GatewayError):
    """The certificate of {url} is not trusted: {reason}. Name the authority that signed it as `ca_file` (TRELLIS_GATEWAY_CA_FILE)."""

    code = "UPSTREAM_UNAVAILABLE"


class AnswerInvalid(GatewayError):
    """The answer to {request} cannot be read: {reason}; perhaps this is no gateway, or one of another version."""


class GatewayRefused(GatewayError):
    """{detail}"""

    def __init__(
        self,
        *,
        detail: str,
        status: int,
        correlation_id: str | None = None,
        retry_after_s: float | None = None,
        problem: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail=detail)
        self.status = status
        self.correlation_id = correlation_id
        """The id of the request in the gateway's log."""
        self.retry_after_s = retry_after_s
        """After how many seconds to retry, if the gateway says so."""
        self.problem: Mapping[str, Any] = MappingProxyType(dict(problem or {}))
        """The whole problem document; its `code` may be more specific than this class."""


class RequestInvalid(GatewayRefused, InputError):
    """{detail}"""

    code = "VALIDATION_FAILED"


class TokenNotTaken(GatewayRefused, TokenRefused):
    """{detail}"""

    code = "AUTH_REQUIRED"


class TokenIsOver(TokenNotTaken, TokenExpired):
    """{detail}"""

    code = "TOKEN_EXPIRED"


class Forbidden(GatewayRefused, NotAllowed):
    """{detail}"""

    code = "FORBIDDEN"


class NotFound(GatewayRefused):
    """{detail}"""

    code = "NOT_FOUND"


class Conflict(GatewayRefused, Refused):
    """{detail}"""

    code = "CONFLICT"


class WrongState(Conflict, InvalidTransition):
    """{detail}"""

    code = "INVALID_TRANSITION"


class AlreadyThere(Conflict):
    """{detail}"""

    code = "DUPLICATE_ENTRY"


class LeaseGone(Conflict, LeaseConflictError):
    """{detail}"""

    code = "LEASE_LOST"


class VersionDiffers(GatewayRefused, Refused):
    """{detail}"""

    code = "PRECONDITION_FAILED"


class TooLarge(GatewayRefused, PayloadTooLarge):
    """{detail}"""

    code = "PAYLOAD_TOO_LARGE"


class KeyTaken(GatewayRefused, IdempotencyMismatch):
    """{detail}"""

    code = "IDEMPOTENCY_MISMATCH"


class TooFast(GatewayRefused):
    """{detail}"""

    code = "RATE_LIMITED"


class GatewayFailed(GatewayRefused):
    """{detail}"""


_BY_CODE: Mapping[str, type[GatewayRefused]] = MappingProxyType(
    {
        kind.code: kind
        for kind in (
            *(RequestInvalid, TokenNotTaken, TokenIsOver, Forbidden, NotFound, Conflict, WrongState, AlreadyThere),
            *(LeaseGone, VersionDiffers, TooLarge, KeyTaken, TooFast),
        )
    }
)
_BY_STATUS: Mapping[int, type[GatewayRefused]] = MappingProxyType(
    {
        401: TokenNotTaken,
        403: Forbidden,
        404: NotFound,
        409: Conflict,
        412: VersionDiffers,
        413: TooLarge,
        429: TooFast,
    }
)
_SERVER_ERROR = 500


def refusal(status: int, problem: Mapping[str, Any], headers: Mapping[str, str]) -> GatewayRefused:
    """The error for a refusal; `problem` is empty if the response did not come from a gateway."""
    fallback = _BY_STATUS.get(status, RequestInvalid) if status < _SERVER_ERROR else GatewayFailed
    kind = _BY_CODE.get(str(problem.get("code")), fallback)
    return kind(
        detail=str(problem.get("detail") or f"The answer was {status}, and nothing says why."),
        status=status,
        correlation_id=headers.get("X-Correlation-ID"),
        retry_after_s=retry_after_s(headers),
        problem=problem,
    )
