"""Every course of a small leased-job engine is tried; each promise, when broken, is seen to be broken."""

import pytest

from tests.lifecycles.model import Bounds, Rules, search

KEYED = Bounds(key_limit=1)
FREE = Bounds(key_limit=2)
PROVEN = [
    Bounds(attempts=3, key_limit=1),
    Bounds(attempts=3, key_limit=2),
    Bounds(workers=3, key_limit=1),
    Bounds(workers=3, key_limit=2),
]
EVERYTHING = {
    "claim",
    "claim-unheard",
    "claim-again",
    "start",
    "start-again",
    "complete",
    "complete-again",
    "retry",
    "retry-again",
    "reject",
    "reject-again",
    "expire",
    "exhaust",
    "cancel",
    "crash",
}


@pytest.mark.requirement("D1", "DJ-3")
@pytest.mark.parametrize("bounds", [KEYED, FREE], ids=["one key", "no key"])
def test_no_course_of_two_jobs_and_two_workers_breaks_a_promise(bounds: Bounds):
    found = search(Rules(), bounds)
    assert (found.problem, found.course) == (None, ())
    assert found.seen == EVERYTHING
    assert found.worlds > 4_000


@pytest.mark.prove
@pytest.mark.requirement("D1", "DJ-3")
@pytest.mark.parametrize("bounds", PROVEN, ids=str)
def test_no_course_of_a_larger_world_breaks_a_promise(bounds: Bounds):
    found = search(Rules(), bounds)
    assert (found.problem, found.course) == (None, ())
    assert found.worlds > 15_000


@pytest.mark.parametrize(
    "broken, problem",
    [
        (Rules(fenced=False), "two holders wrote in one epoch"),
        (Rules(revoking_raises_epoch=False), "two holders wrote in one epoch"),
        (Rules(event_in_transaction=False), "events are not transitions"),
        (Rules(repeat_is_recognised=False), "the answer Answer(applied=False) is not what happened"),
        (Rules(repeat_is_harmless=False), "an ended job changed"),
        (Rules(key_checked_in_transaction=False), "more jobs are held than the key allows"),
        (Rules(attempt_opened=False), "progress fell"),
    ],
    ids=["no fence", "no new epoch", "event apart", "unknown repeat", "second effect", "look then claim", "no attempt"],
)
def test_a_broken_promise_is_seen(broken: Rules, problem: str):
    found = search(broken, KEYED)
    assert found.problem == problem
    assert len(found.course) <= 5, "the shortest course is found first"
