"""Where a claimer of PostgreSQL's ledger begins its search, and how long it may pass over an older job."""

from trellis.ledgers.postgres.turn import LowWaterMarks

TYPE, PRIORITY, POSITION = 7, 1, 40
PLACE = (TYPE, PRIORITY)


def _after_full_claim(at: float) -> LowWaterMarks:
    """The marks of a claimer that asked for one job and took the one at POSITION."""
    marks = LowWaterMarks()
    lows = marks.lows([TYPE], [PRIORITY], at)
    marks.note({"ids": [1], "types": [TYPE], "prios": [PRIORITY], "places": [POSITION]}, 1, lows)
    return marks


def test_claimer_searches_from_the_beginning_half_a_second_after_it_last_did():
    marks = _after_full_claim(at=100.0)
    assert marks.lows([TYPE], [PRIORITY], 100.5) == {PLACE: POSITION}
    assert marks.lows([TYPE], [PRIORITY], 100.51) == {PLACE: 0}


def test_claimer_searches_from_the_beginning_after_a_claim_that_found_nothing():
    marks = _after_full_claim(at=100.0)
    marks.note(None, 1, marks.lows([TYPE + 1], [PRIORITY], 100.1))
    assert marks.lows([TYPE], [PRIORITY], 100.2) == {PLACE: 0}
