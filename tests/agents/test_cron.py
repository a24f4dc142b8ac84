"""Cron expressions are judged when they are written."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from trellis.agents.cron import cron_problem, latest_instant, next_instant


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
def test_an_expression_that_can_never_be_due_is_told(expression: str, problem: str):
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
