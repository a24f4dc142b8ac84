"""`trellis demo`: an agent from trigger to proposals; with --crash, a killed worker and how its job recovers."""

import asyncio
import json as json_
import os
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from trellis.agents.garden import AGENTS
from trellis.app.wiring import connect, make_development_key
from trellis.cli.commands import command
from trellis.cli.demo.processes import DemoWorkers
from trellis.cli.demo.watch import DemoWatch
from trellis.cli.events import EVENT_COLUMNS, print_events
from trellis.cli.invocation import Cli, ledger_url, make_folder
from trellis.cli.output import ListingColumn, state_text
from trellis.cli.places import program_name
from trellis.client import Trellis
from trellis.engine.errors import InputError, Refused
from trellis.engine.jobs import JobId
from trellis.engine.records import DeadLetter, Job, JobFilter
from trellis.engine.verify import verify
from trellis.ledgers import migrate
from trellis.worker.requests import SubmitSettings

APP_FILE = "demo_app.py"
LOOK_S = 0.05
PATIENCE_S = 25.0
"""Far longer than the demo takes, in seconds. Beyond it something is wrong, and the logs say what."""
KILL_AT_STEP = 4
TOKEN_SETTINGS = ("TRELLIS_TOKEN", "TRELLIS_TOKEN_FILE", "TRELLIS_TOKEN_KEY_FILE")

NAMES = ("ada", "alan", "barbara", "dennis", "edsger", "frances", "grace", "ken", "lin")


@dataclass(frozen=True, kw_only=True)
class DemoBatch:
    """Jobs of one type to submit."""

    type: str
    payloads: Sequence[str]
    settings: SubmitSettings = field(default_factory=SubmitSettings)


BATCHES = (
    DemoBatch(type="report.build", payloads=["Q3 revenue"], settings={"priority": "interactive"}),
    DemoBatch(type="page.fetch", payloads=["/prices", "/terms", "/jobs"]),
    DemoBatch(type="feed.import", payloads=["weather"], settings={"max_attempts": 3}),
    DemoBatch(type="card.charge", payloads=["4000-…-0002"]),
    DemoBatch(type="mail.send", payloads=[f"{name}@example.org" for name in NAMES]),
)


def add_to(program: typer.Typer) -> None:
    command(program, "demo", section="Begin", json=False)(demo)


async def demo(
    cli: Cli,
    agent: Annotated[str, typer.Option("--agent", metavar="AGENT", help="Which agent of the garden.")] = AGENTS[0],
    crash: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--crash", help="Jobs instead: kill a worker and see that nothing is lost.")
    ] = False,
    serve: Annotated[
        bool | None,
        typer.Option("--serve/--no-serve", help="Then serve the console until Ctrl-C; by default only at a terminal."),
    ] = None,
) -> int:
    """Run an agent from trigger to proposals that wait for your decision.

    It makes a folder with everything in it (or uses --data DIR), needs no key and no network, takes a few seconds and approves nothing. At a
    terminal it ends with a link that signs in to the console and opens the proposals, and serves it until Ctrl-C; nothing else is left
    running. With --crash a small application runs instead, and its worker is killed in the middle.
    """
    if cli.ledger is not None:
        raise InputError(detail="The demo makes a ledger of its own; --data DIR chooses its folder.")
    for name in TOKEN_SETTINGS:
        os.environ.pop(name, None)  # the demo's ledger is new: no token was issued for it or its workers
    if crash:
        return await _crash(cli)
    from trellis.cli.demo.agent import agent_demo  # imports the whole platform, only for the agent demo

    return await agent_demo(cli, agent, serve=cli.out.console.is_terminal if serve is None else serve)


async def _crash(cli: Cli) -> int:
    """Run a small application, kill its worker with SIGKILL, and show what the ledger records."""
    folder = (cli.data or Path(tempfile.mkdtemp(prefix="trellis-demo-"))).resolve()
    url = ledger_url(folder)
    make_folder(url)
    (folder / APP_FILE).write_text(
        files("trellis.cli.demo").joinpath(f"{APP_FILE}.txt").read_text("utf-8"), encoding="utf-8"
    )
    await migrate(url)
    make_development_key(url)
    async with connect(url, name=cli.person, operator=True) as trellis:
        with DemoWorkers(folder, url) as workers:
            cli.out.line(f"Everything happens in {folder}", style="dim")
            watch = DemoWatch(out=cli.out, ledger=trellis.ledger, position=await trellis.ledger.feed_end())
            crashed = await _run_story(trellis, watch, workers)
        return await _print_story(cli, trellis, watch, crashed, folder)


async def _run_story(trellis: Trellis, watch: DemoWatch, workers: DemoWorkers) -> Job:
    """Submit, work, kill, recover. Returns the job that was running when its worker died."""
    with watch:
        for batch in BATCHES:
            for handle in await trellis.submit_many(batch.type, batch.payloads, **batch.settings):
                watch.expect(await handle.status())
        later = await trellis.submit("mail.send", "donald@example.org", delay_s=3600)
        watch.expect(await later.status())
        watch.say(f"{len(watch.types)} jobs submitted, one of them for in an hour")
        watch.say(f"worker 1 starts (process {workers.start()})")
        report = next(job_id for job_id, type_ in watch.types.items() if type_ == "report.build")
        await _wait_until(watch, workers, lambda: _is_halfway(trellis, report))
        crashed = await trellis.job(report)
        watch.say(
            f"kill -9 {workers.kill()}: report.build was at step {_step(crashed)} of {_steps(crashed)}", "bold red"
        )
        watch.say(f"worker 2 starts (process {workers.start()})")
        await trellis.cancel(later.id, cause="the operator changed their mind")
        await _wait_until(watch, workers, lambda: _is_over(watch))
        watch.say("every job has ended; worker 2 drains")
        code = workers.stop()
        watch.say(f"worker 2 is gone (exit code {code})")
    return crashed


async def _wait_until(watch: DemoWatch, workers: DemoWorkers, done: Callable[[], Awaitable[bool]]) -> None:
    """Poll until `done` returns true, for a bounded time."""
    began = time.monotonic()
    while True:
        await watch.look()
        if await done():
            return
        code = workers.ended_early()
        if code is not None or time.monotonic() - began > PATIENCE_S:
            what = (
                f"a worker ended by itself with code {code}" if code is not None else f"no end after {PATIENCE_S:g} s"
            )
            raise Refused(
                detail=f"The demo is stuck: {what}. Its logs are worker-1.log and worker-2.log in its folder."
            )
        await asyncio.sleep(LOOK_S)


async def _is_halfway(trellis: Trellis, report: JobId) -> bool:
    return _step(await trellis.job(report)) >= KILL_AT_STEP


async def _is_over(watch: DemoWatch) -> bool:
    return watch.all_ended


def _step(job: Job) -> int:
    return int(json_.loads(job.progress)["step"]) if job.progress else 0


def _steps(job: Job) -> int:
    return int(json_.loads(job.progress)["of"]) if job.progress else 0


async def _print_story(cli: Cli, trellis: Trellis, watch: DemoWatch, crashed: Job, folder: Path) -> int:
    ledger, out = trellis.ledger, cli.out
    report = await verify(ledger)
    letters = [letter for letter in await ledger.dead_letters(JobFilter(), limit=50) if letter.job_id in watch.types]
    ends = Counter(watch.states.values())
    story = Text("\n").join([Text(), Text("What happened", style="bold")])
    out.console.print(story)
    out.console.print(
        Text(", ").join(Text.assemble(f"{n} ", state_text("leased-job", state)) for state, n in ends.items())
    )
    out.line(f"\nThe report whose worker was killed ({crashed.job_id})", style="bold")
    print_events(out, await ledger.events(crashed.job_id), EVENT_COLUMNS)
    result = await ledger.result(crashed.job_id)
    out.line(f"result: {json_.loads(result or b'null')}", style="green")
    out.line("\nDead letters, kept until somebody decides", style="bold")
    out.listing(letters, LETTER_COLUMNS, empty="none")
    out.line("\nVerified", style="bold")
    out.line(
        f"{report.events} events of {report.jobs} jobs replayed against the lifecycle: "
        + ("no violation" if report.ok else f"{report.found} violations"),
        style="green" if report.ok else "bold red",
    )
    _next_steps(cli, folder, crashed)
    return 0 if report.ok else 1


LETTER_COLUMNS = (
    ListingColumn[DeadLetter](title="TYPE", cell=lambda letter: letter.type),
    ListingColumn[DeadLetter](title="REASON", cell=lambda letter: Text(letter.reason_code.value, style="red")),
    ListingColumn[DeadLetter](title="TRIES", cell=lambda letter: str(letter.attempts), right=True),
    ListingColumn[DeadLetter](title="LAST ERROR", cell=lambda letter: letter.last_error, wraps=True),
)


def _next_steps(cli: Cli, folder: Path, crashed: Job) -> None:
    program = program_name()
    cli.out.line("\nNothing is left running. Look around:", style="bold")
    cli.out.line(f"  cd {shlex.quote(str(folder))}")
    for order in (
        "jobs",
        f"job explain {crashed.job_id}",
        "dlq requeue --type feed.import",
        "worker demo_app:app",
        "token issue --role submitter",
        "doctor",
    ):
        cli.out.line(f"  {program} {order}", style="cyan")
