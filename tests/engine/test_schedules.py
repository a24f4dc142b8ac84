"""What a schedule of jobs is, and what is decided about its instants at a moment (RUN-9)."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from trellis.engine.errors import OptionInvalid
from trellis.engine.schedules import (
    CATCH_UP_MAX,
    InstantDecision,
    Misfire,
    Overlap,
    ScheduleRecord,
    ScheduleSpec,
    checked_spec,
    decide,
    decided,
    new_record,
    next_fires,
    submitted,
)

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC)
HOURLY = ScheduleSpec(name="hourly", cron="0 * * * *", type="t")


def hourly(**changes: Any) -> ScheduleRecord:
    return new_record(replace(HOURLY, **changes), "anna", NOON)


def hour(n: int) -> datetime:
    return NOON + timedelta(hours=n)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"name": "Night"}, "name"),
        ({"name": "n" * 65}, "name"),
        ({"cron": "often"}, "five fields"),
        ({"tz": "Mars/Olympus"}, "tz database"),
        ({"tz": "../etc/passwd"}, "tz database"),
        ({"type": None}, "one of the two"),
        ({"topic": "job.echo"}, "one of the two"),
        ({"type": "a b"}, "match"),
        ({"jitter_s": -1.0}, "jitter_s"),
        ({"jitter_s": 3_601.0}, "jitter_s"),
        ({"jitter_s": float("nan")}, "jitter_s"),
        ({"payload": "x" * 70_000}, "bytes of JSON"),
        ({"payload": float("nan")}, "JSON"),
        ({"concurrency_key": ""}, "concurrency_key"),
        ({"concurrency_key": "k", "overlap": Overlap.QUEUE}, "concurrency key"),
        ({"type": None, "topic": "job.echo", "overlap": Overlap.QUEUE}, "topic"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_with_what_to_change(changes: dict[str, Any], problem: str):
    with pytest.raises(OptionInvalid, match=problem):
        checked_spec(replace(HOURLY, **changes))


def test_a_schedule_is_the_same_after_it_was_stored():
    spec = checked_spec(replace(HOURLY, cron=" 0  3 * * * ", tz="Europe/Kyiv", payload={"ü": [1]}, jitter_s=5))
    assert spec.cron == "0 3 * * *"
    assert ScheduleSpec.from_json(spec.name, spec.to_json()) == spec


@pytest.mark.requirement("RUN-9")
@pytest.mark.parametrize(
    "misfire, late_s, fired",
    [
        (Misfire.SKIP, 0, [3]),
        (Misfire.SKIP, 61, []),
        (Misfire.ONCE, 0, [3]),
        (Misfire.ONCE, 1_800, [3]),
        (Misfire.ALL, 0, [1, 2, 3]),
        (Misfire.ALL, 1_800, [1, 2, 3]),
    ],
)
def test_the_misfire_policy_decides_which_missed_instants_fire(misfire: Misfire, late_s: float, fired: list[int]):
    record, now, found = hourly(misfire=misfire), hour(3) + timedelta(seconds=late_s), []
    while (decision := decide(record, now)) is not None:
        found += [decision.instant] if decision.skipped is None else []
        record = decided(record, decision)
        record = submitted(record, "job") if record.firing else record
    assert found == [hour(n) for n in fired]
    assert (record.since, record.next_at, record.last_at) == (hour(3), hour(4), hour(3))
    assert (record.skipped is None) is bool(fired)


@pytest.mark.requirement("RUN-9")
def test_a_long_outage_fires_a_bounded_number_of_missed_instants():
    record, oldest = hourly(misfire=Misfire.ALL), 10_000 - CATCH_UP_MAX + 1
    skipped = decide(record, hour(10_000))
    assert skipped is not None
    assert (skipped.instant, "more than 100 instants were missed" in (skipped.skipped or "")) == (
        hour(oldest - 1),
        True,
    )
    assert decide(decided(record, skipped), hour(10_000)) == InstantDecision(hour(oldest))
    assert decide(replace(record, since=hour(oldest - 1)), hour(10_000)) == InstantDecision(hour(oldest)), (
        "none skipped"
    )


def test_nothing_before_a_schedule_was_stored_changed_or_resumed_is_due():
    record = hourly()
    assert decide(record, hour(1) - timedelta(microseconds=1)) is None
    resumed = replace(record, paused=False).from_now(hour(5))
    assert decide(resumed, hour(5)) is None
    assert (replace(record, paused=True).from_now(NOON).next_at, resumed.next_at) == (None, hour(6))


@pytest.mark.requirement("RUN-9")
def test_a_jitter_longer_than_the_time_between_instants_loses_none_of_them():
    record = hourly(cron="*/5 * * * *", jitter_s=3_600.0)
    fired: list[datetime] = []
    while len(fired) < 20:
        assert record.next_at is not None
        decision = decide(record, record.next_at)
        assert decision is not None
        fired.append(decision.instant)
        record = submitted(decided(record, decision), "job")
    assert fired == [fired[0] + timedelta(minutes=5 * number) for number in range(20)]


@pytest.mark.requirement("RUN-9")
def test_jitter_depends_on_name_and_instant_alone_and_delays_only():
    spec = replace(HOURLY, jitter_s=600.0)
    delays = [(spec.fires_at(hour(n)) - hour(n)).total_seconds() for n in range(100)]
    assert delays == [(replace(spec).fires_at(hour(n)) - hour(n)).total_seconds() for n in range(100)]
    assert all(0 <= delay < 600 for delay in delays)
    assert len({round(delay) for delay in delays}) > 50
    assert spec.fires_at(hour(1)) != replace(spec, name="other").fires_at(hour(1))
    record = hourly(jitter_s=600.0)
    fires_at = spec.fires_at(hour(1))
    assert record.next_at == fires_at
    assert decide(record, fires_at - timedelta(microseconds=1)) is None
    assert decide(record, fires_at) == InstantDecision(hour(1))


@pytest.mark.requirement("RUN-9")
def test_the_next_instants_are_those_of_the_time_zone():
    record = new_record(ScheduleSpec(name="n", cron="0 3 * * *", tz="Europe/Kyiv", type="t"), "anna", NOON)
    assert [at.hour for at in next_fires(record, datetime(2026, 3, 27, tzinfo=UTC), 4)] == [1, 1, 1, 0]
