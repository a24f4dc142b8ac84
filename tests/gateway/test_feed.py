"""Events of all jobs over HTTP: looked up, or read in the order of the feed by whoever may read what they tell of."""

from typing import Any

import pytest

from tests.gateway.conftest import VIOLIN, Client, Gateway
from tests.gateway.world import proposal
from trellis.engine.jobs import JobId


async def submitted(client: Client, **asked: Any) -> str:
    return (await client.post("/jobs", json={"type": "work", **asked})).json()["job_id"]


async def read(client: Client, **params: Any) -> list[dict[str, Any]]:
    """Every event of the feed, two at a time."""
    found, position = list[dict[str, Any]](), None
    while True:
        page = (
            await client.get("/events", params={**params, "limit": 2, **({"after": position} if position else {})})
        ).json()
        if page["position"] == position:
            return found
        found, position = found + page["items"], page["position"]


@pytest.mark.requirement("DJ-13")
async def test_the_feed_is_read_page_by_page_and_goes_on_from_its_end(gateway: Gateway):
    owner = gateway.client("owner")
    jobs = [await submitted(owner, correlation_id=f"case-{number}") for number in range(3)]
    assert [event["job_id"] for event in await read(owner, lifecycle="leased-job")] == jobs
    end = (await owner.get("/events", params={"after": "latest"})).json()
    assert end["items"] == []
    later = await submitted(owner)
    (event,) = (await owner.get("/events", params={"after": end["position"]})).json()["items"]
    assert (event["job_id"], event["lifecycle"], event["payload"]["to"]) == (later, "leased-job", "queued")
    for params in ({"job_id": jobs[1]}, {"correlation_id": "case-1"}):
        found = (await owner.get("/events", params=params)).json()
        assert ([one["job_id"] for one in found["items"]], found["position"]) == ([jobs[1]], None)
    assert (await owner.get("/events", params={"type": "job_queued", "limit": 2})).json()["items"][0]["job_id"] == jobs[
        0
    ]
    assert (await owner.get("/events", params={"job_id": "nobody"})).status_code == 404
    wrong = (
        {"lifecycle": "lost"},
        {"since": "2026-01-01T00:00:00Z"},
        {"type": "x", "after": "1"},
        {"after": "nonsense"},
    )
    for params in wrong:
        assert (await owner.get("/events", params=params)).status_code == 422, params


@pytest.mark.requirement("D62", "AUTH-1")
async def test_event_feed_omits_jobs_the_caller_may_not_read(gateway: Gateway):
    owner, worker = gateway.client("owner"), gateway.client("worker")
    ada, eve = gateway.client("submitter", name="ada"), gateway.client("submitter", name="eve")
    acme = gateway.client("owner", name="ada", tenant="acme")
    mine, run = await submitted(ada), (await owner.post("/agents/run", json={"agent_slug": VIOLIN})).json()["run_id"]
    note = await proposal(gateway)
    everyones = {event["lifecycle"] for event in await read(owner)}
    assert {"leased-job", "run", "proposal"} <= everyones
    assert {event["lifecycle"] for event in await read(worker)} == {"leased-job"}, "it reads no runs and no proposals"
    assert [event["job_id"] for event in await read(ada)] == [mine]
    assert (await read(eve), await read(acme)) == ([], [])
    correlation = (await gateway.instance.ledger.events(JobId(run)))[0].correlation_id
    for client in (worker, ada, eve, acme):
        for params in ({"job_id": run}, {"job_id": note}, {"correlation_id": correlation}):
            answer = await client.get("/events", params=params)
            assert answer.status_code in {403, 404} or answer.json()["items"] == [], params
    assert (await eve.get("/events", params={"job_id": mine})).json().get("items", []) == []


@pytest.mark.requirement("D62", "DJ-13")
async def test_own_events_are_found_behind_those_of_others(gateway: Gateway):
    ada, eve = gateway.client("submitter", name="ada"), gateway.client("submitter", name="eve")
    for _ in range(6):
        await submitted(eve)
    mine = [await submitted(ada) for _ in range(3)]
    for limit, expected in ((2, mine[:2]), (3, mine), (50, mine)):
        answer = await ada.get("/events", params={"type": "job_queued", "limit": limit})
        assert [event["job_id"] for event in answer.json()["items"]] == expected


@pytest.mark.requirement("D62")
async def test_events_of_a_foreign_job_are_refused_like_those_of_a_missing_job(gateway: Gateway):
    ada, eve = gateway.client("submitter", name="ada"), gateway.client("submitter", name="eve")
    mine = await submitted(ada)
    answers = [await eve.get("/events", params={"job_id": job_id}) for job_id in (mine, "nobody")]
    assert [answer.status_code for answer in answers] == [403, 403]
    assert (await ada.get("/events", params={"job_id": mine})).status_code == 200


@pytest.mark.requirement("D35", "OBS-1")
async def test_a_type_is_paused_by_an_operator_alone_with_a_record_of_it(gateway: Gateway):
    operator = gateway.client("control-plane", name="olha")
    await submitted(gateway.client("owner"))
    assert (await gateway.client("owner").patch("/queues/work", json={"paused": True})).status_code == 403
    paused = await operator.patch("/queues/work", json={"paused": True, "reason": "a rest"})
    assert paused.json() == {"type": "work", "paused": True}
    (queue,) = (await operator.get("/queues")).json()["items"]
    assert (queue["type"], queue["ready"], queue["paused"]) == ("work", 1, True)
    unknown = await operator.patch("/queues/wrok", json={"paused": True})
    assert (unknown.status_code, "did you mean work?" in unknown.json()["detail"]) == (409, True)
    (act,) = [one for one in await gateway.instance.ledger.acts() if one.event == "type.paused"]
    assert (act.subject, act.actor, act.cause) == ("work", "olha", "a rest")


@pytest.mark.requirement("D62")
async def test_an_explanation_names_workers_to_those_alone_who_may_read_every_job(gateway: Gateway):
    ada = gateway.client("submitter", name="ada")
    job_id = await submitted(ada)
    own, whole = [(await one.get(f"/jobs/{job_id}/explanation")).json() for one in (ada, gateway.client("owner"))]
    assert "A worker that serves 'work' takes it when it has room." in own["why"]
    assert any("No worker that serves 'work' has been seen" in sentence for sentence in whole["why"])
    assert own["where"] == whole["where"]
    assert (await gateway.client("submitter", name="eve").get(f"/jobs/{job_id}/explanation")).status_code == 403
