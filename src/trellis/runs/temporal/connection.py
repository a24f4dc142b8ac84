"""The connection of one process to its Temporal server: TLS, API key, and what its errors mean."""

import asyncio
import logging
import re
import ssl
from datetime import timedelta
from functools import cache
from pathlib import Path

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.runtime import LogForwardingConfig, LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RPCError, RPCStatusCode, TLSConfig

from trellis.documents.errors import TemporalAway
from trellis.engine.errors import SettingsInvalid
from trellis.runs.temporal.options import TemporalOptions, TemporalTls

RPC_TIMEOUT_S = 5.0

_REASONS = (
    (
        r"InvalidCertificate\((\w+)",
        r"its certificate is refused (\1); TRELLIS_TEMPORAL_CA_FILE names the CA that signed it",
    ),
    (
        r"InvalidContentType",
        "it does not speak TLS; remove the settings TRELLIS_TEMPORAL_TLS, …_CA_FILE and …_CERT_FILE",
    ),
    (r"code: (Unauthenticated|PermissionDenied)", r"it refuses this process (\1); see TRELLIS_TEMPORAL_API_KEY"),
    (r"dns error", "its name cannot be resolved"),
    (r"tcp connect error", "nothing answers at this address"),
)
"""What the SDK's errors of a connection mean, by a part of their text. The SDK raises them all as RuntimeError."""


async def connect(options: TemporalOptions, *, identity: str = "trellis") -> Client:
    """Connect to the server and check that its namespace exists. Raises TemporalAway and SettingsInvalid."""
    timeout = timedelta(seconds=RPC_TIMEOUT_S)
    tls = False if options.tls is None else await asyncio.to_thread(read_tls, options.tls)
    try:
        async with asyncio.timeout(RPC_TIMEOUT_S):
            client = await Client.connect(
                options.address,
                namespace=options.namespace,
                identity=identity,
                tls=tls,
                api_key=options.api_key,
                runtime=_runtime(),
            )
            namespace = DescribeNamespaceRequest(namespace=options.namespace)
            await client.workflow_service.describe_namespace(namespace, retry=False, timeout=timeout)
    except TimeoutError as error:
        raise _away(options, f"it does not answer within {RPC_TIMEOUT_S:g} s") from error
    except RPCError as error:
        is_unknown = error.status is RPCStatusCode.NOT_FOUND
        raise _away(options, "it has no such namespace" if is_unknown else error.message) from error
    except RuntimeError as error:  # the SDK's error for a connection that cannot be made
        raise _away(options, _reason(str(error))) from error
    return client


@cache
def _runtime() -> Runtime:
    """The SDK's threads in this process, whose errors go to Python's log.

    By default they write coloured text to standard output, several lines a second while the server is away, also where
    the log is JSON. That the server is away is logged by Trellis.
    """
    errors = TelemetryFilter(core_level="ERROR", other_level="ERROR")
    forwarding = LogForwardingConfig(logger=logging.getLogger("temporalio"))
    return Runtime(telemetry=TelemetryConfig(logging=LoggingConfig(filter=errors, forwarding=forwarding)))


async def check_health(client: Client, options: TemporalOptions) -> None:
    """Ask the server on an open connection whether it serves. Raises TemporalAway."""
    timeout = timedelta(seconds=RPC_TIMEOUT_S)
    try:
        serves = await client.service_client.check_health(timeout=timeout, retry=False)
    except RPCError as error:
        raise _away(options, error.message) from error
    if not serves:
        raise _away(options, "it answers that it does not serve")


def _away(options: TemporalOptions, reason: str) -> TemporalAway:
    return TemporalAway(address=options.address, namespace=options.namespace, reason=reason)


def _reason(text: str) -> str:
    for pattern, reason in _REASONS:
        if (match := re.search(pattern, text)) is not None:
            return match.expand(reason)
    return "it closed the connection; it may need TLS (TRELLIS_TEMPORAL_TLS) or a client certificate (…_CERT_FILE)"


def read_tls(tls: TemporalTls) -> TLSConfig:
    """Read and check the files of a connection. Raises SettingsInvalid, which names the setting."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    pair: tuple[Path, Path] | None = None
    if tls.ca_file is not None:
        try:
            context.load_verify_locations(tls.ca_file)
        except (OSError, ssl.SSLError) as error:
            detail = f"{tls.ca_file} holds no certificates in PEM: {error.strerror or type(error).__name__}"
            raise SettingsInvalid(source="TRELLIS_TEMPORAL_CA_FILE", detail=detail) from error
    if tls.cert_file is not None and tls.key_file is not None:
        pair = tls.cert_file, tls.key_file
        try:
            context.load_cert_chain(*pair, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            detail = (
                f"{pair[0]} and {pair[1]} are no certificate with its key: {error.strerror or type(error).__name__}"
            )
            names = "TRELLIS_TEMPORAL_CERT_FILE, TRELLIS_TEMPORAL_KEY_FILE"
            raise SettingsInvalid(source=names, detail=detail) from error
    return TLSConfig(
        server_root_ca_cert=None if tls.ca_file is None else tls.ca_file.read_bytes(),
        client_cert=None if pair is None else pair[0].read_bytes(),
        client_private_key=None if pair is None else pair[1].read_bytes(),
    )
