"""The functions of PostgreSQL refuse half a completion to whoever calls them, and a session that dies inside one leaves nothing."""

import json
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from tests.ledgers.conformance.rig import Rig
from trellis.engine.jobs import Lease, StepApplied
from trellis.lifecycles import LIFECYCLES, Role

pytestmark = [pytest.mark.only("postgres"), pytest.mark.oldest_server, pytest.mark.requirement("JQ-5", "D15", "D55")]

QUEUE_JOB = LIFECYCLES["queue-job"]
WRITING = QUEUE_JOB.code_of("ARTIFACT_WRITE")
DONE = "SELECT * FROM trellis.turn($1, 2::smallint, $2, $3, $4, NULL, NULL, NULL, NULL, NULL" + ", NULL" * 8 + ")"
OTHERS = "SELECT * FROM trellis.turn($1, 2::smallint, NULL, NULL, NULL, NULL, NULL, NULL, NULL, $2" + ", NULL" * 8 + ")"
DIES_ONCE = (
    "CREATE SEQUENCE public.deaths",
    """CREATE FUNCTION public.die() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  IF nextval('public.deaths') = 1 THEN
    PERFORM pg_terminate_backend(pg_backend_pid());
    PERFORM pg_sleep(60);
  END IF;
  RETURN NEW;
END $$""",
    "CREATE TRIGGER die BEFORE INSERT ON trellis.ended FOR EACH ROW EXECUTE FUNCTION public.die()",
)
FORGET = ("DROP TRIGGER die ON trellis.ended", "DROP FUNCTION public.die()", "DROP SEQUENCE public.deaths")


@pytest_asyncio.fixture(loop_scope="session")
async def shell(rig: Rig) -> AsyncIterator[asyncpg.Connection]:
    """A plain connection with the application's role, as from a SQL shell."""
    connection = await asyncpg.connect(rig.app_url)
    yield connection
    await connection.close()


async def _orchestrator(shell: asyncpg.Connection) -> int:
    role = Role.ORCHESTRATOR.code
    found = await shell.fetchval("SELECT trellis.register_actor('by hand', $1::smallint)", role)
    assert isinstance(found, int)
    return found


async def _refused(rig: Rig, shell: asyncpg.Connection, lease: Lease, statement: str, *arguments: object) -> str:
    before = await rig.snapshot(lease.job_id)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await shell.execute(statement, await _orchestrator(shell), *arguments)
    assert await rig.snapshot(lease.job_id) == before
    return str(getattr(refused.value, "sqlstate", ""))


async def test_a_set_of_completions_cannot_pass_over_the_artifacts(rig: Rig, shell: asyncpg.Connection):
    lease = await rig.writing()
    await rig.artifact_of(lease.job_id)
    assert await _refused(rig, shell, lease, DONE, [lease.key], [lease.epoch], WRITING) == "TR001"


@pytest.mark.parametrize("trigger, named", [("complete", None), ("retry", "art-1")])
async def test_exactly_a_completion_names_an_artifact(
    rig: Rig, shell: asyncpg.Connection, trigger: str, named: str | None
):
    lease = await rig.writing()
    await rig.artifact_of(lease.job_id, job_id="art-1")
    step = {"id": lease.key, "epoch": lease.epoch, "lifecycle": 2, "source": WRITING, "trigger": trigger}
    one = json.dumps([step | {"delay": 0, "finalizes": named}])
    assert await _refused(rig, shell, lease, OTHERS, one) == "TR001"


async def test_a_session_that_dies_between_the_two_steps_leaves_neither(rig: Rig):
    assert rig.admin_sql is not None
    lease = await rig.writing()
    artifact = await rig.artifact_of(lease.job_id)
    for statement in DIES_ONCE:
        await rig.admin_sql(statement)
    try:
        outcome = await rig.complete(lease, artifact)
    finally:
        deaths = await rig.admin_sql("SELECT last_value FROM public.deaths")
        for statement in FORGET:
            await rig.admin_sql(statement)
    assert deaths == [(2,)], "the first try died, and the ledger asked again by itself"
    assert outcome == StepApplied(6), "nothing was left of the first try: this is no repeat"
    assert await rig.event_types(artifact) == ["artifact.staged", "artifact.finalized"]
    assert (await rig.event_types(lease.job_id)).count("job_succeeded") == 1


async def test_text_of_an_artifact_refusal_comes_from_the_database(rig: Rig, shell: asyncpg.Connection):
    lease = await rig.writing()
    step = {"id": lease.key, "epoch": lease.epoch, "lifecycle": 2, "source": WRITING, "trigger": "complete"}
    one = json.dumps([step | {"delay": 0, "finalizes": "nobody"}])
    assert await _refused(rig, shell, lease, OTHERS, one) == "TR005"
