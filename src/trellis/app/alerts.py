"""Builds the services that evaluate alerts and report them, for every process with the role `alerts`."""

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trellis.app.settings import Settings
from trellis.app.wiring import SystemClock, new_id, outgoing_tls, read_keys
from trellis.engine.admin_acts import this_node
from trellis.engine.clock import Clock
from trellis.engine.errors import KeyUnusable, SettingsInvalid
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.service import Service
from trellis.lifecycles import Role
from trellis.net.guard import OutgoingPolicy
from trellis.net.targets import UrlRefused, read_target
from trellis.operations.alert_conditions import LedgerConditions
from trellis.operations.alert_reports import AlertReporter, AppriseChannel, ReportChannel, ReportDriver, WebhookChannel
from trellis.operations.alerts import AlertEvaluator, AlertOptions, AlertThresholds
from trellis.operations.host_conditions import HostConditions

DAY_S = 24 * 3600.0
CERTIFICATES = ("tls_cert_file", "gateway_ca_file", "bus_ca_file", "temporal_ca_file", "temporal_cert_file")
"""Settings that name a file with certificates."""

APPRISE_MAX = 20
"""Most URLs of Apprise. Each has jobs of its own."""

FailingAgents = Callable[[], Awaitable[Sequence[str]]]
UnservedAgents = Callable[[], Awaitable[Mapping[str, str]]]


def alert_services(
    settings: Settings,
    ledger: Ledger,
    *,
    name: str,
    folders: Sequence[Path] = (),
    failing_agents: FailingAgents | None = None,
    unserved_agents: UnservedAgents | None = None,
    clock: Clock | None = None,
) -> list[Service[Any]]:
    """Builds the evaluator, and the reporter if a channel is configured. Raises SettingsInvalid.

    `folders` are those whose disks must have room. Without `failing_agents` there are no agents to look at.
    """
    clock, channels = clock or SystemClock(), report_channels(settings)
    thresholds = AlertThresholds(
        queued_s=settings.alert_queued_s,
        dead_percent=settings.alert_dead_percent,
        proposal_hours=settings.alert_proposal_hours,
        lag_s=settings.alert_lag_s,
        disk_percent=settings.alert_disk_percent,
        expiry_days=settings.alert_expiry_days,
    )
    stored = LedgerConditions(
        ledger=ledger,
        thresholds=thresholds,
        retention=settings.retention,
        failing_agents=failing_agents,
        unserved_agents=unserved_agents,
    )
    host = HostConditions(
        node=this_node(),
        thresholds=thresholds,
        folders=tuple(folders),
        certificates={setting: path for setting in CERTIFICATES if (path := getattr(settings, setting)) is not None},
        token=settings.shown_token,
    )
    evaluator = AlertEvaluator(
        ledger=ledger,
        actor=Actor(role=Role.CONTROL_PLANE, name=name),
        clock=clock,
        checks=(*stored.checks(), *host.checks()),
        counts=stored.counts(),
        new_id=new_id,
        options=AlertOptions(
            interval_s=settings.alert_interval_s,
            keep_s=settings.alert_days * DAY_S,
            report_types=tuple(channel.type for channel in channels),
        ),
    )
    return [evaluator, *([_reporter(settings, ledger, name, channels, clock)] if channels else [])]


def _reporter(
    settings: Settings, ledger: Ledger, name: str, channels: Sequence[ReportChannel], clock: Clock
) -> AlertReporter:
    worker = Actor(role=Role.WORKER, name=name)
    rng = random.Random()  # noqa: S311 - spreads retries, nothing secret
    driver = ReportDriver(
        ledger=ledger,
        actor=worker,
        clock=clock,
        channels={channel.type: channel for channel in channels},
        draw=rng.random,
        gateway=settings.named_gateway,
    )
    first, *others = (channel.type for channel in channels)
    return AlertReporter(
        ledger=ledger,
        actor=worker,
        clock=clock,
        driver=driver,
        new_id=new_id,
        type=first,
        also=tuple(others),
    )


def report_channels(settings: Settings) -> list[ReportChannel]:
    """Opens the configured channels. Raises SettingsInvalid, ExtraMissing."""
    channels: list[ReportChannel] = []
    if settings.alert_webhook is not None and settings.alert_key_file is not None:
        settings.check_alert_webhook()
        channels.append(_webhook(settings, settings.alert_webhook.get_secret_value(), settings.alert_key_file))
    if settings.alert_apprise is not None:
        urls = settings.alert_apprise.get_secret_value().split()
        if len(urls) > APPRISE_MAX:
            raise SettingsInvalid(
                source=settings.source_of("alert_apprise"), detail=f"it may have at most {APPRISE_MAX} URLs"
            )
        channels += [AppriseChannel(url=url, number=number) for number, url in enumerate(urls, start=1)]
    return channels


def _webhook(settings: Settings, url: str, key_file: Path) -> WebhookChannel:
    """The channel. The operator who names the URL allows its origin with that, and no other."""
    try:
        policy = OutgoingPolicy(origins=(read_target(url).origin,), public=False)
    except UrlRefused as error:
        # Without the URL: its path may be a secret.
        raise SettingsInvalid(source=settings.source_of("alert_webhook"), detail=str(error.data["reason"])) from None
    try:
        key = read_keys(key_file)[0]
    except KeyUnusable as error:
        raise SettingsInvalid(source=settings.source_of("alert_key_file"), detail=str(error.data["reason"])) from error
    return WebhookChannel(url=url, key=key, policy=policy, now=time.time, tls=outgoing_tls(settings))
