"""The application on a ledger and its stores, in this process. It has the calls of `http.client.GatewayClient`."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from trellis.api.context import ActingPrincipal, ApiContext, ApiPart
from trellis.app.settings import Settings
from trellis.auth.own_reads import OwnReads
from trellis.auth.principals import Principal
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger

if TYPE_CHECKING:  # each part loads what it needs on its first use: `trellis jobs` loads no agents
    from trellis.api.agents import LocalAgents
    from trellis.api.artifacts import LocalArtifacts
    from trellis.api.dead_letters import LocalDeadLetters
    from trellis.api.feed import LocalFeed
    from trellis.api.jobs import LocalJobs
    from trellis.api.memory import LocalMemory
    from trellis.api.proposals import LocalProposals
    from trellis.api.runs import LocalRuns
    from trellis.api.safety import LocalSafety
    from trellis.api.schedules import LocalSchedules
    from trellis.api.system import LocalSystem
    from trellis.app.instance import Instance
    from trellis.bus.pointers import Pointers
    from trellis.bus.topics import Topics


class LocalApi(ApiPart):
    """The parts of the application for one caller."""

    async def now(self) -> datetime:
        """The time of the ledger."""
        return await self._context.now()

    @property
    def agents(self) -> "LocalAgents":
        """The agents."""
        from trellis.api.agents import LocalAgents

        return LocalAgents(self._context)

    @property
    def artifacts(self) -> "LocalArtifacts":
        """What queue jobs left behind."""
        from trellis.api.artifacts import LocalArtifacts

        return LocalArtifacts(self._context)

    @property
    def dead_letters(self) -> "LocalDeadLetters":
        """Jobs that failed and need an operator."""
        from trellis.api.dead_letters import LocalDeadLetters

        return LocalDeadLetters(self._context)

    @property
    def feed(self) -> "LocalFeed":
        """The events of all jobs."""
        from trellis.api.feed import LocalFeed

        return LocalFeed(self._context)

    @property
    def jobs(self) -> "LocalJobs":
        """Jobs of every lifecycle."""
        from trellis.api.jobs import LocalJobs

        return LocalJobs(self._context)

    @property
    def memory(self) -> "LocalMemory":
        """What agents remember."""
        from trellis.api.memory import LocalMemory

        return LocalMemory(self._context)

    @property
    def proposals(self) -> "LocalProposals":
        """What agents propose."""
        from trellis.api.proposals import LocalProposals

        return LocalProposals(self._context)

    @property
    def runs(self) -> "LocalRuns":
        """Runs of agents."""
        from trellis.api.runs import LocalRuns

        return LocalRuns(self._context)

    @property
    def safety(self) -> "LocalSafety":
        """The safety policy."""
        from trellis.api.safety import LocalSafety

        return LocalSafety(self._context)

    @property
    def schedules(self) -> "LocalSchedules":
        """When agents run and jobs are submitted by themselves."""
        from trellis.api.schedules import LocalSchedules

        return LocalSchedules(self._context)

    @property
    def system(self) -> "LocalSystem":
        """Queues and workers."""
        from trellis.api.system import LocalSystem

        return LocalSystem(self._context)


@asynccontextmanager
async def open_local_api(
    settings: Settings,
    url: str,
    *,
    ledger: Ledger,
    reader: Principal,
    permit: Callable[[str], Actor],
    acting: ActingPrincipal,
    name: str,
) -> AsyncGenerator[LocalApi]:
    """The application on the open `ledger` of this URL, for one caller. `permit` and `acting` decide what it may change.

    `name` is the name of this process, for what the instance itself records.
    """
    async with AsyncExitStack() as stack:
        opened: list[Instance] = []

        async def instance() -> "Instance":
            from trellis.app.instance import open_instance

            if not opened:
                opened.append(await stack.enter_async_context(open_instance(settings, url, name=name)))
            return opened[0]

        async def pointers() -> "Pointers":
            from trellis.app.fleet import open_pointers

            return await stack.enter_async_context(open_pointers(settings, url))

        def topics() -> "Topics":
            from trellis.app.fleet import topics_of

            return topics_of(settings)

        async def unreachable_bus() -> str | None:
            from trellis.app.fleet import bus_problem

            return await bus_problem(settings)

        yield LocalApi(
            ApiContext(
                ledger=ledger,
                changes=ledger.ledger if isinstance(ledger, OwnReads) else ledger,
                reader=reader,
                acting=acting,
                permit=permit,
                instance=instance,
                pointers=pointers,
                topics=topics,
                bus_problem=unreachable_bus,
                cancel_grace_s=settings.cancel_grace_s,
            )
        )
