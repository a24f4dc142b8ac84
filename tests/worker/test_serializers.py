"""Serializers of a job type: they encode its payload and result instead of pydantic, and stay within the same bounds."""

import json
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

from tests.worker.conftest import Stand
from tests.worker.process_jobs import Fractions
from trellis import App, Context, OptionInvalid, PayloadInvalid, PayloadTooLarge
from trellis.testing import sandbox


@dataclass
class Answering:
    """A serializer that answers the same bytes to everything."""

    body: Any

    def dumps(self, value: Any) -> Any:
        return self.body

    def loads(self, body: bytes, annotation: Any) -> Any:
        return body


def halves(serializer: Any) -> App:
    app = App()

    @app.job("halve", serializer=serializer)
    async def halve(ctx: Context, n: Fraction) -> Fraction:
        assert isinstance(n, Fraction)
        return n / 2

    return app


async def test_payload_and_result_go_through_the_serializer():
    async with sandbox(halves(Fractions())) as box:
        job = await box.submit("halve", Fraction(1, 3))
        assert (await job.status()).payload == b"[1, 3]"
        await box.run_until_idle()
        assert await box.ledger.result(job.id) == b"[1, 6]"
        assert await job.result(timeout_s=0) == Fraction(1, 6)


@pytest.mark.parametrize(
    "payload, reason", [([1], "validation_failed"), ("many", "validation_failed")], ids=["too short", "text"]
)
async def test_a_stored_payload_that_it_cannot_read_ends_the_job_without_a_call(
    stand: Stand, payload: Any, reason: str
):
    job = await stand.submit("halve", {"no": payload})  # the caller has no application, so nothing checks it before
    await stand.run_until_idle(halves(Fractions()))
    letter = await stand.ledger.dead_letter(job.id)
    assert letter is not None
    assert (letter.reason_code, letter.stage) == (reason, "input")


@pytest.mark.parametrize("body, why", [(b"\xff{", "must return JSON"), ("text", "must return bytes")])
async def test_a_serializer_that_gives_no_json_is_refused_at_submit(body: Any, why: str):
    async with sandbox(halves(Answering(body))) as box:
        with pytest.raises(PayloadInvalid, match=why):
            await box.submit("halve", Fraction(1, 3))


async def test_what_a_serializer_gives_is_bounded():
    async with sandbox(halves(Answering(b'"' + b"x" * 2_000_000 + b'"'))) as box:
        with pytest.raises(PayloadTooLarge):
            await box.submit("halve", Fraction(1, 3))


async def test_a_result_that_it_cannot_write_dead_letters_the_job(stand: Stand):
    app = App()

    @app.job("t", serializer=Fractions())
    async def handler(ctx: Context) -> Fraction:
        return "no fraction"  # type: ignore[return-value]

    job = await stand.submit("t")
    await stand.run_until_idle(app)
    letter = await stand.ledger.dead_letter(job.id)
    assert letter is not None
    assert letter.stage == "output"
    assert "AttributeError" in letter.last_error


def test_an_object_that_is_no_serializer_is_refused_at_registration():
    with pytest.raises(OptionInvalid, match=r"dumps\(value\) -> bytes and loads\(body, annotation\)"):
        App().job("t", serializer=json.JSONDecoder())  # type: ignore[arg-type]
