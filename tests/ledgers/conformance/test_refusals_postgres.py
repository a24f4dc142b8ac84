"""D55 on PostgreSQL: the application's own database role cannot go around the verbs, whatever it types."""

import asyncpg
import pytest
import pytest_asyncio

from tests.ledgers.conformance.opening import LOGIN
from tests.ledgers.conformance.rig import SUBMITTER, WORKER, Rig, actor
from trellis.engine.errors import TrellisError
from trellis.ledgers import open_ledger
from trellis.lifecycles import LIFECYCLES, Role

pytestmark = [pytest.mark.only("postgres"), pytest.mark.oldest_server]

LIMITED = "trellis_worker_login"

RELATIONS = """
SELECT c.oid::regclass::text, c.relkind::text,
       (SELECT a.attname FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND a.attidentity = '' ORDER BY a.attnum LIMIT 1)
  FROM pg_class c WHERE c.relnamespace = 'trellis'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
"""

FUNCTIONS = """
SELECT p.oid::regprocedure::text, left(p.proname, 1) = '_' OR p.prorettype = 'trigger'::regtype,
       has_function_privilege(current_user, p.oid, 'execute')
  FROM pg_proc p WHERE p.pronamespace = 'trellis'::regnamespace
"""


@pytest_asyncio.fixture(loop_scope="session")
async def shell(rig: Rig):
    """A plain connection with the application's role, as from a SQL shell."""
    connection = await asyncpg.connect(rig.app_url)
    yield connection
    await connection.close()


# A view over several tables takes no writes from anybody, which PostgreSQL says before it looks at rights.
VIEW_REFUSALS = (asyncpg.InsufficientPrivilegeError, asyncpg.ObjectNotInPrerequisiteStateError)


async def _refused(
    connection: asyncpg.Connection,
    statement: str,
    denied: tuple[type[Exception], ...] = (asyncpg.InsufficientPrivilegeError,),
) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await connection.execute(statement)
    assert isinstance(refused.value, denied), (statement, refused.value)


@pytest.mark.requirement("D55")
async def test_raw_writes_are_refused_on_every_relation(rig: Rig, shell: asyncpg.Connection):
    held = await rig.running(concurrency_key="k")
    await rig.ledger.save_checkpoint(held.lease, b"1")
    relations = await shell.fetch(RELATIONS)
    assert {"event", "lease", "job"} <= {row[0].removeprefix("trellis.") for row in relations}
    for name, kind, column in relations:
        if kind == "S":
            await _refused(shell, f"SELECT nextval('{name}')")
            await _refused(shell, f"SELECT setval('{name}', 1)")
            continue
        denied = VIEW_REFUSALS if kind in {"v", "m"} else (asyncpg.InsufficientPrivilegeError,)
        await _refused(shell, f"INSERT INTO {name} DEFAULT VALUES", denied)
        await _refused(shell, f'UPDATE {name} SET "{column}" = "{column}"', denied)
        await _refused(shell, f"DELETE FROM {name}", denied)
        if kind in {"r", "p"}:
            await _refused(shell, f"TRUNCATE {name}")
            await _refused(shell, f"SELECT 1 FROM {name} FOR UPDATE")
    assert await rig.state(held.lease.job_id) == "running"


@pytest.mark.requirement("D55")
async def test_internal_functions_cannot_be_called(rig: Rig, shell: asyncpg.Connection):
    functions = await shell.fetch(FUNCTIONS)
    assert len(functions) > 20
    callable_inside = [name for name, internal, allowed in functions if internal and allowed]
    assert callable_inside == []
    assert [name for name, internal, allowed in functions if not internal and not allowed] == []


@pytest.mark.requirement("D55")
async def test_the_schema_itself_cannot_be_changed(rig: Rig, shell: asyncpg.Connection):
    for statement in (
        "CREATE TABLE trellis.mine (a int)",
        "CREATE FUNCTION trellis.mine() RETURNS int LANGUAGE sql AS 'select 1'",
        "ALTER TABLE trellis.event DISABLE TRIGGER ALL",
        "DROP TABLE trellis.event",
        "DROP FUNCTION trellis.now()",
        "SET ROLE trellis_owner",
        "SET session_replication_role = replica",
        f"GRANT trellis_owner TO {LOGIN}",
    ):
        await _refused(shell, statement)


@pytest.mark.requirement("D55")
async def test_table_of_a_login_does_not_shadow_a_ledger_table(rig: Rig, shell: asyncpg.Connection):
    """Functions that run with the owner's rights must not read temporary tables of their caller."""
    await _limit(rig)
    limited = await asyncpg.connect(rig.app_url.replace(LOGIN, LIMITED))
    try:
        await limited.execute("CREATE TEMP TABLE authority (db_role name, role smallint)")
        await limited.execute("GRANT SELECT ON authority TO PUBLIC")
        await limited.execute("INSERT INTO authority SELECT $1, generate_series(0, 15)", LIMITED)
        with pytest.raises(asyncpg.PostgresError):
            await limited.execute("SELECT trellis.register_actor('me', $1::smallint)", Role.CONTROL_PLANE.code)
    finally:
        await limited.close()


@pytest.mark.requirement("D46", "D55")
async def test_a_database_role_acts_only_in_the_roles_it_was_given(rig: Rig):
    await _limit(rig)
    job_id = await rig.submit_one()
    ledger = await open_ledger(rig.app_url.replace(LOGIN, LIMITED))
    rig.others.append(ledger)
    for role in set(Role) - {Role.WORKER}:
        with pytest.raises(TrellisError):
            await ledger.heartbeat_worker(actor(role), None)
    with pytest.raises(TrellisError):
        await ledger.submit(SUBMITTER, [rig.new_job()])
    claimed = await rig.claim(ledger=ledger, by=WORKER)
    assert [one.lease.job_id for one in claimed] == [job_id]


@pytest.mark.requirement("D46", "D55")
async def test_an_actor_of_another_database_role_cannot_be_borrowed(rig: Rig, shell: asyncpg.Connection):
    await _limit(rig)
    await rig.ledger.heartbeat_worker(actor(Role.CONTROL_PLANE), None)
    admin = await shell.fetchval("SELECT id FROM trellis.actor WHERE role = $1", Role.CONTROL_PLANE.code)
    await shell.execute("SELECT trellis.beat($1, NULL)", admin)
    limited = await asyncpg.connect(rig.app_url.replace(LOGIN, LIMITED))
    try:
        with pytest.raises(asyncpg.PostgresError):
            await limited.execute("SELECT trellis.beat($1, NULL)", admin)
    finally:
        await limited.close()


EVERY_EVENT = """
DO $$
DECLARE
  j record; r smallint; s smallint;
BEGIN
  CREATE TEMP TABLE accepted (lifecycle smallint, source smallint, target smallint, role smallint);
  FOR j IN SELECT e.* FROM trellis.event e
            WHERE e.version = (SELECT max(l.version) FROM trellis.event l WHERE l.id = e.id) LOOP
    FOR r IN 0..15 LOOP
      FOR s IN SELECT state FROM trellis.state WHERE lifecycle = j.lifecycle LOOP
        BEGIN
          INSERT INTO trellis.event (id, batch, at, version, actor, epoch, type, lifecycle, from_state, to_state,
                                     generation, attempt, role)
          VALUES (j.id, j.batch, j.at, j.version + 1, j.actor, j.epoch, j.type, j.lifecycle, j.to_state, s,
                  j.generation + 1, 0, r);
          RAISE EXCEPTION USING ERRCODE = 'TT000';
        EXCEPTION
          WHEN SQLSTATE 'TT000' THEN INSERT INTO accepted VALUES (j.lifecycle, j.to_state, s, r);
          WHEN SQLSTATE 'TR001' THEN NULL;
        END;
      END LOOP;
    END LOOP;
  END LOOP;
END $$
"""


@pytest.mark.requirement("D55", "DJ-1", "JQ-2", "RUN-1", "NLM-2", "BUS-1")
async def test_database_owner_cannot_record_an_undeclared_transition(rig: Rig):
    """The guard on the events themselves: every state with every state and every role, as the superuser."""
    assert rig.admin_sql is not None
    declared = set()
    for lifecycle in LIFECYCLES.values():
        for state in lifecycle.states:
            await rig.drive(await rig.submit_one(lifecycle=lifecycle.name), state.name)
        declared |= {
            (lifecycle.code, lifecycle.code_of(t.source), lifecycle.code_of(t.target), role.code)
            for t in lifecycle.transitions
            if t.source
            for role in t.actors
        }
    await rig.admin_sql("SELECT set_config('search_path', 'trellis', false)")
    await rig.admin_sql(EVERY_EVENT)
    accepted = {tuple(row) for row in await rig.admin_sql("SELECT DISTINCT * FROM accepted")}
    assert accepted == declared


@pytest.mark.requirement("D55", "D1", "DJ-4")
@pytest.mark.parametrize(
    "change",
    [
        "version = version + 2",
        "version = version",
        "version = version + 1, generation = generation - 1",
        "version = version + 1, attempt = attempt - 1, to_state = from_state",
        "version = version + 1, epoch = epoch - 1",
        "version = version + 1, from_state = to_state + 1",
    ],
)
async def test_database_owner_cannot_break_a_history(rig: Rig, change: str):
    assert rig.admin_sql is not None
    held = await rig.running()
    await rig.pull(held, "retry")
    again = await rig.claim_one()
    assert again.attempt == 1
    with pytest.raises(asyncpg.PostgresError):
        await rig.admin_sql(_forged_event(change))
    with pytest.raises(asyncpg.PostgresError):
        await rig.admin_sql("UPDATE trellis.event SET cause = 'other'")


def _forged_event(change: str) -> str:
    """The last event once more, with some columns changed."""
    columns = {
        name: name
        for name in [
            "id",
            "batch",
            "at",
            "version",
            "actor",
            "epoch",
            "type",
            "lifecycle",
            "from_state",
            "to_state",
            "generation",
            "attempt",
            "role",
        ]
    }
    columns |= {"from_state": "to_state", "version": "version + 1"}
    columns |= dict(part.split(" = ") for part in change.split(", "))
    return (
        f"INSERT INTO trellis.event ({', '.join(columns)}) SELECT {', '.join(columns.values())}"
        " FROM trellis.event ORDER BY version DESC LIMIT 1"
    )


async def _limit(rig: Rig) -> None:
    """A login that may act as a worker and as nothing else."""
    assert rig.admin_sql is not None
    await rig.admin_sql(f"DO $$ BEGIN CREATE ROLE {LIMITED} LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    await rig.admin_sql(f"GRANT USAGE ON SCHEMA trellis TO {LIMITED}")
    await rig.admin_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA trellis TO {LIMITED}")
    await rig.admin_sql(
        "DO $$ DECLARE f regprocedure; BEGIN FOR f IN SELECT p.oid::regprocedure FROM pg_proc p"
        " WHERE p.pronamespace = 'trellis'::regnamespace AND has_function_privilege('trellis_app', p.oid, 'execute')"
        f" LOOP EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO {LIMITED}', f); END LOOP; END $$"
    )
    await rig.admin_sql(
        "INSERT INTO trellis.authority (db_role, role) VALUES ($1, $2) ON CONFLICT DO NOTHING",
        LIMITED,
        Role.WORKER.code,
    )
