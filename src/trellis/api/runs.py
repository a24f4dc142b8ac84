"""Runs of agents: start one, follow it, read its documents, cancel it (PIPE-1, RUN-4, RUN-10, D12, D19, D43).

`get` and `list` say what the ledger has now; `status`, `watch` and `manifest` read what was published. What was
published can still be read when retention has removed the run from the ledger.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from trellis.api.context import LIMIT_DEFAULT, ApiPart
from trellis.app.instance import Instance
from trellis.app.system import SystemClock
from trellis.auth.matrices import permit
from trellis.auth.ownership import owns, permit_on_job
from trellis.documents import ids, run_documents
from trellis.documents.errors import ManifestMissing, RunNotFound
from trellis.documents.lookup import find_published, find_run, listed_runs
from trellis.documents.run_documents import RunFacts, RunRequest
from trellis.engine.errors import InvalidTransition
from trellis.engine.jobs import Actor, CancelMode, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, JobPlace
from trellis.engine.subscription import PROJECTOR
from trellis.http.operation_shapes import RunRequestShape
from trellis.http.pages import read_pages
from trellis.http.shapes import (
    Page,
    RunDetail,
    RunListed,
    RunManifest,
    RunStarted,
    RunStatus,
    StepFile,
    Stopped,
)
from trellis.lifecycles import Role
from trellis.lifecycles.run import RUN
from trellis.runs.orchestration import TriggerKind
from trellis.runs.waits import open_wait
from trellis.storage.objects.canonical_json import timestamp

READ = "runs.read"
ENDED = frozenset({"completed", "failed"})
LOOK_S = 0.1
"""How often a run is looked at that is watched, in seconds."""
LOCAL = "file://"
WATCHER = "run-watch"
"""The name of a process that executes its own run and no other begins with this word."""
DRIVER_LOOK_S = 0.5
"""How often a process checks whether another process still executes runs, in seconds."""
ACCEPTED_S = 10.0
"""A run that waits longer than this for acceptance shows that no process executes runs, in seconds."""

ResultT = TypeVar("ResultT")


class RunHasEnded(InvalidTransition):
    """Run {job_id} has ended already: it is {source}."""


@dataclass(frozen=True, slots=True)
class ReadableRun:
    """A run that the caller may read, and its agent."""

    run_id: JobId
    agent_slug: str


class LocalRuns(ApiPart):
    """Runs on a ledger and its stores, with the calls of `client.runs`."""

    async def start(
        self,
        agent: str,
        params: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
        correlation_id: str | None = None,
    ) -> RunStarted:
        """Start a run of an agent. The same key and request again is the same run, and then it is not `created`."""
        gateway = Actor(role=Role.GATEWAY, name=self._context.permit("runs.trigger").name)
        layer = (await self._context.instance()).layer.acting_as(gateway)
        started = await layer.trigger(
            agent, params or {}, kind=TriggerKind.MANUAL, key=idempotency_key, correlation_id=correlation_id
        )
        return RunStarted(run_id=started.job_id, agent_slug=agent, status="requested", created=started.created)

    async def get(self, run_id: str) -> RunDetail:
        """One run as the ledger has it now; its status.json may be a moment behind. Raises RunNotFound."""
        instance, ledger, run = await self._context.instance(), self._context.ledger, await self.find(run_id)
        job = await ledger.job(run.run_id)
        if job is None or job.payload is None:
            return RunDetail(**await self._published(run))
        request, wait = RunRequest.read(job.payload), await open_wait(ledger, job)
        facts = RunFacts(run.run_id, request, tuple(await ledger.events(run.run_id)))
        folder = f"{instance.objects.url.rstrip('/')}/{ids.run_folder(request.agent_slug, run.run_id)}"
        return RunDetail(
            **json.loads(run_documents.status(facts)),
            params=request.params,
            position=(await instance.layer.run_state(run.run_id)).position,
            cancel_requested=job.cancel_requested,
            waits=None if wait is None else {"since": timestamp(wait.since), "reason": wait.reason},
            folder=folder.removeprefix(LOCAL),
        )

    async def request(self, run_id: str) -> RunRequestShape:
        """What a run was started with. Raises RunNotFound, also for a run that has left the ledger."""
        run = await self.find(run_id)
        job = await self._context.ledger.job(run.run_id)
        if job is None or job.payload is None:
            raise RunNotFound(run_id=run_id)
        request = RunRequest.read(job.payload)
        return RunRequestShape(
            run_id=run.run_id, agent_slug=request.agent_slug, trigger=request.trigger, params=request.params
        )

    async def status(self, run_id: str, *, unless: RunStatus | None = None) -> RunStatus | None:
        """One run as it was published last; None when it is still as `unless` says."""
        run_status = RunStatus(**await self._published(await self.find(run_id)))
        return None if unless is not None and run_status.version == unless.version else run_status

    async def list(
        self,
        *,
        agent: str | None = None,
        status: str | None = None,
        archived: bool = False,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> Page[RunListed]:
        self._context.check_read(READ)
        key, place = None if agent is None else f"run:{agent}", JobPlace.ENDED if archived else None
        where = JobFilter(lifecycle=RUN.name, state=status, concurrency_key=key, place=place)
        return await read_pages(partial(self._page, where), limit, cursor)

    async def _page(self, where: JobFilter, limit: int, cursor: str | None) -> Page[RunListed]:
        page = await self._context.ledger.jobs(where, limit=limit, cursor=cursor)
        items = [RunListed(**one) for one in await listed_runs(self._context.ledger, page.jobs)]
        return Page[RunListed](items=items, next_cursor=page.cursor)

    async def steps(self, run_id: str) -> Sequence[StepFile]:
        """The steps that are done, in order, each with the name and hash of its file."""
        run, ledger = await self.find(run_id), self._context.ledger
        events, journal = await ledger.events(run.run_id), await ledger.read_journal(run.run_id)
        done = [json.loads(one.data) for one in events if one.type == run_documents.STEP_DONE and one.data]
        files = [journal.get(run_documents.STEP_ENTRY.format(number=step["step"]), b"{}") for step in done]
        least: dict[str, Any] = {"run_id": run.run_id, "agent_slug": run.agent_slug, "result": {}}
        steps = [{**least, **step, **json.loads(file)} for step, file in zip(done, files, strict=True)]
        return [
            StepFile.model_validate(step) for step in steps or await step_files(await self._context.instance(), run)
        ]

    async def manifest(self, run_id: str) -> RunManifest:
        """What a run that ended left; raises ManifestMissing before."""
        return RunManifest(**await manifest_file(await self._context.instance(), await self.find(run_id)))

    async def wait(self, run_id: str, timeout_s: float | None = None) -> RunStatus:
        from trellis.http.streams import wait_for_last  # loads HTTP

        return await wait_for_last(self.watch(run_id), SystemClock(), timeout_s, f"run {run_id}")

    async def watch(self, run_id: str) -> AsyncGenerator[RunStatus]:
        """How the run stands, each time something was published, until it has ended."""
        async for state in published_states(await self._context.instance(), await self.find(run_id)):
            yield state

    async def cancel(
        self, run_id: str, *, mode: str = "soft", reason: str | None = None, idempotency_key: str | None = None
    ) -> Stopped:
        """End a run: soft asks it to stop, hard ends it now. Raises RunHasEnded."""
        request, chosen = self._context.request_of(idempotency_key), CancelMode(mode)
        actor, ledger = self._context.permit("runs.cancel"), self._context.changes
        run = await find_run(ledger, run_id)
        replayed = await request.changed_before(ledger) or await request.moved(ledger, run)
        layer, key = (await self._context.instance()).layer, request.change(run)
        state = await layer.cancel(run, mode=chosen, request_id=request.request_id, cause=reason, key=key)
        if state in ENDED and not await request.moved(ledger, run):
            raise RunHasEnded(job_id=run, source=state, target="failed", actor=actor.role.value)
        request.note(replayed=replayed)
        return Stopped(run_id=run, status=state)

    async def check_executable(self) -> None:
        """Raise SettingsInvalid if `execute` would fail: no process executes runs now, and this one cannot.

        Ask before the run is started, so that none is left behind.
        """
        instance = await self._context.instance()
        if await _driver_elsewhere(instance.ledger) is None:
            instance.check_executes_runs()

    async def execute(self, run_id: str, work: Awaitable[ResultT], left_to: Callable[[str], None]) -> ResultT:
        """Execute one run in this process, and no other, until `work` is done; its result. Only a ledger offers this.

        While another process executes all runs of this ledger, the run is left to it: either could claim it, and the
        claimer's settings and keys count. `left_to` is called with its name. When it ends, this process takes over, or
        raises SettingsInvalid if it cannot execute runs.
        """
        instance, working, named = await self._context.instance(), asyncio.ensure_future(work), ""
        try:
            while (driver := await _driver_elsewhere(instance.ledger)) is not None:
                if driver != named:
                    left_to(driver)
                named = driver
                await asyncio.wait({working}, timeout=DRIVER_LOOK_S)
                if working.done():
                    return await working
            return await while_executing(instance, JobId(run_id), working)
        finally:
            working.cancel()

    async def find(self, run_id: str) -> ReadableRun:
        """The run with this id, long or short, if the caller may read it. Raises RunNotFound, NotAllowed.

        A run that is gone from the ledger is identified by its published record. Without one its agent is unknown, and
        the run is not found.
        """
        self._context.check_read(READ)
        ledger, reader = self._context.ledger, self._context.reader
        with contextlib.suppress(RunNotFound):
            job = await ledger.job(await find_run(ledger, run_id))
            if job is not None and job.payload is not None:
                await permit_on_job(reader, READ, ledger, job)
                return ReadableRun(job.job_id, RunRequest.read(job.payload).agent_slug)
        published = await find_published((await self._context.instance()).objects, run_id)
        if published is None:
            raise RunNotFound(run_id=run_id)
        permit(reader, READ, own=owns(reader, READ, published.run_id, published.submitter))
        return ReadableRun(published.run_id, published.agent_slug)

    async def _published(self, run: ReadableRun) -> dict[str, Any]:
        document = await (await self._context.instance()).published.status(run.agent_slug, run.run_id)
        if document is None:
            raise RunNotFound(run_id=run.run_id)
        return document


async def step_files(instance: Instance, run: ReadableRun) -> Sequence[dict[str, Any]]:
    """The published files of the steps that were counted, in order."""
    document = await instance.published.status(run.agent_slug, run.run_id)
    done = 0 if document is None else int(document["steps_completed"])
    keys = [ids.step_key(run.agent_slug, run.run_id, number) for number in range(1, done + 1)]
    return [json.loads(file.body) for key in keys if (file := await instance.objects.get(key)) is not None]


async def manifest_file(instance: Instance, run: ReadableRun) -> dict[str, Any]:
    """The published manifest.json; raises ManifestMissing if the run has not ended."""
    file = await instance.objects.get(ids.manifest_key(run.agent_slug, run.run_id))
    if file is None:
        raise ManifestMissing(run_id=run.run_id)
    return json.loads(file.body)


async def published_states(instance: Instance, run: ReadableRun) -> AsyncGenerator[RunStatus]:
    """Each newer published state of a run, up to its end."""
    version, clock = 0, SystemClock()
    while True:
        document = await instance.published.status(run.agent_slug, run.run_id)
        if document is not None and document["version"] > version:
            version = document["version"]
            yield RunStatus(**document)
            if document["status"] in ENDED:
                return
        await clock.sleep(LOOK_S)


async def _driver_elsewhere(ledger: Ledger) -> str | None:
    """The process that executes all runs of this ledger now; None if there is none.

    It is known by the projector, which runs need, and which the ledger has only once; unless a run has waited for
    acceptance for long, which an orchestrator gives at once. A process that executes only its own run does not count.
    """
    now = await ledger.now()
    waiting = await ledger.jobs(JobFilter(lifecycle=RUN.name, state="requested"), limit=1, oldest_first=True)
    if any((now - run.created_at).total_seconds() > ACCEPTED_S for run in waiting.jobs):
        return None
    alive = (seen.actor for seen in await ledger.followers() if seen.name == PROJECTOR and seen.until > now)
    return next((name for name in alive if not name.startswith(f"{WATCHER}:")), None)


async def while_executing(instance: Instance, run_id: JobId, work: Awaitable[ResultT]) -> ResultT:
    """Execute one run in this process until `work` is done, then evaluate agent health; the result of `work`."""
    instance = replace(instance, name=f"{WATCHER}:{instance.name}")
    stop, watching = asyncio.Event(), asyncio.ensure_future(work)
    serving = asyncio.ensure_future(instance.serve_run(run_id, stop))
    try:
        await asyncio.wait({watching, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        return await watching
    finally:
        watching.cancel()
        stop.set()
        await serving
        await instance.judge_agents()
        await instance.release()
