"""What the log says about a failure that lasts: the first one, a count a minute, and that it is over."""

import asyncio
import logging
import random
from collections.abc import Sequence

import pytest

from trellis.engine import outage_log
from trellis.engine.errors import LedgerUnavailable, OutcomeUnknown, TrellisError
from trellis.engine.outage_log import Failures, Outage
from trellis.engine.service import serve
from trellis.storage.objects.store import StoreUnavailable
from trellis.testing import FakeClock

AWAY = LedgerUnavailable(reason="nothing listens there")
STORE_AWAY = StoreUnavailable(verb="get", key="agents/index.json", reason="no answer in time")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trellis")
    monkeypatch.setattr(outage_log, "LEDGER", Outage("ledger_unavailable"))
    monkeypatch.setattr(outage_log, "_outages", {})


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


class Duty:
    """A service whose passes raise what they are given, one after the other, and then succeed."""

    def __init__(self, name: str, errors: Sequence[Exception], stop: asyncio.Event) -> None:
        self.name, self.errors, self.stop = name, list(errors), stop

    async def run_once(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.stop.set()

    def pause_s(self, report: None) -> float:
        return 0.0


async def served(clock: FakeClock, *duties: Sequence[Exception]) -> None:
    """Services with these failures, until each has succeeded once."""
    rng = random.Random(1)
    stops = [asyncio.Event() for _ in duties]
    services = [Duty(f"service-{n}", errors, stop) for n, (errors, stop) in enumerate(zip(duties, stops, strict=True))]
    tasks = [asyncio.create_task(serve(duty, clock, rng, duty.stop)) for duty in services]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if clock.sleeping:
            clock.advance(0.1)
    await asyncio.gather(*tasks)


async def test_a_short_outage_has_its_first_failure_and_its_end_in_the_log(caplog: pytest.LogCaptureFixture):
    await served(FakeClock(0.0), [AWAY, AWAY, AWAY])
    first, last = lines(caplog)
    assert first.startswith("ledger_unavailable service='service-0' error='The ledger does not answer: nothing listens")
    assert last.startswith("recovered after='ledger_unavailable' for_s=")
    assert last.endswith("failures=3")


async def test_an_outage_that_lasts_is_counted_once_a_minute_for_all_services(caplog: pytest.LogCaptureFixture):
    clock = FakeClock(0.0)
    await served(clock, *[[AWAY] * 45 for _ in range(10)])
    said = lines(caplog)
    minutes = int(clock() // 60)
    assert minutes >= 2
    assert len(said) <= minutes + 3
    assert "services=['service-0'" in said[1]
    assert said[-1].startswith("recovered")


async def test_an_outage_of_the_object_store_has_no_tracebacks(caplog: pytest.LogCaptureFixture):
    await served(FakeClock(0.0), [STORE_AWAY] * 12)
    assert [line.partition(" ")[0] for line in lines(caplog)] == ["store_unavailable", "recovered"]
    assert all(record.exc_info is None for record in caplog.records)
    assert len(caplog.text) < 1_000


async def test_a_fault_has_one_traceback_for_each_distinct_error(caplog: pytest.LogCaptureFixture):
    await served(FakeClock(0.0), [KeyError("a"), KeyError("a"), KeyError("a"), ValueError("b"), KeyError("a")])
    shown = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert shown == [KeyError, ValueError]
    assert lines(caplog)[-1].startswith("recovered after='pass_failed'")


async def test_another_kind_of_error_is_logged_at_once(caplog: pytest.LogCaptureFixture):
    await served(FakeClock(0.0), [AWAY, OutcomeUnknown(verb="sweep", request=""), STORE_AWAY])
    events = [line.partition(" ")[0] for line in lines(caplog)]
    assert events == ["ledger_unavailable", "ledger_unavailable", "recovered", "store_unavailable", "recovered"]


def test_a_loop_that_is_gone_keeps_no_outage_open(caplog: pytest.LogCaptureFixture):
    failures = Failures("one")
    failures.failed(AWAY, now=1.0)
    del failures
    other = Failures("two")
    other.failed(AWAY, now=2.0)
    assert [line.partition(" ")[0] for line in lines(caplog)] == ["ledger_unavailable"] * 2


def test_only_unavailability_errors_are_logged_as_outage():
    assert outage_log.outage_of(ValueError()) is None
    assert outage_log.outage_of(TrellisError()) is None
    assert outage_log.outage_of(AWAY) is outage_log.LEDGER
