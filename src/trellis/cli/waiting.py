"""`trellis wait`: come back when an instance can be used, with the address of its gateway.

`trellis up` writes the address of its gateway into a file beside an SQLite ledger, since port 0 takes any free one. The file is a hint
alone: whether the gateway answers is asked of the gateway, so a file that a killed process left behind deceives nobody.
"""

import asyncio
import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trellis.cli import values
from trellis.cli.commands import command
from trellis.cli.invocation import Cli, sqlite_path
from trellis.engine.errors import OptionInvalid, Refused
from trellis.engine.private_files import open_beside
from trellis.operations.explain import duration
from trellis.wiring import elapsed_s, outgoing_tls

if TYPE_CHECKING:  # HTTP is loaded when it is used
    import httpx2

READY_PATH = "/system/ready"
LOOK_S = 0.1
ANSWER_S = 2.0
"""How long one question may take."""
PATIENCE = "60s"
HINT_BYTES_MAX = 4096


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    command(program, "wait", section="Workers", over_http=wait)(wait)


async def wait(
    cli: Cli,
    patience: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="How long at most; after that exit code 1.")
    ] = PATIENCE,
) -> None:
    """Wait until the gateway of `trellis up` answers, and print its address.

    It is the gateway of --gateway or TRELLIS_GATEWAY, else that of the `trellis up` on this SQLite ledger.
    """
    patience_s = values.seconds("--for", patience) or 0.0
    address = await _answering(cli, patience_s)
    if cli.out.as_json:
        cli.out.record({"gateway": address, "ready": True})
    else:
        cli.out.line(address)


async def _answering(cli: Cli, patience_s: float) -> str:
    import httpx2

    named = cli.gateway_url
    hint = None if named is not None else _hint_file(cli)
    ends, address = elapsed_s() + patience_s, named
    tls = outgoing_tls(cli.settings)
    async with httpx2.AsyncClient(verify=tls or True, trust_env=False, timeout=ANSWER_S) as client:
        while True:
            address = named or (None if hint is None else _hinted(hint))
            if address is not None and await _is_ready(client, address):
                return address
            if elapsed_s() >= ends:
                where = address or f"of {cli.url}"
                detail = f"No gateway {where} answered in {duration(patience_s)}; `trellis up` starts one."
                raise Refused(detail=detail)
            await asyncio.sleep(LOOK_S)


async def _is_ready(client: "httpx2.AsyncClient", address: str) -> bool:
    import httpx2

    try:
        return (await client.get(f"{address.rstrip('/')}{READY_PATH}")).status_code == 200
    except httpx2.HTTPError:
        return False


# --- where it is -----------------------------------------------------------------------------------------------------


@contextmanager
def announced(cli: Cli, address: str) -> Generator[None]:
    """Say beside an SQLite ledger where its gateway is, as long as this lasts; elsewhere nothing is written."""
    path = sqlite_path(cli.url)
    if path is None:
        yield
        return
    hint, mine = _beside(path), json.dumps({"gateway": address, "pid": os.getpid()}).encode()
    with os.fdopen(open_beside(hint, path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(mine)
    try:
        yield
    finally:
        # Another process may have taken over the name meanwhile.
        with suppress(OSError):
            if hint.read_bytes() == mine:
                hint.unlink()


def _hint_file(cli: Cli) -> Path:
    path = sqlite_path(cli.url)
    if path is None:
        expected = "name the gateway: only beside an SQLite ledger `trellis up` writes down where it is"
        raise OptionInvalid(option="--gateway", value=None, expected=expected)
    return _beside(path)


def _beside(ledger: Path) -> Path:
    return ledger.with_name(f"{ledger.name}.up")


def _hinted(hint: Path) -> str | None:
    """The address in the file, or None while there is none that can be read."""
    try:
        with hint.open("rb") as file:
            return str(json.loads(file.read(HINT_BYTES_MAX))["gateway"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
