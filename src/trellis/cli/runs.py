"""`trellis run` and `trellis runs`: start, list, show and cancel runs."""

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trellis.app.wiring import new_id
from trellis.cli import values
from trellis.cli.agents import AgentArgument
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, IdsOption, LimitOption, at_gateway, command, group
from trellis.cli.instances import open_for_command, owner
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn
from trellis.cli.reads import open_wait
from trellis.cli.run_output import print_ended, refusals, run_facts, show_runs, step_bar, still_at_work, took, wait_s
from trellis.cli.telemetry import configure_logging, configure_tracing
from trellis.cli.values import params_of
from trellis.documents import ids, run_documents
from trellis.documents.errors import RunNotFound
from trellis.documents.lookup import find_run, listed_runs
from trellis.documents.run_documents import RunFacts, RunRequest
from trellis.engine.errors import Refused
from trellis.engine.jobs import CancelMode, JobId, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter, JobPlace
from trellis.lifecycles.run import RUN
from trellis.operations.explain import duration
from trellis.runs.orchestration import TriggerKind

if TYPE_CHECKING:  # loads the whole platform, so only commands that open an instance import it
    from trellis.app.instance import Instance

ENDED = frozenset({"completed", "failed"})
WATCH_S = 0.1
PAGE_MAX = 500
STEP_FIELDS = ("step", "name", "file", "sha256", "started_at", "finished_at")
LOCAL = "file://"

RunArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The run's id, or run_YYYY-MM-DD_xxxxxx without the time of day.")
]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    command(program, "run", section="Agents", over_http=at_gateway("run"))(run)
    runs = group(program, "runs", section="Agents", help_="Runs of agents: list, show, cancel.", lists=True)
    command(runs, "list", over_http=at_gateway("list_runs"))(list_runs)
    command(runs, "show", over_http=at_gateway("show_run"))(show_run)
    command(runs, "cancel", over_http=at_gateway("cancel_run"))(cancel)


async def run(
    cli: Cli,
    agent: AgentArgument,
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="K=V", help="A parameter of the run; again for another.")
    ] = None,
    watch: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--watch", help="Execute it in this command's own process, and show each step.")
    ] = False,
    wait: Annotated[
        str | None, typer.Option("--wait", metavar="DURATION", help="Wait until `trellis up` has ended it.")
    ] = None,
    correlation: Annotated[
        str | None, typer.Option("--correlation", metavar="ID", help="What the run belongs to; its records carry it.")
    ] = None,
) -> int:
    """Begin a run of an agent.

    Without an option it is left to `trellis up`. --wait waits for its end; --watch needs no `trellis up`, because this process executes
    the run itself, with its own environment (model, keys). Both print the proposals and exit with 1 when the run failed.
    """
    configure_logging(cli.settings)
    configure_tracing()
    params, patience_s = params_of(param or []), wait_s(wait, watch=watch)
    owner(cli, "begin a run")
    async with open_for_command(cli) as instance:
        run_id = await instance.layer.trigger(agent, params, kind=TriggerKind.MANUAL, correlation_id=correlation)
        if patience_s is not None:
            return print_ended(cli, await _waited(cli, instance, agent, run_id, patience_s))
        if not watch:
            standing = await instance.layer.run_state(run_id)
            if cli.out.as_json:
                cli.out.record({"run_id": run_id, "status": standing.status, "position": standing.position})
            else:
                cli.out.line(run_id)
            return 0
        return await _watch(cli, instance, agent, run_id)


async def _waited(cli: Cli, instance: "Instance", slug: str, run_id: JobId, patience_s: float) -> dict[str, Any]:
    """The last status.json of a run that another process executes; raises Refused if it takes too long."""
    try:
        async with asyncio.timeout(patience_s):
            return await _until_ended(cli, instance, slug, run_id, None)
    except TimeoutError:
        raise still_at_work(run_id, patience_s) from None


async def watched(cli: Cli, instance: "Instance", slug: str, run_id: JobId) -> dict[str, Any]:
    """Execute runs in this process until this one has ended, then evaluate agent health; its last status.json."""
    stop = asyncio.Event()
    serving = asyncio.ensure_future(instance.serve(stop, queue_jobs=False))
    try:
        return await _until_ended(cli, instance, slug, run_id, serving)
    finally:
        stop.set()
        await serving
        await instance.judge_agents()


async def _watch(cli: Cli, instance: "Instance", slug: str, run_id: JobId) -> int:
    return print_ended(cli, await watched(cli, instance, slug, run_id))


async def _until_ended(
    cli: Cli, instance: "Instance", slug: str, run_id: JobId, serving: "asyncio.Future[None] | None"
) -> dict[str, Any]:
    """The last status.json, with a progress bar over the published steps."""
    published, status = instance.published, dict[str, Any]()
    with step_bar(cli) as show:
        while status.get("status") not in ENDED:
            if serving is not None and serving.done():
                serving.result()
            await asyncio.sleep(WATCH_S)
            status = await published.status(slug, run_id) or {}
            show(status)
    return status


async def list_runs(
    cli: Cli,
    agent: Annotated[str | None, typer.Option("--agent", metavar="SLUG", help="Only runs of this agent.")] = None,
    state: Annotated[
        str | None, typer.Option("--status", "--state", help="Only those of this status, such as running.")
    ] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Only those that have ended.")] = False,  # noqa: FBT002 - a flag
    limit: LimitOption = LIMIT_DEFAULT,
    ids_: IdsOption = False,  # noqa: FBT002 - a flag
) -> None:
    """List runs, newest first. A run is archived when it has ended: nothing of it changes any more."""
    wanted = values.limit(limit, LIMIT_MAX)
    chosen, lifecycle = values.state(state, RUN.name)
    where = JobFilter(
        lifecycle=lifecycle,
        state=chosen,
        concurrency_key=f"run:{agent}" if agent else None,
        place=JobPlace.ENDED if archived else None,
    )
    async with cli.open() as ledger:
        now = await ledger.now()
        jobs = await _pages(ledger, where, wanted)
        if cli.out.ids_alone(ids_, [job.job_id for job in jobs]):
            return
        found = await listed_runs(ledger, jobs)
    show_runs(cli, found, now)


async def _pages(ledger: Ledger, where: JobFilter, wanted: int) -> list[Job]:
    found: list[Job] = []
    cursor: str | None = None
    while len(found) < wanted:
        page = await ledger.jobs(where, limit=min(PAGE_MAX, wanted - len(found)), cursor=cursor)
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            break
    return found


async def show_run(cli: Cli, id_: RunArgument) -> None:
    """One run: its status, its steps with their times, what it proposed, its error, and where its folder is."""
    async with open_for_command(cli) as instance:
        run_id = await find_run(instance.ledger, id_)
        record = await _record(instance, run_id)
    if cli.out.as_json:
        cli.out.record(record)
        return
    cli.out.facts(run_facts(record))
    if record["steps"]:
        cli.out.line()
        columns = [
            ListingColumn[dict[str, Any]](title="STEP", cell=lambda step: step["name"]),
            ListingColumn[dict[str, Any]](title="BEGAN", cell=lambda step: step["started_at"]),
            ListingColumn[dict[str, Any]](title="TOOK", cell=took, right=True),
            ListingColumn[dict[str, Any]](title="FILE", cell=lambda step: step["file"], gives_way=True),
        ]
        cli.out.listing(record["steps"], columns, empty="")


async def _record(instance: "Instance", run_id: JobId) -> dict[str, Any]:
    """The run as the ledger has it now, because its status.json may be a moment behind."""
    job = await instance.ledger.job(run_id)
    if job is None or job.payload is None:
        raise RunNotFound(run_id=run_id)
    request, events = RunRequest.read(job.payload), await instance.ledger.events(run_id)
    done = [json.loads(event.data) for event in events if event.type == run_documents.STEP_DONE and event.data]
    folder = f"{instance.objects.url.rstrip('/')}/{ids.run_folder(request.agent_slug, run_id)}"
    wait = await open_wait(instance.ledger, job)
    journal = await instance.ledger.read_journal(run_id)
    files = [journal.get(run_documents.STEP_ENTRY.format(number=step["step"])) for step in done]
    return {
        "already_proposed": [],
        "refused_actions": 0,
        **json.loads(run_documents.status(RunFacts(run_id, request, tuple(events)))),
        "refused": refusals([json.loads(file) for file in files if file is not None]),
        "params": request.params,
        "position": (await instance.layer.run_state(run_id)).position,
        "cancel_requested": job.cancel_requested,
        "waits": None if wait is None else {"since": run_documents.timestamp(wait.since), "reason": wait.reason},
        "steps": [{name: step.get(name) for name in STEP_FIELDS} for step in done],
        "folder": folder.removeprefix(LOCAL),
    }


async def cancel(
    cli: Cli,
    id_: RunArgument,
    hard: Annotated[bool, typer.Option("--hard", help="End it now; what its driver still does is refused.")] = False,  # noqa: FBT002 - a flag
    reason: Annotated[str | None, typer.Option("--reason", help="Why, for the run's error and event.")] = None,
) -> None:
    """End a run that has not ended. A running one is asked to stop, and ended after a grace."""
    owner(cli, "cancel a run")
    mode = CancelMode.HARD if hard else CancelMode.SOFT
    async with open_for_command(cli) as instance:
        run_id = await find_run(instance.ledger, id_)
        before = (await instance.layer.run_state(run_id)).status
        if before in ENDED:
            raise Refused(detail=f"Run {run_id} has ended already: it is {before}.")
        state = await instance.layer.cancel(run_id, mode=mode, request_id=RequestId(new_id()), cause=reason)
    if state == "completed":
        raise Refused(detail=f"Run {run_id} was faster: it is completed.")
    if cli.out.as_json:
        cli.out.record({"run_id": run_id, "status": state, "requested": state not in ENDED})
    elif state in ENDED:
        cli.out.line(f"{run_id} is {state}")
    else:
        cli.out.line(
            f"{run_id} was asked to stop; it is ended in {duration(cli.settings.cancel_grace_s)} if it does not"
        )
