"""Where a claimer of PostgreSQL's ledger begins its search, and how long it may pass over an older job."""

from trellis.ledgers.postgres.turn import LowWaterMarks

LIFECYCLE, TYPE, PRIORITY, POSITION = "leased-job", 7, 1, 40
QUEUE = (LIFECYCLE, TYPE, PRIORITY)


def _after_full_claim(at: float) -> LowWaterMarks:
    """The marks of a claimer that asked for one job and took the one at POSITION."""
    marks = LowWaterMarks()
    lows = marks.lows(LIFECYCLE, [TYPE], [PRIORITY], at)
    marks.note(LIFECYCLE, {"ids": [1], "types": [TYPE], "prios": [PRIORITY], "places": [POSITION]}, 1, lows)
    return marks


def test_claimer_searches_from_the_beginning_half_a_second_after_it_last_did():
    marks = _after_full_claim(at=100.0)
    assert marks.lows(LIFECYCLE, [TYPE], [PRIORITY], 100.5) == {QUEUE: POSITION}
    assert marks.lows(LIFECYCLE, [TYPE], [PRIORITY], 100.51) == {QUEUE: 0}


def test_claimer_searches_from_the_beginning_after_a_claim_that_found_nothing():
    marks = _after_full_claim(at=100.0)
    marks.note(LIFECYCLE, None, 1, marks.lows(LIFECYCLE, [TYPE + 1], [PRIORITY], 100.1))
    assert marks.lows(LIFECYCLE, [TYPE], [PRIORITY], 100.2) == {QUEUE: 0}


def test_a_claim_of_one_lifecycle_sets_no_mark_for_another_with_the_same_type():
    marks = _after_full_claim(at=100.0)
    assert marks.lows("bus-job", [TYPE], [PRIORITY], 100.1) == {("bus-job", TYPE, PRIORITY): 0}
