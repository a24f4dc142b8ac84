"""The role `alerts` of `trellis up`: whoever has it evaluates alerts, and nobody else does."""

import asyncio
from pathlib import Path

import pytest

from trellis.app.instance import open_instance
from trellis.app.roles import role_of
from trellis.app.settings import read_settings
from trellis.cli.up_process import ROLES
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.lifecycles import Role

PATIENCE_S = 60.0


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
