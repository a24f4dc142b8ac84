"""`trellis demo`: runs a demo agent from trigger to proposals that wait for a person."""

import asyncio
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from trellis.agents.garden import AGENTS
from trellis.api.runs import ReadableRun, published_states, while_executing
from trellis.app.instance import Instance, open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import make_development_key
from trellis.cli.invocation import Cli, ledger_url, make_folder
from trellis.cli.places import program_name
from trellis.cli.runs import followed
from trellis.documents import ids
from trellis.engine.errors import InputError
from trellis.ledgers import migrate
from trellis.runs.orchestration import TriggerKind

PATIENCE_S = 60.0
"""Far longer than a run takes here, in seconds. Beyond it something is wrong."""
QUOTES_MAX = 4


async def agent_demo(cli: Cli, slug: str, *, serve: bool) -> int:
    """Run one agent in its own folder and show its proposals; nothing is approved.

    With `serve` the instance is then served until stopped, so that a person can decide in the console.
    """
    if slug not in AGENTS:
        raise InputError(detail=f"The garden has no agent {slug!r}; choose {' or '.join(AGENTS)}.")
    folder = (cli.data or Path(tempfile.mkdtemp(prefix="trellis-demo-"))).resolve()
    url = ledger_url(folder)
    make_folder(url)
    await migrate(url)
    make_development_key(url)
    # The demo is the same on every machine: the settings of this machine are not used.
    async with open_instance(Settings.model_validate({}), url, name=cli.process) as instance:
        await instance.plant()
        run_id = (await instance.layer.trigger(slug, {}, kind=TriggerKind.MANUAL)).job_id
        cli.out.line(f"{slug} reads its sources and asks them questions: {run_id}")
        async with asyncio.timeout(PATIENCE_S):
            states = published_states(instance, ReadableRun(run_id, slug))
            status = await while_executing(instance, run_id, followed(cli, states))
        if status["error"]:
            cli.out.line(status["error"])
            return 1
        await _show(cli, instance, slug, status)
        _print_locations(cli, folder, slug, run_id)
        waiting = status["proposals_created"]
        if waiting:
            _print_decisions(cli, folder, waiting[0])
            await _decided_in_a_browser(cli, instance, folder, waiting[0], serve=serve)
    return 0


async def _show(cli: Cli, instance: Instance, slug: str, status: dict[str, Any]) -> None:
    stored = await instance.objects.get(ids.output_key(slug, status["run_id"]))
    assert stored is not None, "a completed run has its output"
    output = json.loads(stored.body)
    cli.out.line()
    cli.out.prose(output["summary"])
    for body in output["proposals"]:
        published = await instance.objects.get(ids.proposal_key(slug, body["id"]))
        state = "pending" if published is None else json.loads(published.body)["status"]
        cli.out.line()
        cli.out.line(f"{body['id']}  {state}", style="bold")
        cli.out.prose(f"  {body['action']} {body['target']}: {body['content']['summary']}")
        grounds = body["content"].get("grounds") or [body["content"]]
        quotes = [citation for ground in grounds for citation in ground["citations"]]
        for quote in quotes[:QUOTES_MAX]:
            cli.out.prose(f"  “{quote['excerpt']}” {quote['ref']}", style="dim")


def _print_locations(cli: Cli, folder: Path, slug: str, run_id: str) -> None:
    cli.out.line()
    cli.out.facts(
        [
            ("run folder", str(folder / "objects" / ids.run_folder(slug, run_id))),
            ("memory", str(folder / "memory.git")),
            ("ledger", ledger_url(folder)),
        ]
    )


def _print_decisions(cli: Cli, folder: Path, proposal: str) -> None:
    cli.out.line()
    cli.out.line("Nothing was changed but the agent's own memory. What waits for you:")
    for act in ("show", "approve"):
        cli.out.line(f"  {program_name()} proposals {act} {proposal} --data {shlex.quote(str(folder))}")


async def _decided_in_a_browser(cli: Cli, instance: Instance, folder: Path, proposal: str, *, serve: bool) -> None:
    """Serve the console with a link to the proposal, or print the command that does."""
    from trellis.gateway.console import is_built  # loads the web framework

    if serve and is_built():
        from trellis.cli.demo.console import serve_console

        await serve_console(cli, instance, ledger_url(folder), proposal=proposal)
    else:
        cli.out.line("Or decide in a browser; this prints a link that signs in:")
        cli.out.line(f"  {program_name()} up --data {shlex.quote(str(folder))}")
