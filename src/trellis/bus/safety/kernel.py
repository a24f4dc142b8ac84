"""Safety kernels: in this process, in another process over gRPC with CAP's SafetyKernel service, and serving one there."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from trellis.bus.errors import BusRequestInvalid, KernelUnavailable
from trellis.bus.requests import JobRequest
from trellis.bus.safety import cap_kernel, evaluation
from trellis.bus.safety.evaluation import DecisionExplanation
from trellis.bus.safety.policy import (
    ALLOW_ALL_POLICY,
    DecisionKernel,
    KernelInDoubt,
    KernelRefuses,
    PolicyInvalid,
    SafetyDecision,
    SafetyPolicy,
    cannot_read,
    read_bounded,
    read_policy_bytes,
)
from trellis.engine.errors import OptionInvalid
from trellis.engine.logs import log_of

# Kernels in this process.

FILE_CHECK_S = 1.0
"""Minimum interval between checks of the file, in seconds."""


class SafetyKernel(DecisionKernel, Protocol):
    """A kernel with the calls for people, in addition to the scheduler's."""

    async def explain(self, request: JobRequest) -> DecisionExplanation:
        """The decision, and how it was made; raises KernelUnavailable."""
        ...

    async def snapshot(self) -> str:
        """The hash of the policy in force; raises KernelUnavailable."""
        ...

    async def close(self) -> None:
        """Release its resources."""
        ...


class _LocalKernel(ABC):
    """A kernel in this process, which evaluates the policy in force. There are no resources to release."""

    @abstractmethod
    async def _policy_in_force(self) -> SafetyPolicy: ...

    async def check(self, request: JobRequest) -> SafetyDecision:
        return evaluation.decide(await self._policy_in_force(), request)

    async def explain(self, request: JobRequest) -> DecisionExplanation:
        return evaluation.explain(await self._policy_in_force(), request)

    async def snapshot(self) -> str:
        return (await self._policy_in_force()).hash

    async def close(self) -> None:  # noqa: B027 - there is nothing to release
        pass


class PolicyKernel(_LocalKernel):
    """Decides by one fixed policy."""

    def __init__(self, policy: SafetyPolicy = ALLOW_ALL_POLICY) -> None:
        self.policy = policy

    async def _policy_in_force(self) -> SafetyPolicy:
        return self.policy


class FileKernel(_LocalKernel):
    """Decides by the policy in a file.

    While the file is unreadable or invalid, no job is dispatched, not even by its last valid version.

    A changed file takes effect when the next check finds it unchanged: a half-written policy may be valid too, and
    allow more.
    """

    def __init__(self, file: Path, *, monotonic: Callable[[], float]) -> None:
        self.file = file
        self._monotonic = monotonic
        self._looked_at: float | None = None
        self._body: bytes | None = None
        self._found: SafetyPolicy | PolicyInvalid | None = None
        self._settled = True
        """Whether two checks in a row found the same content, or there was only one."""
        self._looking: asyncio.Future[None] | None = None
        """The running check of the file, or the last one.

        Only one runs at a time, however slow the disk is: each holds a thread.
        """

    async def _policy_in_force(self) -> SafetyPolicy:
        """The policy in the file; raises KernelUnavailable, which says what is wrong with the file."""
        if self._looking is None or (self._looking.done() and self._is_due()):
            self._looking = asyncio.ensure_future(self._look_beside())
        await asyncio.shield(self._looking)
        if isinstance(self._found, SafetyPolicy) and self._settled:
            return self._found
        changed = f"{self.file} has changed just now; it counts when it stays the same for {FILE_CHECK_S:g} s"
        raise KernelUnavailable(detail=changed if isinstance(self._found, SafetyPolicy) else str(self._found))

    def _is_due(self) -> bool:
        return self._looked_at is None or self._monotonic() - self._looked_at >= FILE_CHECK_S

    async def _look_beside(self) -> None:
        now = self._monotonic()
        await asyncio.to_thread(self._look)
        self._looked_at = now

    def _look(self) -> None:
        try:
            body = read_bounded(self.file)
        except OSError as error:
            self._body, self._found = None, cannot_read(self.file, error)
            return
        self._settled = body == self._body or self._looked_at is None
        if body == self._body:
            return
        self._body, self._found = None, None  # if parsing raises, the previous policy no longer applies
        try:
            self._found = read_policy_bytes(body, source=str(self.file))
        except PolicyInvalid as error:
            self._found = error
        self._body = body


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
        self._failures, self._open_until, self._trying = 0, None, False

    def failed(self) -> None:
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


# Serving a kernel to other processes.

CALLS_MAX = 200
"""Maximum number of concurrent calls. Calls beyond it are refused; the caller tries again."""
DRAIN_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingOptions:
    """Where to listen. Any address but the loopback needs a certificate."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 chooses a free port."""
    cert_file: Path | None = None
    key_file: Path | None = None


@asynccontextmanager
async def serve_kernel(kernel: SafetyKernel, options: ServingOptions) -> AsyncGenerator[int]:
    """Serve this kernel while the context is open; yields the port. Raises OptionInvalid."""
    cap = cap_kernel.load_cap_modules()
    server = cap.grpc.aio.server(
        maximum_concurrent_rpcs=CALLS_MAX,
        options=(("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.so_reuseport", 0)),
    )
    server.add_generic_rpc_handlers(
        (cap.grpc.method_handlers_generic_handler(cap_kernel.SERVICE, _methods(cap, kernel)),)
    )
    port = _bind(cap, server, options)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(DRAIN_S)


def _bind(cap: cap_kernel.CapModules, server: Any, options: ServingOptions) -> int:
    target = f"[{options.host}]:{options.port}" if ":" in options.host else f"{options.host}:{options.port}"
    try:
        if options.cert_file is not None and options.key_file is not None:
            pair = (options.key_file.read_bytes(), options.cert_file.read_bytes())
            return server.add_secure_port(target, cap.grpc.ssl_server_credentials([pair]))
        if not is_this_machine(options.host):
            expected = "a kernel that others can reach needs a certificate and its key"
            raise OptionInvalid(option="host", value=options.host, expected=expected)
        return server.add_insecure_port(target)
    except (OSError, RuntimeError) as error:
        raise OptionInvalid(option="address", value=target, expected=f"it cannot be listened on ({error})") from None


def _methods(cap: cap_kernel.CapModules, kernel: SafetyKernel) -> dict[str, Any]:
    async def explained(check: Any, context: Any, tell: Callable[[DecisionExplanation], str | None]) -> Any:
        request, job_hash = cap_kernel.read_policy_check_request(check)
        explanation = await kernel.explain(request)
        context.set_trailing_metadata(cap_kernel.response_metadata(explanation.decision, job_hash or request.hash))
        return cap_kernel.policy_check_response(cap, explanation.decision, reason=tell(explanation))

    async def judge(check: Any, context: Any) -> Any:
        return await explained(check, context, lambda _: None)

    async def explain(check: Any, context: Any) -> Any:
        return await explained(check, context, explanation_text)

    async def snapshots(_: Any, __: Any) -> Any:
        return cap.safety.ListSnapshotsResponse(snapshots=[await kernel.snapshot()])

    checks = {"Check": judge, "Evaluate": judge, "Simulate": judge, "Explain": explain}
    methods = {name: _handler(cap, act, cap.safety.PolicyCheckRequest) for name, act in checks.items()}
    return methods | {"ListSnapshots": _handler(cap, snapshots, cap.safety.ListSnapshotsRequest)}


def _handler(cap: cap_kernel.CapModules, act: Callable[[Any, Any], Awaitable[Any]], kind: Any) -> Any:
    codes = cap.grpc.StatusCode

    async def handle(check: Any, context: Any) -> Any:
        try:
            return await act(check, context)
        except BusRequestInvalid as error:
            await context.abort(codes.INVALID_ARGUMENT, str(error))
        except KernelUnavailable as error:
            await context.abort(codes.UNAVAILABLE, str(error))

    return cap.grpc.unary_unary_rpc_method_handler(
        handle, request_deserializer=kind.FromString, response_serializer=cap_kernel.to_bytes
    )


def explanation_text(explanation: DecisionExplanation) -> str:
    """An explanation as text: the decision, then each rule that was checked."""
    decision = explanation.decision
    lines = [f"{decision.kind.value} by {decision.rule}: {decision.reason}"]
    lines += [
        f"{'fits' if one.fits else 'does not fit'}: {one.rule} ({one.decision.value}): {one.why}"
        for one in explanation.looked
    ]
    return "\n".join([*lines, *(f"not looked at: {rule}" for rule in explanation.not_looked)])
