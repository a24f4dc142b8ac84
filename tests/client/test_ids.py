"""Ids are random uuids of version 4, never given out twice, not even by a forked child."""

import multiprocessing
import threading
import uuid

import pytest

from trellis.app.system import RandomIds, new_id


@pytest.mark.requirement("D48")
def test_ids_are_uuids_of_version_4_and_all_different():
    made = [uuid.UUID(new_id()) for _ in range(2_000)]
    assert {one.version for one in made} == {4}
    assert {one.variant for one in made} == {uuid.RFC_4122}
    assert len(set(made)) == len(made)


def test_threads_share_the_source_without_sharing_an_id():
    made: list[str] = []
    ids = RandomIds()
    threads = [threading.Thread(target=lambda: made.extend([ids() for _ in range(2_000)])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == len(set(made)) == 16_000


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # newer Pythons warn; the danger is what is tested
def test_a_forked_child_does_not_repeat_its_parents_ids():
    new_id()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(new_id()))
    child.start()
    theirs = answers.get()
    child.join()
    assert theirs != new_id()
