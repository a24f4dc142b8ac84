"""Where the Temporal server is, and how runs use it. Needs no package of the extra `temporal`."""

import re
from dataclasses import dataclass, field
from pathlib import Path

FEATURE = "Driving runs by a Temporal server"
"""What needs the extra `temporal`, as the error for a missing extra names it."""
ADDRESS_DEFAULT = "127.0.0.1:7233"
PORT_MAX = 65_535
NAMESPACE_DEFAULT = "default"
EXPECTED = "temporal://host:port/namespace, such as temporal://127.0.0.1:7233/default"
_URL = re.compile(
    r"temporal://(?P<address>(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5}))(/(?P<namespace>[\w.-]+)/?)?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporalTls:
    """How a connection to the server is encrypted. The files are PEM, and are read for each connection."""

    ca_file: Path | None = None
    """The CA that signed the server's certificate. None: the system's CAs."""
    cert_file: Path | None = None
    """The client certificate of this process, for a server that asks for one."""
    key_file: Path | None = None
    """The private key of that certificate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporalOptions:
    """How runs use a Temporal server."""

    address: str = ADDRESS_DEFAULT
    namespace: str = NAMESPACE_DEFAULT
    tls: TemporalTls | None = None
    """None: the connection is not encrypted."""
    api_key: str | None = field(default=None, repr=False)
    """Sent with every request, and only over TLS."""
    queue: str
    """The task queue of the workflows. Instances that share a namespace need different ones."""
    heartbeat_s: float = 10.0
    """How often a process reports to the server that it executes a step."""
    silence_s: float = 30.0
    """A process that is silent for this long is taken for dead by the workflow."""
    pickup_s: float = 60.0
    """A process that does not begin a step within this time is taken for dead by the workflow."""

    def workflow_id(self, run_id: str) -> str:
        """The id of a run's workflow."""
        return f"{self.queue}/{run_id}"


def read_orchestrator(text: str, queue: str) -> TemporalOptions | None:
    """The server that `temporal` or `temporal://host:port/namespace` names. None for anything else."""
    if text == "temporal":
        return TemporalOptions(queue=queue)
    match = _URL.fullmatch(text)
    if match is None or not 0 < int(match["port"]) <= PORT_MAX:
        return None
    namespace = match["namespace"] or NAMESPACE_DEFAULT
    return TemporalOptions(address=match["address"], namespace=namespace, queue=queue)
