"""The benchmark itself, with a few jobs: it runs, it ends, and what it takes away from a database was there."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from bench import machine, measures, preload_file, processes
from bench.groups import NO_STORE, RUN_SUBJECTS, SMALL, _run_task, _workflow_task, sqlite_drains
from bench.guards import GUARDS, GuardNotFound, drop_batch_row
from bench.marks import BLOCK, Marker, Marks
from bench.measures import drain, drain_file, latencies_ms, reports, submit_rate
from bench.preload import PreloadBroken, preload
from bench.processes import ChildFailed, ask
from bench.published import Folder
from bench.stores import Stores
from bench.subjects.runs import names
from bench.task import Task
from tests.servers.postgres import PostgresServer
from tests.servers.ready_python import ready_python
from trellis.documents import ids

TASK = Task(url="", jobs=60, batch=20, concurrency=20)


@pytest.fixture(autouse=True)
def forked_children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are forked from a ready process, except in tests of what an interpreter of its own does."""
    if "started_children" not in request.fixturenames:
        monkeypatch.setattr(processes, "PYTHON", ready_python())


@pytest.fixture
def started_children() -> None:
    """Children are started as `make bench` starts them."""


@pytest.fixture(scope="module")
def stores(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """Stores on the suite's own server."""
    made = Stores(postgres_server, tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("marks"))
    yield made
    made.close()


@pytest.mark.parametrize("subject", ["trellis", pytest.param("ledger", marks=pytest.mark.prove), "floor_postgres"])
def test_postgres_is_drained(stores: Stores, subject: str):
    drained = drain(stores, subject, TASK)
    assert drained.per_s > 0
    assert drained.wal_bytes > 0


def test_every_mark_is_read_once_also_behind_the_first_block(tmp_path: Path):
    marker, marks = Marker(tmp_path), Marks(tmp_path)
    for number in range(1, BLOCK + 2):
        marker.mark(number)
    assert marks.poll() == BLOCK + 1
    marker.mark(BLOCK + 2)
    assert marks.poll() == BLOCK + 2
    assert [mark.sent_ns for mark in marks.records] == list(range(1, BLOCK + 3))
    assert all(mark.began_ns for mark in marks.records)


@pytest.mark.parametrize("subject", ["trellis", pytest.param("ledger", marks=pytest.mark.prove)])
def test_sqlite_is_drained(stores: Stores, subject: str):
    assert drain_file(stores, subject, TASK).per_s > 0


@pytest.mark.usefixtures("started_children")
def test_sqlite_floor_is_drained_by_processes_as_the_benchmark_starts_them(stores: Stores):
    assert drain_file(stores, "floor_sqlite", TASK).per_s > 0


@pytest.mark.parametrize("lock", ["begin", "begin exclusive"])
def test_jobs_that_never_settle_are_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str):
    monkeypatch.setattr(measures, "DRAIN_TIMEOUT_S", 0.0)
    path = tmp_path / "peer.db"
    writer = apsw.Connection(str(path))
    writer.execute("create table workflow_status (status text); insert into workflow_status values ('PENDING')")
    writer.execute(lock)
    with pytest.raises(ChildFailed, match="not settled"):
        measures._when_settled(path, "peer_dbos")
    writer.close()


@pytest.mark.parametrize("handler", ["join", pytest.param("steps", marks=pytest.mark.prove)])
def test_workflows_are_taken_to_their_end(stores: Stores, handler: str):
    assert drain(stores, "workflows", _workflow_task("workflows", handler, 2)).per_s > 0


def test_runs_are_taken_to_their_end_by_two_processes(stores: Stores):
    task, shown = _run_task(stores, SMALL, "runs")
    assert shown is None
    assert drain(stores, RUN_SUBJECTS["runs"], task, workers=2).per_s > 0


@pytest.mark.prove
def test_published_runs_count_when_readers_see_them_completed(stores: Stores):
    task, shown = _run_task(stores, SMALL, "published")
    assert shown is not None
    assert drain_file(stores, RUN_SUBJECTS["published"], task, shown=shown).per_s > 0
    shown()  # nothing more to wait for: every status.json says so


def test_a_run_that_failed_for_its_readers_is_no_figure(stores: Stores):
    folder = Folder(stores.objects(), runs=1)
    ((slug, run_id),) = names(1)
    status = folder.path / ids.status_key(slug, run_id)
    status.parent.mkdir(parents=True)
    status.write_text('{"status": "failed"}', encoding="utf-8")
    with pytest.raises(ChildFailed, match=f"{run_id} is failed"):
        folder.wait()


def test_benchmark_jobs_end_with_each_guard_removed(stores: Stores):
    for guard in GUARDS[1:-1]:
        database = stores.database("ledger")
        guard.remove(database)
        database.drop()
    assert drain(stores, "ledger", TASK, alter=GUARDS[-1].remove).per_s > 0


def test_a_guard_that_is_not_there_is_not_measured(stores: Stores):
    database = stores.database("ledger")
    drop_batch_row(database)
    with pytest.raises(GuardNotFound):
        drop_batch_row(database)
    database.drop()


def test_preloaded_jobs_verify(stores: Stores):
    database = stores.database("trellis")
    preload(database, ready=30, finished=30)
    assert database.run("select count(*) from trellis.event") == 30 + 4 * 30
    database.drop()


def test_a_preload_of_a_file_that_lies_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copies = {**preload_file.COPIES, "trellis_event": {"seq": "seq + (n - 1) * 4", "job": "n", "epoch": "0"}}
    monkeypatch.setattr(preload_file, "COPIES", copies)
    with pytest.raises(PreloadBroken):
        preload_file.preload_file(tmp_path / "ledger.db", ready=5, finished=5)


def test_a_preload_that_lies_is_found(stores: Stores, monkeypatch: pytest.MonkeyPatch):
    from bench import preload as module

    honest = module._numbers
    monkeypatch.setattr(module, "_numbers", lambda ready, finished: {**honest(ready, finished), "succeeded": 1})
    database = stores.database("trellis")
    with pytest.raises(PreloadBroken):
        preload(database, ready=5, finished=5)
    database.drop()


def test_a_child_that_fails_says_why(stores: Stores):
    with pytest.raises(ChildFailed, match="CantOpenError"):
        ask("floor_sqlite", "setup", replace(TASK, url="/nonexistent/folder/file.db").as_dict(), stores.folder)


def test_a_group_names_its_figures(stores: Stores):
    figures = next(sqlite_drains(stores, SMALL))
    assert set(figures) == {"drain1.sqlite.trellis", "cpu1.sqlite.trellis"}


REQUESTS = 128
"""More work than one tick of the system: the processor time of a process that is running is counted at ticks."""
GATEWAY_TASKS = {
    "status": Task(url="", jobs=REQUESTS, concurrency=4),
    "not_modified": Task(url="", jobs=REQUESTS, concurrency=4),
    "submits": Task(url="", jobs=REQUESTS, concurrency=4),
    "fan_out": Task(url="", jobs=5, concurrency=20, per_s=50.0),
}


@pytest.mark.parametrize(
    "store, subject",
    [(NO_STORE, "floor_gateway"), ("sqlite", "gateway"), pytest.param("pg", "gateway", marks=pytest.mark.prove)],
)
def test_gateway_and_a_bare_server_answer_the_same_requests(stores: Stores, store: str, subject: str):
    figures = dict(reports(stores, store, subject, GATEWAY_TASKS))
    assert figures.keys() == GATEWAY_TASKS.keys()
    for action in ("status", "not_modified", "submits"):
        assert figures[action]["per_s"] > 0
        assert figures[action]["cpu_us"] > 0
    assert 0 < figures["fan_out"]["p50_ms"] <= figures["fan_out"]["p99_ms"]


@pytest.mark.prove
def test_jobs_go_round_over_the_bus_with_either_worker(stores: Stores):
    tasks = {"sdk": Task(url="", jobs=4, concurrency=2), "ours": Task(url="", jobs=4, concurrency=2)}
    for _, figures in reports(stores, "sqlite", "bus", tasks):
        assert figures["per_s"] > 0
        assert 0 < figures["dispatch_p50_ms"] < figures["p99_ms"]


def test_plain_requests_go_round_over_nats(stores: Stores):
    ((_, figures),) = reports(stores, NO_STORE, "floor_nats", {"many": Task(url="", jobs=20, concurrency=4)})
    assert figures["per_s"] > 0
    assert figures["cpu_ms"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]


def test_latency_and_submits_are_measured_on_a_file(stores: Stores):
    task = Task(url="", jobs=3, per_s=200.0, concurrency=4, batch=10)
    waits, worker_cpu_us = latencies_ms(stores, "sqlite", "trellis", task)
    assert all(wait > 0 for wait in waits)
    assert worker_cpu_us >= 0
    per_s, client_cpu_us = submit_rate(stores, "sqlite", "floor_sqlite", "bulk", task)
    assert per_s > 0
    assert client_cpu_us >= 0


@pytest.mark.parametrize(
    "kind, journal, says",
    [
        ("ext4", "dm-3-8", " with a journal"),
        ("ext4", "dm-30-8", " without a journal"),
        ("xfs", "dm-3-8", ""),
    ],
)
def test_a_run_says_whether_its_disk_has_a_journal(tmp_path: Path, kind: str, journal: str, says: str) -> None:
    number = tmp_path.stat().st_dev
    names_of_numbers = tmp_path / "sys/dev/block"
    names_of_numbers.mkdir(parents=True)
    (tmp_path / "dm-3").mkdir()
    (names_of_numbers / f"{os.major(number)}:{os.minor(number)}").symlink_to(tmp_path / "dm-3")
    (tmp_path / "proc/fs/jbd2" / journal).mkdir(parents=True)
    assert machine._journal(tmp_path, kind, root=tmp_path) == says
