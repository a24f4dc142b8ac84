"""Safety kernels in other processes: a client with a circuit breaker, and the choice of the configured kernel."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trellis.bus.errors import KernelUnavailable
from trellis.bus.requests import JobRequest
from trellis.bus.safety import cap_kernel
from trellis.bus.safety.decisions import KernelInDoubt, KernelRefuses, SafetyDecision
from trellis.bus.safety.evaluation import DecisionExplanation
from trellis.bus.safety.kernel import FileKernel, PolicyKernel, SafetyKernel
from trellis.bus.safety.policy import ALLOW_ALL_POLICY
from trellis.engine.errors import OptionInvalid
from trellis.engine.logs import log_of

# Circuit breaker: opens for 30 seconds after three failures in a row, then lets one call try.

FAILURES_MAX = 3
OPEN_S = 30.0


@dataclass(slots=True)
class KernelCircuitBreaker:
    """Counts failures in a row in this process. An admitted caller must call `answered`, `failed` or `release`."""

    monotonic: Callable[[], float]
    failures_max: int = FAILURES_MAX
    open_s: float = OPEN_S
    _failures: int = 0
    _open_until: float | None = None
    _trying: bool = False

    def refuses_for_s(self) -> float | None:
        """How long calls are refused, in seconds; None if this call is admitted.

        After the pause, only one call at a time is admitted.
        """
        if self._open_until is None:
            return None
        left_s = self._open_until - self.monotonic()
        if left_s > 0 or self._trying:
            return max(left_s, 0.0)
        self._trying = True
        return None

    def answered(self) -> None:
        """Record that the kernel answered."""
        self._failures, self._open_until, self._trying = 0, None, False

    def failed(self) -> None:
        """Record a failure of the kernel."""
        self._failures += 1
        if self._trying or self._failures >= self.failures_max:
            self._open_until = self.monotonic() + self.open_s
        self._trying = False

    def release(self) -> None:
        """End a call that says nothing about the kernel; another call may try."""
        self._trying = False


# Client of a kernel in another process, over gRPC with CAP's SafetyKernel service (BUS-4). On any error, no job is
# dispatched.

TIMEOUT_S = 2.0
SCHEMES = ("grpc", "grpcs")
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
_CHANNEL: tuple[tuple[str, int], ...] = (
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)

_ABOUT_THE_QUESTION = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE"})
"""gRPC codes that concern the request, not the kernel. One invalid job must not stop checks of others."""
_NOT_IMPLEMENTED = "UNIMPLEMENTED"
"""A kernel need not implement every method, but one that implements none is not a kernel."""
_UNAVAILABLE = "UNAVAILABLE"
"""Any other code may concern the kernel or the request; a second call shows which."""

_log = log_of("trellis.bus.safety")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelAddress:
    """The address of a kernel."""

    host: str
    port: int
    tls: bool

    @property
    def target(self) -> str:
        """The address in gRPC's notation."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_kernel_address(text: str) -> bool:
    """Whether the text is the address of a kernel, not a file."""
    return text.partition("://")[0].lower() in SCHEMES


def kernel_address(text: str) -> KernelAddress:
    """Parse `grpcs://host:port`, or `grpc://` for a kernel on this machine; raises OptionInvalid."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _invalid_address(text, str(error)) from None
    if (
        parts.scheme not in SCHEMES
        or not host
        or not port
        or parts.path.strip("/")
        or parts.query
        or "@" in parts.netloc
    ):
        raise _invalid_address(text, "write grpcs://host:port, or grpc://localhost:port for a kernel on this machine")
    if parts.scheme == "grpc" and not is_this_machine(host):
        raise _invalid_address(
            text, "only a kernel on this machine is asked without encryption; write grpcs://host:port"
        )
    return KernelAddress(host=host, port=port, tls=parts.scheme == "grpcs")


def is_this_machine(host: str) -> bool:
    """Whether the host is the loopback."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _invalid_address(text: str, expected: str) -> OptionInvalid:
    return OptionInvalid(option="policy", value=text[:200], expected=expected)


class RemoteKernel:
    """Asks a kernel, with a timeout of two seconds.

    After three failures in a row it stops asking for 30 seconds; then one call tries.

    A call that fails while the kernel answers another is not a failure of the kernel: only its own job waits.
    """

    def __init__(
        self,
        address: KernelAddress,
        *,
        monotonic: Callable[[], float],
        ca_file: Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.address = address
        self._cap = cap_kernel.load_cap_modules()
        self._ca_file, self._timeout_s = ca_file, timeout_s
        self._breaker = KernelCircuitBreaker(monotonic)
        self._channel: Any = None

    async def check(self, request: JobRequest) -> SafetyDecision:
        """The kernel's decision."""
        return await self._judged("Check", request)

    async def explain(self, request: JobRequest) -> DecisionExplanation:
        """The kernel's decision. Its reason is the only explanation that another process gives."""
        return DecisionExplanation(decision=await self._judged("Explain", request))

    async def snapshot(self) -> str:
        """The first policy that the kernel lists."""
        async with _GuardedCall(self._breaker, self.address):
            named = await self._snapshots()
            if not named:
                raise KernelRefuses(detail="it names no policy")
        return named[0]

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _judged(self, method: str, request: JobRequest) -> SafetyDecision:
        async with _GuardedCall(self._breaker, self.address):
            try:
                question = cap_kernel.policy_check_request(self._cap, request)
            except (ValueError, TypeError) as error:
                raise KernelRefuses(detail=f"it cannot be asked about this job: {error}") from None
            try:
                answer, beside = await self._ask(method, question, self._cap.safety.PolicyCheckResponse)
            except KernelInDoubt as error:
                if await self._is_there(error):
                    raise KernelRefuses(**error.data) from None
                raise
            return cap_kernel.read_policy_check_response(answer, beside, request)

    async def _is_there(self, doubt: KernelInDoubt) -> bool:
        """Whether the kernel answers a call that is not about a job."""
        try:
            await self._snapshots()
        except KernelInDoubt as error:
            return error.data.get("code") == _NOT_IMPLEMENTED != doubt.data.get("code")
        except KernelUnavailable as error:
            return isinstance(error, KernelRefuses)
        return True

    async def _snapshots(self) -> Sequence[str]:
        safety = self._cap.safety
        answer, _ = await self._ask("ListSnapshots", safety.ListSnapshotsRequest(), safety.ListSnapshotsResponse)
        return answer.snapshots

    async def _ask(self, method: str, question: Any, kind: Any) -> tuple[Any, Mapping[str, str]]:
        """The response and its metadata; raises KernelUnavailable."""
        try:
            call = self._connected().unary_unary(
                f"/{cap_kernel.SERVICE}/{method}",
                request_serializer=cap_kernel.to_bytes,
                response_deserializer=kind.FromString,
            )(question, timeout=self._timeout_s)
            answer = await call
            beside = {str(name): str(value) for name, value in await call.trailing_metadata() or ()}
        except self._cap.grpc.aio.AioRpcError as error:
            raise self._failure(error.code().name, error.details() or "no answer") from None
        except (self._cap.grpc.aio.UsageError, OSError) as error:
            raise KernelUnavailable(detail=f"{self.address.target}: {error}") from None
        if answer is None:  # gRPC returns None for bytes that are not a message
            raise KernelInDoubt(detail=f"{self.address.target} answers with what is no {kind.DESCRIPTOR.name}")
        return answer, beside

    def _failure(self, code: str, detail: str) -> KernelUnavailable:
        about = KernelRefuses if code in _ABOUT_THE_QUESTION else KernelInDoubt
        kind = KernelUnavailable if code == _UNAVAILABLE else about
        return kind(detail=f"{self.address.target} says {code}: {detail[:500]}", code=code)

    def _connected(self) -> Any:
        if self._channel is None:
            aio = self._cap.grpc.aio
            if self.address.tls:
                trusted = None if self._ca_file is None else self._ca_file.read_bytes()
                credentials = self._cap.grpc.ssl_channel_credentials(root_certificates=trusted)
                self._channel = aio.secure_channel(self.address.target, credentials, options=_CHANNEL)
            else:
                self._channel = aio.insecure_channel(self.address.target, options=_CHANNEL)
        return self._channel


class _GuardedCall:
    """One call, counted by the breaker. Raises KernelUnavailable while the breaker is open."""

    def __init__(self, breaker: KernelCircuitBreaker, address: KernelAddress) -> None:
        self._breaker, self._address = breaker, address

    async def __aenter__(self) -> None:
        left_s = self._breaker.refuses_for_s()
        if left_s is not None:
            detail = f"{self._address.target} failed {self._breaker.failures_max} times in a row; asked again in {left_s:.0f} s"
            raise KernelUnavailable(detail=detail)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, KernelRefuses):
            self._breaker.answered()
        elif isinstance(error, KernelUnavailable):
            _log.warning("kernel_failed", address=self._address.target, error=str(error))
            self._breaker.failed()
        elif isinstance(error, asyncio.CancelledError):
            self._breaker.release()
        else:
            self._breaker.failed()


def open_kernel(policy: str | None, *, monotonic: Callable[[], float], ca_file: Path | None = None) -> SafetyKernel:
    """Open the configured kernel. `grpc://…` or `grpcs://…` is another process, any other text is a policy file.

    None allows every job of `job.>` (D53). An unreachable kernel or an invalid file is not an error here: jobs wait for
    it. Raises OptionInvalid.
    """
    if policy is None:
        return PolicyKernel(ALLOW_ALL_POLICY)
    if is_kernel_address(policy):
        return RemoteKernel(kernel_address(policy), monotonic=monotonic, ca_file=ca_file)
    return FileKernel(Path(policy), monotonic=monotonic)
