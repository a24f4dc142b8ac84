"""Jobs that differ only in id and payload: however they reach the file, it holds the same."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ledgers.sqlite.people import ADMIN, SUBMITTER, new_job
from tests.ledgers.sqlite.shell import Shell
from trellis.engine.errors import Refused
from trellis.engine.jobs import AlikeJobs, ChosenOptions, JobId, NewJob, Priority, Submitted, TypeOptions
from trellis.ledgers.sqlite import lanes
from trellis.ledgers.sqlite import submit as submits
from trellis.ledgers.sqlite.ledger import SqliteLedger

PAYLOADS = [b"1", b'"\x00"', '"ü€"'.encode(), b"{}" * 4_000, b"null"]
Reopen = Callable[[], Awaitable[SqliteLedger]]


def alike(common: NewJob, ids: Sequence[str], payloads: Sequence[bytes] | None = None) -> AlikeJobs:
    return AlikeJobs(common, [JobId(one) for one in ids], list(payloads or [b"1"] * len(ids)))


@pytest.fixture(params=[True, False], ids=["by arrays", "one by one"])
def arrays(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> bool:
    """A library that reads arrays, and one that does not."""
    monkeypatch.setattr(lanes, "HAS_ARRAYS", request.param)
    return request.param


@pytest.mark.usefixtures("arrays")
@pytest.mark.parametrize(
    "ids", [["a-1", "b-2", "c-3", "d-4", "e-5"], ["a", "bb", "c", "d", "e"], ["ä", "ö", "ü", "é", "ß"]]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "priority": Priority.CRITICAL,
            "max_attempts": 7,
            "trace": "t",
            "parent_id": JobId("p"),
            "correlation_id": "x",
        },
        {"correlation_id": "a"},
    ],
)
@pytest.mark.parametrize("bytes_max", [submits.ARRAY_BYTES_MAX, 8_000])
async def test_many_jobs_are_stored_as_single_ones_are(
    reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch, ids: list[str], options: dict, bytes_max: int
):
    monkeypatch.setattr(submits, "ARRAY_BYTES_MAX", bytes_max)
    ledger, common = await reopen(), new_job(**options)
    answers = await ledger.submit(SUBMITTER, alike(common, ids, PAYLOADS))
    assert answers == [Submitted(job_id=JobId(one), created=True) for one in ids]
    together = Shell(path).dump()
    await ledger.close()
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    ledger = await reopen()
    for one, payload in zip(ids, PAYLOADS, strict=True):
        await ledger.submit(SUBMITTER, [replace(common, job_id=JobId(one), payload=payload)])
    assert together == Shell(path).dump()


async def test_an_id_that_exists_sends_many_jobs_the_general_way(ledger: SqliteLedger, arrays: bool):
    common = new_job(fingerprint=b"f")
    await ledger.submit(SUBMITTER, alike(common, ["a-1"]))
    answers = await ledger.submit(SUBMITTER, alike(common, ["a-0", "a-1"]))
    assert answers == [Submitted(job_id=JobId("a-0"), created=True), Submitted(job_id=JobId("a-1"), created=False)]
    assert await ledger.feed_end() == f"{2:016d}"


async def test_options_that_a_type_declares_later_hold_for_the_same_request(reopen: Reopen):
    ledger, other = await reopen(), await reopen()
    common = new_job(chosen=ChosenOptions.ALL & ~ChosenOptions.PRIORITY)
    await ledger.submit(SUBMITTER, alike(common, ["a"]))
    for priority in (Priority.CRITICAL, Priority.INTERACTIVE):
        await other.declare_types(ADMIN, [TypeOptions(type=common.type, priority=priority)])
        for ids in ([f"b-{priority}"], [f"c-{priority}", f"d-{priority}"]):
            await ledger.submit(SUBMITTER, alike(common, ids))
            jobs = [await ledger.job(JobId(one)) for one in ids]
            assert [job and job.priority for job in jobs] == [priority] * len(ids)


async def test_a_request_whose_type_was_rolled_back_makes_the_type_again(ledger: SqliteLedger):
    """What a submit keeps for the next one must not outlive the numbers in it."""
    common = new_job(type="brand-new")
    shell = ledger.writer._connection
    shell.execute("CREATE TEMP TRIGGER no BEFORE INSERT ON trellis_event BEGIN SELECT raise(ABORT, 'not now'); END")
    with pytest.raises(Refused, match="not now"):
        await ledger.submit(SUBMITTER, alike(common, ["a"]))
    shell.execute("DROP TRIGGER no")
    await ledger.submit(SUBMITTER, alike(common, ["a"]))
    job = await ledger.job(JobId("a"))
    assert job is not None
    assert job.type == "brand-new"
