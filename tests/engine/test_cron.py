"""Cron expressions are judged when they are written."""

from datetime import UTC, datetime, timedelta, timezone
from itertools import takewhile
from zoneinfo import ZoneInfo

import pytest

from trellis.engine.cron import cron_problem, instants_back, latest_instant, next_instant


@pytest.mark.parametrize(
    "expression",
    [
        "* * * * *",
        "0 6 * * 1-5",
        "*/15 0-6,22 1 jan,JUL sun",
        "59 23 31 12 7",
        "5/10 * * * *",
        "0 0 29 2 *",
        "0 0 31 2 1",
    ],
)
def test_an_expression_that_can_be_due_is_taken(expression: str):
    assert cron_problem(expression) is None


@pytest.mark.parametrize(
    "expression, problem",
    [
        ("", "0 fields"),
        ("* * * *", "4 fields"),
        ("0 0 * * * *", "6 fields"),
        ("@daily", "1 fields"),
        ("60 * * * *", "minute"),
        ("* 24 * * *", "hour"),
        ("* * 0 * *", "day"),
        ("* * * 13 *", "month"),
        ("* * * * 8", "weekday"),
        ("* * * * funday", "weekday"),
        ("9-5 * * * *", "minute"),
        ("*/0 * * * *", "minute"),
        ("*-5 * * * *", "minute"),
        ("1,,2 * * * *", "minute"),
        ("-1 * * * *", "minute"),
        ("0 0 31 2 *", "such a day"),
        ("0 0 31 4,6,9,11 *", "such a day"),
        ("0 0 30 2 */2", "no day fits"),
        ("* " * 200, "characters"),
    ],
)
def test_a_cron_expression_that_is_never_due_is_refused(expression: str, problem: str):
    found = cron_problem(expression)
    assert found is not None
    assert problem in found


SIX = datetime(2026, 3, 2, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    "now, latest, after",
    [
        (SIX, SIX, SIX + timedelta(days=1)),
        (SIX + timedelta(microseconds=1), SIX, SIX + timedelta(days=1)),
        (SIX + timedelta(microseconds=999_999), SIX, SIX + timedelta(days=1)),
        (SIX - timedelta(microseconds=1), SIX - timedelta(days=3), SIX),
        (SIX.astimezone(timezone(timedelta(hours=5))), SIX, SIX + timedelta(days=1)),
    ],
    ids=["on it", "just after", "within its second", "just before, over a weekend", "told in another zone"],
)
@pytest.mark.requirement("RUN-9")
def test_an_instant_belongs_to_the_moments_from_it_to_the_next(now: datetime, latest: datetime, after: datetime):
    assert (latest_instant("0 6 * * 1-5", now), next_instant("0 6 * * 1-5", now)) == (latest, after)


KYIV, NEW_YORK = ZoneInfo("Europe/Kyiv"), ZoneInfo("America/New_York")


@pytest.mark.requirement("RUN-9")
@pytest.mark.parametrize(
    "expression, zone, day, instants",
    [
        # On 8 March 2026 the clocks of New York skip 02:00 to 03:00, on 1 November they show 01:00 to 02:00 twice.
        ("30 2 * * *", NEW_YORK, datetime(2026, 3, 8, 5, tzinfo=UTC), ["07:00"]),
        ("0,30 2 * * *", NEW_YORK, datetime(2026, 3, 8, 5, tzinfo=UTC), ["07:00"]),
        ("*/30 2 * * *", NEW_YORK, datetime(2026, 3, 8, 5, tzinfo=UTC), ["07:00"]),
        ("0 2,3 * * *", NEW_YORK, datetime(2026, 3, 8, 5, tzinfo=UTC), ["07:00"]),
        ("0 */2 * * *", NEW_YORK, datetime(2026, 3, 8, 4, tzinfo=UTC), ["05:00", "07:00", "08:00"]),
        ("30 1 * * *", NEW_YORK, datetime(2026, 11, 1, 4, tzinfo=UTC), ["05:30"]),
        ("*/30 1 * * *", NEW_YORK, datetime(2026, 11, 1, 4, tzinfo=UTC), ["05:00", "05:30"]),
        ("0 * * * *", NEW_YORK, datetime(2026, 11, 1, 4, tzinfo=UTC), ["05:00", "06:00", "07:00", "08:00"]),
        ("0 * * * *", NEW_YORK, datetime(2026, 3, 8, 5, tzinfo=UTC), ["06:00", "07:00", "08:00", "09:00"]),
        # On 29 March 2026 those of Kyiv skip 03:00 to 04:00, on 25 October they show 03:00 to 04:00 twice.
        ("30 3 * * *", KYIV, datetime(2026, 3, 28, 22, tzinfo=UTC), ["01:00"]),
        ("30 3 * * *", KYIV, datetime(2026, 10, 24, 22, tzinfo=UTC), ["00:30"]),
    ],
)
def test_a_skipped_instant_is_right_after_the_gap_and_a_repeated_one_is_the_first(
    expression: str, zone: ZoneInfo, day: datetime, instants: list[str]
):
    until = day + timedelta(hours=4)
    forward, at = [], day
    while (at := next_instant(expression, at, zone)) <= until:
        forward.append(at)
    assert [f"{one:%H:%M}" for one in forward] == instants
    assert list(takewhile(lambda one: one > day, instants_back(expression, until, zone))) == forward[::-1]


@pytest.mark.requirement("RUN-9")
def test_the_hour_that_clocks_show_again_neither_repeats_nor_loses_an_instant():
    first = datetime(2026, 11, 1, 5, 30, tzinfo=UTC)
    second_time = first + timedelta(minutes=45)  # 01:15, for the second time
    assert latest_instant("30 1 * * *", second_time, NEW_YORK) == first
    assert next_instant("30 1 * * *", second_time, NEW_YORK) == first + timedelta(hours=25)
