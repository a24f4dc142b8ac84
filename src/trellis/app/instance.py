"""One instance of the platform: ledger, object store, memory and NLM provider, and the services that work on them."""

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from trellis.agents.catalog import Catalog, agent_key
from trellis.agents.definition import AgentStatus
from trellis.agents.garden import AGENTS, memory_seed, plant
from trellis.agents.run_io import ModelOptions, RunLimits
from trellis.app.alerts import alert_services
from trellis.app.fleet import (
    StorageLocations,
    gateway_address,
    kernel_of,
    local_folders,
    storage_locations,
    topics_of,
)
from trellis.app.memory import open_instance_memory
from trellis.app.nlm import nlm_address, open_settings_provider
from trellis.app.roles import role_of
from trellis.app.settings import Settings
from trellis.app.wiring import (
    SystemClock,
    check_destination,
    elapsed_s,
    lazy_token,
    limited_token,
    new_id,
    new_job_id,
    outgoing_tls,
    process_name,
)
from trellis.artifacts.registry import ArtifactCollector, ArtifactRegistry
from trellis.artifacts.rows import artifacts_of_run, project_id
from trellis.auth.principals import Principal
from trellis.bus.collector import BusCollector, CollectOptions
from trellis.bus.pointers import Pointers, make_pointers
from trellis.bus.safety.kernel import SafetyKernel
from trellis.bus.submitter import BacklogLimit, IdempotencyScopeAndKey
from trellis.bus.submitter import BusSubmitter as BusAsking
from trellis.bus.topics import Topics
from trellis.documents.audit_chain import AuditSealer
from trellis.documents.publisher import DocumentPublisher, PublishedRuns
from trellis.engine.admin_acts import NewAct
from trellis.engine.closing import closing
from trellis.engine.disk_room import require_room
from trellis.engine.errors import SettingsInvalid
from trellis.engine.extras import Extra, extra_needed
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.engine.lease_runner import LeaseHeartbeat, LeaseRunnerOptions, ProcessReport
from trellis.engine.ledger import Ledger
from trellis.engine.records import SweepOptions
from trellis.engine.service import Retention, Service, Sweeper, serve
from trellis.engine.subscription import FeedSubscriber
from trellis.inbox import InboxService, InboxSettler
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.nlm.provider import NlmProvider
from trellis.nlm.retrying_provider import RetryingProvider
from trellis.operations.alert_reports import AlertReporter
from trellis.proposals.apply import ApplyEngine, ApplyOptions
from trellis.proposals.service import ProposalService
from trellis.research.backend_client import READ_BYTES_MAX, NlmBackend
from trellis.research.context import ContextAssembler
from trellis.research.orchestrator import QueueDriver, QueueDriverOptions, QueueOrchestrator
from trellis.runs import finalization
from trellis.runs.agent_status import CREATED, AgentGate, AgentHealth, UnservedAgents
from trellis.runs.event_triggers import EventTriggers
from trellis.runs.memory_readers import GatewayReader, MemoryReader, RepositoryReader
from trellis.runs.orchestration import BuiltinLayer, OrchestrationLayer
from trellis.runs.orchestrator import TYPE, Orchestrator, OrchestratorOptions, RunDriver, RunDriverOptions
from trellis.runs.pipeline import RunSteps
from trellis.runs.projector import Projector, ProjectorOptions
from trellis.runs.schedules import ScheduleFirer, ScheduleRegistrar
from trellis.runs.source_changes import SourceChanges
from trellis.runs.timetable import Timetable
from trellis.storage.memory.collector import MemoryPackCollector
from trellis.storage.memory.layout import AlreadyApplied, Committed, TokenCounter, count_tokens, open_tokenizer
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.updates import Operation, Update
from trellis.storage.objects.address import s3_credentials
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore
from trellis.worker.kinds import JobFactory, make_job_from_json
from trellis.worker.schedules import JobScheduleFirer

PROBE_KEY = "agents/index.json"
"""The object store is asked for this key to check that it answers."""
SEED_RUN = "garden"
JUDGED_PAGES_MAX = 1_000
"""Bound on pages of events judged before a command continues. The next process judges the rest."""
DAY_S = 24 * 3600.0
ALERTS_ROLE = "alerts"
ORCHESTRATOR_ROLE = "orchestrator"
NOT_FOR_ONE_RUN = frozenset({"schedules", ALERTS_ROLE, "retention"})
"""Roles that a process which executes a single run leaves to others."""


def is_of_queue(service: Service[Any]) -> bool:
    """Whether the service drives jobs of the job queue."""
    return service.name.startswith("queue-")


@dataclass(frozen=True, kw_only=True)
class Instance:
    """The open parts of an instance."""

    places: StorageLocations
    ledger: Ledger
    objects: ObjectStore
    repository: MemoryRepository | None
    """Agents' memory; None in a process that reads it through the gateway."""
    provider: NlmProvider
    settings: Settings
    name: str
    counter: TokenCounter = field(default=count_tokens, compare=False)
    """Counts tokens of memory and sources (D50)."""
    schedulers: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]], compare=False)
    """Callbacks that wake the bus schedulers in this process. Empty if they run elsewhere, where they poll."""

    def probes(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """Returns a health check for each dependency. A check returns when the dependency answers."""
        probes: dict[str, Callable[[], Awaitable[object]]] = {
            "ledger": self.ledger.ping,
            "objects": partial(self.objects.head, PROBE_KEY),
        }
        if local_folders(self.places):
            probes["disk"] = self._check_disks
        return probes

    async def _check_disks(self) -> None:
        """Raises DiskFull. A disk of another machine may hang, so this waits in a thread."""
        await asyncio.to_thread(require_room, local_folders(self.places))

    def wake_bus(self) -> None:
        """Wakes the bus schedulers because a job on a topic was submitted or can continue."""
        for wake in self.schedulers:
            wake()

    @property
    def memory(self) -> MemoryRepository:
        """Agents' memory in its repository. Raises SettingsInvalid in a process that has none."""
        if self.repository is None:
            detail = "this process has no memory of its own, which only the role orchestrator does without: set a path"
            raise SettingsInvalid(source=self.settings.source_of("memory"), detail=detail)
        return self.repository

    @cached_property
    def memory_reader(self) -> MemoryReader:
        """Agents' memory as the steps of runs and queue jobs read it."""
        if self.repository is not None:
            return RepositoryReader(self.repository)
        check_destination(self.settings, "gateway", self.gateway_url)
        return GatewayReader(
            url=self.gateway_url,
            token=self._token_as(Role.ORCHESTRATOR, to="gateway"),
            deep_token=self._agent_token,
            tls=outgoing_tls(self.settings),
        )

    @property
    def gateway_url(self) -> str:
        """The URL that receives callbacks and serves snapshots."""
        return gateway_address(self.settings)

    @property
    def nlm_url(self) -> str:
        """The URL of the NLM backend that executes queue jobs: the configured one, else this machine's."""
        return nlm_address(self.settings)

    def actor(self, role: Role) -> Actor:
        """Returns this process as an actor in a role."""
        return Actor(role=role, name=self.name)

    @property
    def catalog(self) -> Catalog:
        """The catalog of agents."""
        return Catalog(self.objects, counter=self.counter)

    @property
    def artifacts(self) -> ArtifactRegistry:
        """The registry of artifacts that queue jobs produced."""
        return ArtifactRegistry(
            ledger=self.ledger,
            objects=self.objects,
            cid=project_id(self.settings.project),
            new_id=new_id,
            keep_days=self.settings.artifact_days,
        )

    @property
    def published(self) -> PublishedRuns:
        """The runs as published for readers."""
        return PublishedRuns(self.objects, SystemClock())

    @property
    def timetable(self) -> Timetable:
        """The registered schedules of agents."""
        return Timetable(objects=self.objects)

    @property
    def layer(self) -> OrchestrationLayer:
        """The layer through which runs are started."""
        parts: dict[str, Any] = {
            "ledger": self.ledger,
            "gateway": self.actor(Role.GATEWAY),
            "orchestrator": self.actor(Role.ORCHESTRATOR),
            "catalog": self.catalog,
            "publisher": DocumentPublisher(self.objects),
            "timetable": self.timetable,
            "random_text": lambda: new_id()[:8],
            "waiting_max": self.settings.runs_waiting,
            "cancel_grace_s": self.settings.cancel_grace_s,
        }
        if self.settings.temporal is None:
            return BuiltinLayer(**parts)
        from trellis.runs.temporal.layer import TemporalLayer  # only few instances need it

        return TemporalLayer(**parts, temporal=self.settings.temporal)

    def apply_engine(self) -> ApplyEngine:
        """Builds the engine that applies approved proposals."""
        return ApplyEngine(
            ledger=self.ledger,
            actor=self.actor(Role.APPLY_ENGINE),
            objects=self.objects,
            memory=self.memory,
            new_id=new_id,
            options=ApplyOptions(),
        )

    def proposal_service(self, gateway: Actor) -> ProposalService:
        """Builds the service that creates proposals from outside a run, in this actor's name."""
        return ProposalService(
            ledger=self.ledger,
            gateway=gateway,
            objects=self.objects,
            catalog=self.catalog,
            apply_engine=self.apply_engine(),
            clock=SystemClock(),
            random_text=new_id,
        )

    def inbox(self, gateway: Actor) -> InboxService:
        """Builds the service that accepts inbox entries, in this actor's name."""
        return InboxService(
            ledger=self.ledger,
            gateway=gateway,
            layer=self.layer.acting_as(gateway),
            proposal_service=self.proposal_service(gateway),
            new_job=self._job_of_entry,
        )

    async def _job_of_entry(
        self, request: Mapping[str, Any], by: str, asked_as: IdempotencyScopeAndKey | None
    ) -> NewJob:
        """Builds the job that an inbox entry asks for, in its sender's name."""
        sender = Principal(name=by, roles=frozenset({Role.GATEWAY}), by_token=True)
        return await make_job_from_json(request, self.job_factory(sender, asked_as=asked_as))

    def job_factory(
        self,
        principal: Principal,
        *,
        asked_as: IdempotencyScopeAndKey | None = None,
        correlation_id: str | None = None,
    ) -> JobFactory:
        """Builds the factory that makes and checks new jobs for this principal."""
        return JobFactory(
            new_id=new_id,
            new_job_id=new_job_id,
            ledger=self.ledger,
            catalog=self.catalog,
            bus_submitter=self._bus_submitter,
            principal=principal,
            asked_as=asked_as,
            correlation_id=correlation_id,
        )

    @cached_property
    def topics(self) -> Topics:
        """The configuration of topics, pools and tenants. Raises BusConfigInvalid."""
        return topics_of(self.settings)

    @cached_property
    def pointers(self) -> Pointers:
        """The stores behind the pointers of jobs on the bus."""
        return make_pointers(self.objects, self.settings.redis_url)

    @cached_property
    def kernel(self) -> SafetyKernel:
        """The safety kernel, which decides about jobs before they are dispatched. Creating it opens no connection."""
        return kernel_of(self.settings, self.places.ledger, monotonic=elapsed_s)

    @cached_property
    def room(self) -> BacklogLimit:
        """Limits how many jobs may wait on the topics."""
        return BacklogLimit(ledger=self.ledger, clock=SystemClock())

    def open_bus_submitter(self) -> AbstractAsyncContextManager[BusAsking]:
        """Opens the submitter of jobs on topics, which the instance itself closes."""
        return nullcontext(self._bus_submitter())

    def _bus_submitter(self) -> BusAsking:
        """Builds the submitter of jobs on topics."""
        return BusAsking(topics=self.topics, pointers=self.pointers, room=self.room, new_id=new_id)

    def _agent_token(self, agent: str) -> str:
        """Returns a token that acts for one agent. Raises KeyUnusable."""
        return limited_token(self.places.ledger, self.settings, Role.AGENT_RUNTIME, each="agent")(agent=agent)

    def _token_as(self, role: Role, *, to: str = "nlm_backend") -> Callable[[], str]:
        """Returns a function that gives this process's token in a role. `to` is the setting with the address."""
        return lazy_token(self.places.ledger, self.settings, role, to=to)

    @cached_property
    def nlm_reader(self) -> NlmBackend:
        """The client with which the gateway reads jobs of the NLM backend."""
        token, tls = self._token_as(Role.GATEWAY), outgoing_tls(self.settings)
        return NlmBackend(self.nlm_url, token, tls, answer_bytes_max=READ_BYTES_MAX)

    async def release(self) -> None:
        """Closes the connections that were opened on demand."""
        for part in ("memory_reader", "nlm_reader", "pointers", "kernel"):
            if part in vars(self):
                await vars(self)[part].close()

    def queue_orchestrator(self) -> QueueOrchestrator:
        """Builds the orchestrator that drives queue jobs."""
        clock, actor = SystemClock(), self.actor(Role.ORCHESTRATOR)
        rng = random.Random()  # noqa: S311 - spreads retries, nothing secret
        artifacts = self.artifacts
        driver = QueueDriver(
            ledger=self.ledger,
            actor=actor,
            clock=clock,
            objects=self.objects,
            assembly=ContextAssembler(
                objects=self.objects, memory=self.memory_reader, cid=artifacts.cid, counter=self.counter
            ),
            artifacts=artifacts,
            layer=self.layer,
            backend=NlmBackend(self.nlm_url, self._token_as(Role.ORCHESTRATOR), outgoing_tls(self.settings)),
            gateway=self.gateway_url,
            draw=rng.random,
            options=QueueDriverOptions(
                execution_s=self.settings.job_timeout_s, operator_window_s=self.settings.operator_window_s
            ),
        )
        return QueueOrchestrator(
            ledger=self.ledger,
            actor=actor,
            clock=clock,
            driver=driver,
            new_id=new_id,
            options=LeaseRunnerOptions(poll_s=0.2),
        )

    def _orchestrator(self, engine: ApplyEngine | None, publisher: DocumentPublisher) -> Orchestrator:
        """Builds the orchestrator that drives runs. `publisher` tells its driver what was published.

        Raises SettingsInvalid, also for a missing extra.
        """
        clock = SystemClock()
        work = RunSteps(
            ledger=self.ledger,
            orchestrator=self.actor(Role.ORCHESTRATOR),
            gateway=self.actor(Role.GATEWAY),
            objects=self.objects,
            memory=self.memory_reader,
            asking=RetryingProvider(self.provider, clock=clock),
            models=_models(self.settings, self.name),
            apply_engine=engine,
            clock=clock,
            limits=RunLimits(),
            counter=self.counter,
        )
        parts: dict[str, Any] = {
            "ledger": self.ledger,
            "actor": self.actor(Role.ORCHESTRATOR),
            "clock": clock,
            "steps": work.steps(),
            "published": PublishedRuns(self.objects, clock, publisher).reached,
            "artifacts": partial(artifacts_of_run, self.ledger),
            "options": RunDriverOptions(upstream_wait_s=self.settings.upstream_wait_s),
        }
        shared: dict[str, Any] = {
            "ledger": self.ledger,
            "actor": self.actor(Role.ORCHESTRATOR),
            "clock": clock,
            "new_id": new_id,
            "options": OrchestratorOptions(concurrency=self.settings.runs, poll_s=0.2),
        }
        temporal = self.settings.temporal
        if temporal is None:
            return Orchestrator(driver=RunDriver(**parts), **shared)
        from trellis.runs.temporal.options import FEATURE

        with extra_needed(Extra.TEMPORAL, FEATURE):
            from trellis.runs.temporal.connection import read_tls
            from trellis.runs.temporal.driver import TemporalRunDriver
            from trellis.runs.temporal.worker import TemporalOrchestrator, TemporalWorker
        if temporal.tls is not None:
            read_tls(temporal.tls)  # files that cannot be used are refused at the start
        queue = f"{temporal.queue}/{self.name}/{new_id()[:8]}"
        driver = TemporalRunDriver(temporal=temporal, queue=queue, **parts)
        worker = TemporalWorker(driver=driver, clock=clock, concurrency=self.settings.runs)
        return TemporalOrchestrator(driver=driver, worker=worker, **shared)

    def services(self, *, alerts: bool = True, runs: bool = True) -> list[Service[Any]]:
        """Builds all services of one process. Raises ExtraMissing.

        Without `alerts`, those that evaluate and report alerts are left out; without `runs`, those that drive runs.
        """
        clock, engine, layer = SystemClock(), self.apply_engine(), self.layer
        publisher = DocumentPublisher(self.objects)  # tells the driver what the projector has published
        projector = Projector(
            ledger=self.ledger,
            actor=self.actor(Role.PROJECTOR),
            publisher=publisher,
            sealer=AuditSealer(ledger=self.ledger, actor=self.actor(Role.PROJECTOR), objects=self.objects, clock=clock),
            clock=clock,
            options=ProjectorOptions(alone=frozenset(self.settings.audit_objects)),
        )
        return [
            *self._orchestrators(engine, publisher, runs=runs),
            projector,
            engine,
            ScheduleRegistrar(layer=layer, catalog=self.catalog),
            ScheduleFirer(ledger=self.ledger, layer=layer, timetable=self.timetable),
            JobScheduleFirer(
                ledger=self.ledger,
                actor=self.actor(Role.ORCHESTRATOR),
                new_id=new_id,
                bus=self.open_bus_submitter,
                accepted=self.wake_bus,
            ),
            EventTriggers(
                ledger=self.ledger,
                actor=self.actor(Role.CONTROL_PLANE),
                clock=clock,
                catalog=self.catalog,
                layer=layer,
            ),
            SourceChanges(
                ledger=self.ledger,
                actor=self.actor(Role.CONTROL_PLANE),
                objects=self.objects,
                catalog=self.catalog,
                layer=layer,
            ),
            self.agent_health(),
            InboxSettler(inbox=self.inbox(self.actor(Role.GATEWAY))),
            ArtifactCollector(artifacts=self.artifacts, is_recorded=partial(finalization.is_recorded, self.objects)),
            Sweeper(
                ledger=self.ledger,
                actor=self.actor(Role.SWEEPER),
                options=SweepOptions(windows_s=self.settings.windows_s),
            ),
            Retention(ledger=self.ledger, actor=self.actor(Role.SWEEPER), options=self.settings.retention),
            self.bus_collector(),
            *self._memory_collectors(),
            *(self.alert_services() if alerts else ()),
        ]

    def _orchestrators(
        self, engine: ApplyEngine | None, publisher: DocumentPublisher, *, runs: bool = True
    ) -> list[Service[Any]]:
        """Builds the services of the role orchestrator. `engine` applies approved memory updates; None leaves it to others.

        Without `runs`, those that drive runs are left out. Raises ExtraMissing.
        """
        queue = self.queue_orchestrator()
        return [
            *(_with_helpers(self._orchestrator(engine, publisher)) if runs else ()),
            queue,
            LeaseHeartbeat(holder=queue, name="queue-heartbeat"),
            ProcessReport(holder=queue, name="queue-report"),
            AgentGate(ledger=self.ledger, actor=self.actor(Role.ORCHESTRATOR), catalog=self.catalog),
        ]

    def services_of(self, roles: frozenset[str] | None) -> list[Service[Any]]:
        """Builds the services of these roles, or all. Raises ExtraMissing.

        Settings of alerts matter only to a process that evaluates them, and the extra `temporal` only to one that
        drives runs.
        """
        if self.repository is None:
            if roles != frozenset({ORCHESTRATOR_ROLE}):
                detail = "only a process with --roles orchestrator can read memory through the gateway; set a path here"
                raise SettingsInvalid(source=self.settings.source_of("memory"), detail=detail)
            return self._orchestrators(None, DocumentPublisher(self.objects))
        services = self.services(
            alerts=roles is None or ALERTS_ROLE in roles, runs=roles is None or ORCHESTRATOR_ROLE in roles
        )
        return [service for service in services if roles is None or role_of(service.name) in roles]

    def check_executes_runs(self) -> None:
        """Raises SettingsInvalid if this process cannot execute a run without the help of others."""
        if self.repository is None:
            detail = (
                "this process reads memory through the gateway, so it cannot execute a run by itself, and no other process "
                "executes runs of this ledger now; start `trellis up`, or set TRELLIS_MEMORY to where the memory is"
            )
            raise SettingsInvalid(source=self.settings.source_of("memory"), detail=detail)

    def services_of_run(self, run_id: JobId) -> list[Service[Any]]:
        """Builds what one run needs. Other runs, queue jobs, schedules, alerts and retention are left to other processes.

        The process has the settings of somebody's shell, not those that the operator of the instance chose. Raises
        SettingsInvalid.
        """
        self.check_executes_runs()
        all_services = self.services(alerts=False)
        services = [one for one in all_services if not is_of_queue(one) and role_of(one.name) not in NOT_FOR_ONE_RUN]
        for service in services:
            if isinstance(service, Orchestrator):
                service.only = run_id
        return services

    def alert_services(self) -> list[Service[Any]]:
        """Builds the services that evaluate alerts and report them. Raises SettingsInvalid."""
        return alert_services(
            self.settings,
            self.ledger,
            name=self.name,
            folders=local_folders(self.places),
            failing_agents=partial(self.catalog.indexed, AgentStatus.ERROR),
            unserved_agents=UnservedAgents(ledger=self.ledger, catalog=self.catalog),
        )

    def agent_health(self) -> AgentHealth:
        """Builds the service that stops agents that keep failing."""
        return AgentHealth(
            ledger=self.ledger, actor=self.actor(Role.CONTROL_PLANE), clock=SystemClock(), catalog=self.catalog
        )

    async def judge_agents(self) -> None:
        """Judges every run that has ended by now: an agent that failed three times in a row is stopped.

        If another process does this, it is left to that process.
        """
        health = self.agent_health()
        try:
            for _ in range(JUDGED_PAGES_MAX):
                if not (await health.run_once()).events:
                    return
        finally:
            await health.release()

    def bus_collector(self) -> BusCollector:
        """Builds the collector of stored contexts and results whose jobs retention has removed from the ledger."""
        return BusCollector(
            ledger=self.ledger,
            actor=self.actor(Role.CONTROL_PLANE),
            objects=self.objects,
            options=CollectOptions(keep_s=self.settings.bus_object_days * DAY_S),
        )

    def _memory_collectors(self) -> list[Service[Any]]:
        """Builds the collector of packs that killed writers of memory left; none if the memory is in a folder."""
        shared = self.memory.shared
        if shared is None:
            return []
        return [MemoryPackCollector(objects=self.objects, repository=shared, now=self.ledger.now)]

    async def serve(self, stop: asyncio.Event, roles: frozenset[str] | None = None, *, queue_jobs: bool = True) -> None:
        """Runs the services of these roles, or all, until `stop` is set. Unfinished runs are left to another process.

        Without `queue_jobs`, queue jobs are not driven: without a gateway in the process they would only spend
        attempts.
        """
        services = self.services_of(roles)
        if not queue_jobs:
            services = [service for service in services if not is_of_queue(service)]
        if any(isinstance(service, Orchestrator) for service in services):
            await self.ledger.limit_held(self.actor(Role.ORCHESTRATOR), TYPE, self.settings.runs, cause="TRELLIS_RUNS")
        await self._serve(services, stop)

    async def serve_run(self, run_id: JobId, stop: asyncio.Event) -> None:
        """Runs what one run needs until `stop` is set."""
        await self._serve(self.services_of_run(run_id), stop)

    async def _serve(self, services: Sequence[Service[Any]], stop: asyncio.Event) -> None:
        rng = random.Random()  # noqa: S311 - spreads retries, nothing secret
        await asyncio.gather(*(serve(service, SystemClock(), rng, stop) for service in services))
        for service in services:
            if isinstance(service, Orchestrator | QueueOrchestrator | AlertReporter):
                await service.drain()
            elif isinstance(service, FeedSubscriber | BusCollector):  # so that another process can follow at once
                await service.release()

    async def plant(self) -> None:
        """Creates the demonstration agents with the first pages of their memory. Idempotent."""
        for slug in AGENTS:  # recorded before the object exists: a crash leaves no agent without its creation event
            if await self.objects.head(agent_key(slug)) is None:
                created = NewAct(event=CREATED, subject=slug, target="active", cause="the garden is planted")
                await self.ledger.record_act(self.actor(Role.CONTROL_PLANE), created)
        await plant(self.objects)
        for slug in AGENTS:
            if (await asyncio.to_thread(self.memory.read, slug)).version == 0:
                await self._seed(slug)

    async def _seed(self, slug: str) -> None:
        files = memory_seed(slug).items()
        answer = await asyncio.to_thread(
            self.memory.commit,
            slug,
            [Update(file=file, operation=Operation.REPLACE, content=text) for file, text in files],
            expected_version=0,
            run_id=SEED_RUN,
            proposal_id=f"seed-{slug}",
            reason="the garden is planted",
            auto_approved=False,
            author="garden",
            at=await self.ledger.now(),
        )
        # Another process may have planted at the same moment.
        assert isinstance(answer, Committed | AlreadyApplied) or answer.current > 0, answer


@asynccontextmanager
async def open_instance(
    settings: Settings,
    ledger_url: str,
    *,
    name: str | None = None,
    part: str | None = None,
    uses_memory: bool = True,
) -> AsyncGenerator[Instance]:
    """Opens all parts of an instance and closes them at the end.

    Checks that the object store honours conditional writes. Raises MemoryOfAnother if `uses_memory` and the memory
    belongs to another instance.
    """
    locations, counter = storage_locations(settings, ledger_url), open_tokenizer(settings.tokenizer)
    async with (
        closing(await open_ledger(locations.ledger, part=part)) as ledger,
        closing(await open_objects(locations.objects, credentials=s3_credentials(os.environ))) as objects,
    ):
        await objects.probe()
        async with (
            closing(open_settings_provider(settings, clock=SystemClock(), ledger=locations.ledger)) as provider,
            open_instance_memory(locations.memory, objects, counter=counter, uses_memory=uses_memory) as memory,
        ):
            instance = Instance(
                places=locations,
                ledger=ledger,
                objects=objects,
                repository=memory,
                provider=provider,
                settings=settings,
                counter=counter,
                name=name or process_name("trellis"),
            )
            try:
                yield instance
            finally:
                await instance.release()


def _with_helpers(orchestrator: Orchestrator) -> list[Service[Any]]:
    """The orchestrator that drives runs, with the services it needs in its process."""
    heartbeat = LeaseHeartbeat(holder=orchestrator, name="run-heartbeat")
    return [orchestrator, heartbeat, ProcessReport(holder=orchestrator, name="run-report"), *orchestrator.helpers()]


def _models(settings: Settings, name: str) -> ModelOptions:
    key = settings.key_for("model_base_url")
    return ModelOptions(
        base_url=settings.model_base_url,
        key=None if key is None else key.get_secret_value(),
        process=f"the process {name}",
    )
