"""What `@app.job` declares holds for callers that do not have the application, and a misspelt setting is refused."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trellis.app.wiring import SystemClock, new_id
from trellis.auth.principals import Principal
from trellis.client import Trellis
from trellis.engine.errors import ConcurrencyKeyMissing, LedgerUnavailable, OptionInvalid, PayloadInvalid
from trellis.engine.event_data import ARTIFACTS_BYTES_MAX, ArtifactPointer, add_artifact
from trellis.engine.jobs import JobId, Priority
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.testing import run_until_idle
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.payloads import Undo


@dataclass
class Fetch:
    url: str
    depth: int = 0


def crawler(**changed: object) -> App:
    app, options = App(), {"max_attempts": 4, "priority": "interactive", "deadline_s": 600.0, **changed}

    @app.job("http.fetch", concurrency_key=lambda fetch: fetch.url, concurrency_limit=2, **options)  # type: ignore[arg-type]
    async def fetch(ctx: Context, fetch: Fetch) -> int:
        return fetch.depth

    @app.job("order", max_attempts=3, compensation="order.undo")
    async def order(ctx: Context) -> str:
        ctx.artifact("s3://orders/1")
        return "ordered"

    @app.job("order.undo")
    async def undo(ctx: Context, made: Undo[None, str]) -> str:
        return f"undone: {made.result}"

    return app


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
async def ledger(url: str) -> AsyncGenerator[Ledger]:
    opened = await open_ledger(url)
    yield opened
    await opened.close()


def caller(ledger: Ledger, app: App | None = None, *roles: Role) -> Trellis:
    principal = Principal(name="test", roles=frozenset(roles or Role))
    return Trellis(ledger, principal, clock=SystemClock(), new_id=new_id, app=app)


@pytest.mark.requirement("D66")
async def test_a_worker_declares_its_types_for_callers_without_the_application(ledger: Ledger):
    trellis = caller(ledger)
    await run_until_idle(crawler(), ledger)
    with pytest.raises(ConcurrencyKeyMissing, match="concurrency_key"):
        await trellis.submit("http.fetch", {"url": "a"})
    job = await (await trellis.submit("http.fetch", {"url": "a"}, concurrency_key="a")).status()
    assert (job.max_attempts, job.priority, job.concurrency_key) == (4, Priority.INTERACTIVE, "user:a")
    assert job.deadline_at is not None
    named = await (await trellis.submit("order", max_attempts=9, priority="critical")).status()
    assert (named.max_attempts, named.priority) == (9, Priority.CRITICAL)
    await run_until_idle(crawler(max_attempts=7), ledger)  # a worker of the next version starts
    later = await (await trellis.submit("http.fetch", {"url": "a"}, concurrency_key="a")).status()
    assert later.max_attempts == 7


@pytest.mark.requirement("D66")
async def test_a_client_declares_what_is_new_and_leaves_what_a_worker_declared(ledger: Ledger):
    await caller(ledger, crawler()).submit("order")
    assert {one.type for one in await ledger.declared_types()} == {"http.fetch", "order", "order.undo"}
    old = await caller(ledger, crawler(max_attempts=9)).submit("http.fetch", Fetch("a"))
    assert (await old.status()).max_attempts == 4, "the type's options in the ledger hold"
    await caller(ledger).declare(crawler(max_attempts=9))
    new = await caller(ledger).submit("http.fetch", {"url": "a"}, concurrency_key="a")
    assert (await new.status()).max_attempts == 9


class BusyOnce:
    """A ledger that cannot take the first declaration."""

    def __init__(self, real: Ledger) -> None:
        self.real, self.asked = real, 0

    def __getattr__(self, name: str):
        return getattr(self.real, name)

    async def declare_types(self, *arguments, **options) -> None:
        self.asked += 1
        if self.asked == 1:
            raise LedgerUnavailable(reason="it is busy")
        await self.real.declare_types(*arguments, **options)


@pytest.mark.requirement("D66")
async def test_a_declaration_that_failed_is_made_with_the_next_submit(ledger: Ledger):
    trellis = caller(BusyOnce(ledger), crawler())  # type: ignore[arg-type]
    with pytest.raises(LedgerUnavailable):
        await trellis.submit("order")
    await trellis.submit("order")
    assert {one.type for one in await ledger.declared_types()} == {"http.fetch", "order", "order.undo"}


def test_the_pointers_of_one_job_have_a_bound_together():
    pointers: list[ArtifactPointer] = []
    large = ArtifactPointer(pointer=f"s3://{'x' * 1_900}")
    for _ in range(ARTIFACTS_BYTES_MAX // 2_000):
        add_artifact(pointers, large)
    with pytest.raises(OptionInvalid, match=str(ARTIFACTS_BYTES_MAX)):
        [add_artifact(pointers, large) for _ in range(10)]


@pytest.mark.requirement("D66")
async def test_a_caller_who_only_submits_still_has_the_options_of_its_application(ledger: Ledger):
    job = await (await caller(ledger, crawler(), Role.SUBMITTER).submit("order")).status()
    assert job.max_attempts == 3
    assert await ledger.declared_types() == []


@pytest.mark.requirement("D66", "D36")
async def test_a_declared_compensation_is_known_without_the_application(ledger: Ledger):
    trellis = caller(ledger)
    job = await trellis.submit("order")
    await run_until_idle(crawler(), ledger)
    (undoing,) = await trellis.compensate(job.id)
    await run_until_idle(crawler(), ledger)
    assert (await job.events())[-1].type == "job_compensated"
    assert await job.artifacts() == (ArtifactPointer(pointer="s3://orders/1"),), "what was undone can still be found"
    assert await undoing.result(timeout_s=0) == "undone: ordered"


@pytest.mark.requirement("DJ-5")
async def test_the_same_request_with_and_without_the_application_is_the_same(ledger: Ledger):
    first = await caller(ledger, crawler()).submit("http.fetch", Fetch("a"), idempotency_key="once")
    bare = await caller(ledger).submit(
        "http.fetch", {"url": "a", "depth": 0}, idempotency_key="once", concurrency_key="a"
    )
    assert (bare.id, bare.created) == (first.id, False)


async def test_a_payload_is_its_type_before_its_key_is_computed(ledger: Ledger):
    trellis = caller(ledger, crawler())
    for payload in ({"url": "a"}, Fetch("a")):
        assert (await (await trellis.submit("http.fetch", payload)).status()).concurrency_key == "user:a"
    with pytest.raises(PayloadInvalid, match="did you mean url"):
        await trellis.submit("http.fetch", {"ulr": "a", "url": "b"})
    parents: list[JobId] = []
    app = crawler()

    @app.job("start")
    async def start(ctx: Context) -> None:
        parents.append(await ctx.submit("http.fetch", {"url": "b"}))

    await caller(ledger, app).submit("start")
    await run_until_idle(app, ledger)
    assert (await trellis.job(parents[0])).concurrency_key == "user:b"


async def test_a_key_function_that_fails_is_named_and_nothing_is_written(ledger: Ledger):
    app = App()

    @app.job("broken", concurrency_key=lambda payload: payload["missing"])
    async def broken(ctx: Context, payload: dict[str, str]) -> None: ...

    @app.job("number", concurrency_key=lambda payload: payload)  # type: ignore[arg-type, return-value]
    async def number(ctx: Context, payload: int) -> None: ...

    with pytest.raises(OptionInvalid, match=r"concurrency_key of broken .*KeyError"):
        await caller(ledger, app).submit("broken", {})
    with pytest.raises(OptionInvalid, match=r"concurrency_key of number .*not int"):
        await caller(ledger, app).submit("number", 1)
    assert not any(depth.ready for depth in await ledger.queues())


async def test_a_misspelt_setting_is_refused_with_the_one_that_was_meant(ledger: Ledger):
    trellis = caller(ledger)
    with pytest.raises(OptionInvalid, match="did you mean max_attempts"):
        await trellis.submit("snz", max_atempts=77)  # type: ignore[call-arg]
    with pytest.raises(OptionInvalid, match="prio"):
        await trellis.submit_many("snz", [1, 2], prio="batch")  # type: ignore[call-arg]
    with pytest.raises(OptionInvalid, match="did you mean priority"):
        await trellis.submit_topic("job.echo", priorty="batch")  # type: ignore[call-arg]
    refused: list[str] = []
    app = App()

    @app.job("parent")
    async def parent(ctx: Context) -> None:
        try:
            await ctx.submit("child", dealy_s=1)  # type: ignore[call-arg]
        except OptionInvalid as error:
            refused.append(str(error))

    await trellis.submit("parent")
    await run_until_idle(app, ledger)
    assert "did you mean delay_s" in refused[0]
    assert await ledger.declared_types("child") == []
    assert not any(depth.type == "snz" and depth.ready for depth in await ledger.queues())


@pytest.mark.requirement("D65", "D4")
def test_a_lease_alone_is_enough_and_its_heartbeat_follows():
    for lease_s, heartbeat_s in ((30.0, 10.0), (36.0, 12.0), (60.0, 15.0), (120.0, 15.0)):
        app = App()

        @app.job("t", lease_s=lease_s)
        async def handler(ctx: Context) -> None: ...

        assert app.spec("t").claim.heartbeat_s == heartbeat_s
        assert app.spec("t").options.heartbeat_s == heartbeat_s
    usual = App()

    @usual.job("t")
    async def unsaid(ctx: Context) -> None: ...

    assert (usual.spec("t").claim.lease_s, usual.spec("t").claim.heartbeat_s) == (60.0, 15.0)
    testing = App(testing=True)

    @testing.job("t", lease_s=3.0)
    async def short(ctx: Context) -> None: ...

    assert testing.spec("t").claim.heartbeat_s == 1.0
