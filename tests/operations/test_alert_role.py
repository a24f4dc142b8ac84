"""The role `alerts` of `trellis up`: whoever has it evaluates alerts, and nobody else does."""

import asyncio
from pathlib import Path

import pytest

from trellis.app.instance import open_instance
from trellis.app.roles import role_of
from trellis.app.settings import read_settings
from trellis.cli.up_process import ROLES
from trellis.engine.errors import SettingsInvalid
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.lifecycles import Role

PATIENCE_S = 60.0
RUN_ROLES = {"orchestrator", "projector", "sweeper"}


@pytest.mark.requirement("OBS-4")
async def test_a_process_with_the_role_alerts_raises_them(tmp_path: Path):
    settings = read_settings({"TRELLIS_ALERT_QUEUED_S": "0.000001", "TRELLIS_ALERT_DISK_PERCENT": "0"}, tmp_path)
    async with open_instance(settings, f"sqlite:///{tmp_path / 'trellis.db'}") as instance:
        assert {role_of(service.name) for service in instance.services()} <= set(ROLES)
        await instance.ledger.submit(Actor(role=Role.SUBMITTER, name="s"), [NewJob(job_id=JobId("waits"), type="work")])
        stop = asyncio.Event()
        serving = asyncio.ensure_future(instance.serve(stop, frozenset({"alerts"})))
        async with asyncio.timeout(PATIENCE_S):
            while not (found := await instance.ledger.alerts()):
                await instance.ledger.queues()
        stop.set()
        await serving
    assert [(alert.name, alert.subject) for alert in found] == [("jobs-wait", "work")]


@pytest.mark.requirement("OBS-4")
async def test_settings_of_alerts_matter_only_to_a_process_with_the_role_alerts(tmp_path: Path):
    """A process that executes one run has the settings of a shell: it evaluates no alert and removes nothing."""
    named = {"TRELLIS_ALERT_WEBHOOK": "https://hooks.example/x", "TRELLIS_ALERT_KEY_FILE": str(tmp_path / "gone.key")}
    async with open_instance(read_settings(named, tmp_path), f"sqlite:///{tmp_path / 'trellis.db'}") as instance:
        stop = asyncio.Event()
        stop.set()
        await instance.serve(stop, frozenset({"sweeper"}))
        await instance.serve_run(JobId("run-1"), stop)
        roles = {role_of(service.name) for service in instance.services_of_run(JobId("run-1"))}
        assert roles >= RUN_ROLES
        assert not roles & {"alerts", "retention", "schedules"}
        with pytest.raises(SettingsInvalid, match=r"^TRELLIS_ALERT_KEY_FILE: the key .*gone\.key cannot be read"):
            await instance.serve(stop, frozenset({"alerts"}))
