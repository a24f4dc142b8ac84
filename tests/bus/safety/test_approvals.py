"""What a person decides about a held job: once, about what was seen, and bound to the job and the policy."""

import asyncio
import json
from typing import Any

import pytest

from tests.bus.safety.holding import PEOPLE, SCHEDULER, held, hold, moved, scheduled
from tests.bus.safety.policies import policy, rule
from trellis.bus import approvals
from trellis.bus.requests import JobRequest
from trellis.bus.safety.evaluation import decide
from trellis.bus.safety.policy import NotHeld, PolicyDiffers
from trellis.bus.scheduling.dispatch_policy import find_approval, request_within_policy
from trellis.documents.errors import NoteTooShort
from trellis.engine.errors import JobNotFound, NotAllowed
from trellis.engine.jobs import Actor, CancelMode, JobId, NewJob, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobPlace
from trellis.lifecycles import Role

OWNER = Actor(role=Role.OWNER, name="iryna")
ADMIN = Actor(role=Role.CONTROL_PLANE, name="operator")
STRICTER = policy(rule("two-people", "require_human", reason="since yesterday"))


async def say(ledger: Ledger, job_id: JobId, *, by: Actor = OWNER, **said: Any):
    given = {"approve": True, "note": None, "request_id": RequestId("request-1")} | said
    return await approvals.decide(ledger, by, job_id, **given)


async def state(ledger: Ledger, job_id: JobId) -> tuple[str, JobPlace]:
    job = await ledger.job(job_id)
    assert job is not None
    return job.state, job.place


async def last_data(ledger: Ledger, job_id: JobId) -> dict[str, Any]:
    return json.loads((await ledger.events(job_id))[-1].data or b"{}")


@pytest.mark.requirement("D45", "BUS-4")
@pytest.mark.parametrize("person", [OWNER, ADMIN])
async def test_an_approved_job_is_ready_and_the_approval_names_the_job_and_the_policy(
    any_ledger: Ledger, person: Actor
):
    job_id = await held(any_ledger)
    assert await state(any_ledger, job_id) == ("SCHEDULED", JobPlace.SCHEDULED)
    await say(any_ledger, job_id, by=person, note="the backup is from today")
    assert await state(any_ledger, job_id) == ("SCHEDULED", JobPlace.READY)
    job, events = await any_ledger.job(job_id), await any_ledger.events(job_id)
    assert job is not None
    request = JobRequest.read(job.payload or b"")
    assert await last_data(any_ledger, job_id) == {
        "job_hash": request.hash,
        "policy_hash": PEOPLE.hash,
        "order_hash": request_within_policy(request, {}).hash,
        "rule": "people-first",
        "note": "the backup is from today",
    }
    assert (events[-1].type, events[-1].role, events[-1].actor) == ("job_approved", person.role, person.name)
    assert find_approval(events, request, decide(PEOPLE, request)) == events[-1].id
    assert find_approval(events, request, decide(STRICTER, request)) is None


@pytest.mark.requirement("D45")
async def test_a_refused_job_is_denied_with_the_reason(ledger: Ledger):
    job_id = await held(ledger)
    for note in (None, "no", "   no   \n  "):
        with pytest.raises(NoteTooShort):
            await say(ledger, job_id, approve=False, note=note)
    await say(ledger, job_id, approve=False, note="these files are still needed")
    assert await state(ledger, job_id) == ("DENIED", JobPlace.ENDED)
    assert (await last_data(ledger, job_id))["note"] == "these files are still needed"


@pytest.mark.requirement("D45")
async def test_a_note_that_no_database_keeps_is_kept_as_far_as_it_can_be(any_ledger: Ledger):
    """As a terminal that does not speak UTF-8 hands it over."""
    job_id = await held(any_ledger)
    await say(any_ledger, job_id, note="fine \udcff\0")
    assert (await last_data(any_ledger, job_id))["note"] == "fine ?\N{REPLACEMENT CHARACTER}"


@pytest.mark.requirement("D45")
async def test_a_decision_that_comes_again_is_answered_as_the_first_and_another_is_refused(any_ledger: Ledger):
    job_id = await held(any_ledger)
    first = await say(any_ledger, job_id)
    again = await say(any_ledger, job_id)
    assert (again.version, again.repeated) == (first.version, True)
    with pytest.raises(NotHeld, match="iryna has approved it"):
        await say(any_ledger, job_id, request_id=RequestId("request-2"))
    assert [event.type for event in await any_ledger.events(job_id)].count("job_approved") == 1


@pytest.mark.requirement("D45")
async def test_concurrent_decisions_about_a_held_job_have_one_winner(any_ledger: Ledger):
    job_id = await held(any_ledger)
    said = [
        say(
            any_ledger,
            job_id,
            approve=number % 2 == 0,
            note="decided at once",
            request_id=RequestId(f"request-{number}"),
        )
        for number in range(8)
    ]
    answers = await asyncio.gather(*said, return_exceptions=True)
    assert sum(not isinstance(answer, NotHeld) for answer in answers) == 1
    assert all(isinstance(answer, NotHeld) or not isinstance(answer, BaseException) for answer in answers)


@pytest.mark.requirement("D45")
async def test_decision_applies_only_to_a_current_hold(ledger: Ledger):
    free = await scheduled(ledger)
    with pytest.raises(NotHeld, match="the safety kernel has not held it"):
        await say(ledger, free)
    deferred = await held(ledger)
    await moved(ledger, SCHEDULER, deferred, target="SCHEDULED", delay_s=5.0, data=b'{"hold":"throttle"}')
    with pytest.raises(NotHeld, match="it has gone on since it was held"):
        await say(ledger, deferred)
    gone = await held(ledger)
    await ledger.cancel(ADMIN, gone, CancelMode.HARD, RequestId("cancel"), grace_s=0, cause=None)
    with pytest.raises(NotHeld, match="it is CANCELLED"):
        await say(ledger, gone)
    other = JobId("other")
    await ledger.submit(Actor(role=Role.SUBMITTER, name="s"), [NewJob(job_id=other, type="t")])
    for unknown in (other, JobId("nobody")):
        with pytest.raises(JobNotFound):
            await say(ledger, unknown)


@pytest.mark.requirement("D45")
async def test_a_decision_about_another_policy_or_version_than_the_one_that_holds_is_refused(ledger: Ledger):
    job_id = await held(ledger)
    await hold(ledger, job_id, under=STRICTER)
    with pytest.raises(PolicyDiffers, match="look at it again"):
        await say(ledger, job_id, policy_hash=PEOPLE.hash)
    job = await ledger.job(job_id)
    assert job is not None
    with pytest.raises(NotHeld, match=f"it has version {job.version} and not {job.version - 1}"):
        await say(ledger, job_id, version=job.version - 1)
    await say(ledger, job_id, policy_hash=STRICTER.hash, version=job.version)
    assert (await last_data(ledger, job_id))["policy_hash"] == STRICTER.hash


@pytest.mark.requirement("D45")
async def test_an_approval_is_not_good_for_the_policy_that_holds_the_job_again(ledger: Ledger):
    job_id = await held(ledger)
    await say(ledger, job_id)
    decision, job = await hold(ledger, job_id, under=STRICTER), await ledger.job(job_id)
    assert job is not None
    request = JobRequest.read(job.payload or b"")
    assert find_approval(await ledger.events(job_id), request, decision) is None
    assert await state(ledger, job_id) == ("SCHEDULED", JobPlace.SCHEDULED)
    await say(ledger, job_id, request_id=RequestId("request-2"))
    assert find_approval(await ledger.events(job_id), request, decision) is not None


@pytest.mark.requirement("D45")
async def test_only_a_person_approves_a_bus_job(ledger: Ledger):
    job_id = await held(ledger)
    for role in set(Role) - {Role.OWNER, Role.CONTROL_PLANE}:
        with pytest.raises(NotAllowed, match="a person does that"):
            await say(ledger, job_id, by=Actor(role=role, name="x"))
    assert (await ledger.events(job_id))[-1].type == "job_held"


# --- the inbox -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D45")
async def test_the_inbox_lists_what_waits_for_a_person_and_nothing_that_rests_beside_it(any_ledger: Ledger):
    mine = [await held(any_ledger, job_id=f"held-{number}") for number in range(3)]
    for number in range(5):
        resting = await scheduled(any_ledger, job_id=f"resting-{number}")
        await moved(any_ledger, SCHEDULER, resting, target="SCHEDULED", delay_s=60.0, data=b'{"hold":"throttle"}')
    seen, cursor = list[str](), None
    for _ in range(20):
        page = await approvals.list_waiting(any_ledger, limit=2, cursor=cursor)
        seen += [job.job_id for job, _ in page.items]
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == list(reversed(mine))
    await say(any_ledger, mine[0])
    assert [job.job_id for job, _ in (await approvals.list_waiting(any_ledger, limit=50)).items] == [mine[2], mine[1]]


@pytest.mark.requirement("D45")
async def test_job_waiting_for_approval_is_found_behind_many_delayed_jobs(any_ledger: Ledger):
    mine = [await held(any_ledger, job_id=f"held-{number}") for number in range(3)]
    for number in range(30):
        resting = await scheduled(any_ledger, job_id=f"resting-{number}")
        await moved(any_ledger, SCHEDULER, resting, target="SCHEDULED", delay_s=86_400.0, data=b'{"hold":"throttle"}')
    first = await approvals.list_waiting(any_ledger, limit=2)
    assert [job.job_id for job, _ in first.items] == [mine[2], mine[1]]
    second = await approvals.list_waiting(any_ledger, limit=2, cursor=first.cursor)
    assert ([job.job_id for job, _ in second.items], second.cursor) == ([mine[0]], None)


async def shown(ledger: Ledger, job_id: JobId) -> dict[str, Any]:
    job = await ledger.job(job_id)
    assert job is not None
    document = approvals.inbox_document(job, await ledger.events(job_id))
    assert document is not None
    return document


@pytest.mark.requirement("D45")
async def test_a_job_held_for_approval_is_shown_in_the_shape_of_a_proposal(ledger: Ledger):
    fields = {"tenant_id": "acme", "principal_id": "ada", "labels": {"env": "prod"}, "meta": {"risk_tags": ["pii"]}}
    job_id = await held(ledger, job_id="delete-1", **fields)
    told = await shown(ledger, job_id)
    expected = {
        "id": "approval-delete-1",
        "status": "pending",
        "action": "bus-dispatch",
        "target": "job.files.delete",
        "requiresHumanReview": True,
        "approval": None,
    }
    assert {name: told[name] for name in expected} == expected
    content = told["content"]
    assert (content["tenant"], content["principal"], content["labels"]) == ("acme", "ada", {"env": "prod"})
    assert (content["decision"], content["rule"], content["risk_tags"]) == ("require_human", "people-first", ["pii"])
    assert (content["policy_hash"], content["job_hash"]) == (PEOPLE.hash, told["target_hash"])
    assert approvals.job_id_of_inbox_id(told["id"]) == job_id
    assert approvals.job_id_of_inbox_id("prop_2026-01-01_x") is None


@pytest.mark.requirement("D45")
async def test_the_inbox_shows_the_decision_on_a_held_job(ledger: Ledger):
    yes, no, late, denied = [await held(ledger) for _ in range(4)]
    await say(ledger, yes, note="it is fine")
    await say(ledger, no, approve=False, note="it is not fine")
    await ledger.cancel(ADMIN, late, CancelMode.HARD, RequestId("cancel"), grace_s=0, cause=None)
    await moved(ledger, SCHEDULER, denied, target="DENIED", data=b"{}")
    told = [await shown(ledger, job_id) for job_id in (yes, no, late, denied)]
    assert [one["status"] for one in told] == ["approved", "rejected", "expired", "expired"]
    assert [(one["approval"] or {}).get("decision_note") for one in told] == [
        "it is fine",
        "it is not fine",
        None,
        None,
    ]
    await hold(ledger, yes, under=STRICTER)
    assert (await shown(ledger, yes))["status"] == "pending"
    free = await ledger.job(await scheduled(ledger))
    assert free is not None
    assert approvals.inbox_document(free, await ledger.events(free.job_id)) is None
