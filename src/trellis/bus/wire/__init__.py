"""The transport of packets: CAP's encoding, signatures, the two implementations of the bus port, and opening one.

`open_bus` opens the bus that the settings name: `local` for one process, or the addresses of NATS servers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from trellis.bus.wire.local import URL as LOCAL
from trellis.bus.wire.local import LocalBus
from trellis.engine.clock import Clock
from trellis.engine.extras import Extra, extra_needed

if TYPE_CHECKING:
    from trellis.bus.wire.nats import NatsBus

SENDER_DEFAULT = "trellis"


@dataclass(frozen=True, kw_only=True)
class BusOptions:
    """Which bus to use, and our identity on it."""

    url: str = LOCAL
    """`local`, or `nats://[user:password@|token@]host:port`, several separated by commas; `tls://` for TLS."""
    sender_id: str = SENDER_DEFAULT
    key_file: Path | None = None
    """Our private key (PEM, P-256); packets are signed when there is one."""
    keys_dir: Path | None = None
    """Public keys of others, `<sender id>.pem`."""
    require_signatures: bool = False
    signature_window_s: float = 300.0
    """How far a signed packet's time may be from the time the bus took it, in seconds."""
    creds_file: Path | None = None
    """A NATS credentials file, or a file with only the seed of a user's nkey."""
    ca_file: Path | None = None
    """CA certificates for the server's certificate, instead of the system's."""


async def open_bus(
    options: BusOptions, *, clock: Clock, now: Callable[[], datetime], new_id: Callable[[], str]
) -> "LocalBus | NatsBus":
    """Open the bus. If the server is unreachable, it connects later by itself. Raises SettingsInvalid."""
    if options.url == LOCAL:
        return LocalBus(options.sender_id, clock=clock, now=now)
    with extra_needed(Extra.BUS, "A bus on NATS"):
        from trellis.bus.wire.cap import load
        from trellis.bus.wire.connection import NatsConnection, NatsOptions, servers_of
        from trellis.bus.wire.nats import NatsBus
        from trellis.bus.wire.signatures import read_keys
    load()
    keys = read_keys(
        sender_id=options.sender_id,
        key_file=options.key_file,
        keys_dir=options.keys_dir,
        required=options.require_signatures,
        window_s=options.signature_window_s,
    )
    connection = NatsConnection(
        NatsOptions(
            servers=servers_of(options.url),
            name=options.sender_id,
            creds_file=options.creds_file,
            ca_file=options.ca_file,
        ),
        clock=clock,
        new_id=new_id,
    )
    await connection.open()
    return NatsBus(connection, sender_id=options.sender_id, keys=keys, clock=clock, now=now, new_id=new_id)
