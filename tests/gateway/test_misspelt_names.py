"""A misspelt query parameter or field is refused on every route, and the answer names the one that may be meant."""

import pytest
from fastapi.routing import APIRoute

from tests.gateway.conftest import Gateway
from trellis.gateway.app import ROUTES
from trellis.http_server.bodies import StrictRoute
from trellis.nlm_backend import app as nlm

ONE = "/jobs/0b9f3c1e-5d0a-4f5e-9a43-0c6f2f1d2a77"


@pytest.mark.requirement("D27")
async def test_a_query_parameter_that_the_route_does_not_have_is_refused(gateway: Gateway):
    routers = [module.router for module in ROUTES] + [nlm.jobs, nlm.questions, nlm.system]
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    assert [route.path for route in routes if not isinstance(route, StrictRoute)] == []
    owner = gateway.client("owner")
    for address, meant in [
        ("/jobs?limit=2&stauts=queued", "query/stauts: there is no such parameter (did you mean status?). GET /jobs"),
        ("/runs?agnet=zz", "(did you mean agent?)"),
        ("/proposals?statuss=zz", "(did you mean status?)"),
        ("/events/stream?for_s=0&tpye=run.status.changed", "(did you mean type?)"),
        (f"{ONE}?limit=1", f"query/limit: there is no such parameter. GET {ONE}: it takes no query parameters."),
    ]:
        answer = await owner.get(address)
        assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_FAILED"), address
        assert meant in answer.json()["detail"]
    for probe in ("/system/live", "/system/ready", "/metrics"):
        assert (await owner.get(f"{probe}?now=1")).status_code == 200, "a machine may add a query of its own"
    many = await owner.get("/jobs?" + "&".join(f"{number}{'x' * 300}=1" for number in range(50)))
    assert len(many.json()["errors"]) == 20
    assert len(many.text) < 8_000


async def test_who_may_not_ask_is_told_so_before_the_name_of_a_parameter(gateway: Gateway):
    assert (await gateway.anonymous().get("/jobs?stauts=queued")).status_code == 401
    assert (await gateway.anonymous().get("/events/stream?tpye=x")).status_code == 401
    ticket = (await gateway.client("owner").post("/events/tickets")).json()["ticket"]
    refused = await gateway.anonymous().get(f"/events/stream?ticket={ticket}&for_s=0&tpye=x")
    assert refused.status_code == 422
    taken = await gateway.anonymous().get(f"/events/stream?ticket={ticket}&for_s=0")
    assert taken.status_code == 200, "a refused request used the ticket up"


@pytest.mark.requirement("D27")
async def test_a_field_of_a_body_that_does_not_exist_is_named_with_the_one_that_may_be_meant(gateway: Gateway):
    owner, operator = gateway.client("owner"), gateway.client("control-plane")
    for answer, meant in [
        (await owner.post("/jobs", json={"type": "t", "paylod": 1}), "body/paylod: {} (did you mean payload?)"),
        (
            await owner.post("/jobs", json={"topic": "job.echo", "budget": {"deadline": 1}}),
            "body/budget/deadline: {} (did you mean deadline_ms?)",
        ),
        (await owner.post(f"{ONE}/cancel", json={"cause": "x"}), "body/cause: {} (did you mean reason?)"),
        (await operator.post(f"{ONE}/requeue", json={"resaon": "x"}), "body/resaon: {} (did you mean reason?)"),
        (await operator.post("/schedules", json={"nam": "x"}), "body/nam: {} (did you mean name?)"),
        (await owner.post(f"{ONE}/cancel", json={"qqqqqq": 1}), "body/qqqqqq: {}"),
    ]:
        assert answer.status_code == 422
        places = {f"{one['at']}: {one['message']}" for one in answer.json()["errors"]}
        assert meant.format("there is no such field") in places
