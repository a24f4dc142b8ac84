"""The processes that a queue job needs, each of which tells of every point it passes and can kill or stop itself at any of them.

The platform is the shipped instance with its gateway on a loopback socket, its orchestrator of queue jobs, projector, sweeper and
collector, in one process or in two; the NLM backend is the shipped one with a ledger of its own. Only times are shorter. Every call that changes something, every
request that goes out or is answered and the looks that a decision rests on are points, before and after. They are named and counted as
they are met, so that a job without a fault lists them all.
"""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from tests.faults.nursery import tend
from tests.runs.processes import run_process
from tests.runs.processes.run_process import AFTER, Watch, WatchedLedger, WatchedProvider
from trellis.app.instance import Instance, open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import callback_secrets, new_id, trusted_keys
from trellis.artifacts.registry import ArtifactCollector
from trellis.cli.up_process import run_together
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import Lease, LeaseLost
from trellis.engine.lease_runner import LeaseRunnerOptions
from trellis.engine.records import SweepOptions
from trellis.engine.retry_policy import RetryPolicy
from trellis.engine.service import Service, Sweeper
from trellis.gateway import create_app
from trellis.http_server.server import ServerOptions, listen, serve_gateway
from trellis.nlm_backend import BackendProcess, open_backend
from trellis.nlm_backend.driver import NlmDriver
from trellis.research import retry_policy
from trellis.research.orchestrator import QueueOrchestrator
from trellis.runs.projector import Projector, ProjectorOptions
from trellis.storage.objects.store import OVERWRITE, PutCondition, PutRefused, PutStored

PLATFORM, GATEWAY, ORCHESTRATOR, NLM = "platform", "gateway", "orchestrator", "nlm"
PARTS = (PLATFORM, NLM)
APART = (GATEWAY, ORCHESTRATOR, NLM)
"""The same with a gateway in a process of its own: it can die while whoever holds the job goes on."""
HOST = "127.0.0.1"
SERVICES = frozenset({"queue-orchestrator", "queue-heartbeat", "projector", "artifact-collector", "sweeper"})
BACKOFF_S = (0.5, 1.5, 3.0)
"""Instead of 15, 30 and 60 s; together longer than a process needs to come back."""
DELIVERY = RetryPolicy(base_s=0.1, factor=2.0, max_s=1.0, jitter=0.2)
POLL_S = 0.05
COLLECT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Orders(run_process.Orders):
    """How one of the two behaves; passed as JSON."""

    part: str
    gateway: str
    nlm: str
    nlm_ledger: str
    key: str
    """The file with what signs tokens and callbacks."""
    stop_at: str = ""
    """The point at which it stops (SIGSTOP) until somebody lets it go on."""
    tag: str = ""
    """What this backend adds to its artifacts, so that they differ from another's."""
    lease_s: float = 3.0
    heartbeat_s: float = 1.0
    """A living process on a busy machine must not lose what it holds: a story counts attempts."""
    renews: bool = True
    """Whether its renewals are answered; without an answer nothing tells it that its lease is another's."""
    sweep_s: float | None = 0.5
    look_s: float = 0.1
    ask_again_s: float = 1.5

    def settings(self) -> Settings:
        return Settings.model_validate(
            {
                "objects": self.objects,
                "memory": self.memory,
                "gateway": self.gateway,
                "nlm_backend": self.nlm,
                "nlm_ledger": self.nlm_ledger,
                "token_key_file": self.key,
                "callback_key_file": self.key,
            }
        )

    @property
    def holding(self) -> LeaseRunnerOptions:
        return LeaseRunnerOptions(concurrency=4, lease_s=self.lease_s, heartbeat_s=self.heartbeat_s, poll_s=POLL_S)

    @property
    def sweeping(self) -> SweepOptions:
        return SweepOptions(interval_s=self.sweep_s or 1.0)

    def address(self) -> ServerOptions:
        url = self.nlm if self.part == NLM else self.gateway
        return ServerOptions(host=HOST, port=int(url.rpartition(":")[2]))


class PartWatch(Watch):
    """Names the part of each point, and stops there if it was told to."""

    def __init__(self, orders: Orders) -> None:
        super().__init__(orders)
        self._part, self._stop_at = orders.part, orders.stop_at

    def reach(self, what: str, side: str) -> None:
        super().reach(f"{self._part} {what}", side)
        if self._stop_at == f"{self._part} {what} {side}":
            self._stop_at = ""
            self.note("stopped", what)
            os.kill(os.getpid(), signal.SIGSTOP)


# --- what is watched in both ---------------------------------------------------------------------------------------


class QueueLedger(WatchedLedger):
    """A ledger whose writes are points; an entry of the journal is named without ids."""

    async def journal(self, lease: Lease, entry: str, body: bytes) -> Any:
        what = f"keep {entry.partition(':')[0]}"
        answer = await self._watch.around(what, self._inner.journal(lease, entry, body))
        if not isinstance(answer, LeaseLost):
            self._watch.note("kept", entry, job=lease.job_id, epoch=lease.epoch)
        return answer


class DeafLedger(QueueLedger):
    """One whose renewals get no answer."""

    async def renew(self, *_: Any) -> Any:
        raise LedgerError(detail="no answer to renewals")


class QueueObjects(run_process.WatchedObjects):
    """An object store whose puts and deletions are points, and the looks at what a job waits for."""

    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        return await self._watch.around(f"put {kind_of(key, body)}", self._inner.put(key, body, when=when))

    async def get(self, key: str) -> Any:
        found = await self._inner.get(key)
        if found is not None and kind_of(key) in {"callback", "staged"}:
            self._watch.reach(f"read {kind_of(key)}", AFTER)
        return found

    async def delete(self, key: str) -> Any:
        return await self._watch.around(f"delete {kind_of(key)}", self._inner.delete(key))


def kind_of(key: str, body: bytes = b"") -> str:
    """What an object is, without ids."""
    match key.split("/"):
        case ["audit", *_] if body:
            return f"audit {json.loads(body).get('event', 'block')}"
        case ["callbacks", *_]:
            return "callback"
        case ["projects", _, "snapshots", *_]:
            return "snapshot"
        case ["projects", _, "staged", *_]:
            return "staged"
        case ["projects", _, "artifacts", *_]:
            return "artifact"
        case _:
            return "something else"


def request_kind(method: str, path: str) -> str | None:
    """What a request between the two is; None for any other."""
    match method, path.strip("/").split("/"):
        case "GET", ["jobs", _, "context", _]:
            return "context"
        case "POST", ["artifacts"]:
            return "artifacts"
        case "POST", ["jobs", _, "result"]:
            return "result"
        case "POST", ["jobs", "process"]:
            return "process"
        case _:
            return None


class WatchedApp:
    """An application whose answers to the other process are points."""

    def __init__(self, app: ASGIApp, watch: Watch) -> None:
        self._app, self._watch = app, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = request_kind(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if kind is None:
            await self._app(scope, receive, send)
            return
        await self._watch.around(f"answer {kind}", _answered(self._app, scope, receive, send))


async def _answered(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


# --- the platform --------------------------------------------------------------------------------------------------


class QueueInstance(Instance):
    """The shipped instance with the services that queue jobs need, at shorter times."""

    orders: Orders
    watch: Watch

    def services(self, *, alerts: bool = True, runs: bool = True) -> list[Service[Any]]:
        orders = self.orders
        kept = [service for service in super().services(alerts=alerts, runs=runs) if service.name in SERVICES]
        assert {service.name for service in kept} == SERVICES, "a service was renamed"
        for service in kept:
            match service:
                case QueueOrchestrator():
                    service.options = orders.holding
                    options = replace(service.driver.options, look_s=orders.look_s, ask_again_s=orders.ask_again_s)
                    service.driver.options = options
                    service.driver.backend = WatchedNlm(service.driver.backend, self.watch)  # type: ignore[assignment] - the rest passes through
                case Projector():
                    service.options = ProjectorOptions(lease_s=orders.follow_s)
                case ArtifactCollector():
                    service.interval_s = COLLECT_S
                case Sweeper():
                    service.options = orders.sweeping
                case _:
                    pass
        return kept


class WatchedNlm(run_process.Wrapped):
    """The NLM backend as the orchestrator asks it."""

    async def process(self, execution: Any, /) -> Any:
        return await self._watch.around("send process", self._inner.process(execution))


def watched_instance(instance: Instance, orders: Orders, watch: Watch) -> QueueInstance:
    parts = {part.name: getattr(instance, part.name) for part in fields(instance)}
    parts["ledger"] = QueueLedger(instance.ledger, watch)
    parts["objects"] = QueueObjects(instance.objects, watch)
    made = QueueInstance(**parts)
    # The instance is frozen; what makes this one special is set once, here.
    object.__setattr__(made, "orders", orders)
    object.__setattr__(made, "watch", watch)
    return made


async def be_platform(orders: Orders, watch: Watch, stop: asyncio.Event) -> None:
    """The gateway, the services, or both."""
    retry_policy.BACKOFF_S = BACKOFF_S
    async with open_instance(orders.settings(), orders.url, name=orders.name) as opened:
        instance, serving = watched_instance(opened, orders, watch), list[Coroutine[Any, Any, None]]()
        if orders.part != ORCHESTRATOR:
            serving.append(answer_requests(instance, orders, watch, stop))
        if orders.part != GATEWAY:
            serving.append(instance.serve(stop))
        watch.note("opened", orders.name)
        await run_together(stop, *serving)


def answer_requests(instance: Instance, orders: Orders, watch: Watch, stop: asyncio.Event) -> Coroutine[Any, Any, None]:
    settings, options = orders.settings(), orders.address()
    app = create_app(
        instance,
        trusted_keys(orders.url, settings),
        monotonic=asyncio.get_running_loop().time,
        new_id=new_id,
        callback_secrets=callback_secrets(orders.url, settings),
    )
    listening = listen(options, key_configured=True)
    return serve_gateway(WatchedApp(app, watch), listening, options, stop, end_streams=app.state.streams.hub.close)


# --- the NLM backend -----------------------------------------------------------------------------------------------


class WatchedClient(run_process.Wrapped):
    """What the backend sends out."""

    tag: str = ""

    async def send(self, method: str, url: str, *, headers: Any = None, content: bytes | None = None) -> Any:
        kind = request_kind(method, url.partition("://")[2].partition("/")[2])
        if kind == "artifacts" and self.tag:
            asked = json.loads(content or b"")
            content = json.dumps({**asked, "tags": [*asked["tags"], self.tag]}).encode()
        what = f"send {kind or 'something else'}"
        answer = await self._watch.around(what, self._inner.send(method, url, headers=headers, content=content))
        self._watch.note("answered", f"{kind} {answer.status}")
        return answer


def watch_backend(backend: BackendProcess, orders: Orders, watch: Watch) -> None:
    """Put the watch between the backend and everything it touches, and shorten its times."""
    ledger, holder = (QueueLedger if orders.renews else DeafLedger)(backend.ledger, watch), backend.holder
    driver: NlmDriver = holder.driver
    client = WatchedClient(driver.delivery.links.client, watch)
    client.tag = orders.tag
    driver.ledger = holder.ledger = ledger  # type: ignore[assignment]
    driver.provider = replace(driver.provider, inner=WatchedProvider(driver.provider.inner, watch))  # type: ignore[arg-type]
    links = replace(driver.delivery.links, client=client)  # type: ignore[arg-type]
    driver.delivery = replace(driver.delivery, links=links, retry=DELIVERY)
    holder.options = orders.holding
    backend.sweeper.options = orders.sweeping
    backend.parts = replace(backend.parts, intake=replace(backend.parts.intake, ledger=ledger))  # type: ignore[arg-type]


async def be_nlm(orders: Orders, watch: Watch, stop: asyncio.Event) -> None:
    settings, options = orders.settings(), orders.address()
    listening = listen(options, key_configured=True)
    async with open_backend(settings, orders.url, name=orders.name) as backend:
        watch_backend(backend, orders, watch)
        watch.note("opened", orders.name)
        app = WatchedApp(backend.app(trusted_keys(orders.url, settings)), watch)
        await run_together(stop, serve_gateway(app, listening, options, stop), backend.serve(stop))


BE: dict[str, Callable[[Orders, Watch, asyncio.Event], Awaitable[None]]] = {
    PLATFORM: be_platform,
    GATEWAY: be_platform,
    ORCHESTRATOR: be_platform,
    NLM: be_nlm,
}


async def main(orders: Orders) -> int:
    watch, stop = PartWatch(orders), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await BE[orders.part](orders, watch, stop)
    return 0


def be(orders: dict[str, Any]) -> int:
    return asyncio.run(main(Orders(**orders)))


def ledger_files(url: str) -> list[Path]:
    """The files of an SQLite ledger."""
    path = Path(url.removeprefix("sqlite:///"))
    return [path, *(path.with_name(path.name + tail) for tail in ("-wal", "-shm"))]


if __name__ == "__main__":
    tend(be)
