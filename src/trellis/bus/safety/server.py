"""Serves a kernel to other processes, over gRPC with CAP's SafetyKernel service."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trellis.bus.errors import BusRequestInvalid, KernelUnavailable
from trellis.bus.safety import cap_kernel
from trellis.bus.safety.evaluation import DecisionExplanation
from trellis.bus.safety.kernel import SafetyKernel
from trellis.bus.safety.remote_kernel import MESSAGE_BYTES_MAX, is_this_machine
from trellis.engine.errors import OptionInvalid

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
        found = await kernel.explain(request)
        context.set_trailing_metadata(cap_kernel.response_metadata(found.decision, job_hash or request.hash))
        return cap_kernel.policy_check_response(cap, found.decision, reason=tell(found))

    async def judge(check: Any, context: Any) -> Any:
        return await explained(check, context, lambda _: None)

    async def explain(check: Any, context: Any) -> Any:
        return await explained(check, context, explanation_text)

    async def snapshots(_: Any, __: Any) -> Any:
        return cap.safety.ListSnapshotsResponse(snapshots=[await kernel.snapshot()])

    checks = {"Check": judge, "Evaluate": judge, "Simulate": judge, "Explain": explain}
    made = {name: _handler(cap, act, cap.safety.PolicyCheckRequest) for name, act in checks.items()}
    return made | {"ListSnapshots": _handler(cap, snapshots, cap.safety.ListSnapshotsRequest)}


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


def explanation_text(found: DecisionExplanation) -> str:
    """An explanation as text: the decision, then each rule that was checked."""
    decision = found.decision
    lines = [f"{decision.kind.value} by {decision.rule}: {decision.reason}"]
    lines += [
        f"{'fits' if one.fits else 'does not fit'}: {one.rule} ({one.decision.value}): {one.why}"
        for one in found.looked
    ]
    return "\n".join([*lines, *(f"not looked at: {rule}" for rule in found.not_looked)])
