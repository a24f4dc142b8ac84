"""One NLM backend process: its ledger, provider, outgoing client, HTTP application and background services.

No other component depends on its ledger (D42, NLM-6). If that is lost, the orchestration layer asks again.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from trellis.app.fleet import gateway_address, object_store_url
from trellis.app.nlm import open_settings_provider
from trellis.app.settings import Settings
from trellis.app.wiring import SystemClock, callback_secrets, limited_token, new_id, outgoing_tls, process_name
from trellis.artifacts.payloads import SNAPSHOT_BYTES_MAX
from trellis.auth.tokens import TrustedKey
from trellis.documents.audit_chain import NLM_CHAIN, AuditSealer
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.clock import Clock
from trellis.engine.errors import KeyUnusable, SettingsInvalid
from trellis.engine.jobs import CANCEL_GRACE_S_DEFAULT, Actor
from trellis.engine.lease_runner import LeaseHeartbeat, LeaseRunner, LeaseRunnerOptions, ProcessReport
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import RetentionOptions
from trellis.engine.service import RETENTION_DEFAULT, Retention, Service, Sweeper, serve
from trellis.ledgers import open_ledger
from trellis.ledgers.moving.source import refuse_closed
from trellis.lifecycles import Role
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.net.guard import GuardedClient, OutgoingPolicy
from trellis.net.targets import read_target
from trellis.nlm.provider import NlmProvider
from trellis.nlm.retrying_provider import RetryingProvider
from trellis.nlm_backend.app import BackendServices, create_backend_app
from trellis.nlm_backend.delivery import BackendEnvironment, BackendLinks, JobDelivery
from trellis.nlm_backend.driver import NlmDriver
from trellis.nlm_backend.intake import JobIntake
from trellis.nlm_backend.limits import LimitedProvider, ProviderCircuit, RequestPace
from trellis.nlm_backend.metrics import Metrics
from trellis.nlm_backend.orders import type_of
from trellis.runs.projector import Projector
from trellis.storage.objects.address import s3_credentials
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore

_log = log_of("trellis.nlm_backend")

OUTGOING_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendOptions(LeaseRunnerOptions):
    """Capacity and lease times of one backend process."""

    concurrency: int = 4
    poll_s: float = 0.2
    per_second: float | None = None
    cancel_grace_s: float = CANCEL_GRACE_S_DEFAULT
    retention: RetentionOptions = RETENTION_DEFAULT
    """How long ended NLM jobs are kept in the backend's ledger."""


class BackendProcess:
    """One backend process: `app` answers requests, `serve` executes jobs."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        provider: NlmProvider,
        links: BackendLinks,
        name: str,
        options: BackendOptions,
        world: BackendEnvironment,
        objects: ObjectStore | None = None,
    ) -> None:
        clock, self.metrics = world.clock, Metrics()
        self.ledger, self._world, self._retention = ledger, world, options.retention
        actor = Actor(role=Role.NLM_BACKEND, name=name)
        limited = LimitedProvider(
            inner=provider,
            clock=clock,
            metrics=self.metrics,
            circuit=ProviderCircuit(clock.monotonic),
            pace=RequestPace(clock.monotonic, options.per_second),
            slots=asyncio.Semaphore(options.concurrency),
        )
        first, *others = sorted(map(type_of, links.trusted))
        driver = NlmDriver(
            ledger=ledger,
            actor=actor,
            clock=clock,
            provider=limited,
            delivery=JobDelivery(links=links, world=world, metrics=self.metrics),
            metrics=self.metrics,
        )
        self.holder = LeaseRunner(
            ledger=ledger,
            actor=actor,
            clock=clock,
            driver=driver,
            new_id=world.new_id,
            options=options,
            type=first,
            also=tuple(others),
            lifecycle=NLM_JOB.name,
            name="nlm",
        )
        self.projector = None if objects is None else _projector(ledger, objects, name, clock)
        """Publishes audit records of NLM jobs (D35); None if no object store is configured."""
        self.sweeper = Sweeper(ledger=ledger, actor=Actor(role=Role.SWEEPER, name=name), name="nlm-sweeper")
        intake = JobIntake(
            ledger=ledger,
            actor=actor,
            outgoing=links.client,
            trusted=links.trusted,
            circuit=limited.circuit,
            metrics=self.metrics,
            concurrency=options.concurrency,
            cancel_grace_s=options.cancel_grace_s,
        )
        self.parts = BackendServices(intake=intake, asking=RetryingProvider(limited, clock=clock))

    def app(self, keys: Sequence[TrustedKey]) -> FastAPI:
        """Builds the application for callers whose tokens these keys verify."""
        world = self._world
        return create_backend_app(self.parts, keys, monotonic=world.clock.monotonic, new_id=world.new_id, now=world.now)

    def services(self) -> list[Service[Any]]:
        return [
            self.holder,
            LeaseHeartbeat(holder=self.holder, name="nlm-heartbeat"),
            ProcessReport(holder=self.holder, name="nlm-report"),
            self.sweeper,
            Retention(ledger=self.ledger, actor=self.sweeper.actor, options=self._retention, name="nlm-retention"),
            *([] if self.projector is None else [self.projector]),
        ]

    async def serve(self, stop: asyncio.Event) -> None:
        """Runs the services until `stop` is set. Unfinished executions are left to the next process."""
        world = self._world
        await asyncio.gather(*(serve(service, world.clock, world.rng, stop) for service in self.services()))
        await self.holder.drain()
        if self.projector is not None:
            await self.projector.release()


def _projector(ledger: Ledger, objects: ObjectStore, name: str, clock: Clock) -> Projector:
    actor = Actor(role=Role.PROJECTOR, name=name)
    sealer = AuditSealer(ledger=ledger, actor=actor, objects=objects, clock=clock, chain=NLM_CHAIN)
    publisher = DocumentPublisher(objects)
    return Projector(ledger=ledger, actor=actor, publisher=publisher, sealer=sealer, clock=clock, name="nlm-projector")


def signing_secret(ledger_url: str, settings: Settings) -> bytes:
    """Returns the secret that signs callbacks. Raises KeyUnusable."""
    secrets = callback_secrets(ledger_url, settings)
    if not secrets:
        raise KeyUnusable(reason="no callback can be signed without a secret; set TRELLIS_CALLBACK_KEY_FILE")
    return secrets[0]


@asynccontextmanager
async def open_backend(
    settings: Settings, ledger_url: str, *, name: str | None = None
) -> AsyncGenerator[BackendProcess]:
    """Opens all parts of a backend and closes them at the end.

    `ledger_url` is the main ledger, which is not opened. Raises KeyUnusable, LedgerError.
    """
    secret = signing_secret(ledger_url, settings)
    token = limited_token(ledger_url, settings, Role.NLM_BACKEND)
    gateway = _gateway_origin(settings)
    origins = (gateway, *(read_target(one).origin for one in settings.outgoing))
    policy = OutgoingPolicy(origins=origins, answer_bytes_max=SNAPSHOT_BYTES_MAX, total_s=OUTGOING_S)
    async with AsyncExitStack() as stack:
        refuse_closed(settings.nlm_ledger_of(ledger_url))
        ledger = await open_ledger(settings.nlm_ledger_of(ledger_url), part="nlm")
        stack.push_async_callback(ledger.close)
        objects = await _open_objects(settings, ledger_url)
        if objects is not None:
            stack.push_async_callback(objects.close)
        provider = open_settings_provider(settings, clock=SystemClock(), ledger=None)
        stack.push_async_callback(provider.close)
        client = await stack.enter_async_context(GuardedClient(policy, tls=outgoing_tls(settings)))
        yield BackendProcess(
            ledger=ledger,
            provider=provider,
            links=BackendLinks(client=client, trusted=frozenset({gateway}), token=token, secret=secret),
            name=name or process_name("nlm"),
            objects=objects,
            options=BackendOptions(
                concurrency=settings.nlm_concurrency,
                per_second=settings.nlm_per_second,
                cancel_grace_s=settings.cancel_grace_s,
                retention=settings.retention,
            ),
            world=BackendEnvironment(
                clock=SystemClock(),
                rng=random.Random(),  # noqa: S311 - spreads retries, nothing secret
                now=time.time,
                new_id=new_id,
            ),
        )


async def _open_objects(settings: Settings, ledger_url: str) -> ObjectStore | None:
    """Opens the instance's object store for audit records of NLM jobs; None, with a warning, if none is configured."""
    place = object_store_url(settings, ledger_url)
    if place is None:
        _log.warning("nlm_jobs_not_recorded", remedy="set TRELLIS_OBJECTS to the object store of the instance")
        return None
    return await open_objects(place, credentials=s3_credentials(os.environ))


def _gateway_origin(settings: Settings) -> str:
    """Returns the origin that receives artifacts, callbacks and tokens. Raises SettingsInvalid, UrlRefused."""
    if settings.gateway is None and settings.port == 0:
        detail = "set TRELLIS_GATEWAY: where the port is any free one, the backend cannot know who gets its artifacts"
        raise SettingsInvalid(source="TRELLIS_GATEWAY", detail=detail)
    if settings.gateway is None and settings.tls_cert_file is not None:
        detail = "set TRELLIS_GATEWAY to the address that the gateway's certificate names: no other can be verified"
        raise SettingsInvalid(source="TRELLIS_GATEWAY", detail=detail)
    return read_target(gateway_address(settings)).origin
