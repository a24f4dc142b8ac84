"""One queue job from its request to its artifact, by two processes that may be killed, and everything that must hold meanwhile and afterwards."""

import asyncio
import contextlib
import json
import secrets
import shutil
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.faults.fleet import Fleet, Line, Nursery, Running
from tests.research.processes.queue_process import HOST, PLATFORM, Orders
from trellis import connect
from trellis.app.instance import Instance, open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import token_key
from trellis.artifacts.rows import DISCARDED, FINALIZED, ArtifactRow
from trellis.auth.tokens import issue
from trellis.documents import audit, ids
from trellis.engine.jobs import JobId
from trellis.engine.records import Event, Job, JobFilter
from trellis.engine.verify import verify
from trellis.http.client import GatewayClient
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.lifecycles.nlm_job import NLM_JOB, OPEN
from trellis.research.retry_policy import EXECUTIONS
from trellis.storage.objects.canonical_json import sha256

AnswerT = TypeVar("AnswerT")

VIOLIN = "archivist-violin"
QUESTION = {"query": "What is known about the varnish of the violin?"}
LOOK_S = 0.1
PATIENCE_S = 120.0
TOKEN_S = 3_600.0
REQUEUES_MAX = 40
PAGE = 1_000
REFUSALS = "refused-"
"""How the names of audit records begin that are about a request and not an event: a callback that came again, or too late."""


async def make_template(folder: Path) -> Path:
    """An instance with the garden planted, and a key; every story begins with a copy of it."""
    key = folder / "key"
    key.write_text(secrets.token_hex(32) + "\n")
    key.chmod(0o600)
    async with open_instance(Settings.model_validate({}), f"sqlite:///{folder / 'ledger.db'}") as instance:
        await instance.plant()
    return folder


@contextlib.contextmanager
def reserved() -> Iterator[str]:
    """An address on this machine that nobody else gets: bound here, so that whoever is told of it can listen there, again and again."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        yield f"http://{HOST}:{held.getsockname()[1]}"


@dataclass(kw_only=True)
class Story:
    """One instance with one queue job in it."""

    fleet: Fleet
    instance: Instance
    client: GatewayClient
    admin: GatewayClient
    next_life: Callable[[str], Mapping[str, Any]] = lambda _: {}
    """The orders of whoever comes after a dead process of this part."""
    deaths: Counter[str] = field(default_factory=Counter[str])
    requeued: int = 0
    looks: int = 0
    _alive: dict[str, Running] = field(default_factory=dict[str, Running])
    _job_id: JobId | None = None

    @property
    def job_id(self) -> JobId:
        assert self._job_id is not None, "the story has not begun"
        return self._job_id

    @property
    def nlm_ledger(self) -> str:
        return self.fleet.orders["nlm_ledger"]

    # --- who works -------------------------------------------------------------------------------------------------

    def start(self, part: str, **orders: Any) -> Running:
        (self._alive[part],) = self.fleet.start(part=part, **orders)
        return self._alive[part]

    def leave(self, part: str) -> Running:
        """A process that nobody replaces any more."""
        return self._alive.pop(part)

    async def kill(self, part: str) -> None:
        """Kill it from outside, wherever it is; it is not replaced."""
        await self.fleet.kill(self.leave(part))

    def replace_dead(self) -> None:
        """Another process for each that died; one that ended otherwise than by its orders is an error."""
        for part, one in list(self._alive.items()):
            if one.is_alive:
                continue
            killed = any(line.op == "died" and line.pid == one.pid for line in self.fleet.lines())
            assert killed, f"{part} ended by itself\n{self.last_words()}"
            self.fleet.alive.remove(one)
            self.deaths[part] += 1
            self.start(part, **self.next_life(part))

    # --- what happens ----------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Ask for the job; the client asks again until it is answered."""
        job = await self._answered(self.client.jobs.submit_for(VIOLIN, "RESEARCH", QUESTION, idempotency_key="one"))
        self._job_id = JobId(job.job_id)

    async def finish(self) -> ArtifactRow:
        """Until the job is complete and everybody has done what is left to do; its artifact."""
        await self.until(self._is_over, "the job is over")
        (row,) = await self.artifacts(FINALIZED)
        return row

    async def until(self, holds: Callable[[], Any], what: str) -> None:
        """Until that is so, by whoever is alive; what holds at every moment is looked at meanwhile."""
        end = time.monotonic() + PATIENCE_S
        while True:
            found = holds()
            if await found if asyncio.iscoroutine(found) else found:
                return
            self.replace_dead()
            if self._job_id is not None:
                await self.look()
                await self._requeue_spent()
            assert time.monotonic() < end, f"waited {PATIENCE_S:g} s until {what}\n{await self._told()}"
            await asyncio.sleep(LOOK_S)

    async def _answered(self, asking: Coroutine[Any, Any, AnswerT]) -> AnswerT:
        """What the gateway answers, whoever of it dies meanwhile; the client asks until then, for a bounded time."""
        task = asyncio.ensure_future(asking)
        while not task.done():
            self.replace_dead()
            await asyncio.wait([task], timeout=LOOK_S)
        return task.result()

    async def _requeue_spent(self) -> None:
        """What an operator does with a job whose attempts are spent, and with no other."""
        job = await self.job()
        if job.state != "FAILED":
            return
        assert job.attempt == EXECUTIONS - 1, f"it failed before its attempts were spent: {await self._told()}"
        self.requeued += 1
        assert self.requeued <= REQUEUES_MAX, await self._told()
        key = f"requeue-{job.version}"
        await self._answered(self.admin.jobs.requeue(job.job_id, reason="again", idempotency_key=key))

    async def _is_over(self) -> bool:
        """Complete, published, recorded, collected; and the backend has nothing left to do."""
        if (await self.job()).state != "COMPLETE" or await self._unrecorded():
            return False
        (row,) = await self.artifacts(FINALIZED)
        staged = await self.instance.objects.list(row.staged_key.rpartition("/")[0] + "/")
        if staged.items or await self.instance.objects.get(row.key) is None:
            return False
        return not [job for job in await self.executions() if job.state in OPEN]

    async def look(self) -> None:
        """What holds at every moment. What was seen first decides which way round it is asked: nothing here is ever taken back."""
        self.looks += 1
        final = await self.artifacts(FINALIZED)
        job = await self.job()
        assert len(final) <= 1, f"two artifacts: {final}"
        assert not final or job.state == "COMPLETE", f"{final[0].artifact_id} is finalized and its job is {job.state}"
        if job.state == "COMPLETE":
            (row,) = await self.artifacts(FINALIZED)
            result = await self.instance.ledger.result(self.job_id)
            assert json.loads(result or b"{}")["sha256"] == row.sha256
            shown = await self.instance.artifacts.read(row.artifact_id)
            assert shown is not None, f"{row.artifact_id} cannot be read"
            assert shown["finalized"], shown

    # --- what is there ---------------------------------------------------------------------------------------------

    async def job(self) -> Job:
        found = await self.instance.ledger.job(self.job_id)
        assert found is not None
        return found

    async def artifacts(self, state: str | None = None) -> tuple[ArtifactRow, ...]:
        return await self.instance.artifacts.of_job(self.job_id, state=state)

    async def executions(self) -> list[Job]:
        """What the backend's ledger knows of the job."""
        ledger = await open_ledger(self.nlm_ledger)
        try:
            where = JobFilter(lifecycle=NLM_JOB.name, parent_id=self.job_id)
            return list((await ledger.jobs(where, limit=PAGE)).jobs)
        finally:
            await ledger.close()

    async def _events(self) -> dict[str, Event]:
        """Every event of the ledger, by the key of its audit record."""
        events = [event async for history in self.instance.ledger.histories() for event in history.events]
        return {ids.audit_key(event.ts, event.id): event for event in events}

    async def _records(self) -> list[str]:
        """The keys of audit records of events in the instance's ledger; the backend publishes those of its own (`…@epoch`)."""
        items = (await self.instance.objects.list("audit/2", limit=PAGE)).items
        names = [(info.key, info.key.rpartition("/")[2]) for info in items]
        return [key for key, name in names if not name.startswith((REFUSALS, "act-")) and "@" not in name]

    async def _unrecorded(self) -> set[str]:
        return set(await self._events()) - set(await self._records())

    def asked(self) -> int:
        """How often the provider was asked."""
        return sum(line.op == "asked" for line in self.fleet.lines())

    def claims(self) -> list[Line]:
        return [line for line in self.fleet.lines() if (line.op, line.what) == ("claimed", "queue-job")]

    def attempts(self) -> int:
        return len({line.epoch for line in self.claims()})

    def points(self) -> list[str]:
        return [line.what for line in self.fleet.lines() if line.op == "point"]

    def retried_while_alive(self) -> int:
        """Attempts that ended although their holder lived: the backend had failed, or the machine let somebody wait for too long."""
        died = {line.pid for line in self.fleet.lines() if line.op == "died"}
        return sum(line.pid not in died for line in self.claims()[:-1])

    def last_words(self) -> str:
        lines = [f"{line.at:.2f} {line.pid} {line.op} {line.what}" for line in self.fleet.lines()[-40:]]
        return "\n".join([*lines, self.fleet.last_words()])

    async def _told(self) -> str:
        events = await self.instance.ledger.events(self.job_id) if self._job_id else []
        told = [f"{event.version} {event.target} {event.cause} {event.data}" for event in events]
        return "\n".join([*told, *map(str, await self.executions()), self.last_words()])

    # --- what must hold at the end ---------------------------------------------------------------------------------

    async def check(self) -> None:
        """Everything that holds after any death."""
        await self.look()
        (row,) = await self.artifacts(FINALIZED)
        others = {one.artifact_id: one.state for one in await self.artifacts() if one.artifact_id != row.artifact_id}
        assert set(others.values()) <= {DISCARDED}, f"left behind: {others}\n{await self._told()}"
        await self._check_bytes(row)
        await self._check_served(row)
        await self._check_recorded()
        self._check_paid()

    async def _check_bytes(self, row: ArtifactRow) -> None:
        """Published are the recorded bytes, which are also in the ledger; nothing else of an artifact is in the store."""
        published = await self.instance.objects.get(row.key)
        assert published is not None
        assert (sha256(published.body), len(published.body)) == (row.sha256, row.size)
        told = json.loads(published.body)
        assert (told["artifact_id"], told["job_id"]) == (row.artifact_id, self.job_id)
        journal = await self.instance.ledger.read_journal(self.job_id)
        assert journal[f"artifact:{row.artifact_id}"] == published.body
        folder = row.key.rpartition("/")[0] + "/"
        assert [info.key for info in (await self.instance.objects.list(folder)).items] == [row.key]

    async def _check_served(self, row: ArtifactRow) -> None:
        """Over HTTP there is one artifact, and it says what was published."""
        published = await self.instance.objects.get(row.key)
        assert published is not None
        served = await self._answered(self.client.artifacts.get(row.artifact_id))
        told = json.loads(published.body)
        assert served.finalized
        assert (served.artifact_id, served.job_id, served.content) == (row.artifact_id, self.job_id, told["content"])
        listed = await self._answered(self.client.artifacts.list())
        assert [one.artifact_id for one in listed.items] == [row.artifact_id]

    async def _check_recorded(self) -> None:
        """Both ledgers keep every rule, the job was completed once, and every event has its one audit record."""
        report = await verify(self.instance.ledger)
        assert report.ok, "\n".join(map(str, report.violations[:20]))
        nlm = await open_ledger(self.nlm_ledger)
        try:
            report = await verify(nlm)
            assert report.ok, "\n".join(map(str, report.violations[:20]))
        finally:
            await nlm.close()
        events = await self._events()
        assert sum(event.type == "job_succeeded" for event in events.values()) == 1
        assert sum(event.type == "artifact.finalized" for event in events.values()) == 1
        assert sorted(await self._records()) == sorted(events), "one audit record for each event, and no other"
        for key, event in events.items():
            found = await self.instance.objects.get(key)
            assert found is not None
            (known,) = await self.instance.ledger.recorded([event])
            assert found.body == audit.to_bytes(known), key

    def _check_paid(self) -> None:
        """The provider is asked at most once for each attempt, and there are no more of those than are allowed."""
        attempts = self.attempts()
        assert 1 <= self.asked() <= attempts, f"{self.asked()} questions in {attempts} attempts"
        assert attempts <= EXECUTIONS * (self.requeued + 1)


@contextlib.asynccontextmanager
async def a_story(template: Path, folder: Path, nursery: Nursery, *, url: str | None = None) -> AsyncGenerator[Story]:
    """A fresh instance, with none of its processes started; they end with it."""
    await asyncio.to_thread(shutil.copytree, template, folder)
    ledger = url or f"sqlite:///{folder / 'ledger.db'}"
    try:
        with reserved() as gateway, reserved() as nlm:
            orders: dict[str, Any] = {
                "objects": f"file://{folder / 'objects'}",
                "memory": str(folder / "memory.git"),
                "gateway": gateway,
                "nlm": nlm,
                "nlm_ledger": f"sqlite:///{folder / 'nlm.db'}",
                "key": str(folder / "key"),
            }
            settings = Orders(url=ledger, trace="", name="test", part=PLATFORM, **orders).settings()
            async with (
                open_instance(settings, ledger, name="test") as instance,
                _client(instance, Role.OWNER) as owner,
                _client(instance, Role.CONTROL_PLANE) as admin,
            ):
                with Fleet(nursery, ledger, folder, orders, Orders) as fleet:
                    yield Story(fleet=fleet, instance=instance, client=owner, admin=admin)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)


@contextlib.asynccontextmanager
async def _client(instance: Instance, role: Role) -> AsyncGenerator[GatewayClient]:
    settings = instance.settings
    key = token_key(instance.places.ledger, settings)
    token = issue(key, name=role.value, roles=[role], ttl_s=TOKEN_S, now=time.time())
    async with connect(gateway=instance.gateway_url, token=token) as client:
        yield client
