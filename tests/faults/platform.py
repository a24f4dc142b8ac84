"""The platform as processes, one for each role, and load that flows through its gateway: for tests that stop or cut them off."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from tests.faults.effects import EFFECTS_APPLICATION
from tests.faults.fleet import POLL_S
from trellis.app.settings import Settings
from trellis.app.wiring import connect, trusted_keys
from trellis.auth.tokens import issue
from trellis.cli.up_process import GATEWAY, NLM, ROLES, SAFETY_KERNEL
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter
from trellis.http.calls import RETRIED_STATUSES, CallOptions
from trellis.http.client import GatewayClient
from trellis.http.errors import GatewayRefused, GatewayUnavailable
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.lifecycles.artifact import ARTIFACT

APPLICATION = f"""{EFFECTS_APPLICATION}
@app.job("effect", lease_s=30)
async def effect(ctx: Context, word: str) -> str:
    return await leave_line(word)

@app.job("hold", lease_s=30)
async def hold(ctx: Context, word: str) -> str:
    await leave_line(word)
    while not os.path.exists(os.environ["EFFECTS"] + "." + word.rpartition("-")[0]):
        await asyncio.sleep(0.1)
    return word
"""
"""A job `effect` leaves a line and ends; a job `hold` leaves one, and ends when `Platform.let_go` is called for it."""
BUS_APPLICATION = re.sub(r'"(\w+)", lease_s=30', r'"job.\1"', APPLICATION)
POLICY = '[[rules]]\nid = "all"\ndecision = "allow"\nmatch = { topics = ["job.>"] }\n'
AGENT = "archivist-violin"
QUESTION = {"query": "Who made the violin?"}
WORKER, BUS_WORKER = "worker", "worker --bus"
EVERYBODY = (SAFETY_KERNEL, GATEWAY, NLM, *(role for role in ROLES if role not in {SAFETY_KERNEL, GATEWAY, NLM}))
STOP_S = 35.0
"""The declared time: 25 s for handlers (TRELLIS_DRAIN_S), 10 s for connections and requests that are open."""
PATIENCE_S = 120.0
SUCCESS = {"plain": "succeeded", "bus": "SUCCEEDED", "queue": "COMPLETE", "run": "completed"}
"""The state in which each kind of work ends."""
PAUSE_S = 0.4
ACKNOWLEDGED_S = 300.0
"""How long a request is sent again, and a ledger that is away is asked again."""
BUS_RETRIES_MAX = 2
"""A job on the bus has three attempts; each after the first is a job of its own."""
MOST_WAITING = 12
"""Load is offered until so many of a kind have not ended."""


@dataclass
class Platform:
    """The processes of one instance, by role, and what they printed."""

    folder: Path
    environment: dict[str, str]
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def command(self, role: str) -> list[str]:
        if role == WORKER:
            return ["worker", "shop:app", "--concurrency", "4"]
        if role == BUS_WORKER:
            return ["worker", "bus_shop:app", "--bus", self.environment["TRELLIS_BUS"], "--concurrency", "4"]
        return ["up", "--roles", role, *(["--demo"] if role == GATEWAY else [])]

    def log(self, role: str) -> Path:
        return self.folder / f"{role.replace(' ', '')}.log"

    def start(self, role: str) -> None:
        self.log(role).touch()
        with self.log(role).open("ab") as log:
            command = [sys.executable, "-m", "trellis", *self.command(role)]
            self.running[role] = self.spawn(role, command, log)

    def spawn(self, role: str, command: list[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start a program for a role, where the role is at home."""
        return subprocess.Popen(command, cwd=self.folder, env=self.environment_of(role), stdout=log, stderr=log)

    async def ready(self, role: str, times: int = 1) -> None:
        """Until it has printed so many times that it is ready."""

        def is_ready() -> bool:
            assert self.running[role].poll() is None, f"{role} ended by itself\n{self.log(role).read_text()}"
            return len(re.findall(r"Ctrl-C|serves", self.log(role).read_text())) >= times

        await until(is_ready, f"{role} is ready")

    async def stop(self, role: str) -> tuple[int, float]:
        """SIGTERM; the exit code and the seconds until it ended."""
        began, process = time.monotonic(), self.running[role]
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, PATIENCE_S)
        return code, time.monotonic() - began

    def run(self, *words: str) -> int:
        """Run a command to its end; its exit code."""
        with self.log(words[0]).open("ab") as log:
            return subprocess.run(
                [sys.executable, "-m", "trellis", *words],
                cwd=self.folder,
                env=self.environment_of(""),
                stdout=log,
                stderr=log,
                check=False,
            ).returncode

    def logs(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-2_000:]}" for log in sorted(self.folder.glob("*.log")))

    def environment_of(self, role: str) -> dict[str, str]:
        own = {"TRELLIS_POLICY": str(self.folder / "policy.toml")} if role == SAFETY_KERNEL else {}
        return {**os.environ, **self.environment, **own}

    def effects(self) -> Counter[str]:
        file = self.folder / "effects"
        return Counter(file.read_text().split() if file.exists() else [])

    def let_go(self, words: str) -> None:
        """End the jobs `hold` whose words are these and a number."""
        (self.folder / f"effects.{words}").touch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def write_files(folder: Path) -> dict[str, str]:
    """What the processes read from a folder, and the settings that name it."""
    (folder / "shop.py").write_text(APPLICATION)
    (folder / "bus_shop.py").write_text(BUS_APPLICATION)
    (folder / "policy.toml").write_text(POLICY)
    key = folder / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    return {
        "EFFECTS": str(folder / "effects"),
        "TRELLIS_TOKEN_KEY_FILE": str(key),
        "TRELLIS_CALLBACK_KEY_FILE": str(key),
    }


@dataclass
class Load:
    """Offers work through the gateway all the time, and notes what was acknowledged.

    A request that raised was not acknowledged: it is sent again, with the same idempotency key, until it is.
    """

    client: GatewayClient
    ledger: Ledger
    acknowledged: dict[str, list[str]] = field(default_factory=dict)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    is_over: bool = False
    sent_again: int = 0

    async def offer(self, kind: str, submit: Callable[[str], Awaitable[str]]) -> None:
        """Submit one after the other while fewer than a bound have not ended."""
        ids = self.acknowledged.setdefault(kind, [])
        waiting: list[str] = []
        for number in itertools.count():
            if self.is_over:
                return
            ids.append(await self.until_acknowledged(lambda word=f"{kind}-{number}": submit(word)))
            waiting.append(ids[-1])
            await asyncio.sleep(PAUSE_S)
            while len(waiting) >= MOST_WAITING and not self.is_over:
                waiting = [id_ for id_ in waiting if not await self.has_ended(id_)]
                await asyncio.sleep(5 * POLL_S)

    async def until_acknowledged(self, submit: Callable[[], Awaitable[str]]) -> str:
        """The id of what was submitted; only an unavailable gateway is asked again."""
        end = time.monotonic() + ACKNOWLEDGED_S
        while True:
            try:
                return await submit()
            except (GatewayUnavailable, GatewayRefused) as error:
                passing = isinstance(error, GatewayUnavailable) or error.status in RETRIED_STATUSES
                if not passing or time.monotonic() > end:
                    raise
                self.sent_again += 1

    async def job(self, job_id: str) -> Job | None:
        """The job, or the retry that took its place on the bus. A ledger that is away is waited for."""
        end = time.monotonic() + ACKNOWLEDGED_S
        while True:
            try:
                job = await self.ledger.job(JobId(job_id))
                for number in range(1, BUS_RETRIES_MAX + 1):
                    retry = job and job.state == "TIMEOUT" and await self.ledger.job(JobId(f"{job_id}.r{number}"))
                    job = retry or job
            except LedgerError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(5 * POLL_S)
            else:
                return job

    async def has_ended(self, job_id: str) -> bool:
        """Whether it has ended. A job on the bus that timed out has a retry, unless that was the last."""
        job = await self.job(job_id)
        assert job is not None, f"{job_id} was acknowledged and is not there"
        return job.place == "ended" and (job.state != "TIMEOUT" or job.job_id.endswith(f".r{BUS_RETRIES_MAX}"))

    async def plain(self, word: str, type_: str = "effect") -> str:
        return (await self.client.jobs.submit(type_, word, idempotency_key=word)).job_id

    async def on_bus(self, word: str, topic: str = "job.effect") -> str:
        return (await self.client.jobs.submit_topic(topic, word, idempotency_key=word)).job_id

    async def queue_job(self, word: str) -> str:
        return (await self.client.jobs.submit_for(AGENT, "RESEARCH", QUESTION, idempotency_key=word)).job_id

    async def run(self, word: str) -> str:
        return (await self.client.runs.start(AGENT, {"word": word}, idempotency_key=word)).run_id

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncGenerator[None]:
        kinds = {"plain": self.plain, "bus": self.on_bus, "queue": self.queue_job, "run": self.run}
        self.tasks = [asyncio.create_task(self.offer(kind, submit)) for kind, submit in kinds.items()]
        try:
            yield
            self.is_over = True
            await asyncio.gather(*self.tasks)
        finally:
            for task in self.tasks:
                task.cancel()

    @property
    def count(self) -> int:
        """How many requests were acknowledged so far. Raises what a refused one raised."""
        for task in self.tasks:
            if task.done():
                task.result()
        return sum(map(len, self.acknowledged.values()))

    async def finalized_artifacts(self) -> dict[str, int]:
        """How many finalized artifacts each queue job has."""
        finalized: dict[str, int] = {}
        for job_id in self.acknowledged["queue"]:
            where = JobFilter(lifecycle=ARTIFACT.name, state="finalized", parent_id=JobId(job_id))
            finalized[job_id] = len((await self.ledger.jobs(where, limit=10)).jobs)
        return finalized

    async def ended(self, job_id: str, *, patience_s: float = PATIENCE_S) -> Job:
        """Wait until it has ended; the job, or the retry that took its place."""
        end = time.monotonic() + patience_s
        while not await self.has_ended(job_id):
            assert time.monotonic() < end, f"{job_id} has not ended: {await self.job(job_id)}"
            await asyncio.sleep(5 * POLL_S)
        job = await self.job(job_id)
        assert job is not None
        return job

    async def all_ended(self, logs: Callable[[], str]) -> Counter[tuple[str, str]]:
        """Wait until all that was acknowledged has ended; how many of each kind ended in which state."""
        states: Counter[tuple[str, str]] = Counter()
        end = time.monotonic() + PATIENCE_S
        try:
            for kind, job_id in [(kind, id_) for kind, ids in self.acknowledged.items() for id_ in ids]:
                states[kind, (await self.ended(job_id, patience_s=end - time.monotonic())).state] += 1
        except AssertionError as error:
            raise AssertionError(f"{error}\n{logs()}") from None
        return states


async def until(holds: Callable[[], object], what: str) -> None:
    """Look until it holds; only other processes can make it so."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s until {what}"
        await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def loaded(
    platform: Platform, ledger_url: str | None = None, *, timeout_s: float = PATIENCE_S
) -> AsyncGenerator[Load]:
    """Load through the platform's gateway. `ledger_url` is how the test itself reaches the ledger."""
    settings = Settings.model_validate({"token_key_file": platform.environment["TRELLIS_TOKEN_KEY_FILE"]})
    url = platform.environment["TRELLIS_LEDGER"]
    key = next(iter(trusted_keys(url, settings)))
    token = issue(key, name="load", roles=[Role.OWNER], ttl_s=3_600, now=time.time())
    ledger = await open_ledger(ledger_url or url)
    try:
        options = CallOptions(timeout_s=timeout_s, plain_http=True)
        async with connect(gateway=platform.environment["TRELLIS_GATEWAY"], token=token, options=options) as client:
            yield Load(client, ledger)
    finally:
        await ledger.close()
