"""`trellis mcp` as a client of the protocol starts it: a real process, asked by the official SDK over its pipes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.gateway.serving import Served, serving, settings_in
from tests.gateway.world import proposal
from tests.servers.ready_python import ready_python
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import development_key, make_development_key
from trellis.auth.tokens import issue
from trellis.engine.jobs import JobId
from trellis.ledgers import migrate, open_ledger
from trellis.lifecycles import Role
from trellis.mcp_server.stdio import LINE_BYTES_MAX
from trellis.mcp_server.tools import TOOLS

if TYPE_CHECKING:
    from mcp import Client

DECISIONS = {name for name, tool in TOOLS.items() if tool.decides}
PATIENCE_S = 60.0


@pytest.fixture
async def url(tmp_path: Path) -> str:
    """The ledger of a local instance with its key."""
    chosen = f"sqlite:///{tmp_path / 'trellis.db'}"
    await migrate(chosen, by="test", reason=None)
    make_development_key(chosen)
    return chosen


def token(url: str, role: Role, name: str) -> str:
    return issue(development_key(url), name=name, roles=[role], ttl_s=3600, now=time.time())


@asynccontextmanager
async def started(folder: Path, *arguments: str, shown: str | None = None) -> "AsyncGenerator[Client]":
    """The SDK's client of `trellis mcp`, which it starts in this folder. Imported here: most runs collect this file and do not use it."""
    from mcp import Client, StdioServerParameters

    environment = {"TRELLIS_TOKEN": shown} if shown is not None else {}
    words = ["-m", "trellis", "mcp", *arguments]
    command = StdioServerParameters(command=ready_python(), args=words, cwd=folder, env=environment)
    async with Client(command, read_timeout_seconds=PATIENCE_S) as client:
        yield client


async def called(client: "Client", tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    return result.content[0].text if result.is_error else result.structured_content  # type: ignore[union-attr]


async def test_a_local_instance_is_used_as_the_person_who_started_it_but_nobody_decides(tmp_path: Path, url: str):
    async with open_instance(Settings.model_validate({}), url) as instance:
        waiting = await proposal(_Holder(instance))  # type: ignore[arg-type]
    async with started(tmp_path) as client:
        offered = {tool.name for tool in (await client.list_tools()).tools}
        submitted = await called(client, "job_submit", job={"type": "index", "payload": [1, 2]})
        shown = await called(client, "job_show", job_id=submitted["job_id"])
        refused = await called(client, "proposal_approve", proposal_id=waiting, version=1)
        proposed = await called(client, "proposal_show", proposal_id=waiting)
        missing = await called(client, "job_show", job_id="nothing")
    assert (offered, shown["payload"]) == (set(TOOLS) - DECISIONS, [1, 2])
    assert proposed["status"] == "pending"
    assert "this server has none" in refused
    assert "trellis token issue --role owner" in refused
    assert "nothing" in missing
    ledger = await open_ledger(url)
    try:
        first = (await ledger.events(JobId(submitted["job_id"])))[0]
        assert "@" in first.actor, "the user and the machine, as in every command"
    finally:
        await ledger.close()


async def test_a_local_instance_is_decided_about_by_a_token_that_may(tmp_path: Path, url: str):
    async with open_instance(Settings.model_validate({}), url) as instance:
        waiting = await proposal(_Holder(instance))  # type: ignore[arg-type]
    async with started(tmp_path, shown=token(url, Role.CONTROL_PLANE, "otto")) as client:
        refused = await called(client, "proposal_reject", proposal_id=waiting, version=1, note="not good enough")
        assert "control-plane may not decide about a proposal" in refused
    async with started(tmp_path, shown=token(url, Role.OWNER, "ada")) as client:
        rejected = await called(client, "proposal_reject", proposal_id=waiting, version=1, note="not good enough")
    assert (rejected["status"], rejected["approval"]["decided_by"]) == ("rejected", "ada")


class _Holder:
    """What `tests.gateway.world` needs of a gateway."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance


@pytest.fixture
def served(tmp_path: Path, url: str) -> Iterator[Served]:
    with serving(url, [development_key(url)], settings=settings_in(tmp_path)) as gateway:
        yield gateway


async def test_a_gateway_elsewhere_decides_by_the_token_of_the_settings(tmp_path: Path, url: str, served: Served):
    gateway = f"http://127.0.0.1:{served.port}"
    waiting = await proposal(served)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with started(elsewhere, "--gateway", gateway, shown=token(url, Role.FRONTEND, "vera")) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == set(TOOLS)
        refused = await called(client, "proposal_approve", proposal_id=waiting, version=1)
        assert "frontend may not decide about a proposal" in refused
    async with started(elsewhere, "--gateway", gateway, shown=token(url, Role.OWNER, "ada")) as client:
        approved = await called(client, "proposal_approve", proposal_id=waiting, version=1, note="read and checked")
    assert (approved["status"], approved["approval"]["decided_by"]) == ("approved", "ada")


def talk(folder: Path, sent: bytes) -> list[dict[str, Any]]:
    """What the process answers to these bytes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRELLIS_")}
    done = subprocess.run(
        [ready_python(), "-m", "trellis", "mcp"],
        input=sent,
        capture_output=True,
        cwd=folder,
        env=environment,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_lines_that_are_no_messages_are_answered_and_one_that_is_too_long_is_the_last(tmp_path: Path, url: str):
    ping = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n'
    answers = talk(tmp_path, b"no json\n\n[1]\n" + ping + b"x" * (LINE_BYTES_MAX + 1) + b"\n" + ping)
    assert [one.get("error", {}).get("code") for one in answers] == [-32700, -32600, None, -32600]
    assert (answers[2]["id"], str(LINE_BYTES_MAX) in answers[3]["error"]["message"]) == (1, True)


def test_without_a_ledger_the_command_says_how_to_make_one(tmp_path: Path):
    words = [ready_python(), "-m", "trellis", "mcp"]
    done = subprocess.run(words, capture_output=True, cwd=tmp_path, input=b"", check=False, timeout=PATIENCE_S)
    assert done.returncode != 0
    assert b"trellis migrate" in done.stderr


@pytest.mark.parametrize("opened", ["< /dev/null", "< messages", "<&-"])
def test_a_standard_input_that_nobody_can_wait_for_is_refused(tmp_path: Path, opened: str):
    (tmp_path / "messages").write_text("{}\n")
    words = f'exec "$0" -m trellis mcp --gateway http://127.0.0.1:1 {opened}'
    python = sys.executable if opened == "<&-" else ready_python()  # the ready one passes on no closed descriptor
    done = subprocess.run(
        ["/bin/sh", "-c", words, python], capture_output=True, cwd=tmp_path, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"standard input" in done.stderr
    assert b"a pipe, as a client of the protocol opens it" in done.stderr
    assert b"Traceback" not in done.stderr
