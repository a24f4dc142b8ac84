"""How much a worker asks for."""

from trellis.worker.turns import JobPace, PrefetchPolicy

ROOM = PrefetchPolicy(concurrency=10, prefetch_max=40)


def paced(per_s: float, turn_s: float = 0.0) -> JobPace:
    pace = JobPace()
    pace.per_s, pace.turn_s = per_s, turn_s
    return pace


def wanted(
    per_s: float, *, running: int = 0, ready: int = 0, assigned: int = 0, turn_s: float = 0.0
) -> tuple[int, int]:
    asked = ROOM.wanted(paced(per_s, turn_s), running=running, ready=ready, assigned=assigned)
    return asked.start, asked.prefetch


def test_a_worker_without_a_pace_asks_for_its_free_slots_only():
    assert wanted(0.0) == (10, 0)
    assert wanted(0.0, running=7) == (3, 0)
    assert wanted(0.0, running=10) == (0, 0)


def test_short_jobs_are_taken_and_started_ahead_up_to_the_bound():
    assert wanted(100_000.0) == (50, 0)
    assert wanted(100_000.0, running=10, ready=25) == (15, 0)


def test_long_jobs_are_not_hoarded():
    ten_second_jobs = 1.0
    assert wanted(ten_second_jobs, running=10) == (0, 0)
    assert wanted(ten_second_jobs, running=9) == (1, 0)


def test_jobs_that_begin_soon_but_not_at_once_are_claimed_and_not_started():
    assert wanted(20.0, running=10) == (1, 9)
    assert wanted(20.0, running=10, assigned=10) == (0, 0)


def test_jobs_that_begin_within_two_turns_are_started_in_the_claim():
    assert wanted(200.0, running=10, turn_s=0.01) == (10, 30), "a quick turn changes nothing"
    assert wanted(200.0, running=10, turn_s=0.05) == (20, 20)
    assert wanted(20.0, running=10, turn_s=60.0) == (2, 8), "a slow ledger leaves few jobs started that have not begun"


def test_the_time_of_a_turn_follows_what_turns_take():
    pace = JobPace()
    for _ in range(20):
        pace.note_turn(0.1)
    assert 0.099 < pace.turn_s < 0.1
    pace.note_turn(0.0)
    assert pace.turn_s < 0.051


def test_without_prefetch_nothing_is_held_beyond_the_slots():
    none = PrefetchPolicy(concurrency=10, prefetch_max=0)
    assert none.wanted(paced(100_000.0), running=0, ready=0, assigned=0).total == 10


def test_idle_time_does_not_slow_the_pace():
    pace = JobPace()
    pace.note(0, 0.0, busy=True)
    pace.note(100, 1.0, busy=True)
    busy = pace.per_s
    pace.note(100, 1.1, busy=False)
    pace.note(100, 1_000.0, busy=False)
    pace.note(200, 1_001.0, busy=True)
    assert busy == 50.0
    assert pace.per_s == 75.0
