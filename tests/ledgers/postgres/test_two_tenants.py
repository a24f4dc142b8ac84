"""Two database logins that may submit and nothing else: neither reads, cancels, blocks, undoes or squats on what is the other's.

Whoever adds a relation or a function to the schema has to say here what a limited login gets of it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

import asyncpg
import pytest

from tests.ledgers.conformance.rig import WORKER
from tests.servers.postgres import PostgresServer
from trellis.app.wiring import new_id
from trellis.auth.ownership import visible_among
from trellis.auth.principals import Principal
from trellis.client import Trellis
from trellis.engine.admin_acts import GRANTED
from trellis.engine.errors import NotAllowed, QueueFull
from trellis.engine.jobs import (
    Actor,
    Advance,
    Claim,
    ClaimId,
    JobId,
    JobKey,
    Lease,
    Move,
    NewJob,
    RequestId,
    RequestKey,
    Turn,
    TypeClaim,
    TypeOptions,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import RetentionOptions, SweepOptions
from trellis.ledgers import open_ledger
from trellis.ledgers.postgres.migrate import migrate
from trellis.lifecycles import Role
from trellis.testing import FakeClock

TEMPLATE = "trellis_two_tenants"
ACME, RIVAL = "tenant_acme", "tenant_rival"
SWEEPER = Actor(role=Role.SWEEPER, name="sweep")
SUBMITTER = Role.SUBMITTER.code
OF_EVERYBODY = {
    "contract": {"decision", "event_type", "lifecycle", "meta", "role", "rule_grant", "state", "transition"},
    "names": {"actor", "authority", "job_type", "type_options", "worker"},
    "positions": {"batch", "claim", "feed", "feed_end", "follower", "follower_place", "sweeper", "work_lock"},
}
"""Relations that hold no job's content and that every login reads: names, positions and the contract."""


@dataclass(kw_only=True)
class Tenants:
    """A ledger of the application, and the connections of the two logins."""

    ledger: Ledger
    acme: asyncpg.Connection
    rival: asyncpg.Connection
    rival_url: str

    async def submit(self, **named: Any) -> JobId:
        """A job of ACME's."""
        return await submitted(self.acme, **named)


async def submitted(login: asyncpg.Connection, **named: Any) -> JobId:
    listed = "".join(f", p_{name} => ${number}" for number, name in enumerate(named, 1))
    return JobId(
        str(await login.fetchval(f"SELECT trellis.submit_job('ship', '{{\"secret\": 1}}'{listed})", *named.values()))
    )


@pytest.fixture(scope="module")
def template(postgres_server: PostgresServer) -> str:
    """A database in which two logins may submit."""
    url = postgres_server.create_database(TEMPLATE)
    asyncio.run(_prepare(url))
    postgres_server.seal_template(TEMPLATE)
    return TEMPLATE


async def _prepare(url: str) -> None:
    admin = await asyncpg.connect(url)
    for name in (ACME, RIVAL):
        await admin.execute(
            f"DO $$ BEGIN CREATE ROLE {name} LOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
        )
    await migrate(url, grants=[(ACME, Role.SUBMITTER), (RIVAL, Role.SUBMITTER)])
    await admin.execute("SELECT trellis.type_id('ship')")
    await admin.close()


@pytest.fixture
async def tenants(
    template: str, new_postgres_database: Callable[..., str], postgres_server: PostgresServer
) -> AsyncGenerator[Tenants]:
    url = new_postgres_database(template=template)
    database = url.rpartition("/")[2].partition("?")[0]
    acme, rival = [await asyncpg.connect(postgres_server.url(database, name)) for name in (ACME, RIVAL)]
    ledger = await open_ledger(url)
    yield Tenants(ledger=ledger, acme=acme, rival=rival, rival_url=postgres_server.url(database, RIVAL))
    for connection in (acme, rival):
        await connection.close()
    await ledger.close()


async def relations(login: asyncpg.Connection) -> list[str]:
    found = await login.fetch(
        "SELECT c.relname FROM pg_class c WHERE c.relnamespace = 'trellis'::regnamespace AND c.relkind IN ('r', 'p', 'v')"
        " AND has_table_privilege(c.oid, 'select') ORDER BY 1"
    )
    return [row["relname"] for row in found]


async def worked(tenants: Tenants, *, end: bool) -> None:
    """A worker of the application claims what is there; it leaves traces in every place, and ends the job or holds it."""
    terms = TypeClaim(type="ship", lease_s=60, heartbeat_s=20)
    claim = Claim(claim_id=ClaimId("c"), types=(terms,), start=10)
    for one in (await tenants.ledger.turn(Turn(actor=WORKER, claim=claim))).claimed:
        await tenants.ledger.save_checkpoint(one.lease, b"secret")
        await tenants.ledger.journal(one.lease, "entry", b"secret")
        await tenants.ledger.renew(WORKER, [one.lease])
        if end:
            move = Move(job_id=one.lease.job_id, target="cancelled", request_id=RequestId(one.lease.job_id))
            await tenants.ledger.move(Actor(role=Role.CONTROL_PLANE, name="admin"), move)


@pytest.mark.requirement("D62", "D55")
@pytest.mark.parametrize("end", [False, True], ids=["held", "ended"])
async def test_a_login_reads_nothing_of_another_login(tenants: Tenants, end: bool):
    await tenants.submit(job_id="acme-1", idempotency_key="key", concurrency_key="host", deadline_s=600.0)
    await tenants.submit(job_id="acme-later", delay_s=60.0)
    for number in range(2):
        await tenants.submit(job_id=f"acme-parked-{number}", concurrency_key="one")
    await tenants.ledger.sweep(SWEEPER, SweepOptions())
    await worked(tenants, end=end)
    await submitted(tenants.rival, job_id="rival-1")
    seen = await relations(tenants.rival)
    assert {"job", "event", "journal", "lease", "job_status"} <= set(seen)
    assert not [name for name in seen if name.startswith("event_") and name != "event_type"], (
        "partitions have no policies"
    )
    for name in sorted(set(seen) - set[str]().union(*OF_EVERYBODY.values())):
        rows = await tenants.rival.fetch(f"SELECT * FROM trellis.{name}")
        mine = await tenants.rival.fetchval("SELECT id FROM trellis.job WHERE job_id = 'rival-1'")
        assert all(row["id"] == mine for row in rows), (name, rows)
    assert {row["job_id"] for row in await tenants.acme.fetch("SELECT job_id FROM trellis.job_status")} == {
        "acme-1", "acme-later", "acme-parked-0", "acme-parked-1",
    }  # fmt: skip
    assert len(await tenants.acme.fetch("SELECT * FROM trellis.journal")) >= 1


@pytest.mark.requirement("D62", "D43")
@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("held", [True, False])
async def test_a_login_cancels_its_own_jobs_and_learns_nothing_about_others(tenants: Tenants, soft: bool, held: bool):
    job_id = await tenants.submit()
    if held:
        await worked(tenants, end=False)
    before = await tenants.acme.fetchrow("SELECT state, version FROM trellis.job_status")
    cancel = "SELECT * FROM trellis.cancel(trellis.register_actor('x', $1::smallint), $2, $3, $4, 30, 'because')"
    assert await tenants.rival.fetch(cancel, SUBMITTER, job_id, soft, "r1") == []
    assert await tenants.rival.fetch(cancel, SUBMITTER, "no-such-job", soft, "r2") == []
    assert await tenants.acme.fetchrow("SELECT state, version FROM trellis.job_status") == before
    assert await tenants.acme.fetch("SELECT * FROM trellis.wish") == []
    answer = await tenants.acme.fetchrow(cancel, SUBMITTER, job_id, soft, "r3")
    assert answer is not None
    assert answer["outcome"] == ("requested" if soft and held else "moved")


@pytest.mark.requirement("D62")
async def test_a_login_moves_nothing_of_another(tenants: Tenants):
    job_id = await tenants.submit()
    moves = (
        "SELECT outcome FROM trellis.moves(array[trellis.register_actor('x', $1::smallint)], array[$2], array['cancelled'],"
        " array['r'], array[null::int], array[null::float8], array[null::int], array[null::int], array[null::text],"
        " array[null::bytea], array[null::text], array[null::text], array[null::text])"
    )
    assert await tenants.rival.fetchval(moves, SUBMITTER, job_id) == "missing"
    assert await tenants.acme.fetchval(moves, SUBMITTER, job_id) == "moved"


@pytest.mark.requirement("D62")
async def test_a_login_changes_its_own_jobs_only_and_as_a_submitter_only_cancels_them(tenants: Tenants):
    job_id = await tenants.submit()
    change = (
        "SELECT outcome FROM trellis.change_jobs(trellis.register_actor('x', $1::smallint), $2, array[$3], array[null::int], $4,"
        " 'because', true, 30, $5, 'type=work', $6)"
    )
    key = ["s", "k", "00", "jobs", "k"]
    assert await tenants.rival.fetch(change, SUBMITTER, "cancel", job_id, "r1", None, key) == []
    assert await tenants.rival.fetch("SELECT * FROM trellis.find_request_key('s', 'k')") == [], (
        "nothing, not even its key"
    )
    assert await tenants.acme.fetchval(change, SUBMITTER, "run_now", job_id, "r2", None, None) == "actor"
    assert await tenants.acme.fetchval(change, SUBMITTER, "prioritize", job_id, "r3", 0, None) == "actor"
    assert await tenants.acme.fetchval(change, SUBMITTER, "cancel", job_id, "r4", None, key) == "moved"
    for wrong in (("delete", None), ("cancel", 1), ("prioritize", None), ("prioritize", 3)):
        with pytest.raises(Exception, match="a change is cancel, discard, run_now, or prioritize"):
            await tenants.acme.fetch(change, SUBMITTER, wrong[0], job_id, "r5", wrong[1], None)


@pytest.mark.requirement("D62")
async def test_a_login_sends_no_signal_to_a_job_of_another_and_spawns_nothing_for_it(tenants: Tenants):
    job_id = await tenants.submit()
    send = "SELECT outcome FROM trellis.send_signal(trellis.register_actor('x', $1::smallint), $2, 'go', '1', null, null, false)"
    assert await tenants.rival.fetchval(send, SUBMITTER, job_id) == "missing"
    assert await tenants.acme.fetchval(send, SUBMITTER, job_id) == "sent"
    assert [len(await login.fetch("SELECT * FROM trellis.job_signal")) for login in (tenants.acme, tenants.rival)] == [
        1,
        0,
    ]
    await worked(tenants, end=False)
    number = await tenants.acme.fetchval("SELECT id FROM trellis.job WHERE job_id = $1", job_id)
    epoch = await tenants.acme.fetchval("SELECT epoch FROM trellis.job_status WHERE job_id = $1", job_id)
    assert await tenants.rival.fetchval("SELECT trellis.begin_spawn($1, $2, 'e', '1')", number, epoch) == 0
    with pytest.raises(asyncpg.PostgresError, match="is not held under epoch"):
        await tenants.rival.execute("SELECT trellis.link_children($1, $2, '{}', '{}')", number, epoch)


@pytest.mark.requirement("D62", "D46")
async def test_a_login_cannot_write_another_name_into_the_history(tenants: Tenants):
    for name in ("anna", f"sql:{ACME}", f"db:{ACME}:sql:{ACME}"):
        actor = await tenants.rival.fetchval("SELECT trellis.register_actor($1, $2::smallint)", name, SUBMITTER)
        stored = await tenants.rival.fetchrow("SELECT name, db_role FROM trellis.actor WHERE id = $1", actor)
        assert tuple(stored or ()) == (f"db:{RIVAL}:{name}", RIVAL)
    await tenants.submit(job_id="acme-1")
    first = (await tenants.ledger.events(JobId("acme-1")))[0]
    assert first.actor == f"db:{ACME}:sql:{ACME}"


@pytest.mark.requirement("D62")
async def test_keys_of_two_logins_are_two_keys(tenants: Tenants):
    first = await submitted(tenants.rival, idempotency_key="order-4711", concurrency_key="order")
    second = await tenants.submit(idempotency_key="order-4711", concurrency_key="order", delay_s=1.0)
    assert first != second
    assert await tenants.submit(idempotency_key="order-4711", concurrency_key="order", delay_s=1.0) == second
    names = [row[0] for row in await tenants.acme.fetch("SELECT key_name FROM trellis.job")]
    assert names == [f"db:{ACME}:user:order"]


@pytest.mark.requirement("D62", "D27")
async def test_request_keys_of_two_logins_and_the_application_are_three_keys(tenants: Tenants):
    key = RequestKey(scope="s", key="k", fingerprint=b"app", about="job", given="k")
    await tenants.ledger.submit(
        Actor(role=Role.SUBMITTER, name="app"), [NewJob(job_id=JobId("a"), type="ship")], key=key
    )
    for login, fingerprint in ((tenants.acme, b"acme"), (tenants.rival, b"rival")):
        row = ["s", "k", fingerprint.hex(), "job", "k"]
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await login.execute("SELECT trellis._take_request_key($1)", row)
        await login.execute("SELECT trellis.store_request_answer('s', 'k', $1)", fingerprint)
        assert await login.fetch("SELECT * FROM trellis.find_request_key('s', 'k')") == []
        me = await login.fetchval("SELECT trellis.register_actor('x', $1::smallint)", SUBMITTER)
        cancel = "SELECT outcome FROM trellis.cancel($1, $2, false, 'r', 0, null, $3)"
        assert await login.fetch(cancel, me, "a", row) == [], "a job of another is not there, and stores no key"
        assert await login.fetch("SELECT * FROM trellis.find_request_key('s', 'k')") == []
        assert [one[0] for one in await login.fetch(cancel, me, await submitted(login), row)] == ["moved"]
        with pytest.raises(asyncpg.PostgresError, match="was used before for another request"):
            await login.fetch(cancel, me, await submitted(login), ["s", "k", "00", "job", "k"])
        await login.execute("SELECT trellis.store_request_answer('s', 'k', $1)", fingerprint)
        stored = await login.fetchrow("SELECT fingerprint, answer FROM trellis.find_request_key('s', 'k')")
        assert tuple(stored or ()) == (fingerprint, fingerprint)
        assert await login.fetch("SELECT * FROM trellis.request_key") == []
    found = await tenants.ledger.find_request(key)
    assert found is not None
    assert (found.fingerprint, found.answer) == (b"app", b'["a"]')


@pytest.mark.requirement("D62")
async def test_a_rival_cannot_fill_the_key_that_a_login_waits_for(tenants: Tenants):
    await submitted(tenants.rival, concurrency_key="host")
    await worked(tenants, end=False)
    own = await tenants.submit(concurrency_key="host")
    await tenants.ledger.sweep(SWEEPER, SweepOptions())
    assert await tenants.acme.fetchval("SELECT place FROM trellis.job_status WHERE job_id = $1", own) == "ready"


@pytest.mark.requirement("D62", "D49")
async def test_a_key_of_a_login_shares_no_slot_with_the_applications_key_of_that_name(tenants: Tenants):
    """Neither holds up the other; each is limited by itself."""
    mine = NewJob(job_id=JobId("app-1"), type="ship", concurrency_key="user:host")
    await tenants.ledger.submit(Actor(role=Role.SUBMITTER, name="app"), [mine, replace(mine, job_id=JobId("app-2"))])
    await tenants.submit(job_id="acme-1", concurrency_key="host")
    await tenants.submit(job_id="acme-2", concurrency_key="host")
    await tenants.ledger.sweep(SWEEPER, SweepOptions())
    claim = Claim(claim_id=ClaimId("c"), types=(TypeClaim(type="ship"),), start=10)
    claimed = (await tenants.ledger.turn(Turn(actor=WORKER, claim=claim))).claimed
    assert {one.lease.job_id for one in claimed} == {"app-1", "acme-1"}


@pytest.mark.requirement("D62")
async def test_a_login_links_its_jobs_to_its_own_only(tenants: Tenants):
    own = await tenants.submit()
    for parent in (own, "no-such-job"):
        with pytest.raises(asyncpg.PostgresError, match="of yours to link to"):
            await submitted(tenants.rival, parent_id=parent)
    assert await tenants.submit(parent_id=own)


@pytest.mark.requirement("D62")
async def test_a_login_completes_batches_of_its_own_jobs_only(tenants: Tenants):
    own = await tenants.submit()
    role = "(SELECT role FROM trellis.role WHERE name = 'submitter')"
    complete = f"SELECT trellis.complete_batch(trellis.register_actor('x', {role}), "
    for sql in (
        "SELECT trellis.submit_completion($1, 'ship')",
        f"{complete} trellis.submit_job('ship'), $1, '[]', false)",
    ):
        with pytest.raises(asyncpg.PostgresError, match="of yours to link to"):
            await tenants.rival.fetchval(sql, [own])
    with pytest.raises(asyncpg.PostgresError, match="not submitted in this transaction"):
        await tenants.rival.fetchval(f"{complete} $1, array[]::text[], '[]', false)", own)
    completion = str(await tenants.acme.fetchval("SELECT trellis.submit_completion($1, 'ship')", [own]))
    job = await tenants.ledger.job(JobId(completion))
    assert job is not None
    assert job.state == "suspended"


@pytest.mark.requirement("D62", "D36")
@pytest.mark.parametrize("link", ["parent_id", "compensates"])
@pytest.mark.parametrize("keyed", [True, False])
async def test_the_ledgers_own_client_is_held_to_the_same(tenants: Tenants, link: str, keyed: bool):
    own = await tenants.submit()
    rival = await open_ledger(tenants.rival_url)
    try:
        key = "user:k" if keyed else None
        job = NewJob(job_id=JobId("rival-1"), type="ship", lifecycle="leased-job", payload=b"1", concurrency_key=key)
        job = replace(job, parent_id=own) if link == "parent_id" else replace(job, compensates=own)
        with pytest.raises(Exception, match="of yours to link to"):
            await rival.submit(Actor(role=Role.SUBMITTER, name="x"), [job])
        assert await rival.job(own) is None
        assert await rival.events(own) == []
    finally:
        await rival.close()


CALLABLE = {
    "submitted or cancelled, looked at above": {
        "submit_job",
        "submit_unique_job",
        "submit_completion",
        "complete_batch",
        "submit_plain",
        "submit_alike_jobs",
        "submit_keyed",
        "submit_one",
        "cancel",
        "moves",
        "send_signal",
        "change_jobs",
    },
    "by role: no transition lets a submitter": {"requeue", "turn", "turns", "restore", "sweep", "remark"},
    "by role: for operators and services": {
        "set_home_issuer",
        "set_paused",
        "set_rate",
        "set_held_max",
        "set_key_limit",
        "declare_types",
        "save_schedule",
        "remove_schedule",
        "advance_schedule",
        "record_act",
        "acts_published",
        "restore_acts",
        "retain",
        "observe_alerts",
        "retention_plan",
        "extend_audit_chain",
    },
    "by role: for followers": {"follow", "leave_behind"},
    "only what the login holds": {
        *("renew", "save_checkpoint", "journal_entries", "add_signals", "followed", "begin_spawn", "link_children"),
    },
    "reads through row security": {"ended_kinds", "heads"},
    "names and positions only": {
        "register_actor",
        "name_prefix",
        "type_id",
        "lock_waiting",
        "lock_keys",
        "beat",
        "sequence_feed",
        "feed_places",
        "summarize_events",
        "now",
    },
    "keys of requests, its own": {"find_request_key", "store_request_answer"},
    "keys of requests, its own, for programs of the version before": {"take_request_key"},
    "what a policy asks": {"reads_all", "owns"},
}


@pytest.mark.requirement("D62")
async def test_every_function_of_the_schema_is_accounted_for(tenants: Tenants):
    found = await tenants.rival.fetch(
        "SELECT DISTINCT p.proname FROM pg_proc p WHERE p.pronamespace = 'trellis'::regnamespace"
        " AND has_function_privilege(p.oid, 'execute')"
    )
    known = set[str]().union(*CALLABLE.values())
    assert {row["proname"] for row in found} == known


@pytest.mark.requirement("D62", "AUTH-1")
async def test_a_submitters_login_is_refused_what_operators_and_services_do(tenants: Tenants):
    job_id = await tenants.submit()
    me = await tenants.rival.fetchval("SELECT trellis.register_actor('x', $1::smallint)", SUBMITTER)
    for statement in (
        f"SELECT trellis.set_home_issuer({me}, 'mine', null)",
        f"SELECT trellis.set_paused({me}, 'ship', true)",
        f"SELECT trellis.set_rate({me}, 'ship', 1, 1)",
        f"SELECT trellis.set_held_max({me}, 'ship', 1)",
        f"SELECT trellis.declare_types({me}, false, '{{4}}', '{{ship}}', '{{0}}', '{{1}}', '{{1}}', null, '{{1}}', '{{t}}', null)",
        f"SELECT trellis.save_schedule({me}, 's', 0, '{{}}', false, false, 'x', now(), now())",
        f"SELECT trellis.remove_schedule({me}, 's')",
        f"SELECT trellis.advance_schedule({me}, 's', 1, now(), now(), null, null, null, null)",
        f"SELECT trellis.set_key_limit({me}, 'user:host', 1)",
        f"SELECT trellis.record_act({me}, 'agent.status.changed', 'gardener', null, null, null, null)",
        f"SELECT trellis.acts_published({me}, '{{1}}')",
        f"SELECT trellis.restore_acts({me}, '[]')",
        f"SELECT trellis.retain({me}, '[]', 0, 0, 0, 100)",
        f"SELECT trellis.extend_audit_chain({me}, 0, repeat('0', 64), null, 1, null, null, null, null, '{{}}')",
        "SELECT trellis.retention_plan('[]', 0)",
        f"SELECT trellis.follow({me}, 'projector', 10, true)",
        f"SELECT trellis.leave_behind({me}, 'projector')",
        f"SELECT trellis.sweep({me}, false, 1, 10, '{{}}')",
        f"SELECT trellis.remark({me}, '{job_id}', 4::smallint, 'x', 10, false)",
    ):
        with pytest.raises(asyncpg.PostgresError, match="may not"):
            await tenants.rival.execute(statement)
    requeue = await tenants.rival.fetch(f"SELECT outcome FROM trellis.requeue({me}, array['{job_id}'], 'r', 'x')")
    assert [row["outcome"] for row in requeue] in ([], ["actor"], ["undeclared"])


@pytest.mark.requirement("D62")
async def test_a_limited_gateway_gives_no_act_an_id_or_facts_and_sets_no_issuer(tenants: Tenants):
    admin = await asyncpg.connect(tenants.rival_url.replace(RIVAL, "postgres"))
    await admin.execute("INSERT INTO trellis.authority VALUES ($1, $2)", RIVAL, Role.GATEWAY.code)
    await admin.close()
    me = await tenants.rival.fetchval("SELECT trellis.register_actor('x', $1::smallint)", Role.GATEWAY.code)
    act = f"trellis.record_act({me}, 'access.refused', 'y', null, null, null, null"
    for given in ("p_id => 'refused-1f'", "p_facts => '{}'"):
        with pytest.raises(asyncpg.PostgresError, match="may give an act its id or facts") as refused:
            await tenants.rival.execute(f"SELECT {act}, {given})")
        assert getattr(refused.value, "sqlstate", "") == "TR004"
    with pytest.raises(asyncpg.PostgresError, match="only a member of trellis_app may set it") as refused:
        await tenants.rival.execute(f"SELECT trellis.set_home_issuer({me}, 'mine', null)")
    assert getattr(refused.value, "sqlstate", "") == "TR002"
    await tenants.rival.execute(f"SELECT {act})")
    acts = await tenants.ledger.acts()
    assert [act.event for act in acts if act.event != GRANTED] == ["access.refused"]
    assert await tenants.ledger.home_issuer() is None


@pytest.mark.requirement("D62", "D55")
async def test_a_worker_steps_with_leases_of_its_own_login_only(tenants: Tenants, postgres_server: PostgresServer):
    job_id = await tenants.submit()
    await worked(tenants, end=False)
    admin = await asyncpg.connect(tenants.rival_url.replace(RIVAL, "postgres"))
    await admin.execute("INSERT INTO trellis.authority VALUES ($1, $2)", RIVAL, Role.WORKER.code)
    await admin.close()
    rival = await open_ledger(tenants.rival_url)
    try:
        held = await rival.job(job_id)
        assert held is not None
        with pytest.raises(NotAllowed, match="holds for everybody"):
            await rival.declare_types(WORKER, [TypeOptions(type="ship", max_attempts=1)])
        key = await tenants.rival.fetchval("SELECT id FROM trellis.job WHERE job_id = $1", job_id)
        lease = Lease(key=JobKey(int(key or 0)), epoch=held.epoch, job_id=job_id, lifecycle="leased-job")
        for trigger in ("complete", "fail", "release"):
            step = Advance(
                lease=lease, source="running", trigger=trigger, result=b"1" if trigger == "complete" else None
            )
            with pytest.raises(Exception, match="does not hold these jobs"):
                await rival.turn(Turn(actor=WORKER, advances=(step,)))
    finally:
        await rival.close()
    assert await tenants.ledger.job(job_id) == held


@pytest.mark.requirement("D62")
async def test_a_login_cannot_take_the_id_of_a_job_that_it_does_not_submit(tenants: Tenants):
    me = await tenants.rival.fetchval("SELECT trellis.register_actor('x', $1::smallint)", SUBMITTER)
    job = await tenants.rival.fetchval("SELECT lifecycle FROM trellis.lifecycle WHERE name = 'leased-job'")
    bus = await tenants.rival.fetchval("SELECT lifecycle FROM trellis.lifecycle WHERE name = 'bus-job'")
    submit = (
        "SELECT * FROM trellis.submit_keyed($1, array[$2::smallint], array['mine'], array[trellis.type_id('ship')],"
        " array[1::smallint], array['1'::bytea], array[5::smallint], array[3::smallint], array[0::float8],"
        " array[null::timestamptz], array[null::float8], array[null::text], array[null::text], array[null::text],"
        " array[null::text], array[null::text], array[null::int], array['job_id'], array[$3], array['f'::bytea], false,"
        " array[true], array[null::int], array[63::smallint])"
    )
    with pytest.raises(asyncpg.PostgresError, match="reserved by the job"):
        await tenants.rival.fetch(submit, me, job, "acme-1")
    with pytest.raises(asyncpg.PostgresError, match="through the gateway"):
        await tenants.rival.fetch(submit, me, bus, "mine")
    assert [row["outcome"] for row in await tenants.rival.fetch(submit, me, job, "mine")] == ["created"]


@pytest.mark.requirement("D62")
async def test_requeue_of_a_foreign_job_reveals_nothing(tenants: Tenants):
    job_id = await tenants.submit()
    me = await tenants.rival.fetchval("SELECT trellis.register_actor('x', $1::smallint)", SUBMITTER)
    assert await tenants.rival.fetch("SELECT * FROM trellis.requeue($1, array[$2], 'r', 'x')", me, job_id) == []


async def test_a_login_that_holds_advisory_locks_stops_nobody(tenants: Tenants):
    job_id = await tenants.submit()
    no = await tenants.acme.fetchval("SELECT id FROM trellis.job WHERE job_id = $1", job_id)
    for name in ("feed", "retain", "partitions", "alone", "restore"):
        await tenants.rival.execute("SELECT pg_advisory_lock(hashtext($1))", f"trellis.{name}")
    await tenants.rival.execute("SELECT pg_advisory_lock(hashtext('trellis.remark'), hashint8($1))", no)
    await worked(tenants, end=True)
    page = await tenants.ledger.feed(None, limit=10)
    assert {event.job_id for event in page.events} == {job_id}
    assert await tenants.ledger.annotate(Actor(role=Role.SCHEDULER, name="s"), job_id, "job_result_refused", b"{}")
    removed = await tenants.ledger.retain(RetentionOptions(ended_s=0.0, testing=True))
    assert (removed.jobs, await tenants.ledger.job(job_id)) == (1, None)
    asks = await tenants.acme.fetch(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'trellis'::regnamespace AND prosrc ~ 'pg_(try_)?advisory'"
    )
    assert [row["proname"] for row in asks] == ["_lock_waiting"], "which waits for three seconds at most"


@pytest.mark.requirement("D25")
async def test_a_login_that_holds_the_lock_of_a_bounded_key_does_not_stop_submits(tenants: Tenants):
    """The key's bound still holds, since nobody else counts at the same moment."""
    admin = await asyncpg.connect(tenants.ledger.url)
    await admin.execute("ALTER FUNCTION trellis._lock_waiting SET lock_timeout = '20ms'")
    await admin.close()
    await tenants.rival.execute("SELECT pg_advisory_lock(hashtextextended('user:k', 43))")

    def job(number: int) -> NewJob:
        return NewJob(job_id=JobId(f"j{number}"), type="ship", concurrency_key="user:k", waiting_max=1)

    submitting = asyncio.ensure_future(tenants.ledger.submit(Actor(role=Role.SUBMITTER, name="x"), [job(1)]))
    assert (await asyncio.wait([submitting], timeout=10))[0], "it waits for the lock"
    with pytest.raises(QueueFull):
        await tenants.ledger.submit(Actor(role=Role.SUBMITTER, name="x"), [job(2)])


@pytest.mark.requirement("D62", "D46")
async def test_a_token_through_a_limited_login_has_the_jobs_that_it_submitted_there(tenants: Tenants):
    """The database records the login in front of the name. The same name at another login, or at the gateway, is another owner."""
    iryna = Principal(name="iryna", roles=frozenset({Role.SUBMITTER}), by_token=True)
    olha = replace(iryna, name="olha")
    acme, rival = [await open_ledger(url) for url in (tenants.rival_url.replace(RIVAL, ACME), tenants.rival_url)]
    try:
        own, colleague, stranger, gateway = (
            Trellis(ledger, who, clock=FakeClock(), new_id=new_id)
            for ledger, who in ((acme, iryna), (acme, olha), (rival, iryna), (tenants.ledger, iryna))
        )
        parent = await own.submit("ship", {"secret": 1}, idempotency_key="k")
        row = await tenants.ledger.job(parent.id) or pytest.fail("it is gone")
        assert await visible_among(iryna, "jobs.read", acme, [row]) == [row]
        assert (await own.submit("ship", {"secret": 1}, idempotency_key="k")).id == parent.id
        step = await own.submit("ship", parent_id=parent.id)
        assert [event.actor for event in await own.events(parent.id)] == [f"db:{ACME}:iryna"]
        for other in (colleague, stranger, gateway):
            for verb in (other.job, other.events, other.cancel):
                with pytest.raises(NotAllowed):
                    await verb(parent.id)
        told = [event.job_id async for page in own.feed(follow=False) for event in page.events]
        assert told == [parent.id, step.id]
        assert (await own.cancel(parent.id, "hard")).state == "cancelled"
    finally:
        for ledger in (acme, rival):
            await ledger.close()
