"""A run that waits for upstream says since when and what for."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from tests.cli.conftest import Terminal
from tests.cli.test_runs import VIOLIN, planted
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.documents.errors import AgentStopped
from trellis.engine.jobs import Actor, Claim, ClaimId, Turn, TypeClaim
from trellis.engine.records import SubscriberRecord
from trellis.engine.step_runner import journal_once
from trellis.lifecycles import Role
from trellis.operations.agent_waits import projector_words, wait_words
from trellis.runs.orchestration import TriggerKind
from trellis.runs.orchestrator import TYPE
from trellis.runs.waits import UpstreamWait, UpstreamWaits

__all__ = ["planted"]

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
REASON = "steps/02-execute-agent.json is not published yet"


async def waiting_runs(url: str, reason: str, *, is_bounded: bool) -> list[str]:
    """Two runs, of which the first has noted a wait, and a projector that is at work no more."""
    async with open_instance(Settings.model_validate({}), url) as instance:
        runs = [(await instance.layer.trigger(VIOLIN, {}, kind=TriggerKind.MANUAL)).job_id for _ in range(2)]
        claim = Claim(claim_id=ClaimId("c"), types=(TypeClaim(type=TYPE),), lifecycle="run")
        turn = Turn(actor=instance.actor(Role.ORCHESTRATOR), claim=claim)
        (claimed,) = (await instance.ledger.turn(turn)).claimed

        async def keep(entry: str, body: bytes) -> bytes:
            return await journal_once(instance.ledger, claimed.lease, entry, body)

        since = await instance.ledger.now() - timedelta(minutes=3)
        await UpstreamWaits({}, keep).begin(reason, since, is_bounded=is_bounded)
        projector = Actor(role=Role.PROJECTOR, name="projector@gone")
        following = await instance.ledger.subscribe(projector, "projector", lease_s=5.0)
        assert following is not None
        await instance.ledger.unsubscribe(following)
        return [str(run) for run in runs]


def test_explain_and_show_say_what_a_run_waits_for(planted: Terminal):
    run_id, behind = asyncio.run(waiting_runs(planted.url, REASON, is_bounded=True))
    told = " ".join(planted("job", "explain", run_id).out.split())
    assert f"(3 min): {REASON}." in told
    assert "No projector is at work: projector@gone was the last, until" in told
    assert "The projector has still to publish or record what happened since" in told
    assert f"trellis runs cancel {run_id}" in told
    assert "attempt" not in told, "a run goes on where it was; it has no attempts"
    record = planted("runs", "show", run_id, "--json").record
    assert record["waits"]["reason"] == REASON
    assert f"{record['waits']['since']}: {REASON}" in " ".join(planted("runs", "show", run_id).out.split())
    assert planted("runs", "cancel", run_id, "--hard").code == 0
    assert REASON not in planted("job", "explain", run_id).out
    assert REASON not in planted("job", "explain", behind).out


@pytest.mark.requirement("D24")
def test_explain_of_a_run_of_a_stopped_agent_names_the_remedy(planted: Terminal):
    reason = str(AgentStopped(slug=VIOLIN, status="paused"))
    for run_id in asyncio.run(waiting_runs(planted.url, reason, is_bounded=False)):
        told = " ".join(planted("job", "explain", run_id).out.split())
        assert (
            f"Agent {VIOLIN} is paused; only an active agent runs: `trellis agents activate {VIOLIN} --ledger" in told
        )
        assert "projector" not in told


def test_a_waiting_run_is_shown_with_the_length_of_its_wait():
    wait = UpstreamWait(NOW - timedelta(minutes=4), "The object store did not answer get 'a': 503; try again.")
    assert wait_words(wait, NOW) == (
        "It waits since 2026-03-01 11:56:00 UTC (4 min): The object store did not answer get 'a': 503; try again."
        " That takes nothing from its time, and then it goes on."
    )


@pytest.mark.parametrize(
    "until_s, unread_s, words",
    [
        (5, None, ["The projector p is at work, and nothing is unread."]),
        (
            5,
            90,
            [
                "The projector has still to publish or record what happened since 2026-03-01 11:58:30 UTC, 1 min 30 s ago."
            ],
        ),
        (
            -60,
            90,
            [
                "No projector is at work: p was the last, until 2026-03-01 11:59:00 UTC, 1 min ago; start `trellis up --roles projector`.",
                "The projector has still to publish or record what happened since 2026-03-01 11:58:30 UTC, 1 min 30 s ago.",
            ],
        ),
    ],
    ids=["idle", "behind", "gone"],
)
def test_explain_of_a_run_shows_the_lag_of_the_projector(until_s: int, unread_s: int | None, words: list[str]):
    seen = SubscriberRecord(
        name="projector",
        actor="p",
        until=NOW + timedelta(seconds=until_s),
        waits=True,
        unread_since=None if unread_s is None else NOW - timedelta(seconds=unread_s),
    )
    assert list(projector_words([seen], NOW)) == words


def test_a_ledger_that_no_projector_ever_followed_says_so():
    assert "start `trellis up --roles projector`" in "".join(projector_words([], NOW))
