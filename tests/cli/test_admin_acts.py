"""Every administrative act leaves one record that says who, from which node, why and when (OBS-1, D35).

What there is to do is read from the program itself: its commands, the gateway's routes, the client's methods and the ledger's verbs. Each
must stand in one of the tables below, so a new one that leaves no record, or that nobody thought about, fails here.
"""

import asyncio
import getpass
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import typer

from tests.cli.conftest import Terminal
from trellis import App
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import connect, new_id
from trellis.auth.principals import ADMINISTRATION
from trellis.auth.tokens import issue, symmetric_key
from trellis.cli.program import make_program
from trellis.client import Trellis
from trellis.engine.admin_acts import AdminAct, this_node
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.engine.records import Event
from trellis.engine.schedules import ScheduleSpec
from trellis.gateway import GatewayOptions, create_app
from trellis.gateway.app import ROUTES
from trellis.ledgers import migrate, open_ledger
from trellis.ledgers.sqlite.connection import connect as connect_sqlite
from trellis.ledgers.sqlite.connection import parse_url
from trellis.ledgers.sqlite.schema import SCHEMA_VERSION, migrations
from trellis.lifecycles import Role

KEY = symmetric_key(b"for the tests of administrative acts: 32 bytes", issuer="trellis")
WHY = "spring cleaning"

# --- what leaves an act -------------------------------------------------------------------------------------------------

COMMAND_ACTS: dict[str, tuple[str, ...]] = {
    "queues pause": ("type.paused",),
    "queues resume": ("type.resumed",),
    "followers leave-behind": ("follower.left_behind",),
    "schedules add": ("schedule.added",),
    "schedules pause": ("schedule.paused",),
    "schedules resume": ("schedule.resumed",),
    "schedules remove": ("schedule.removed",),
    "token issue": ("token.issued",),
    "agents create": ("agent.created",),
    "agents pause": ("agent.status.changed",),
    "agents activate": ("agent.status.changed",),
    "agents resume": ("agent.status.changed",),
    "token issuer": ("issuer.changed",),
    "rebuild": ("objects.rebuilt",),
    "memory export": ("memory.exported",),
    "memory import": ("memory.imported",),
    "backup": ("instance.backed_up",),
    "restore": ("instance.restored",),
    "move": ("instance.moved", "instance.move_undone"),
    "migrate": ("ledger.migrated",),
    "retention apply": ("retention.removed",),
}
ROUTE_ACTS = {
    "PATCH /agents/{slug}/status": "agent.status.changed",
    "PATCH /queues/{type}": "type.resumed",
    "POST /schedules": "schedule.added",
    "PATCH /schedules/{name}": "schedule.changed",
    "DELETE /schedules/{name}": "schedule.removed",
    "POST /sign-in": "token.issued",
}
METHOD_ACTS = {
    "pause": "type.paused",
    "resume": "type.resumed",
    "leave_behind": "follower.left_behind",
    "schedules": "schedule.added",
    "declare": "type.options.changed",
}
VERB_ACTS = {
    "send_signal": "job.signalled",
    "pause": "type.paused",
    "limit_rate": "type.rate.changed",
    "limit_held": "type.held_limit.changed",
    "limit_key": "key.limit.changed",
    "declare_types": "type.options.changed",
    "save_schedule": "schedule.added, schedule.changed, schedule.paused or schedule.resumed",
    "remove_schedule": "schedule.removed",
    "leave_behind": "follower.left_behind",
    "replace_home_issuer": "issuer.changed",
    "retain": "retention.removed",
    "record_act": "any act on what is not in the ledger",
}

# --- what leaves the event of a job, which has a record of its own ------------------------------------------------------

COMMAND_EVENTS = {
    *(
        "run",
        "runs cancel",
        "submit",
        "batch",
        "proposals approve",
        "proposals reject",
        "artifacts discard",
        "artifacts cleanup",
    ),
    *("jobs cancel", "jobs discard", "jobs run-now", "jobs prioritize", "job discard", "job run-now", "job prioritize"),
    *("job cancel", "job dead-letter", "job requeue", "job approve", "job deny", "dlq requeue", "sweep"),
    *("worker", "up", "demo", "schedules run"),
    "job signal",  # an act without a reason: tests/ledgers/conformance/test_waits.py shows it
}
ROUTE_EVENTS = {
    "POST /batches",
    *("POST /dlq/requeue", "POST /jobs", "POST /jobs/{job_id}/cancel", "POST /jobs/{job_id}/requeue"),
    *("POST /jobs/{job_id}/dead-letter", "POST /jobs/{job_id}/approval", "POST /jobs/{job_id}/result"),
    "POST /jobs/{job_id}/signals",
    *("POST /jobs/cancel", "POST /jobs/discard", "POST /jobs/run-now", "POST /jobs/prioritize"),
    *("POST /artifacts", "POST /artifacts/{artifact_id}/discard", "POST /artifacts/cleanup"),
    *("POST /inbox/submit", "POST /agents/run", "POST /runs/{run_id}/cancel", "POST /schedules/{name}/run"),
    *("PATCH /proposals/{proposal_id}", "POST /proposals/{proposal_id}/apply"),
    *("POST /memory/{agent_id}/propose", "POST /logic/{agent_id}/propose"),
}
METHOD_EVENTS = {
    "change_jobs",
    *("cancel", "signal", "compensate", "dead_letter", "requeue", "submit", "submit_many", "submit_on", "submit_topic"),
    "submit_batch",
}

# --- what changes nothing that is kept, and why -------------------------------------------------------------------------

COMMANDS_WITHOUT = {
    **dict.fromkeys(
        [
            *(
                "jobs list",
                "events",
                "schedules list",
                "schedules show",
                "workers",
                "wait",
                "verify",
                "doctor",
                "health",
            ),
            *("metrics", "slo", "version", "alerts list", "alerts runbook"),
        ],
        "reads",
    ),
    **dict.fromkeys(["lifecycles", "authority", "completion", "runs list", "runs show"], "reads"),
    **dict.fromkeys(["agents list", "agents show", "agents sources", "memory diff"], "reads"),
    **dict.fromkeys(["proposals list", "proposals show", "artifacts list", "artifacts show"], "reads"),
    "mcp": "each tool is a request to a route of the gateway, which leaves its record",
    "artifacts download": "reads, and writes a file of its caller's own",
    **dict.fromkeys(["memory list", "memory read", "memory history", "job show", "job wait", "job result"], "reads"),
    **dict.fromkeys(["job context", "job explain", "policy check", "policy explain", "policy simulate"], "reads"),
    **dict.fromkeys(["queues list", "dlq list", "dlq show", "followers list"], "reads"),
    **dict.fromkeys(["audit verify", "audit head", "retention plan"], "reads"),
    "init": "writes an example into a folder of its caller's own, and no ledger",
    "token key": "makes a key that nobody trusts before its public half is put into a key set, which is a file",
}
ROUTES_WITHOUT = {
    "POST /mcp": "each tool is a request to another route, which leaves its record",
    "POST /events/tickets": "a ticket is what its bearer may do already, for some seconds",
    "POST /safety/explain": "reads",
    "POST /safety/simulate": "reads",
}
METHODS_WITHOUT = dict.fromkeys(
    ["events", "feed", "handle", "job", "preview_change", "read_result", "signals", "wait", "why"], "reads"
)
VERBS_WITHOUT = {
    "advance_schedule": "the job that it fires has an event; a skipped instant stands with the schedule",
    "sweep": "each job that it moves has an event",
    "set_home_issuer": "the first gateway records its own setting; another issuer instead is the act",
    "follow": "a reader says where it is; leaving one behind is the act",
    "restore": "puts back what has records already; the rebuild around it is the act",
    "remark": "a note beside a job's history, shown with the job",
    "publish_acts": "says that records are there",
    "observe_alerts": "an alert is a record of its own, with its times",
    "seal": "says that records are in a block; the block has its time and its place in the chain",
}


def commands() -> set[str]:
    """Every command of the program."""

    def walk(found: Any, path: tuple[str, ...]) -> Iterator[str]:
        if not hasattr(found, "commands"):
            yield " ".join(path)
            return
        for name, inner in found.commands.items():
            yield from walk(inner, (*path, name))

    return set(walk(typer.main.get_command(make_program()), ()))


def routes() -> set[str]:
    """Every request to the gateway that may change something."""
    found = [route for module in ROUTES for route in module.router.routes]
    return {f"{method} {route.path}" for route in found for method in route.methods - {"GET", "HEAD", "OPTIONS"}}


@pytest.mark.requirement("OBS-1", "D35")
def test_every_entrance_that_changes_something_is_accounted_for():
    """A new command, route, method or verb fails here until it stands in a table above, and so in a test below."""
    methods = {name for name in dir(Trellis) if not name.startswith("_")}
    accounted = {
        "commands": (commands(), COMMAND_ACTS.keys() | COMMAND_EVENTS | COMMANDS_WITHOUT.keys()),
        "routes": (routes(), ROUTE_ACTS.keys() | ROUTE_EVENTS | ROUTES_WITHOUT.keys()),
        "methods": (methods, METHOD_ACTS.keys() | METHOD_EVENTS | METHODS_WITHOUT.keys()),
        "verbs": (set[str](ADMINISTRATION), VERB_ACTS.keys() | VERBS_WITHOUT.keys()),
    }
    for what, (there, known) in accounted.items():
        assert there ^ known == set(), f"{what}: say what record each of these leaves, or why none"
    twice = [COMMAND_ACTS.keys() & COMMAND_EVENTS, ROUTE_ACTS.keys() & ROUTE_EVENTS, VERB_ACTS.keys() & VERBS_WITHOUT]
    assert not any(twice)


async def acts_in(url: str) -> list[AdminAct]:
    ledger = await open_ledger(url)
    try:
        return await ledger.acts()
    finally:
        await ledger.close()


def acts_of(url: str) -> list[AdminAct]:
    return asyncio.run(acts_in(url))


async def _followed(url: str) -> None:
    ledger = await open_ledger(url)
    try:
        await ledger.subscribe(Actor(role=Role.PROJECTOR, name="p"), "reader", lease_s=0.0)
        await ledger.set_home_issuer(Actor(role=Role.GATEWAY, name="g"), "https://old.example")
    finally:
        await ledger.close()


@pytest.mark.requirement("OBS-1", "D35")
def test_every_command_that_administers_leaves_an_act(
    trellis: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
):
    key = tmp_path / "own.key"
    key.write_text("5" * 64)
    key.chmod(0o600)
    monkeypatch.setenv("TRELLIS_OBJECTS", f"file://{tmp_path / 'store'}")
    monkeypatch.setenv("TRELLIS_MEMORY", str(tmp_path / "memory"))
    asyncio.run(_followed(trellis.url))
    words = [
        ("queues pause", ("t", "--force")),
        ("queues resume", ("t", "--force")),
        ("schedules add", ("nightly", "--cron", "0 3 * * *", "--type", "t")),
        ("schedules pause", ("nightly",)),
        ("schedules resume", ("nightly",)),
        ("schedules remove", ("nightly",)),
        ("followers leave-behind", ("reader",)),
        ("retention apply", ()),
        ("agents create", ("boiler", "--purpose", "p")),
        ("agents pause", ("boiler",)),
        ("agents activate", ("boiler",)),
        ("agents pause", ("boiler",)),
        ("agents resume", ("boiler",)),
        ("token issuer", ("https://new.example", "--replaces", "https://old.example")),
        ("rebuild", ("--from", "ledger")),
        ("token issue", ("--role", "worker")),
        ("memory export", (str(tmp_path / "exported.git"),)),
        ("memory import", (str(tmp_path / "memory"),)),
    ]
    assert trellis("job", "cancel", trellis.submit("t")).code == 0
    began = len(acts_of(trellis.url))
    for command, more in words:
        with monkeypatch.context() as patch:
            if command == "token issue":
                patch.setenv("TRELLIS_TOKEN_KEY_FILE", str(key))
            if command == "memory import":
                patch.setenv("TRELLIS_MEMORY", "objects")
                patch.setenv("TRELLIS_MEMORY_CACHE", str(tmp_path / "cache.git"))
            if command == "retention apply":
                patch.setattr("trellis.engine.records.KEEP_DAYS_MIN", 0.0)  # what ended a moment ago
                patch.setenv("TRELLIS_RETENTION_DAYS", "0.0000001")
            answer = trellis(*command.split(), *more, "--reason", WHY)
        assert answer.code == 0, (command, answer.err)
        found = acts_of(trellis.url)[began:]
        began += len(found)
        assert tuple(act.event for act in found) == COMMAND_ACTS[command], command
        _check(found, since=time.time())
    fresh = _fresh_ledger(trellis.url, request, tmp_path)
    assert trellis("migrate", "--reason", WHY, ledger=fresh).code == 0
    assert trellis("migrate", ledger=fresh).code == 0, "the second time nothing changes, and nothing is recorded"
    migrated = acts_of(fresh)
    assert tuple(act.event for act in migrated) == COMMAND_ACTS["migrate"]
    _check(migrated, since=time.time())
    # These are for SQLite alone; tests/cli/test_backup.py and tests/cli/test_move.py show their acts.
    assert {command for command, _ in words} | {"migrate", "backup", "restore", "move"} == COMMAND_ACTS.keys()


def _fresh_ledger(url: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if url.startswith("sqlite"):
        return f"sqlite:///{tmp_path / 'fresh.db'}"
    made: Callable[..., str] = request.getfixturevalue("new_postgres_database")
    return made()


def _check(acts: list[AdminAct], *, since: float, by: str | None = None, why: str = WHY) -> None:
    """Who, from which node, why and when."""
    for act in acts:
        name = act.actor.partition("@")[0] if by is None else act.actor
        assert (name, act.node, act.cause) == (by or getpass.getuser(), this_node(), why), act
        assert abs(act.at.timestamp() - since) < 600


@pytest.mark.requirement("OBS-1", "D35")
async def test_every_method_that_administers_leaves_an_act(url: str):
    ledger = await open_ledger(url)
    app = App(testing=True)
    app.job("declared")(_nothing)
    try:
        await ledger.subscribe(Actor(role=Role.PROJECTOR, name="p"), "reader", lease_s=0.0)
        began = len(await ledger.acts())
        async with connect(url, name="anna", operator=True) as client:
            await client.pause("t", reason=WHY)
            await client.resume("t", reason=WHY)
            await client.leave_behind("reader", reason=WHY)
            await client.schedules.add(ScheduleSpec(name="s", cron="0 3 * * *", type="t"), reason=WHY)
            await client.declare(app)
        found = (await ledger.acts())[began:]
    finally:
        await ledger.close()
    assert [act.event for act in found] == list(METHOD_ACTS.values())
    _check(found[:-1], since=time.time(), by="anna")
    _check(found[-1:], since=time.time(), by="anna", why="declared by an application")


async def _nothing(ctx: Any) -> None: ...


ADMINISTRATIVE_REQUESTS: dict[str, tuple[str, str, dict[str, Any], Role]] = {
    "PATCH /agents/{slug}/status": (
        "/agents/archivist-violin/status",
        "agents.status",
        {"status": "paused"},
        Role.OWNER,
    ),
    "PATCH /queues/{type}": ("/queues/t", "queues.pause", {"paused": False}, Role.CONTROL_PLANE),
    "POST /schedules": ("/schedules", "schedules.manage", {"name": "s", "cron": "0 3 * * *", "type": "t"}, Role.OWNER),
    "PATCH /schedules/{name}": ("/schedules/s", "schedules.manage", {"cron": "0 4 * * *"}, Role.OWNER),
    "DELETE /schedules/{name}": ("/schedules/s", "schedules.manage", {}, Role.OWNER),
}
"""By route: the path, the rule, the body without its reason, and a role that may. In this order each finds its object."""


@pytest.mark.requirement("OBS-1", "D35")
async def test_every_administrative_request_records_an_act_also_when_refused(url: str, tmp_path: Path):
    # A sign-in shows a code instead of a token, so no rule refuses it; tests/gateway/test_console.py shows its act.
    assert ADMINISTRATIVE_REQUESTS.keys() == ROUTE_ACTS.keys() - {"POST /sign-in"}
    places = {"objects": f"file://{tmp_path / 'store'}", "memory": str(tmp_path / "memory")}
    async with open_instance(Settings.model_validate(places), url) as instance:
        await instance.plant()
        await instance.ledger.submit(Actor(role=Role.SUBMITTER, name="s"), [NewJob(job_id=JobId("j"), type="t")])
        await instance.ledger.pause(Actor(role=Role.CONTROL_PLANE, name="c"), "t", paused=True)
        options = GatewayOptions(requests_per_second=1e6, burst=1_000_000)
        app = create_app(instance, [KEY], monotonic=time.monotonic, new_id=new_id, options=options)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
            for route, (path, rule, body, role) in ADMINISTRATIVE_REQUESTS.items():
                method, began = route.partition(" ")[0], len(await instance.ledger.acts())
                said: dict[str, Any] = (
                    {"params": {"reason": WHY}} if method == "DELETE" else {"json": {**body, "reason": WHY}}
                )
                for caller, allowed in ((Role.FRONTEND, False), (role, True)):
                    token = issue(KEY, name="anna", roles=[caller], ttl_s=600, now=time.time())
                    shown = {"Authorization": f"Bearer {token}"}
                    answer = await client.request(method, path, headers=shown, **said)
                    assert (answer.status_code < 300, answer.status_code == 403) == (allowed, not allowed), answer.text
                refused, changed = (await instance.ledger.acts())[began:]
                assert changed.event == ROUTE_ACTS[route]
                assert (refused.event, refused.subject) == ("access.refused", f"{method} {path}")
                _check([changed], since=time.time(), by="anna")
                _check([refused], since=time.time(), by="anna", why=refused.cause or "")
                assert rule in (refused.cause or "")


@pytest.mark.requirement("OBS-1", "D35", "DJ-15")
def test_each_act_of_an_operator_on_a_job_is_an_event_with_actor_node_cause_and_time(trellis: Terminal):
    first, second = trellis.submit("t"), trellis.submit("t")
    steps = [
        ("job", "dead-letter", first, "--cause", WHY),
        ("job", "requeue", first, "--cause", WHY),
        ("job", "dead-letter", second, "--cause", WHY),
        ("dlq", "requeue", "--type", "t", "--yes", "--cause", WHY),
        ("job", "cancel", first, "--cause", WHY),
    ]
    for words in steps:
        assert trellis(*words).code == 0, words
    later = asyncio.run(_later_events(trellis.url, first, second))
    assert len(later) == len(steps)
    for one in later:
        named = (one.actor.partition("@")[0], one.cause, one.node)
        assert (*named, abs(one.ts.timestamp() - time.time()) < 600) == (getpass.getuser(), WHY, this_node(), True), one


async def _later_events(url: str, *job_ids: str) -> list[Event]:
    """What happened to these jobs after their submit."""
    ledger = await open_ledger(url)
    try:
        found = [one for job_id in job_ids for one in await ledger.events(JobId(job_id))]
    finally:
        await ledger.close()
    return [one for one in found if one.version > 1]


@pytest.mark.requirement("OBS-1")
async def test_an_older_ledger_that_is_opened_is_migrated_in_the_name_of_the_process(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'old.db'}"
    connection = connect_sqlite(parse_url(url))
    for number, text in sorted(migrations().items())[:-1]:
        connection.execute(text)
        connection.execute("INSERT OR REPLACE INTO trellis_meta (key, value) VALUES ('schema_version', ?)", (number,))
    connection.close()
    acts = list[AdminAct]()
    for _ in range(2):
        ledger = await open_ledger(url)
        acts = await ledger.acts()
        await ledger.close()
    (act,) = acts
    assert (act.event, act.source, act.target) == (
        "ledger.migrated",
        f"version {SCHEMA_VERSION - 1}",
        f"version {SCHEMA_VERSION}",
    )
    _check([act], since=time.time(), why="an older ledger was opened by a newer program")


@pytest.mark.requirement("OBS-1")
async def test_a_grant_to_a_database_role_is_an_act(new_postgres_database: Callable[..., str]):
    url = new_postgres_database()
    for _ in range(2):
        await migrate(url, by="anna", reason=WHY, grants=[("pg_monitor", Role.WORKER)])
    acts = await acts_in(url)
    assert [(act.event, act.subject, act.target) for act in acts[1:]] == [("authority.granted", "pg_monitor", "worker")]
    _check(acts, since=time.time(), by="anna")
