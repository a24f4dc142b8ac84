"""Nodes: the machines that write to the ledger, as audit records name them (OBS-1)."""

import re
import socket

NODE_CHARS_MAX = 255
_PROCESS = re.compile(r"@(?P<node>[^@]+):\d+$")


def this_node() -> str:
    """The name of this machine."""
    return (socket.gethostname() or "localhost")[:NODE_CHARS_MAX]


def node_of(actor: str, recorded: str | None) -> str | None:
    """The machine that an actor wrote from: as recorded, else as the name of a process (`worker@alpine:71`) says.

    Ledgers of before record no machine; of a name that names no process, such as a person's, it is then not known.
    """
    if recorded:
        return recorded
    found = _PROCESS.search(actor)
    return None if found is None else found["node"]
