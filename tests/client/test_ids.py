"""Ids are random uuids of version 4, never given out twice, not even by a forked child. Those of jobs come as neighbours."""

import multiprocessing
import threading
import uuid

import pytest

from trellis.app.system import NeighbourIds, RandomIds, new_id, new_job_id
from trellis.app.wiring import connect

SOURCES = (new_id, new_job_id)


@pytest.mark.requirement("D48")
@pytest.mark.parametrize("source", SOURCES)
def test_ids_are_uuids_of_version_4_and_all_different(source: RandomIds):
    texts = [source() for _ in range(2_000)]
    ids = [uuid.UUID(text) for text in texts]
    assert {one.version for one in ids} == {4}
    assert {one.variant for one in ids} == {uuid.RFC_4122}
    assert [str(one) for one in ids] == texts
    assert len(set(ids)) == len(ids)


def test_every_digit_that_may_differ_does():
    columns = [set(column) for column in zip(*(RandomIds()() for _ in range(2_000)), strict=True)]
    digits = [len(column) for place, column in enumerate(columns) if place not in {8, 13, 14, 18, 19, 23}]
    assert digits == [16] * 30
    assert columns[19] == set("89ab")


def test_ids_of_jobs_share_twelve_digits_within_a_page_and_none_with_the_next():
    ids = NeighbourIds()
    page = [ids() for _ in range(ids.PAGE_BYTES // 16)]
    later = ids()
    assert len({one[:13] for one in page}) == 1
    assert len({one[15:18] + one[20:] for one in page}) == len(page)
    assert later[:13] != page[0][:13]


def test_the_first_digits_of_other_ids_are_not_shared():
    """Names of runs and entries are made of the first digits of an id."""
    assert len({new_id()[:13] for _ in range(256)}) == 256


async def test_a_client_gives_its_jobs_neighbouring_ids(tmp_path):
    async with connect(f"sqlite:///{tmp_path}/jobs.db") as trellis:
        first, second = await trellis.submit_many("mail.send", [1, 2])
        third = await trellis.submit("mail.send", 3)
    shared = {handle.id[:13] for handle in (first, second, third)}
    assert len(shared) <= 2  # a page may end between them


@pytest.mark.parametrize("kind", [RandomIds, NeighbourIds])
def test_threads_share_the_source_without_sharing_an_id(kind: type[RandomIds]):
    taken: list[str] = []
    ids = kind()
    threads = [threading.Thread(target=lambda: taken.extend([ids() for _ in range(2_000)])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 16_000


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # newer Pythons warn; the danger is what is tested
@pytest.mark.parametrize("source", SOURCES)
def test_a_forked_child_does_not_repeat_its_parents_ids(source: RandomIds):
    source()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(source()))
    child.start()
    theirs = answers.get()
    child.join()
    assert theirs != source()
