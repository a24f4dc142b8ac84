"""Cron expressions are judged when they are written."""

import pytest

from trellis.agents.cron import cron_problem


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
        ("* " * 200, "characters"),
    ],
)
def test_an_expression_that_can_never_be_due_is_told(expression: str, problem: str):
    found = cron_problem(expression)
    assert found is not None
    assert problem in found
