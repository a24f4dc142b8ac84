"""Two tenants over HTTP: whatever one asks for, in whatever role, nothing of the other is told, moved, held up or taken (D62).

The tests for Python are in tests/client/test_two_tenants.py, those for the bus in tests/bus/test_two_tenants.py. Both tenants have a
caller of the same name at the same issuer: the tenant alone tells them apart.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.artifacts.desk import call_nlm, queue_job
from tests.gateway.conftest import KEY, VIOLIN, Client, Gateway
from tests.gateway.test_authority import RULE_OF_ROUTE, ask
from tests.gateway.world import World, make_world
from trellis.app.wiring import new_id
from trellis.auth.matrices import OF_AGENTS, RULES, Grant
from trellis.auth.tokens import issue, symmetric_key
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.engine.jobs import Actor, Claim, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.gateway import create_app
from trellis.lifecycles import Role
from trellis.storage.memory.layout import ReadMode

SECRET = "the-recipe-of-acme"
BEGINNING = "0000000000000000"
REFUSED, NOTHING, OWN, OPEN, RULE = "refused", "nothing of it", "its own", "open to all", "the same for all"
OUTCOMES: dict[tuple[str, str], str] = {
    ("GET", "/agents"): REFUSED,
    ("POST", "/agents/run"): REFUSED,
    ("GET", "/agents/{slug}"): REFUSED,
    ("GET", "/agents/{slug}/sources"): REFUSED,
    ("PATCH", "/agents/{slug}/status"): REFUSED,
    ("POST", "/artifacts"): REFUSED,
    ("GET", "/artifacts"): REFUSED,
    ("POST", "/artifacts/cleanup"): REFUSED,
    ("POST", "/artifacts/{artifact_id}/discard"): REFUSED,
    ("GET", "/artifacts/{artifact_id}"): REFUSED,
    ("GET", "/artifacts/{artifact_id}/content"): REFUSED,
    ("GET", "/authority"): RULE,
    ("GET", "/proposals/{proposal_id}/diff"): REFUSED,
    ("GET", "/system/live"): OPEN,
    ("POST", "/sign-in"): OPEN,
    ("GET", "/system/ready"): OPEN,
    ("GET", "/dlq"): REFUSED,
    ("POST", "/dlq/requeue"): REFUSED,
    ("GET", "/dlq/{job_id}"): REFUSED,
    ("GET", "/events"): NOTHING,
    ("GET", "/events/stream"): NOTHING,
    ("POST", "/events/tickets"): OWN,
    ("GET", "/inbox/entries"): REFUSED,
    ("GET", "/inbox/stats"): REFUSED,
    ("POST", "/inbox/submit"): REFUSED,
    ("POST", "/jobs"): OWN,
    ("POST", "/batches"): OWN,
    ("GET", "/jobs"): NOTHING,
    ("GET", "/jobs/{job_id}"): REFUSED,
    ("POST", "/jobs/{job_id}/approval"): REFUSED,
    ("POST", "/jobs/{job_id}/cancel"): REFUSED,
    ("POST", "/jobs/cancel"): NOTHING,
    ("POST", "/jobs/discard"): REFUSED,
    ("POST", "/jobs/run-now"): REFUSED,
    ("POST", "/jobs/prioritize"): REFUSED,
    ("POST", "/jobs/{job_id}/signals"): REFUSED,
    ("GET", "/jobs/{job_id}/context"): REFUSED,
    ("GET", "/jobs/{job_id}/context/{epoch}"): REFUSED,
    ("GET", "/jobs/{job_id}/events"): REFUSED,
    ("GET", "/jobs/{job_id}/explanation"): REFUSED,
    ("POST", "/jobs/{job_id}/requeue"): REFUSED,
    ("POST", "/jobs/{job_id}/dead-letter"): REFUSED,
    ("GET", "/jobs/{job_id}/signals"): REFUSED,
    ("GET", "/jobs/{job_id}/result"): REFUSED,
    ("POST", "/jobs/{job_id}/result"): OPEN,
    ("GET", "/lifecycles"): RULE,
    ("GET", "/lifecycles/{name}"): RULE,
    ("POST", "/logic/{agent_id}/propose"): REFUSED,
    ("GET", "/memory/{agent_id}/deep"): REFUSED,
    ("GET", "/memory/{agent_id}/diff"): REFUSED,
    ("GET", "/memory/{agent_id}/history"): REFUSED,
    ("POST", "/mcp"): RULE,
    ("POST", "/memory/{agent_id}/propose"): REFUSED,
    ("GET", "/memory/{agent_id}/read"): REFUSED,
    ("GET", "/proposals"): REFUSED,
    ("GET", "/proposals/pending"): REFUSED,
    ("GET", "/proposals/{proposal_id}"): REFUSED,
    ("PATCH", "/proposals/{proposal_id}"): REFUSED,
    ("POST", "/proposals/{proposal_id}/apply"): REFUSED,
    ("GET", "/runs"): REFUSED,
    ("GET", "/runs/{run_id}"): REFUSED,
    ("POST", "/runs/{run_id}/cancel"): REFUSED,
    ("GET", "/runs/{run_id}/manifest"): REFUSED,
    ("GET", "/runs/{run_id}/request"): REFUSED,
    ("GET", "/runs/{run_id}/status"): REFUSED,
    ("GET", "/runs/{run_id}/steps"): REFUSED,
    ("POST", "/safety/explain"): REFUSED,
    ("POST", "/safety/simulate"): REFUSED,
    ("GET", "/system/health"): OPEN,
    ("GET", "/metrics"): REFUSED,
    ("GET", "/slo"): REFUSED,
    ("GET", "/workers"): REFUSED,
    ("GET", "/alerts"): REFUSED,
    ("GET", "/runbooks/{name}"): REFUSED,
    ("GET", "/queues"): REFUSED,
    ("PATCH", "/queues/{type}"): REFUSED,
    ("GET", "/schedules"): REFUSED,
    ("POST", "/schedules"): REFUSED,
    ("GET", "/schedules/{name}"): REFUSED,
    ("PATCH", "/schedules/{name}"): REFUSED,
    ("DELETE", "/schedules/{name}"): REFUSED,
    ("POST", "/schedules/{name}/run"): REFUSED,
}
"""What a caller that is bound to another tenant gets of each route, at most: its roles may give it less."""


def of(gateway: Gateway, tenant: str | None, role: Role | str = Role.SUBMITTER, name: str = "iryna") -> Client:
    return gateway.client(role, name=name, tenant=tenant)


async def submitted(client: Client, **asked: Any) -> str:
    answer = await client.post("/jobs", json=asked)
    assert answer.status_code == 202, answer.text
    return answer.json()["job_id"]


async def recorded(gateway: Gateway, *job_ids: str) -> list[Any]:
    """Everything that the ledger knows of these jobs."""
    ledger = gateway.instance.ledger
    return [(await ledger.job(JobId(one)), await ledger.events(JobId(one))) for one in job_ids]


async def asked(client: Client, place: tuple[str, str], world: World, job: str) -> tuple[int, str]:
    """The answer of a route that is asked about this job, or about everything."""
    if place == ("GET", "/events/stream"):
        answer = await client.get("/events/stream", params={"for_s": 0, "last_event_id": BEGINNING})
        return answer.status_code, answer.text
    if place == ("POST", "/jobs/{job_id}/result"):
        answer = await client.post(f"/jobs/{job}/result", json={})
        return answer.status_code, answer.text
    about = replace(world, dead=job, also_dead=job, held=job, waiting=job)
    status, body = await ask(client, place, about, job)
    return status, json.dumps(body)


def may(role: Role, place: tuple[str, str]) -> bool:
    """Whether the role alone would give it something of this route."""
    return all(RULES[rule].grants[role] is not Grant.NO for rule in RULE_OF_ROUTE[place])


def test_every_route_has_an_outcome_here():
    assert set(OUTCOMES) == set(RULE_OF_ROUTE), "say what a caller of another tenant gets of a new route"


async def check_routes(gateway: Gateway, roles: Iterable[Role]) -> None:
    acme, world = of(gateway, "acme"), await make_world(gateway, "somebody")
    jobs = [
        await submitted(acme, type="work", payload={"secret": SECRET}),
        await submitted(acme, topic="job.echo", payload={"secret": SECRET}, labels={"x": SECRET}),
    ]
    before = await recorded(gateway, *jobs)
    for role in roles:
        client = of(gateway, "globex", role)
        for place, outcome in OUTCOMES.items():
            for job in jobs:
                status, shown = await asked(client, place, world, job)
                if outcome == REFUSED or (outcome != OPEN and not may(role, place)):
                    assert (role, place, status) == (role, place, 403), shown
                if status < 400:
                    assert (role, place, SECRET in shown, job in shown) == (role, place, False, False)
    assert await recorded(gateway, *jobs) == before
    own = await acme.get("/jobs")
    assert {one["job_id"] for one in own.json()["items"]} == set(jobs), "the owner still has them"


@pytest.mark.requirement("D62", "AUTH-2")
async def test_a_submitter_of_one_tenant_reaches_nothing_of_another_by_any_route(gateway: Gateway):
    await check_routes(gateway, [Role.SUBMITTER])


@pytest.mark.prove
@pytest.mark.requirement("D62", "AUTH-2")
async def test_no_role_of_one_tenant_reaches_anything_of_another_by_any_route(gateway: Gateway):
    await check_routes(gateway, Role)


@pytest.mark.requirement("D62")
async def test_a_tenant_of_its_own_reaches_what_is_its_own(gateway: Gateway):
    acme = of(gateway, "acme")
    job = await submitted(acme, type="work", payload={"secret": SECRET})
    assert (await acme.get(f"/jobs/{job}")).json()["payload"] == {"secret": SECRET}
    assert job in (await acme.get("/events/stream", params={"for_s": 0, "last_event_id": BEGINNING})).text
    colleague, manager = of(gateway, "acme", name="olha"), of(gateway, "acme", Role.OWNER, name="olha")
    assert (await colleague.get(f"/jobs/{job}")).status_code == 403, "a right to its own is a right to its own"
    assert (await manager.get(f"/jobs/{job}")).status_code == 200, "a right to all is one to all of the tenant"
    assert (await acme.post(f"/jobs/{job}/cancel", json={"mode": "hard"})).json()["status"] == "cancelled"


@pytest.mark.requirement("D62")
async def test_an_owner_is_an_issuer_and_a_subject_and_a_tenant(gateway: Gateway, make_app: Callable[..., Client]):
    plain = await submitted(of(gateway, None), type="work")
    bound = await submitted(of(gateway, "acme"), type="work")
    foreign = make_app("https://tokens.example", "iryna")
    elsewhere = (await foreign.post("/jobs", json={"type": "work"})).json()["job_id"]
    events = [(await gateway.instance.ledger.events(JobId(job)))[0] for job in (plain, bound, elsewhere)]
    names = ["iryna", "<tenant=acme>iryna", "<iss=https://tokens.example>iryna"]
    assert [event.actor for event in events] == names
    assert (await foreign.get(f"/jobs/{plain}")).status_code == 403
    assert (await foreign.get(f"/jobs/{elsewhere}")).status_code == 200
    assert (await of(gateway, None).get(f"/jobs/{elsewhere}")).status_code == 403
    assert (await of(gateway, None).get(f"/jobs/{bound}")).status_code == 403


@pytest.fixture
def make_app(gateway: Gateway) -> Callable[..., Client]:
    """A submitter of another issuer, at a gateway that trusts both."""

    def make(issuer: str, name: str) -> Client:
        key = symmetric_key(b"of another issuer that is trusted, too", issuer=issuer)
        app = create_app(gateway.instance, [KEY, key], monotonic=gateway.clock.monotonic, new_id=new_id)
        both = replace(gateway, app=app)
        return both.client(token=issue(key, name=name, roles=[Role.SUBMITTER], ttl_s=600, now=time.time()))

    return make


# --- squatting and blocking ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("D62", "BUS-11")
@pytest.mark.parametrize("tenants", [("globex", "acme"), (None, "acme"), (None, None)])
async def test_idempotency_key_of_another_tenant_cannot_be_taken(
    gateway: Gateway, tenants: tuple[str | None, str | None]
):
    stranger, own = of(gateway, tenants[0], name="mallory"), of(gateway, tenants[1])
    request = {"topic": "job.echo", "meta": {"idempotency_key": "order-4711"}}
    said = {} if tenants[0] else {"tenant_id": "acme"}
    taken = await submitted(stranger, **request, **said, payload={"by": "mallory"})
    answer = await own.post("/jobs", json={**request, "tenant_id": "acme", "payload": {"by": "iryna"}})
    assert (answer.status_code, taken in answer.text) == (202, False), answer.text
    again = await own.post("/jobs", json={**request, "tenant_id": "acme", "payload": {"by": "iryna"}})
    assert again.json()["job_id"] == answer.json()["job_id"]
    refused = await own.post("/jobs", json={**request, "tenant_id": "acme", "payload": {"by": "somebody"}})
    assert refused.status_code == 422


@pytest.mark.requirement("D62")
async def test_a_key_of_the_version_before_still_means_the_same_job(gateway: Gateway):
    request = JobRequest.checked(
        {"job_id": "old", "topic": "job.echo", "meta": {"idempotency_key": "k", "tenant_id": "a"}}
    )
    old = new_bus_job(request.model_copy(update={"principal_id": "iryna"}), gateway.instance.topics, trace_id="")
    await gateway.instance.ledger.submit(Actor(role=Role.SUBMITTER, name="iryna"), [old])
    asked = {"topic": "job.echo", "meta": {"idempotency_key": "k", "tenant_id": "a"}}
    assert await submitted(of(gateway, None), **asked) == "old"
    assert await submitted(of(gateway, None, name="mallory"), **asked) != "old"


@pytest.mark.requirement("D62", "D49")
async def test_a_concurrency_key_of_one_tenant_holds_up_no_other(gateway: Gateway):
    keys: list[str | None] = []
    for tenant in ("globex", "acme", None):
        job = await submitted(of(gateway, tenant), type="work", concurrency_key="database", concurrency_limit=1)
        found = await gateway.instance.ledger.job(JobId(job))
        keys.append(None if found is None else found.concurrency_key)
    assert len(set(keys)) == 3
    # What a token without a tenant names is the application's own key, and so the one that an application computes.
    assert keys[2] == "user:database"
    mine = NewJob(job_id=JobId("app-1"), type="work", concurrency_key="user:database")
    await gateway.instance.ledger.submit(Actor(role=Role.SUBMITTER, name="app"), [mine])
    claim = Claim(claim_id=ClaimId("c"), types=(TypeClaim(type="work"),), start=10)
    taken = await gateway.instance.ledger.turn(Turn(actor=Actor(role=Role.WORKER, name="w"), claim=claim))
    assert len(taken.claimed) == 3, "one of each tenant, and one that holds the application's key"


@pytest.mark.requirement("D62")
async def test_a_token_says_which_tenant_a_request_is_for(gateway: Gateway):
    client = of(gateway, "globex")
    for named in (
        {"tenant_id": "acme"},
        {"meta": {"tenant_id": "acme"}},
        {"compensation": {"meta": {"tenant_id": "acme"}}},
    ):
        answer = await client.post("/jobs", json={"topic": "job.echo", **named})
        assert (answer.status_code, answer.json()["rule"]) == (403, "jobs.create"), named
        assert "tenant globex" in answer.json()["detail"]
    job = await gateway.instance.ledger.job(JobId(await submitted(client, topic="job.echo")))
    assert job is not None
    assert JobRequest.read(job.payload or b"").tenant_id == "globex"


# --- links --------------------------------------------------------------------------------------------------------------

STEP = {"topic": "job.echo", "workflow_id": "w", "step_index": 1, "tenant_id": "acme"}


@pytest.mark.requirement("D62")
@pytest.mark.parametrize("role", [Role.SUBMITTER, Role.OWNER])
async def test_a_step_hangs_below_a_job_of_its_submitter_only(gateway: Gateway, role: Role):
    parent = await submitted(of(gateway, None), topic="job.echo")
    answer = await of(gateway, None, role, name="mallory").post("/jobs", json={**STEP, "parent_job_id": parent})
    assert (answer.status_code, answer.json()["rule"]) == (403, "jobs.create")
    assert (await of(gateway, None).post("/jobs", json={**STEP, "parent_job_id": parent})).status_code == 202
    nowhere = {**STEP, "parent_job_id": "not-there"}
    assert (await of(gateway, None, name="mallory").post("/jobs", json=nowhere)).status_code == 202


@pytest.mark.requirement("D62")
async def test_a_step_hangs_below_a_job_of_its_tenant(gateway: Gateway):
    parent = await submitted(of(gateway, "acme"), topic="job.echo")
    step = {"topic": "job.echo", "workflow_id": "w", "step_index": 1, "parent_job_id": parent}
    assert (await of(gateway, "acme", name="olha").post("/jobs", json=step)).status_code == 202
    assert (await of(gateway, "globex").post("/jobs", json=step)).status_code == 403
    assert (await of(gateway, None).post("/jobs", json=step)).status_code == 403


# --- agents -------------------------------------------------------------------------------------------------------------

OTHER = "architect-guardian"
CHANGE = {"summary": "one more", "updates": [{"file": "facts.md", "operation": "append", "content": "- a fact"}]}


def about(agent: str) -> tuple[tuple[str, str, Any], ...]:
    """Every request of an agent's runtime about one agent."""
    return (
        ("POST", f"/memory/{agent}/propose", CHANGE),
        ("POST", f"/logic/{agent}/propose", {"summary": "better", "text": "Obey."}),
        ("GET", f"/memory/{agent}/read", None),
        ("GET", f"/memory/{agent}/history", None),
        ("GET", f"/memory/{agent}/diff?from_version=0", None),
        ("GET", f"/memory/{agent}/deep?part=decisions", None),
        ("POST", "/inbox/submit", {"intent": {"action": "propose-note", "target": f"{agent}/notes/x.md"}}),
    )


@pytest.mark.requirement("D62")
async def test_a_token_for_one_agent_proposes_and_reads_nothing_of_another(gateway: Gateway):
    client = gateway.client(Role.AGENT_RUNTIME, agent=VIOLIN)
    assert (await client.post(f"/memory/{VIOLIN}/propose", json=CHANGE)).status_code == 202
    for method, path, body in about(OTHER):
        answer = await client.request(method, path, json=body)
        assert (path, answer.status_code) == (path, 403), answer.text
        assert f"agent {VIOLIN}" in answer.json()["detail"]
    assert (await client.get(f"/memory/{VIOLIN}/read")).status_code == 200


@pytest.mark.requirement("D62")
async def test_a_token_of_a_runtime_that_names_no_agent_reaches_none(gateway: Gateway):
    """`trellis token issue` makes no such token, but another issuer may."""
    unbound = issue(KEY, name="runtime", roles=[Role.AGENT_RUNTIME], ttl_s=600, now=time.time())
    client, before = gateway.client(token=unbound), gateway.instance.memory.read(VIOLIN, ReadMode.WIDE)
    for method, path, body in about(VIOLIN):
        answer = await client.request(method, path, json=body)
        assert (path, answer.status_code) == (path, 403), answer.text
        assert "it names none" in answer.json()["detail"]
    assert gateway.instance.memory.read(VIOLIN, ReadMode.WIDE) == before


@pytest.mark.requirement("D62")
async def test_a_token_that_is_bound_to_an_agent_is_refused_what_is_no_agents(gateway: Gateway):
    client = gateway.client(*Role, name="everybody", agent=VIOLIN)
    for (method, path), rules in RULE_OF_ROUTE.items():
        if rules and rules[0] not in OF_AGENTS and "{" not in path:
            answer = await client.request(method, path, json={} if method == "POST" else None)
            assert (path, answer.status_code) == (path, 403), answer.text


@pytest.mark.requirement("AUTH-3", "D62")
async def test_a_token_for_one_job_reads_memory_and_artifacts_of_its_agent_alone(gateway: Gateway):
    world = await make_world(gateway, f"a {Role.NLM_BACKEND}")
    client = gateway.client(Role.NLM_BACKEND, job_id=world.waiting)
    other = (await call_nlm(gateway.instance.ledger, queue_job("of-another", agent_slug=OTHER))).job_id
    stranger = gateway.client(Role.NLM_BACKEND, job_id=other)
    artifact = f"/artifacts/{world.artifact}"
    for path in (f"/memory/{VIOLIN}/read", f"/memory/{VIOLIN}/history", artifact, f"{artifact}/content"):
        assert (await client.get(path)).status_code == 200, path
        assert (await stranger.get(path)).status_code == 403, path
    assert len((await client.get("/artifacts")).json()["items"]) == 1
    assert (await stranger.get("/artifacts")).json()["items"] == []
