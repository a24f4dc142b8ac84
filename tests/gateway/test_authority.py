"""Every rule, every role, every route, one's own and another's: what is granted works, what is not is 403 and changes nothing."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

import trellis.gateway.routes
from tests.artifacts.desk import draft, queue_job
from tests.gateway.conftest import VIOLIN, Client, Gateway
from tests.gateway.world import GATEWAY, LOGICIAN, World, everything, make_world, refusals
from trellis.app.wiring import new_id
from trellis.auth.matrices import COLUMNS as DECLARED
from trellis.auth.matrices import ROWS, RULES, WITHOUT_ENTRANCE, Grant, MatrixIncomplete, MatrixRow, permit, table
from trellis.auth.principals import Principal
from trellis.bus.requests import JobRequest, new_bus_job
from trellis.bus.topics import Topics
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import (
    Actor,
    DeadLetterReason,
    JobId,
    Move,
    Moved,
    NewJob,
    NotMoved,
    ReasonCode,
    RequestId,
    Stage,
)
from trellis.gateway import nlm
from trellis.gateway.callers import RequiresRule
from trellis.gateway.routes.safety import POLICY_EXAMPLE
from trellis.http_server.limits import REFUSALS_PER_MINUTE_MAX
from trellis.lifecycles import LIFECYCLES, Role, Trigger
from trellis.nlm_backend import app as nlm_app
from trellis.nlm_backend.app import RequiresBackendRule as NlmRequires
from trellis.proposals.apply import ApplyEngine

# --- the matrices of document 000, section 4, row by row ---------------------------------------------------------------

Y, N, OWN = Grant.YES, Grant.NO, Grant.OWN
COLUMNS = {
    "4.1": ("jobs.create", "jobs.read", "jobs.update", "jobs.delete"),
    "4.2": ("artifacts.write", "artifacts.read", "artifacts.modify", "artifacts.registry", "artifacts.cleanup"),
    "4.3": ("memory.read", "memory.read-deep", "memory.propose", "memory.commit"),
}
DOCUMENTED: Mapping[str, Mapping[Role, tuple[Grant, ...]]] = {
    # Create, read, update status, delete.
    "4.1": {
        Role.OWNER: (Y, Y, N, N),  # "Gateway (Owner via Frontend)" is both of them
        Role.GATEWAY: (Y, Y, N, N),
        Role.ORCHESTRATOR: (Y, Y, Y, N),
        Role.NLM_BACKEND: (N, OWN, OWN, N),
        Role.AGENT_RUNTIME: (N, N, N, N),
        Role.CONTROL_PLANE: (N, Y, Y, N),
        Role.FRONTEND: (N, Y, N, N),
    },
    # Write new, read, modify; of the control plane: registry metadata and admin cleanup.
    "4.2": {
        Role.NLM_BACKEND: (Y, Y, N, N, N),
        Role.ORCHESTRATOR: (N, Y, N, N, N),
        Role.MEMORY: (N, Y, N, N, N),
        Role.CONTROL_PLANE: (N, Y, N, Y, Y),
        Role.FRONTEND: (N, Y, N, N, N),
        Role.GATEWAY: (N, Y, N, N, N),
    },
    # Layer 1, layer 2, write via a proposal, and the git commit of the apply engine.
    "4.3": {
        Role.ORCHESTRATOR: (Y, N, Y, N),
        Role.AGENT_RUNTIME: (Y, Y, Y, N),
        Role.NLM_BACKEND: (Y, N, N, N),
        Role.FRONTEND: (N, N, N, N),
        Role.APPLY_ENGINE: (Y, Y, N, Y),
    },
}
ADDED: Mapping[str, Mapping[Role, tuple[Grant, ...]]] = {
    # Roles that a document does not know have nothing there, unless a line says so.
    # Engine jobs (003, 004): who submits and works them, and the services of the bus.
    "4.1": {
        Role.SUBMITTER: (Y, OWN, N, N),
        Role.WORKER: (Y, Y, OWN, N),
        Role.SCHEDULER: (N, Y, Y, N),
        Role.SAFETY_KERNEL: (N, Y, Y, N),
        Role.RECONCILER: (N, Y, Y, N),
        Role.SWEEPER: (N, Y, Y, N),
        Role.PROJECTOR: (N, Y, N, N),
        Role.MEMORY: (N, N, N, N),
        Role.APPLY_ENGINE: (N, N, N, N),
    },
    "4.2": {
        Role.OWNER: (N, Y, N, N, N),
        Role.AGENT_RUNTIME: (N, N, N, N, N),
        Role.APPLY_ENGINE: (N, N, N, N, N),
        Role.WORKER: (N, N, N, N, N),
        Role.SUBMITTER: (N, N, N, N, N),
        Role.SCHEDULER: (N, N, N, N, N),
        Role.SAFETY_KERNEL: (N, N, N, N, N),
        Role.RECONCILER: (N, N, N, N, N),
        Role.PROJECTOR: (N, N, N, N, N),
        Role.SWEEPER: (N, N, N, N, N),
    },
    "4.3": {
        # D44: the owner is a person and reads what the agents remember.
        Role.OWNER: (Y, Y, N, N),
        Role.GATEWAY: (N, N, N, N),
        Role.CONTROL_PLANE: (N, N, N, N),
        Role.MEMORY: (N, N, N, N),
        Role.WORKER: (N, N, N, N),
        Role.SUBMITTER: (N, N, N, N),
        Role.SCHEDULER: (N, N, N, N),
        Role.SAFETY_KERNEL: (N, N, N, N),
        Role.RECONCILER: (N, N, N, N),
        Role.PROJECTOR: (N, N, N, N),
        Role.SWEEPER: (N, N, N, N),
    },
}


@pytest.mark.requirement("AUTH-1", "AUTH-7", "D44")
@pytest.mark.parametrize("matrix", COLUMNS)
def test_every_cell_of_a_matrix_is_as_the_document_has_it(matrix: str):
    assert set(ADDED[matrix]) & set(DOCUMENTED[matrix]) == set()
    expected = {**ADDED[matrix], **DOCUMENTED[matrix]}
    assert {role: tuple(RULES[rule].grants[role] for rule in COLUMNS[matrix]) for role in Role} == expected


@pytest.mark.requirement("AUTH-7")
@pytest.mark.parametrize("role", Role)
def test_a_role_without_a_row_cannot_be_loaded(role: Role):
    rows = {other: row for other, row in ROWS.items() if other is not role}
    with pytest.raises(MatrixIncomplete, match=f"no row for a role: {role.value};"):
        table(DECLARED, rows)


@pytest.mark.requirement("AUTH-7")
def test_a_rule_that_is_misspelt_or_granted_to_nobody_cannot_be_loaded():
    for changed, problem in (
        (MatrixRow(yes=frozenset({"jobs.creat"})), "not declared: jobs.creat;"),
        (
            MatrixRow(yes=frozenset({"rules.read"}), own=frozenset({"rules.read"})),
            "both kinds of grant of a rule: rules.read;",
        ),
    ):
        with pytest.raises(MatrixIncomplete, match=problem):
            table(DECLARED, {**ROWS, Role.MEMORY: changed})
    without = {**ROWS, Role.APPLY_ENGINE: MatrixRow(yes=ROWS[Role.APPLY_ENGINE].yes - {"memory.commit"})}
    with pytest.raises(MatrixIncomplete, match=r"granted to nobody and has an entrance: memory\.commit;"):
        table(DECLARED, without)
    assert table(DECLARED, ROWS) == RULES


@pytest.mark.requirement("AUTH-1", "AUTH-2")
@pytest.mark.parametrize("rule", RULES)
def test_authority_check_allows_what_the_matrix_grants_and_names_the_rule_otherwise(rule: str):
    for role, grant in RULES[rule].grants.items():
        principal = Principal(name="ada", roles=frozenset({role}))
        for own, passes in {None: grant is not N, True: grant is not N, False: grant is Y}.items():
            if passes:
                assert permit(principal, rule, own=own).role is role
                continue
            with pytest.raises(NotAllowed, match=f"rule {rule} ") as refusal:
                permit(principal, rule, own=own)
            assert refusal.value.data["rule"] == rule


# --- the routes --------------------------------------------------------------------------------------------------------

OPEN = {
    ("GET", "/system/live"): "whoever restarts processes asks it, and it tells nothing else",
    ("GET", "/system/ready"): "load balancers ask it, and it tells only which dependency answers",
    ("GET", "/system/health"): "load balancers ask it, and it tells only whether the gateway answers",
    ("POST", "/sign-in"): "a code that works once, from the terminal that started the gateway, is its credential",
    ("POST", "/jobs/{job_id}/result"): "a signature over the body is its credential (D26)",
}
UNENDING = {("GET", "/events/stream")}
"""Routes whose answer does not end; their own tests ask them in every role."""


def routes() -> Iterator[APIRoute]:
    package = trellis.gateway.routes
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = [*(importlib.import_module(f"{package.__name__}.{name}") for name in names), nlm]
    for module in modules:
        yield from (route for route in module.router.routes if isinstance(route, APIRoute))


def rule_of(dependant: Dependant) -> Iterator[str]:
    for inner in dependant.dependencies:
        if isinstance(inner.call, RequiresRule | NlmRequires):
            yield inner.call.rule
        yield from rule_of(inner)


RULE_OF_ROUTE: dict[tuple[str, str], list[str]] = {
    (method, route.path): list(rule_of(route.dependant)) for route in routes() for method in route.methods or ()
}
GUARDED = {place: rules[0] for place, rules in RULE_OF_ROUTE.items() if place not in OPEN}

Ask = Callable[[World, str], dict[str, Any]]
ENTRY = {"intent": {"action": "propose-note", "target": f"{VIOLIN}/notes/x.md"}}
UPDATE = {"file": "facts.md", "operation": "append", "content": "- one more fact"}
COUNT_JOBS = {"filter": {"type": "work"}, "dry_run": True}
REQUESTS: dict[tuple[str, str], Ask] = {
    ("POST", "/agents/run"): lambda *_: {"json": {"agent_slug": VIOLIN}},
    ("PATCH", "/agents/{slug}/status"): lambda *_: {"slug": LOGICIAN, "json": {"status": "paused"}},
    ("GET", "/agents/{slug}"): lambda *_: {"slug": VIOLIN},
    ("GET", "/agents/{slug}/sources"): lambda *_: {"slug": VIOLIN},
    ("GET", "/runs/{run_id}"): lambda world, _: {"run_id": world.run},
    ("GET", "/runs/{run_id}/status"): lambda world, _: {"run_id": world.run},
    ("GET", "/runs/{run_id}/steps"): lambda world, _: {"run_id": world.run},
    ("GET", "/runs/{run_id}/manifest"): lambda world, _: {"run_id": world.run, "expect": 404},
    ("GET", "/runs/{run_id}/request"): lambda world, _: {"run_id": world.run},
    ("POST", "/runs/{run_id}/cancel"): lambda world, _: {"run_id": world.run},
    ("POST", "/jobs"): lambda *_: {"json": {"type": "work"}},
    ("POST", "/batches"): lambda *_: {"json": {"jobs": [{"type": "work"}], "on_complete": {"type": "work"}}},
    ("GET", "/jobs/{job_id}"): lambda _, job: {"job_id": job},
    ("GET", "/jobs/{job_id}/events"): lambda _, job: {"job_id": job},
    ("GET", "/jobs/{job_id}/explanation"): lambda _, job: {"job_id": job},
    ("GET", "/runbooks/{name}"): lambda *_: {"name": "jobs-wait"},
    ("PATCH", "/queues/{type}"): lambda *_: {"type": "work", "json": {"paused": False}},
    ("GET", "/jobs/{job_id}/signals"): lambda _, job: {"job_id": job},
    ("GET", "/jobs/{job_id}/result"): lambda _, job: {"job_id": job, "expect": 404},
    ("GET", "/jobs/{job_id}/context"): lambda _, job: {"job_id": job, "expect": 404},
    ("GET", "/jobs/{job_id}/context/{epoch}"): lambda world, _: {"job_id": world.waiting, "epoch": 1, "expect": 404},
    ("POST", "/jobs/{job_id}/cancel"): lambda _, job: {"job_id": job},
    ("POST", "/jobs/cancel"): lambda *_: {"json": COUNT_JOBS},
    ("POST", "/jobs/discard"): lambda *_: {"json": COUNT_JOBS},
    ("POST", "/jobs/run-now"): lambda *_: {"json": COUNT_JOBS},
    ("POST", "/jobs/prioritize"): lambda *_: {"json": {**COUNT_JOBS, "priority": "critical"}},
    ("POST", "/jobs/{job_id}/signals"): lambda _, job: {"job_id": job, "json": {"name": "go"}},
    ("POST", "/jobs/{job_id}/requeue"): lambda world, _: {"job_id": world.dead},
    ("POST", "/jobs/{job_id}/dead-letter"): lambda world, _: {"job_id": world.dead, "json": {"reason": "no"}},
    ("POST", "/jobs/{job_id}/approval"): lambda world, _: {"job_id": world.held, "json": {"decision": "approve"}},
    ("POST", "/mcp"): lambda *_: {"json": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}},
    ("POST", "/safety/explain"): lambda *_: {"json": {"request": {"topic": "job.x"}}},
    ("POST", "/safety/simulate"): lambda *_: {"json": {"policy": POLICY_EXAMPLE}},
    ("GET", "/dlq/{job_id}"): lambda world, _: {"job_id": world.also_dead},
    ("POST", "/dlq/requeue"): lambda world, _: {"json": {"job_ids": [world.also_dead]}},
    ("GET", "/memory/{agent_id}/read"): lambda *_: {"agent_id": VIOLIN},
    ("GET", "/memory/{agent_id}/deep"): lambda *_: {"agent_id": VIOLIN, "params": {"part": "decisions"}},
    ("GET", "/memory/{agent_id}/history"): lambda *_: {"agent_id": VIOLIN},
    ("GET", "/memory/{agent_id}/diff"): lambda *_: {"agent_id": VIOLIN, "params": {"from_version": 0}},
    ("POST", "/memory/{agent_id}/propose"): lambda *_: {
        "agent_id": VIOLIN,
        "json": {"summary": "one more", "updates": [UPDATE]},
    },
    ("POST", "/logic/{agent_id}/propose"): lambda world, _: {
        "agent_id": LOGICIAN,
        "json": {"summary": "better", "text": f"Weed, says {world.pending}."},
    },
    ("GET", "/proposals/{proposal_id}"): lambda world, _: {"proposal_id": world.pending},
    ("GET", "/proposals/{proposal_id}/diff"): lambda world, _: {"proposal_id": world.pending},
    ("PATCH", "/proposals/{proposal_id}"): lambda world, _: {
        "proposal_id": world.pending,
        "json": {"decision": "approve"},
    },
    ("POST", "/proposals/{proposal_id}/apply"): lambda world, _: {"proposal_id": world.approved},
    ("POST", "/inbox/submit"): lambda *_: {"json": ENTRY},
    ("POST", "/artifacts"): lambda world, _: {"json": {"job_id": world.waiting, **draft().model_dump(mode="json")}},
    ("GET", "/artifacts/{artifact_id}"): lambda world, _: {"artifact_id": world.artifact},
    ("GET", "/artifacts/{artifact_id}/content"): lambda world, _: {"artifact_id": world.artifact},
    ("POST", "/artifacts/{artifact_id}/discard"): lambda world, _: {"artifact_id": world.staged},
    ("GET", "/lifecycles/{name}"): lambda *_: {"name": "run"},
    ("POST", "/schedules"): lambda *_: {"json": {"name": "nightly", "cron": "0 3 * * *", "type": "work"}},
    ("GET", "/schedules/{name}"): lambda *_: {"name": "nightly", "expect": 404},
    ("PATCH", "/schedules/{name}"): lambda *_: {"name": "nightly", "json": {"paused": True}, "expect": 404},
    ("DELETE", "/schedules/{name}"): lambda *_: {"name": "nightly", "expect": 404},
    ("POST", "/schedules/{name}/run"): lambda *_: {"name": "nightly", "expect": 404},
}
"""What a request to a route needs beside its method and path; a route that needs nothing is not here."""
ABOUT_A_JOB = {
    ("GET", "/jobs/{job_id}"),
    ("GET", "/jobs/{job_id}/events"),
    ("GET", "/jobs/{job_id}/explanation"),
    ("GET", "/jobs/{job_id}/signals"),
    ("GET", "/jobs/{job_id}/result"),
    ("GET", "/jobs/{job_id}/context"),
    ("POST", "/jobs/{job_id}/cancel"),
}


async def ask(client: Client, place: tuple[str, str], world: World, job: str) -> tuple[int, dict[str, Any]]:
    method, path = place
    wanted = REQUESTS.get(place, lambda *_: {})(world, job)
    options = {name: wanted.pop(name) for name in ("json", "params") if name in wanted}
    expect = wanted.pop("expect", None)
    answer = await client.request(method, path.format(**wanted), **options)
    is_text = answer.headers.get("content-type", "").startswith("text/")
    body: dict[str, Any] = {} if is_text else answer.json()
    return (200 if answer.status_code == expect else answer.status_code), body


@pytest.mark.requirement("AUTH-1")
def test_every_route_has_one_rule_or_is_meant_to_be_open():
    assert {place for place, rules in RULE_OF_ROUTE.items() if not rules} == set(OPEN)
    assert {rule for rules in RULE_OF_ROUTE.values() for rule in rules} <= set(RULES)
    assert {place for place, rules in RULE_OF_ROUTE.items() if len(rules) > 1} == set()


async def test_the_description_has_no_route_that_is_not_looked_at_here(gateway: Gateway):
    described = (await gateway.anonymous().get("/openapi.json")).json()["paths"]
    assert {(method.upper(), path) for path, told in described.items() for method in told} == set(RULE_OF_ROUTE)


# --- what is no request to the gateway -----------------------------------------------------------------------------------

AT_NLM_BACKEND = {
    rule
    for route in (*nlm_app.jobs.routes, *nlm_app.questions.routes)
    if isinstance(route, APIRoute)
    for rule in rule_of(route.dependant)
}
"""Rules of the NLM backend's routes; its own tests ask those in every role."""
IN_PYTHON = {"jobs.update", "memory.commit"}
"""Rules about what components do to the stores themselves; the tests below ask them in every role."""


@pytest.mark.requirement("AUTH-2")
def test_every_rule_has_an_entrance_or_says_why_it_has_none():
    entered = set(GUARDED.values()) | AT_NLM_BACKEND | IN_PYTHON
    assert entered & set(WITHOUT_ENTRANCE) == set()
    assert entered | set(WITHOUT_ENTRANCE) == set(RULES)


@pytest.mark.requirement("AUTH-2")
@pytest.mark.parametrize("rule", WITHOUT_ENTRANCE)
def test_authority_rule_without_a_route_is_used_nowhere_and_granted_to_no_role(rule: str):
    assert set(RULES[rule].grants.values()) == {N}
    source = Path(trellis.__file__).parent
    naming = [path.name for path in source.rglob("*.py") if f'"{rule}"' in path.read_text(encoding="utf-8")]
    assert naming == ["matrices.py"]


JOB_LIFECYCLES = ("queue-job", "nlm-job", "leased-job", "bus-job")
OTHER_RULES = {Trigger.SUBMIT, Trigger.CANCEL, Trigger.REQUEUE, "approve", "deny"}
"""Steps that other rules than jobs.update are about."""


@pytest.mark.requirement("AUTH-2", "JQ-6")
def test_each_role_that_may_change_the_status_of_jobs_is_named_by_a_lifecycle():
    named = {
        role
        for name in JOB_LIFECYCLES
        for step in LIFECYCLES[name].transitions
        for role in step.actors
        if step.trigger not in OTHER_RULES and (step.trigger != Trigger.SUSPEND or step.fenced)  # the submit of a batch
    }
    assert named == set(RULES["jobs.update"].holders)


@pytest.mark.requirement("AUTH-2", "AUTH-1", "JQ-6")
async def test_ledger_refuses_status_changes_by_roles_without_the_right(gateway: Gateway):
    ledger, world = gateway.instance.ledger, await make_world(gateway, "mine")
    (queued,) = await ledger.submit(GATEWAY, [queue_job(new_id())])
    (on_topic,) = await ledger.submit(GATEWAY, [bus_job()])
    death = DeadLetterReason(reason_code=ReasonCode.POLICY_VIOLATION, stage=Stage.INPUT, last_error="no good")
    moves = [
        Move(job_id=queued.job_id, target="QUEUED", request_id=RequestId("1")),
        Move(job_id=on_topic.job_id, target="SCHEDULED", request_id=RequestId("2")),
        Move(job_id=JobId(world.foreign_job), target="dead_lettered", request_id=RequestId("3"), death=death),
    ]
    before = await everything(gateway)
    for role in (role for role, grant in RULES["jobs.update"].grants.items() if grant is N):
        for move in moves:
            answer = await ledger.move(Actor(role=role, name=f"a {role}"), move)
            assert isinstance(answer, NotMoved), (role, move.target)
        assert {**await everything(gateway), "trellis_actor": before["trellis_actor"]} == before, role
    for role, move in zip((Role.ORCHESTRATOR, Role.SCHEDULER, Role.CONTROL_PLANE), moves, strict=True):
        assert isinstance(await ledger.move(Actor(role=role, name=f"a {role}"), move), Moved), role


@pytest.mark.requirement("AUTH-2", "AUTH-6")
async def test_only_the_apply_engine_commits_to_memory(gateway: Gateway):
    update = {"type": "memory-update", "updates": [UPDATE], "priority": "high"}
    asked = await gateway.client("orchestrator").post(f"/memory/{VIOLIN}/propose", json=update)
    proposal = asked.json()["proposalId"]
    decision = {"decision": "approve"}
    assert (await gateway.client("owner").patch(f"/proposals/{proposal}", json=decision)).status_code == 200
    before, engine = await everything(gateway), gateway.instance.apply_engine()
    for role, grant in RULES["memory.commit"].grants.items():
        if grant is N:
            for act in (
                ApplyEngine.run_once,
                partial(ApplyEngine.apply_now, proposal=proposal, request_id=RequestId("1")),
            ):
                with pytest.raises(NotAllowed, match=r"rule memory\.commit "):
                    await act(replace(engine, actor=Actor(role=role, name=f"a {role}")))
    assert await everything(gateway) == before
    assert (await engine.run_once()).applied == 1
    assert len((await everything(gateway))["commits"]) == len(before["commits"]) + 1


def client_in(gateway: Gateway, role: Role, world: World) -> Client:
    return gateway.client(role, name=f"a {role}", job_id=world.own_job if role is Role.NLM_BACKEND else None)


@pytest.mark.requirement("AUTH-2", "AUTH-3", "AUTH-4", "AUTH-7", "D9", "D43", "D44", "AUTH-1")
async def test_every_role_is_refused_what_no_rule_gives_it_and_nothing_changes(gateway: Gateway):
    world = await make_world(gateway, "mine")
    before = await everything(gateway)
    asked = 0
    for role in Role:
        client = client_in(gateway, role, world)
        refused = {place: rule for place, rule in GUARDED.items() if RULES[rule].grants[role] is N}
        own_only = {place: GUARDED[place] for place in ABOUT_A_JOB if RULES[GUARDED[place]].grants[role] is OWN}
        for place, rule in {**refused, **own_only}.items():
            if place not in UNENDING:
                status, problem = await ask(client, place, world, world.foreign_job)
                assert (role, place, status, problem["code"]) == (role, place, 403, "FORBIDDEN")
                assert (problem["rule"], f"rule {rule} " in problem["detail"]) == (rule, True)
                asked += 1
        assert await everything(gateway) == before, role
    assert asked > 100


@pytest.mark.requirement("AUTH-2", "AUTH-3", "AUTH-4", "D9", "D43", "D44")
async def test_every_role_does_what_its_rules_give_it(gateway: Gateway):
    for role in Role:
        world = await make_world(gateway, f"a {role}")
        client = logician = client_in(gateway, role, world)
        if role is Role.AGENT_RUNTIME:  # a token of it is for one agent
            logician = gateway.client(role, agent=LOGICIAN)
        granted = {place: RULES[rule].grants[role] for place, rule in GUARDED.items() if place not in UNENDING}
        for place, grant in granted.items():
            jobs = {Y: [world.foreign_job, world.own_job], OWN: [world.own_job], N: []}[grant]
            for job in jobs if place in ABOUT_A_JOB else jobs[:1]:
                asking = logician if place == ("POST", "/logic/{agent_id}/propose") else client
                status, body = await ask(asking, place, world, job)
                assert 200 <= status < 300, (role, place, body)
        assert any(grant is not N for grant in granted.values())


@pytest.mark.requirement("AUTH-3")
async def test_job_of_another_owner_and_missing_job_give_the_same_answer(gateway: Gateway):
    world = await make_world(gateway, "mine")
    for client in (gateway.client("submitter", name="mine"), gateway.client("nlm-backend", job_id=world.own_job)):
        answers = [await client.get(f"/jobs/{job}") for job in (world.foreign_job, "nobodys", world.run)]
        assert [answer.status_code for answer in answers] == [403, 403, 403]
        assert len({answer.json()["detail"] for answer in answers}) == 1
        listed = (await client.get("/jobs")).json()
        assert [job["job_id"] for job in listed["items"]] == [world.own_job]


@pytest.mark.requirement("AUTH-3")
async def test_a_backend_whose_token_names_no_job_has_none(gateway: Gateway):
    world = await make_world(gateway, "nlm-backend")
    client = gateway.client("nlm-backend")
    assert (await client.get(f"/jobs/{world.own_job}")).status_code == 403
    assert (await client.get("/jobs")).json()["items"] == []


@pytest.mark.requirement("AUTH-2", "D51")
@pytest.mark.parametrize(
    "action, target, payload, rule",
    [
        ("run", VIOLIN, {}, "runs.trigger"),
        ("job", "work", {"type": "work", "agent_slug": VIOLIN}, "jobs.create"),
    ],
)
async def test_an_entry_gives_nobody_a_right_it_has_not(
    gateway: Gateway, action: str, target: str, payload: dict[str, Any], rule: str
):
    before = await everything(gateway)
    entry = {"intent": {"action": action, "target": target, "payload": payload}}
    answer = await gateway.client("agent-runtime").post("/inbox/submit", json=entry)
    assert (answer.status_code, answer.json()["rule"]) == (403, rule)
    assert await everything(gateway) == before


@pytest.mark.requirement("AUTH-2")
async def test_several_roles_give_what_each_of_them_gives(gateway: Gateway):
    world = await make_world(gateway, "mine")
    client = gateway.client("owner", "control-plane", name="iryna")
    assert (await client.post(f"/jobs/{world.dead}/requeue")).status_code == 200
    assert (await client.patch(f"/proposals/{world.pending}", json={"decision": "approve"})).status_code == 200


@pytest.mark.requirement("AUTH-2")
async def test_a_refusal_is_audited_with_its_rule_and_only_so_many_a_minute(gateway: Gateway):
    client = gateway.client("frontend", name="screen")
    answer = await client.get("/dlq", headers={"X-Correlation-ID": "look-1"})
    assert answer.status_code == 403
    (record,) = await refusals(gateway)
    expected = {
        "event": "access.refused",
        "actor": "gateway",
        "actor_name": "screen",
        "roles": "frontend",
        "subject": "GET /dlq",
        "rule": "dead-letters.read",
        "method": "GET",
        "path": "/dlq",
        "correlation_id": "look-1",
        "left_out": 0,
        "ts": "2026-01-01T00:00:00.000000Z",
    }
    assert {name: record[name] for name in expected} == expected
    for _ in range(REFUSALS_PER_MINUTE_MAX + 4):
        await client.get("/dlq")
    assert len(await refusals(gateway)) == REFUSALS_PER_MINUTE_MAX
    gateway.clock.advance(60)
    await client.get("/dlq")
    records = await refusals(gateway)
    assert len(records) == REFUSALS_PER_MINUTE_MAX + 1
    assert max(int(str(one["left_out"])) for one in records) == 5


def bus_job() -> NewJob:
    request = JobRequest.model_validate({"job_id": new_id(), "topic": "job.x"})
    return new_bus_job(request, Topics(), trace_id="trace-1")


async def test_the_table_is_shown_as_it_is_held(gateway: Gateway):
    shown = (await gateway.client("worker").get("/authority")).json()["items"]
    assert {rule["name"]: rule["grants"] for rule in shown} == {
        name: {role.value: grant.value for role, grant in rule.grants.items()} for name, rule in RULES.items()
    }
