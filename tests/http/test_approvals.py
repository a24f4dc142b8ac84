"""Held jobs and the safety policy through a gateway, for programs and at the command line."""

import asyncio
from pathlib import Path

import pytest

from tests.bus.safety.holding import PEOPLE, held
from tests.http.conftest import Place, Shell, Token
from trellis import connect
from trellis.gateway.routes.safety import POLICY_EXAMPLE
from trellis.http.errors import WrongState
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role


async def make_held(place: Place, *job_ids: str) -> None:
    ledger = await open_ledger(place.ledger)
    try:
        for job_id in job_ids:
            await held(ledger, job_id=job_id)
    finally:
        await ledger.close()


@pytest.mark.requirement("D45", "BUS-4")
async def test_a_program_decides_about_held_jobs_and_asks_the_policy(address: str, token: Token, place: Place):
    await make_held(place, "client-1", "client-2", "client-3")
    async with connect(gateway=address, token=token(Role.OWNER)) as client:
        assert {"approval-client-1", "approval-client-2"} <= {
            one.id for one in (await client.proposals.pending()).items
        }
        assert (await client.jobs.approve("client-1", policy_hash=PEOPLE.hash)).status == "SCHEDULED"
        assert (await client.jobs.deny("client-2", "these are still needed")).status == "DENIED"
        decided = await client.proposals.approve("approval-client-3", "it is fine")
        assert (decided.status, decided.action) == ("approved", "bus-dispatch")
        with pytest.raises(WrongState):
            await client.jobs.approve("client-1")
        told = await client.safety.explain({"topic": "job.mail"}, policy=POLICY_EXAMPLE)
        assert (told.decision, told.looked[0].rule) == ("deny", "code")
        tried = await client.safety.simulate(POLICY_EXAMPLE, requests=[{"topic": "job.mail"}])
        assert [(one.before, one.after) for one in tried.items] == [("allow", "deny")]


@pytest.mark.requirement("D45")
def test_a_person_decides_about_held_jobs_through_a_gateway(shell: Shell, place: Place):
    asyncio.run(make_held(place, "shell-1", "shell-2", "shell-3"))
    assert "approval-shell-1" in shell("proposals", "--state", "pending")
    assert shell("job", "approve", "shell-1") == "shell-1 may go; the scheduler hands it out\n"
    assert shell("job", "deny", "shell-2", "--note", "these are still needed") == "shell-2 is DENIED\n"
    assert shell("proposals", "approve", "approval-shell-3") == "approval-shell-3 is approved\n"
    for name in ("shell-1", "approval-shell-1"):  # the job's id, and its id in the inbox
        assert "does not wait for a person" in shell("job", "approve", name, code=1)


@pytest.mark.requirement("BUS-4")
def test_a_person_asks_a_gateway_for_its_policy_and_not_for_that_of_his_own_machine(
    shell: Shell, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine.toml").write_text(POLICY_EXAMPLE)
    monkeypatch.setenv("TRELLIS_POLICY", "mine.toml")
    asyncio.run(make_held(place, "asked-1"))
    assert shell("policy", "explain", "--topic", "job.mail").startswith("allow by embedded")
    (told,) = shell.records("policy", "explain", "--job", "asked-1")
    (shown,) = shell.records("proposals", "show", "approval-asked-1")
    assert (told["rule"], told["job_hash"]) == ("embedded", shown["target_hash"])
    (mine,) = shell.records("policy", "explain", "--job", "asked-1", "--policy", "mine.toml")
    assert (mine["rule"], mine["job_hash"]) == ("default", told["job_hash"])
    (tried,) = shell.records("policy", "simulate", "mine.toml", "--last", "1")
    assert (tried["job_id"], tried["before"], tried["after"]) == ("asked-1", "require_human", "deny")
