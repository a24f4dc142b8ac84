"""A TLS front of a Temporal server: it may ask for a client certificate and for an API key, as a hosted server does.

It passes every call on as it is, so that what is behind it is a real server.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from tests.servers.temporal import TemporalServer


class _Passing(grpc.GenericRpcHandler):
    """Passes calls on. All methods of the server have one request and one answer."""

    def __init__(self, channel: aio.Channel, api_key: str | None) -> None:
        self._channel, self._api_key = channel, api_key

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method, given = handler_call_details.method, dict(_metadata(handler_call_details))

        async def passed(request: bytes, context: aio.ServicerContext) -> bytes:
            if self._api_key is not None and given.get("authorization") != f"Bearer {self._api_key}":
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this API key is not known")
            try:
                return await self._channel.unary_unary(method)(request, timeout=context.time_remaining())
            except aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", error.trailing_metadata())
                raise

        return grpc.unary_unary_rpc_method_handler(passed)  # type: ignore[arg-type] - aio handlers are coroutines


def _metadata(details: grpc.HandlerCallDetails) -> Sequence[tuple[str, Any]]:
    return details.invocation_metadata or ()


def _credentials(pair: tuple[Path, Path], clients: Path | None) -> grpc.ServerCredentials:
    certificate, key = pair
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())],
        root_certificates=None if clients is None else clients.read_bytes(),
        require_client_auth=clients is not None,
    )


@asynccontextmanager
async def tls_front(
    server: TemporalServer,
    pair: tuple[Path, Path],
    *,
    clients: Path | None = None,
    api_key: str | None = None,
    port: int = 0,
) -> AsyncGenerator[str]:
    """The address of the front. With `clients`, a client needs a certificate that this CA signed."""
    front = aio.server()
    async with aio.insecure_channel(server.address) as channel:
        front.add_generic_rpc_handlers((_Passing(channel, api_key),))
        port = front.add_secure_port(f"127.0.0.1:{port}", _credentials(pair, clients))
        await front.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await front.stop(grace=None)
