"""The client and a gateway that is really served, over a real connection."""

import asyncio
import inspect
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.agents.files import agent_file
from tests.gateway.serving import PATIENCE_S
from tests.http.conftest import Place, Token
from trellis import App, Context, connect, connect_sync
from trellis.engine.errors import NotAllowed, OptionInvalid, TokenRefused
from trellis.http.client import GatewayClient
from trellis.http.errors import (
    Conflict,
    Forbidden,
    GatewayUrlInvalid,
    KeyTaken,
    NotFound,
    RequestInvalid,
    WrongState,
)
from trellis.http.sync import BlockingIterator, BlockingMethod, BlockingTwin, SyncGatewayClient
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.testing import run_until_idle

AGENT = "archivist-violin"


async def test_connect_opens_a_ledger_or_a_gateway_by_its_url(address: str, token: Token, tmp_path: Path):
    async with connect(gateway=address, token=token(Role.OWNER)) as client:
        assert (await client.health()).status == "ok"
    async with connect(address, token=token(Role.OWNER)) as either:
        assert type(either) is GatewayClient
    async with connect(f"sqlite:///{tmp_path}/new.db") as trellis:
        assert await trellis.ledger.now()
    with pytest.raises(OptionInvalid):
        connect("sqlite:///a.db", gateway=address)  # type: ignore[call-overload]
    with pytest.raises(OptionInvalid):
        connect(address, operator=True)


async def test_the_token_may_come_from_a_file_that_is_replaced(
    address: str, token: Token, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "token"
    file.write_text(token(Role.WORKER))
    monkeypatch.setenv("TRELLIS_TOKEN_FILE", str(file))
    async with connect(gateway=address) as client:
        with pytest.raises(Forbidden):
            await client.agents.list()
        file.write_text(token(Role.OWNER))
        assert [agent.slug for agent in (await client.agents.list()).items]
        file.write_text("nonsense")
        with pytest.raises(TokenRefused):
            await client.agents.list()


async def test_agents_are_read_paused_and_let_run(address: str, token: Token):
    async with connect(gateway=address, token=token(Role.OWNER)) as client:
        assert AGENT in [agent.slug for agent in (await client.agents.list()).items]
        assert (await client.agents.get(AGENT)).status == "active"
        assert (await client.agents.pause(AGENT, reason="a rest")).status == "paused"
        with pytest.raises(Conflict):
            await client.runs.start(AGENT)
        assert (await client.agents.activate(AGENT)).status == "active"
        with pytest.raises(NotFound):
            await client.agents.get("nobody")
    async with connect(gateway=address, token=token(Role.FRONTEND)) as client:
        with pytest.raises(NotAllowed, match=r"agents\.status"):
            await client.agents.pause(AGENT)


@pytest.mark.requirement("DJ-5")
async def test_the_same_key_is_the_same_run_and_with_another_request_it_is_refused(address: str, token: Token):
    async with connect(gateway=address, token=token(Role.OWNER)) as client:
        first = await client.runs.start(AGENT, {"topic": "bows"}, idempotency_key="k")
        again = await client.runs.start(AGENT, {"topic": "bows"}, idempotency_key="k")
        assert (first.run_id, first.created, again.created) == (again.run_id, True, False)
        with pytest.raises(KeyTaken) as refused:
            await client.runs.start(AGENT, {"topic": "strings"}, idempotency_key="k")
        assert refused.value.correlation_id
        assert [run.run_id for run in (await client.runs.list(agent=AGENT, limit=1)).items] == [first.run_id]


async def test_runs_are_listed_in_pages_of_any_length(address: str, token: Token):
    async with connect(gateway=address, token=token(Role.OWNER)) as client:
        begun = [(await client.runs.start(AGENT)).run_id for _ in range(5)]
        page = await client.runs.list(limit=3)
        rest = await client.runs.list(limit=1_000, cursor=page.next_cursor)
        assert [run.run_id for run in (*page.items, *rest.items)][:5] == begun[::-1]
        assert rest.next_cursor is None
        with pytest.raises(RequestInvalid):
            await client.runs.list(status="nonsense")


async def test_a_cancelled_run_has_ended_for_those_who_watch(address: str, token: Token, publishing: None):
    async with connect(gateway=address, token=token(Role.OWNER)) as client:
        run = await client.runs.start(AGENT)
        watching = asyncio.create_task(_statuses(client, run.run_id))
        stopped = await client.runs.cancel(run.run_id, mode="hard", reason="not needed", idempotency_key="c")
        assert await client.runs.cancel(run.run_id, mode="hard", reason="not needed", idempotency_key="c") == stopped
        with pytest.raises(WrongState):
            await client.runs.cancel(run.run_id)
        assert (await client.runs.wait(run.run_id, timeout_s=PATIENCE_S)).status == "failed"
        assert (await watching)[-1] == "failed"
        assert "CANCELLED" in ((await client.runs.get(run.run_id)).error or "")


async def _statuses(client: GatewayClient, run_id: str) -> list[str]:
    return [state.status async for state in client.runs.watch(run_id)]


@pytest.mark.requirement("RUN-5")
@pytest.mark.usefixtures("publishing")
async def test_events_come_as_they_happen_and_go_on_after_any_of_them(address: str, token: Token):
    async with connect(gateway=address, token=token(Role.OWNER)) as client, asyncio.timeout(PATIENCE_S):
        begins = await client.position()
        first = await client.runs.start(AGENT)
        async with aclosing(client.events(after=begins, types=["run.status.changed"], agent=AGENT)) as events:
            seen = [await anext(events)]
            await client.runs.cancel(first.run_id, mode="hard")
            while seen[-1].status != "failed":
                seen.append(await anext(events))
        assert {one.run_id for one in seen} == {first.run_id}
        assert [one.version for one in seen] == list(range(1, len(seen) + 1))
        async with aclosing(client.events(run=first.run_id, after=seen[0].id)) as rest:
            assert [(await anext(rest)).id for _ in seen[1:]] == [one.id for one in seen[1:]]


# --- jobs and the inbox ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("DJ-5", "DJ-11")
async def test_jobs_are_submitted_once_followed_and_ended(address: str, token: Token):
    roles = (Role.OWNER, Role.CONTROL_PLANE)
    async with connect(gateway=address, token=token(*roles)) as client, asyncio.timeout(PATIENCE_S):
        job = await client.jobs.submit("echo", {"n": 1}, idempotency_key="j", priority="interactive", max_attempts=2)
        again = await client.jobs.submit("echo", {"n": 1}, idempotency_key="j", priority="interactive", max_attempts=2)
        assert (job.created, again) == (True, job.model_copy(update={"created": False, "outcome": "returned"}))
        with pytest.raises(KeyTaken):
            await client.jobs.submit("echo", {"n": 2}, idempotency_key="j")
        late = await client.jobs.submit("once", {"n": 3}, unique="args", while_="waiting", delay_s=600)
        other = await client.jobs.submit("once", {"n": 3}, unique="args", debounce_s=600)
        assert (late.outcome, other.outcome, other.replaced) == ("created", "replaced", late.job_id)
        whole = await client.jobs.get(job.job_id)
        assert (whole.payload, whole.priority, whole.max_attempts) == ({"n": 1}, "interactive", 2)
        assert [one.job_id for one in (await client.jobs.list(type_="echo")).items] == [job.job_id]
        waiting = asyncio.create_task(client.jobs.wait(job.job_id, timeout_s=PATIENCE_S))
        assert (await client.jobs.cancel(job.job_id, mode="hard", reason="enough")).status == "cancelled"
        assert (await waiting).status == "cancelled"
        last = (await client.jobs.events(job.job_id)).items[-1]
        assert (last.payload["to"], last.cause) == ("cancelled", "enough")
        with pytest.raises(WrongState):
            await client.jobs.cancel(job.job_id)
        with pytest.raises(NotFound):
            await client.jobs.get("nothing")


@pytest.mark.requirement("DJ-12")
async def test_a_dead_letter_is_found_and_run_again(address: str, token: Token, place: Place):
    app = App()

    @app.job("broken")
    async def broken(ctx: Context, n: int) -> None:
        raise AssertionError

    async with connect(gateway=address, token=token(Role.OWNER, Role.CONTROL_PLANE)) as client:
        job = await client.jobs.submit("broken", "no number")
        ledger = await open_ledger(place.ledger)
        try:
            await run_until_idle(app, ledger)
        finally:
            await ledger.close()
        assert (await client.jobs.wait(job.job_id, timeout_s=PATIENCE_S)).status == "dead_lettered"
        letter = await client.dead_letters.get(job.job_id)
        assert letter.reason_code == "validation_failed"
        assert [one.job_id for one in (await client.dead_letters.list(type_="broken")).items] == [job.job_id]
        (answer,) = (await client.dead_letters.requeue([job.job_id], reason="mended")).items
        assert answer["requeued"]
        with pytest.raises(WrongState):
            await client.jobs.requeue(job.job_id)


@pytest.mark.requirement("D51")
async def test_an_entry_of_the_inbox_makes_one_thing(address: str, token: Token):
    async with connect(gateway=address, token=token(Role.OWNER)) as client:
        taken = await client.inbox.submit("run", AGENT, {"topic": "bows"}, entry_id="inbox_1")
        assert taken == await client.inbox.submit("run", AGENT, {"topic": "bows"}, entry_id="inbox_1")
        assert taken.run_id is not None
        assert [one.run_id for one in (await client.runs.list(limit=1)).items] == [taken.run_id]
        assert [one.id for one in (await client.inbox.entries()).items] == ["inbox_1"]
        assert (await client.inbox.stats()).processed_today == 1


@pytest.mark.requirement("D22")
async def test_changes_of_memory_and_logic_are_proposed(address: str, token: Token, place: Place):
    agents = Path(place.ledger.removeprefix("sqlite:///")).parent / "objects" / "agents"
    (agents / "logician").mkdir()
    (agents / "logician" / "_agent.md").write_bytes(agent_file(slug="logician", safe_outputs="[logic-update]"))
    update = {"file": "facts.md", "operation": "append", "content": "- rehaired in March"}
    async with connect(gateway=address, token=token(Role.ORCHESTRATOR, Role.OWNER)) as client:
        first = await client.memory.propose(AGENT, "rehaired", [update], priority="high", idempotency_key="m")
        assert first == await client.memory.propose(AGENT, "rehaired", [update], priority="high", idempotency_key="m")
        assert (first.status, (await client.proposals.get(first.proposalId)).action) == ("pending", "memory-update")
        with pytest.raises(KeyTaken):
            await client.memory.propose(AGENT, "another", [update], idempotency_key="m")
        logic = await client.logic.propose(
            "logician", "ask first", "1. Ask.\n", change="append", reasoning="it is safer"
        )
        shown = await client.proposals.get(logic.proposalId)
        assert (shown.action, shown.content["change"]) == ("logic-update", {"type": "append", "text": "1. Ask.\n"})
        assert logic.requiresHumanReview
        with pytest.raises(RequestInvalid):
            await client.logic.propose(AGENT, "ask first", "1. Ask.\n")


@pytest.mark.requirement("RUN-5")
async def test_events_of_one_job_can_be_followed(address: str, token: Token):
    async with connect(gateway=address, token=token(Role.OWNER, Role.CONTROL_PLANE)) as client:
        begins = await client.position()
        other, job = [await client.jobs.submit("echo", number) for number in range(2)]
        for one in (other, job):
            await client.jobs.cancel(one.job_id, mode="hard")
        async with asyncio.timeout(PATIENCE_S), aclosing(client.events(after=begins, job=job.job_id)) as events:
            seen = [await anext(events) for _ in range(2)]
        assert [(event.job_id, event.status) for event in seen] == [(job.job_id, "queued"), (job.job_id, "cancelled")]


# --- the blocking side -----------------------------------------------------------------------------------------------


def test_a_script_does_the_same_without_async(address: str, token: Token, publishing: None):
    with connect_sync(address, token=token(Role.OWNER)) as client:
        assert client.health().status == "ok"
        begins = client.position()
        run = client.runs.start(AGENT, {"topic": "bows"})
        assert next(client.events(after=begins, run=run.run_id)).run_id == run.run_id
        client.runs.cancel(run.run_id, mode="hard")
        assert [state.status for state in client.runs.watch(run.run_id)][-1] == "failed"
        assert client.runs.wait(run.run_id, timeout_s=PATIENCE_S).status == "failed"
        with pytest.raises(NotFound):
            client.agents.get("nobody")
    with pytest.raises(GatewayUrlInvalid), connect_sync("gateway"):
        pass


def test_every_public_method_has_its_blocking_twin():
    """One that is added to the client and forgotten in its twin is found here."""
    missing = [
        f"{kind.__name__}.{name}"
        for kind, twin in _pairs()
        for name, method in vars(kind).items()
        if not name.startswith("_")
        and callable(method)
        and not isinstance(vars(twin).get(name), BlockingIterator if _flows(method) else BlockingMethod)
    ]
    assert missing == []


def _flows(method: Any) -> bool:
    return inspect.isasyncgenfunction(method) or not inspect.iscoroutinefunction(method)


def _pairs() -> list[tuple[type, type[BlockingTwin]]]:
    client: Any = GatewayClient(None)  # type: ignore[arg-type]
    sync: Any = SyncGatewayClient(client, None)  # type: ignore[arg-type]
    groups = [name for name, value in vars(sync).items() if isinstance(value, BlockingTwin)]
    assert groups == [name for name in vars(client) if not name.startswith("_")]
    return [(GatewayClient, SyncGatewayClient), *((type(getattr(client, n)), type(getattr(sync, n))) for n in groups)]
