"""The blocking client, for scripts without `async`: the same resources and verbs.

  with connect_sync(gateway="http://127.0.0.1:8420") as client:
      run = client.runs.start("archivist-violin")
      print(client.runs.wait(run.run_id, timeout_s=120).status)

Every method runs the asynchronous one on an event loop in a separate thread, so nothing is implemented twice.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from trellis.engine.event_loop_thread import EventLoopThread
from trellis.http.client import GatewayClient
from trellis.http.jobs import Jobs
from trellis.http.resources import (
    Agents,
    Artifacts,
    DeadLetters,
    Feed,
    Inbox,
    Logic,
    Memory,
    Proposals,
    Runs,
    Safety,
    Schedules,
    System,
)

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")


class BlockingTwin:
    """The blocking counterpart of one asynchronous object."""

    def __init__(self, inner: Any, thread: EventLoopThread) -> None:
        self.inner, self.thread = inner, thread


class BlockingMethod(Generic[P, ResultT]):
    """A method that blocks until the asynchronous one has returned."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, ResultT]]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    def __get__(self, twin: BlockingTwin, owner: type[BlockingTwin]) -> Callable[P, ResultT]:
        """Bind the method to this object."""

        def call(*args: P.args, **kwargs: P.kwargs) -> ResultT:
            return twin.thread.run(self.method(twin.inner, *args, **kwargs))

        call.__doc__ = self.__doc__
        return call


class BlockingIterator(Generic[P, ItemT]):
    """A method that yields the items of an asynchronous generator; leaving the loop closes it."""

    def __init__(self, method: Callable[Concatenate[Any, P], AsyncGenerator[ItemT]]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    def __get__(self, twin: BlockingTwin, owner: type[BlockingTwin]) -> Callable[P, Iterator[ItemT]]:
        """Bind the method to this object."""

        def call(*args: P.args, **kwargs: P.kwargs) -> Iterator[ItemT]:
            return _flow(twin.thread, self.method(twin.inner, *args, **kwargs))

        call.__doc__ = self.__doc__
        return call


def _flow(thread: EventLoopThread, items: AsyncGenerator[ItemT]) -> Generator[ItemT]:
    try:
        while True:
            try:
                item = thread.run(_awaited(anext(items)))
            except StopAsyncIteration:
                return
            yield item
    finally:
        thread.run(items.aclose())


async def _awaited(work: Awaitable[ResultT]) -> ResultT:
    return await work


class SyncAgents(BlockingTwin):
    """`client.agents`"""

    list = BlockingMethod(Agents.list)
    get = BlockingMethod(Agents.get)
    sources = BlockingMethod(Agents.sources)
    activate = BlockingMethod(Agents.activate)
    pause = BlockingMethod(Agents.pause)


class SyncRuns(BlockingTwin):
    """`client.runs`"""

    start = BlockingMethod(Runs.start)
    get = BlockingMethod(Runs.get)
    status = BlockingMethod(Runs.status)
    list = BlockingMethod(Runs.list)
    steps = BlockingMethod(Runs.steps)
    manifest = BlockingMethod(Runs.manifest)
    request = BlockingMethod(Runs.request)
    wait = BlockingMethod(Runs.wait)
    watch = BlockingIterator(Runs.watch)
    cancel = BlockingMethod(Runs.cancel)


class SyncProposals(BlockingTwin):
    """`client.proposals`"""

    list = BlockingMethod(Proposals.list)
    pending = BlockingMethod(Proposals.pending)
    get = BlockingMethod(Proposals.get)
    diff = BlockingMethod(Proposals.diff)
    approve = BlockingMethod(Proposals.approve)
    reject = BlockingMethod(Proposals.reject)
    apply = BlockingMethod(Proposals.apply)


class SyncArtifacts(BlockingTwin):
    """`client.artifacts`"""

    list = BlockingMethod(Artifacts.list)
    get = BlockingMethod(Artifacts.get)
    content = BlockingMethod(Artifacts.content)
    stage = BlockingMethod(Artifacts.stage)
    discard = BlockingMethod(Artifacts.discard)
    cleanup = BlockingMethod(Artifacts.cleanup)


class SyncJobs(BlockingTwin):
    """`client.jobs`"""

    submit = BlockingMethod(Jobs.submit)
    submit_for = BlockingMethod(Jobs.submit_for)
    submit_topic = BlockingMethod(Jobs.submit_topic)
    submit_asked = BlockingMethod(Jobs.submit_asked)
    submit_batch = BlockingMethod(Jobs.submit_batch)
    get = BlockingMethod(Jobs.get)
    result = BlockingMethod(Jobs.result)
    context = BlockingMethod(Jobs.context)
    list = BlockingMethod(Jobs.list)
    events = BlockingMethod(Jobs.events)
    explain = BlockingMethod(Jobs.explain)
    signals = BlockingMethod(Jobs.signals)
    wait = BlockingMethod(Jobs.wait)
    watch = BlockingIterator(Jobs.watch)
    cancel = BlockingMethod(Jobs.cancel)
    signal = BlockingMethod(Jobs.signal)
    dead_letter = BlockingMethod(Jobs.dead_letter)
    requeue = BlockingMethod(Jobs.requeue)
    change = BlockingMethod(Jobs.change)
    preview = BlockingMethod(Jobs.preview)
    approve = BlockingMethod(Jobs.approve)
    deny = BlockingMethod(Jobs.deny)


class SyncDeadLetters(BlockingTwin):
    """`client.dead_letters`"""

    list = BlockingMethod(DeadLetters.list)
    get = BlockingMethod(DeadLetters.get)
    requeue = BlockingMethod(DeadLetters.requeue)


class SyncMemory(BlockingTwin):
    """`client.memory`"""

    list = BlockingMethod(Memory.list)
    read = BlockingMethod(Memory.read)
    history = BlockingMethod(Memory.history)
    diff = BlockingMethod(Memory.diff)
    propose = BlockingMethod(Memory.propose)


class SyncLogic(BlockingTwin):
    """`client.logic`"""

    propose = BlockingMethod(Logic.propose)


class SyncInbox(BlockingTwin):
    """`client.inbox`"""

    submit = BlockingMethod(Inbox.submit)
    entries = BlockingMethod(Inbox.entries)
    stats = BlockingMethod(Inbox.stats)


class SyncSafety(BlockingTwin):
    """`client.safety`"""

    explain = BlockingMethod(Safety.explain)
    simulate = BlockingMethod(Safety.simulate)


class SyncSystem(BlockingTwin):
    """`client.system`"""

    queues = BlockingMethod(System.queues)
    pause = BlockingMethod(System.pause)
    resume = BlockingMethod(System.resume)
    workers = BlockingMethod(System.workers)
    alerts = BlockingMethod(System.alerts)
    metrics = BlockingMethod(System.metrics)
    slo = BlockingMethod(System.slo)
    authority = BlockingMethod(System.authority)


class SyncSchedules(BlockingTwin):
    """`client.schedules`"""

    list = BlockingMethod(Schedules.list)
    get = BlockingMethod(Schedules.get)
    add = BlockingMethod(Schedules.add)
    change = BlockingMethod(Schedules.change)
    pause = BlockingMethod(Schedules.pause)
    resume = BlockingMethod(Schedules.resume)
    remove = BlockingMethod(Schedules.remove)
    run = BlockingMethod(Schedules.run)


class SyncFeed(BlockingTwin):
    """`client.feed`"""

    find = BlockingMethod(Feed.find)
    page = BlockingMethod(Feed.page)


class SyncGatewayClient(BlockingTwin):
    """One gateway, for scripts. Made by `connect_sync(gateway=…)`; for one thread at a time."""

    def __init__(self, inner: GatewayClient, thread: EventLoopThread) -> None:
        super().__init__(inner, thread)
        self.agents = SyncAgents(inner.agents, thread)
        self.runs = SyncRuns(inner.runs, thread)
        self.proposals = SyncProposals(inner.proposals, thread)
        self.artifacts = SyncArtifacts(inner.artifacts, thread)
        self.jobs = SyncJobs(inner.jobs, thread)
        self.dead_letters = SyncDeadLetters(inner.dead_letters, thread)
        self.memory = SyncMemory(inner.memory, thread)
        self.logic = SyncLogic(inner.logic, thread)
        self.inbox = SyncInbox(inner.inbox, thread)
        self.safety = SyncSafety(inner.safety, thread)
        self.schedules = SyncSchedules(inner.schedules, thread)
        self.system = SyncSystem(inner.system, thread)
        self.feed = SyncFeed(inner.feed, thread)

    events = BlockingIterator(GatewayClient.events)
    position = BlockingMethod(GatewayClient.position)
    health = BlockingMethod(GatewayClient.health)


@contextmanager
def blocking(opening: AbstractAsyncContextManager[GatewayClient]) -> Generator[SyncGatewayClient]:
    """The blocking counterpart of a client that stays open for the duration of the context."""
    thread = EventLoopThread("trellis-client")
    try:
        client = thread.run(_awaited(opening.__aenter__()))
        try:
            yield SyncGatewayClient(client, thread)
        finally:
            thread.run(_awaited(opening.__aexit__(None, None, None)))
    finally:
        thread.stop()
