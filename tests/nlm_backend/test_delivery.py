"""Staging and callbacks: tried again until they are taken or the deadline comes, the same bytes under the same id (NLM-4)."""

import json

import pytest

from tests.artifacts.desk import draft
from tests.nlm_backend.conftest import KEY, Stand, provider_calls, until
from tests.nlm_backend.gatewaying import FakeGateway, gateway_on_loopback
from tests.nlm_backend.test_stages import WAY
from trellis.artifacts.content import JobType
from trellis.net.signatures import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from trellis.nlm_backend.delivery import RETRY, DeliveryGivenUp
from trellis.nlm_backend.errors import Fault
from trellis.nlm_backend.orders import ProcessRequest, StoredOrder


def backoffs_near(found: list[float], nominal: list[float]) -> bool:
    return len(found) == len(nominal) and all(0.8 * n <= f <= n for f, n in zip(found, nominal, strict=True))


@pytest.mark.requirement("NLM-4")
async def test_a_callback_is_sent_again_after_1_2_4_up_to_30_seconds_until_it_is_taken(stand: Stand):
    working = stand.backend()
    stand.gateway.fail("callback", *[500] * 7)
    await working.post(stand.order("job-a"))
    await working.work()
    assert backoffs_near(stand.pauses, [1, 2, 4, 8, 16, 30, 30])
    assert await stand.states("job-a@1") == WAY
    sent = [headers for kind, headers in stand.gateway.requests if kind == "callback"]
    assert len(sent) == 8
    assert len({headers[ID_HEADER] for headers in sent}) == 1
    assert len({headers[TIMESTAMP_HEADER] for headers in sent}) >= 7  # each signed when it was sent, to the second
    assert len({headers[SIGNATURE_HEADER] for headers in sent}) >= 7
    assert len(stand.gateway.of("job-a")) == 1
    assert provider_calls(working.backend) == 1


@pytest.mark.requirement("NLM-4")
async def test_callback_to_an_absent_gateway_is_retried_like_an_error(stand: Stand):
    working = stand.backend()
    order = stand.order("job-a")
    hold = stand.gateway.hold("artifact", after=True)
    await working.post(order)
    await working.begin()
    await hold.arrived.wait()
    delivery = working.backend.holder.driver.delivery
    away = _Refusing(delivery.links.client, times=3)
    object.__setattr__(delivery.links, "client", away)
    hold.go.set()
    await working.finish()
    assert away.times == 0
    assert await stand.states("job-a@1") == WAY


class _Refusing:
    """The guarded client, whose connections are refused for a while."""

    def __init__(self, client, times: int) -> None:
        self._client, self.times = client, times

    async def send(self, method: str, url: str, **given):
        if self.times > 0:
            self.times -= 1
            url = "http://127.0.0.1:1" + url[url.index("/jobs") :]
            self._client._origins |= {"http://127.0.0.1:1"}
        return await self._client.send(method, url, **given)


@pytest.mark.requirement("NLM-4", "NLM-3")
async def test_delivery_is_given_up_at_the_deadline_and_that_is_an_error_of_callback(stand: Stand):
    working = stand.backend()
    stand.gateway.fail("callback", *[503] * 100)
    await working.post(stand.order("job-a", deadline=stand.in_s(100.0)))
    await working.work()
    assert (await stand.states("job-a@1"))[-2:] == ["CALLBACK", "ERROR"]
    last = (await stand.ledger.events("job-a@1"))[-1]  # type: ignore[arg-type]
    assert json.loads(last.data or b"")["code"] == "CALLBACK_GIVEN_UP"
    longest_s = RETRY.max_s * (1 + RETRY.jitter)
    assert 100.0 - longest_s <= sum(stand.pauses) < 100.0, "until no other try would come in time"
    assert not stand.gateway.of("job-a")


@pytest.mark.requirement("NLM-3")
@pytest.mark.parametrize("status", [400, 404, 409, 410, 413, 422])
async def test_callback_refused_for_good_by_the_gateway_is_given_up_at_once(stand: Stand, status: int):
    working = stand.backend()
    stand.gateway.fail("callback", status)
    await working.post(stand.order("job-a"))
    await working.work()
    assert (await stand.states("job-a@1"))[-2:] == ["CALLBACK", "ERROR"]
    assert stand.gateway.count("callback") == 1


@pytest.mark.requirement("NLM-4")
async def test_a_secret_that_is_put_right_before_the_deadline_is_in_time(stand: Stand):
    working = stand.backend()
    stand.gateway.fail("callback", 401, 403, 302)
    await working.post(stand.order("job-a"))
    await working.work()
    assert await stand.states("job-a@1") == WAY


@pytest.mark.requirement("NLM-4")
async def test_delivery_waits_for_the_retry_after_of_the_gateway(stand: Stand):
    working = stand.backend()
    stand.gateway.fail("callback", (503, {"retry-after": "17"}), (429, {"retry-after": "1"}))
    await working.post(stand.order("job-a"))
    await working.work()
    assert stand.pauses[0] == 17.0
    assert 1.6 <= stand.pauses[1] <= 2.0
    assert await stand.states("job-a@1") == WAY


@pytest.mark.requirement("NLM-3", "NLM-4")
async def test_a_failure_is_called_back_with_the_same_patience_and_only_then_an_error(stand: Stand):
    working = stand.backend({"status": 503})
    stand.gateway.fail("callback", 500, 500)
    await working.post(stand.order("job-a"))
    await working.begin()
    await until(lambda: stand.gateway.count("callback") == 1)
    assert (await stand.states("job-a@1"))[-1] == "NLM_QUERY"
    await working.finish()
    assert (await stand.states("job-a@1"))[-1] == "ERROR"
    (callback,) = stand.gateway.of("job-a")
    assert callback["error"]["code"] == "NLM_UNAVAILABLE"
    assert stand.gateway.count("callback") == 3


# -- to whom -----------------------------------------------------------------------------------------------------------


async def test_an_origin_that_may_be_asked_gets_no_token_no_artifact_and_no_callback(stand: Stand):
    async with gateway_on_loopback(FakeGateway(KEY, stand.clock)) as other:
        working = stand.backend(outgoing=(other.url,))
        order = stand.order("job-a", context_snapshot_url=f"{other.url}/jobs/job-a/context/1")
        await working.post(order)
        await working.work()
        assert other.tokens("snapshot") == [None]
        assert stand.gateway.of("job-a")[0]["error"]["code"] == "CONTEXT_INVALID"
        foreign = stand.order("job-b", callback_url=f"{other.url}/jobs/job-b/result")
        refused = await working.post(foreign)
        assert (refused.status_code, "TRELLIS_GATEWAY" in refused.json()["detail"]) == (422, True)
        delivery = working.backend.holder.driver.delivery
        kept = StoredOrder.of(ProcessRequest.model_validate(foreign), execution=1, estimated_seconds=1)
        until_ = stand.clock.monotonic() + 60.0
        answer = await delivery.call_back(kept, b'{"status": "COMPLETE"}', "c", until=until_)
        assert isinstance(answer, DeliveryGivenUp)
        with pytest.raises(Fault, match="to the gateway alone"):
            await delivery.stage(kept, draft(JobType.RESEARCH), "c", until=until_)
        assert other.count("artifact") == other.count("callback") == 0


# -- staging -----------------------------------------------------------------------------------------------------------


async def test_staging_is_tried_again_and_makes_one_artifact(stand: Stand):
    working = stand.backend()
    stand.gateway.fail("artifact", 500, 429, 503)
    await working.post(stand.order("job-a"))
    await working.work()
    assert await stand.states("job-a@1") == WAY
    assert stand.gateway.count("artifact") == 4
    assert len(stand.gateway.staged) == 1


@pytest.mark.requirement("NLM-3")
@pytest.mark.parametrize(
    "status,code",
    [
        (401, "STAGING_REFUSED"),
        (403, "STAGING_REFUSED"),
        (404, "STAGING_REFUSED"),
        (422, "VALIDATION_ERROR"),
        (413, "VALIDATION_ERROR"),
    ],
)
async def test_an_artifact_that_is_refused_fails_the_job(stand: Stand, status: int, code: str):
    working = stand.backend()
    stand.gateway.fail("artifact", status)
    await working.post(stand.order("job-a"))
    await working.work()
    (callback,) = stand.gateway.of("job-a")
    assert (callback["status"], callback["error"]["code"]) == ("FAILED", code)
    assert (await stand.states("job-a@1"))[-2:] == ["STRUCTURING", "ERROR"]


async def test_an_artifact_that_is_gone_is_worth_another_attempt(stand: Stand):
    working = stand.backend()
    stand.gateway.discarding = True
    await working.post(stand.order("job-a"))
    await working.work()
    (callback,) = stand.gateway.of("job-a")
    assert callback["error"]["code"] == "STAGING_REFUSED"


async def test_a_store_that_takes_nothing_before_the_deadline_fails_the_job_in_time(stand: Stand):
    working = stand.backend()
    stand.gateway.fail("artifact", *[500] * 100)
    await working.post(stand.order("job-a", deadline=stand.in_s(60.0)))
    await working.work()
    (callback,) = stand.gateway.of("job-a")
    assert callback["error"]["code"] == "DEADLINE"
