"""`trellis wait`: waits until an instance is ready, and prints the address of its gateway.

`trellis up` writes the address of its gateway into a file beside an SQLite ledger, because port 0 takes any free port.
The file is only a hint: its process must be alive, and the server at the address must report the instance name in the
file. So neither a stale file of a killed process nor another program on the same port is mistaken for the gateway.
"""

import asyncio
import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trellis.app.wiring import elapsed_s, outgoing_tls
from trellis.cli import values
from trellis.cli.commands import command
from trellis.cli.invocation import Cli, sqlite_path
from trellis.engine.errors import OptionInvalid, Refused
from trellis.engine.private_files import open_beside
from trellis.engine.text import duration
from trellis.http_server.health import INSTANCE_HEADER

if TYPE_CHECKING:  # HTTP is imported only when it is used
    import httpx2

READY_PATH = "/system/ready"
LOOK_S = 0.1
ANSWER_S = 2.0
"""Timeout of one request, in seconds."""
PATIENCE = "60s"
HINT_BYTES_MAX = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class _GatewayLocation:
    """The address of a gateway and, unless a person named it, the instance that must answer there."""

    address: str
    instance: str | None = None


def add_to(program: typer.Typer) -> None:
    command(program, "wait", section="Workers", gateway=True)(wait)


async def wait(
    cli: Cli,
    patience: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="The longest wait; after it, exit code 1.")
    ] = PATIENCE,
) -> None:
    """Wait until the gateway of `trellis up` answers, and print its address.

    It is the gateway of --gateway or TRELLIS_GATEWAY, else that of the `trellis up` on this SQLite ledger.
    """
    patience_s = values.seconds("--for", patience) or 0.0
    address = await _answering(cli, patience_s)
    cli.out.answer({"gateway": address, "ready": True}, address)


async def _answering(cli: Cli, patience_s: float) -> str:
    import httpx2

    named = cli.gateway_url
    hint = None if named is not None else _hint_file(cli)
    ends = elapsed_s() + patience_s
    tls = outgoing_tls(cli.settings)
    async with httpx2.AsyncClient(verify=tls or True, trust_env=False, timeout=ANSWER_S) as client:
        while True:
            where = _hinted(hint) if hint is not None else None if named is None else _GatewayLocation(address=named)
            if where is not None and await _is_ready(client, where):
                return where.address
            if elapsed_s() >= ends:
                which = f"of {cli.url}" if where is None else where.address
                detail = f"No gateway {which} answered in {duration(patience_s)}; `trellis up` starts one."
                raise Refused(detail=detail)
            await asyncio.sleep(LOOK_S)


async def _is_ready(client: "httpx2.AsyncClient", where: _GatewayLocation) -> bool:
    import httpx2

    try:
        answer = await client.get(f"{where.address.rstrip('/')}{READY_PATH}")
    except httpx2.HTTPError:
        return False
    is_it = where.instance is None or answer.headers.get(INSTANCE_HEADER) == where.instance
    return is_it and answer.status_code == 200


# --- the hint file ---------------------------------------------------------------------------------------------------


@contextmanager
def announce_gateway(cli: Cli, address: str, instance: str) -> Generator[None]:
    """Write the gateway's address and instance name beside an SQLite ledger, and remove them at the end.

    Nothing is written for other ledgers.
    """
    path = sqlite_path(cli.url)
    if path is None:
        yield
        return
    hint = _hint_path_beside(path)
    content = json.dumps({"gateway": address, "pid": os.getpid(), "instance": instance}).encode()
    with os.fdopen(open_beside(hint, path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(content)
    try:
        yield
    finally:
        # Another process may have replaced the file in the meantime.
        with suppress(OSError):
            if hint.read_bytes() == content:
                hint.unlink()


def _hint_file(cli: Cli) -> Path:
    path = sqlite_path(cli.url)
    if path is None:
        expected = "name the gateway: only beside an SQLite ledger `trellis up` writes down where it is"
        raise OptionInvalid(option="--gateway", value=None, expected=expected)
    return _hint_path_beside(path)


def _hint_path_beside(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.up")


def _hinted(hint: Path) -> _GatewayLocation | None:
    """The gateway in the hint file; None if the file cannot be read or its process is gone."""
    try:
        with hint.open("rb") as file:
            content = json.loads(file.read(HINT_BYTES_MAX))
        where = _GatewayLocation(address=str(content["gateway"]), instance=str(content["instance"]))
        return where if is_alive(int(content["pid"])) else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has this id."""
    if pid <= 0:  # such ids name process groups
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
