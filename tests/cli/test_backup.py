"""`trellis backup` and `trellis restore`: an instance is saved while it runs, and made again elsewhere."""

import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import tarfile
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import apsw
import pytest
from dulwich.repo import Repo

from tests.cli.conftest import Answer, Terminal, stored_rows
from tests.servers.ready_python import ready_python
from trellis import connect
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.ledgers import open_ledger
from trellis.ledgers.sqlite.connection import BUSY_TIMEOUT_S
from trellis.ledgers.sqlite.snapshot import damage_of
from trellis.lifecycles import Role
from trellis.operations.archives import ArchiveReader, ArchiveWriter
from trellis.storage.linked_tree import link_tree

VIOLIN = "archivist-violin"
ALTERATIONS = 40


@pytest.fixture
def instance(local: Terminal) -> Terminal:
    """An instance with agents, a run that ended, jobs, objects and memory."""

    async def plant() -> None:
        async with open_instance(Settings.model_validate({}), local.url) as instance:
            await instance.plant()

    asyncio.run(plant())
    local.submit("greet", '"world"', "--id", "first", "--key", "once")
    local.submit("greet", '"later"', "--id", "second", "--delay", "1h")
    assert local("run", VIOLIN, "--watch").code == 0
    return local


@pytest.fixture
def small(local: Terminal, tmp_path: Path) -> Terminal:
    """An instance with a job and some objects."""
    local.submit("greet", '"world"', "--id", "first", "--key", "once")
    for number in range(20):
        file = tmp_path / "objects" / f"folder{number % 3}" / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"number": number, "text": "x" * 37 * number}))
    return local


class Restored:
    """The command line on a folder into which a backup was restored."""

    def __init__(self, terminal: Terminal, folder: Path) -> None:
        self.folder = folder
        self._terminal = terminal

    def __call__(self, *arguments: str) -> Answer:
        return self._terminal(*arguments, ledger=f"sqlite:///{self.folder / 'trellis.db'}")


def files(folder: Path) -> dict[str, bytes]:
    """The files below a folder, without the locks of stores."""
    found = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in found.items() if ".trellis/" not in name and ".lock" not in name}


def without_acts(found: dict[str, bytes]) -> dict[str, bytes]:
    """Objects without the audit records of administrative acts, of which backup and restore make one each."""
    return {name: body for name, body in found.items() if b'"instance.' not in body}


def history(terminal: Callable[..., Answer]) -> tuple[list[dict[str, object]], ...]:
    """What the ledger says about its jobs: rows, events, dead letters. How long a job still waits changes meanwhile."""
    found = [stored_rows(terminal), *(terminal(word, "--json").records for word in ("events", "dlq"))]
    return tuple(
        [{name: value for name, value in one.items() if name != "waits_for"} for one in page] for page in found
    )


def test_backup_restored_elsewhere_is_the_same_instance_and_goes_on(instance: Terminal, tmp_path: Path):
    file, keys, folder = tmp_path / "b.tar", tmp_path / "keys", tmp_path / "elsewhere"
    saved = instance("backup", str(file), "--keys", str(keys), "--reason", "before the move", "--json").record
    before, objects, memory = history(instance), files(tmp_path / "objects"), files(tmp_path / "memory.git")
    restored = Restored(instance, folder)
    answer = restored("restore", str(file), "--keys", str(keys), "--digest", saved["digest"], "--json")
    assert answer.code == 0, answer.err
    assert (answer.record["jobs"], answer.record["files"]) == (len(before[0]), saved["files"])
    assert history(restored) == before
    assert without_acts(files(folder / "objects")) == without_acts(objects)
    assert files(folder / "memory.git") == memory
    assert restored("verify").code == 0
    assert (folder / "trellis.db.key").read_bytes() == (tmp_path / "ledger.db.key").read_bytes()
    assert restored("submit", "greet", '"world"', "--id", "first", "--key", "once").out.strip() == "first"
    assert restored("run", VIOLIN, "--watch").code == 0, "work goes on"
    assert not list(tmp_path.rglob(".trellis-backup-*")), "nothing is left behind"


@pytest.mark.requirement("OBS-1", "D35")
def test_backup_and_restore_are_recorded_with_who_and_why(small: Terminal, tmp_path: Path):
    file, folder = tmp_path / "b.tar", tmp_path / "elsewhere"
    assert small("backup", str(file), "--reason", "weekly").code == 0
    assert Restored(small, folder)("restore", str(file), "--reason", "a lost disk").code == 0

    async def acts(url: str) -> list[tuple[str, str | None]]:
        ledger = await open_ledger(url)
        try:
            return [(act.event, act.cause) for act in await ledger.acts() if act.event.startswith("instance.")]
        finally:
            await ledger.close()

    assert asyncio.run(acts(small.url)) == [("instance.backed_up", "weekly")]
    assert asyncio.run(acts(f"sqlite:///{folder / 'trellis.db'}")) == [("instance.restored", "a lost disk")]


def test_every_altered_or_truncated_backup_is_refused_with_the_place_named(small: Terminal, tmp_path: Path):
    good, bad, folder = tmp_path / "b.tar", tmp_path / "bad.tar", tmp_path / "elsewhere"
    assert small("backup", str(good)).code == 0
    body = good.read_bytes()
    randomness = random.Random(7)
    restored = Restored(small, folder)
    for number in range(ALTERATIONS):
        bad.write_bytes(_altered(body, number, randomness))
        answer = restored("restore", str(bad), "--check")
        assert answer.code == 1, number
        assert "damaged at" in answer.err, (number, answer.err)
    assert restored("restore", str(bad)).code == 1
    assert not folder.exists() or not any(folder.iterdir()), "nothing is restored from a damaged backup"
    assert restored("restore", str(good), "--check").code == 0


def _altered(body: bytes, number: int, randomness: random.Random) -> bytes:
    at = randomness.randrange(len(body))
    match number % 5:
        case 0:
            return body[:at] + bytes([body[at] ^ 1 << randomness.randrange(8)]) + body[at + 1 :]
        case 1:
            return body[:at]
        case 2:
            return body[: at // 512 * 512] + body[at // 512 * 512 + 512 :]
        case 3:
            return body + b"x"
        case _:
            return body[: at // 512 * 512] + bytes(512) + body[at // 512 * 512 :]


def test_damaged_file_of_a_backup_is_named(small: Terminal, tmp_path: Path):
    good, bad = tmp_path / "b.tar", tmp_path / "bad.tar"
    assert small("backup", str(good)).code == 0
    with tarfile.open(good) as archive:
        members = [member for member in archive.getmembers() if member.name.startswith("objects/") and member.size]
    chosen = members[len(members) // 2]
    body = bytearray(good.read_bytes())
    body[chosen.offset_data] ^= 1
    bad.write_bytes(body)
    answer = small("restore", str(bad), "--check")
    assert (answer.code, chosen.name in answer.err) == (1, True), answer.err


def test_exchanged_backup_is_refused_by_its_digest(small: Terminal, tmp_path: Path):
    first, second = tmp_path / "1.tar", tmp_path / "2.tar"
    digest = small("backup", str(first), "--json").record["digest"]
    small.submit("greet", '"more"')
    assert small("backup", str(second)).code == 0
    assert small("restore", str(first), "--check", "--digest", digest).code == 0
    answer = small("restore", str(second), "--check", "--digest", digest)
    assert (answer.code, "its digest" in answer.err) == (1, True)


def test_restore_refuses_a_place_that_is_in_use_and_backup_a_name(small: Terminal, tmp_path: Path):
    file = tmp_path / "b.tar"
    assert small("backup", str(file)).code == 0
    before = files(tmp_path / "objects")
    refused = small("restore", str(file))
    assert (refused.code, "exists already" in refused.err) == (1, True)
    assert files(tmp_path / "objects") == before
    again = small("backup", str(file))
    assert (again.code, "choose another name" in again.err) == (1, True)


@pytest.mark.parametrize("left", ["trellis.db-wal", "nlm.db-shm"])
def test_restore_refuses_a_place_with_the_log_of_another_ledger(left: str, small: Terminal, tmp_path: Path):
    """SQLite would replay it into the restored file."""
    assert small("backup", str(tmp_path / "b.tar")).code == 0
    restored = Restored(small, tmp_path / "elsewhere")
    restored.folder.mkdir()
    (restored.folder / left).write_bytes(b"of another ledger")
    refused = restored("restore", str(tmp_path / "b.tar"))
    assert (refused.code, left in refused.err) == (1, True), refused.err


def test_memory_whose_references_are_packed_is_restored_as_a_repository(instance: Terminal, tmp_path: Path):
    memory, file = tmp_path / "memory.git", tmp_path / "b.tar"
    with Repo(str(memory)) as before:
        refs = before.get_refs()
        before.refs.pack_refs(all=True)
    assert instance("backup", str(file)).code == 0
    restored = Restored(instance, tmp_path / "elsewhere")
    assert restored("restore", str(file)).code == 0
    with Repo(str(restored.folder / "memory.git")) as after:
        assert after.get_refs() == refs


def test_ledger_that_broke_a_rule_before_it_was_saved_is_restored_on_request(small: Terminal, tmp_path: Path):
    ledger = apsw.Connection(str(tmp_path / "ledger.db"))
    for trigger in list(ledger.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'")):
        ledger.execute(f'DROP TRIGGER "{trigger[0]}"')
    ledger.execute("UPDATE trellis_event SET version = 7")
    ledger.close()
    assert small("backup", str(tmp_path / "b.tar")).code == 0
    restored = Restored(small, tmp_path / "elsewhere")
    refused = restored("restore", str(tmp_path / "b.tar"))
    assert (refused.code, "the archive is whole" in refused.err, "--accept-violations" in refused.err) == (
        1,
        True,
        True,
    )
    taken = restored("restore", str(tmp_path / "b.tar"), "--accept-violations", "--json")
    assert (taken.code, taken.record["violations"]) == (0, 1)


def damage(ledger: Path) -> None:
    """Overwrite an index of a ledger as a failing disk does: SQLite opens the file and reads the jobs as before."""
    connection = apsw.Connection(str(ledger))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    page_bytes = connection.execute("PRAGMA page_size").fetchone()
    page = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", ("trellis_claim_age",)).fetchone()
    connection.close()
    assert page_bytes is not None
    assert page is not None
    with ledger.open("r+b") as file:
        file.seek((page[0] - 1) * page_bytes[0])
        file.write(b"\xa5" * page_bytes[0])


def archive_of(ledger: Path, file: Path) -> None:
    """A sealed backup that has this ledger as it is, which programs before this check took."""
    about = file.with_name("about")
    about.write_text(json.dumps({"format": 1, "taken_at": "2026-03-01T10:00:00+00:00"}))
    writer = ArchiveWriter(file)
    writer.add("backup.json", about)
    writer.add("trellis.db", ledger)
    writer.finish()
    writer.close()


@contextlib.contextmanager
def files_of_at_most(size: int) -> Generator[None]:
    """Refuse to let a file of this process grow further, which is like a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_backup_of_a_damaged_ledger_is_refused_and_leaves_nothing_behind(small: Terminal, tmp_path: Path):
    damage(tmp_path / "ledger.db")
    before = {*tmp_path.rglob("*")}
    refused = small("backup", str(tmp_path / "b.tar"))
    assert refused.code == 1
    assert f"{tmp_path / 'ledger.db'} is damaged: " in refused.err, refused.err
    assert "restore the last backup that is whole" in refused.err
    assert {*tmp_path.rglob("*")} == before


@pytest.mark.parametrize("words", [("--check",), ()], ids=["check", "restore"])
def test_backup_with_a_ledger_that_was_damaged_when_it_was_saved_is_refused(
    words: tuple[str, ...], small: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(scratch := tmp_path / "scratch"))
    scratch.mkdir()
    damage(tmp_path / "ledger.db")
    archive_of(tmp_path / "ledger.db", tmp_path / "b.tar")
    restored = Restored(small, tmp_path / "elsewhere")
    refused = restored("restore", str(tmp_path / "b.tar"), *words)
    assert refused.code == 1
    assert "trellis.db was damaged when it was saved: " in refused.err, refused.err
    assert "use an older backup" in refused.err
    assert [*scratch.iterdir()] == []
    assert not restored.folder.exists() or [*restored.folder.iterdir()] == []


def test_backup_without_a_ledger_is_not_called_whole(small: Terminal, tmp_path: Path):
    about = tmp_path / "about"
    about.write_text(json.dumps({"format": 1, "taken_at": "2026-03-01T10:00:00+00:00"}))
    writer = ArchiveWriter(tmp_path / "b.tar")
    writer.add("backup.json", about)
    writer.finish()
    writer.close()
    refused = small("restore", str(tmp_path / "b.tar"), "--check")
    assert (refused.code, "trellis.db: it is missing" in refused.err) == (1, True), refused.err


def test_check_of_a_whole_backup_leaves_no_ledger_in_the_temporary_folder(
    small: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(scratch := tmp_path / "scratch"))
    scratch.mkdir()
    assert small("backup", str(tmp_path / "b.tar")).code == 0
    checked = small("restore", str(tmp_path / "b.tar"), "--check")
    assert (checked.code, "the backup is whole" in checked.out) == (0, True), checked.err
    assert [*scratch.iterdir()] == []


def test_disk_that_fills_while_a_backup_is_unpacked_is_named(small: Terminal, tmp_path: Path):
    assert small("backup", str(tmp_path / "b.tar")).code == 0
    reader = ArchiveReader(
        path=tmp_path / "b.tar",
        place_of=lambda name: tmp_path / "unpacked" if name == "trellis.db" else None,
    )
    with files_of_at_most(64 * 1024), pytest.raises(OSError, match="File too large") as refused:
        reader.read()
    assert refused.value.filename == str(tmp_path / "unpacked")


def test_ledger_that_cannot_be_checked_for_want_of_room_is_not_called_damaged(small: Terminal, tmp_path: Path):
    assert small("backup", str(tmp_path / "b.tar")).code == 0
    copy = tmp_path / "copy.db"
    place_of = {"trellis.db": copy}.get
    ArchiveReader(path=tmp_path / "b.tar", place_of=place_of).read()
    with files_of_at_most(1024), pytest.raises(LedgerError):
        damage_of(copy)
    assert damage_of(copy) is None


def test_restored_folders_are_their_owners_alone(instance: Terminal, tmp_path: Path):
    assert instance("backup", str(tmp_path / "b.tar")).code == 0
    restored = Restored(instance, tmp_path / "new" / "elsewhere")
    before = os.umask(0o022)
    try:
        assert restored("restore", str(tmp_path / "b.tar")).code == 0
    finally:
        os.umask(before)
    folders = [restored.folder.parent, restored.folder, *(path for path in restored.folder.rglob("*") if path.is_dir())]
    assert restored.folder / "objects" / "audit" in folders
    assert [path for path in folders if path.stat().st_mode & 0o777 != 0o700] == []


def test_two_backups_at_once_under_one_name_leave_the_first_complete(small: Terminal, tmp_path: Path):
    file = tmp_path / "b.tar"
    first, second = ArchiveWriter(file), ArchiveWriter(file)
    body = tmp_path / "objects" / "folder0" / "0.json"
    for writer in (first, second):
        writer.add("objects/folder0/0.json", body)
    digest = first.finish().digest
    with pytest.raises(FileExistsError):
        second.finish()
    first.close()
    second.close()
    assert ArchiveReader(path=file, place_of=lambda _: None).read().digest == digest
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_backup_that_holds_writers_for_too_long_is_given_up(
    small: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trellis.operations.backup.HOLD_S_MAX", 0.0)
    answer = small("backup", str(tmp_path / "b.tar"))
    assert (answer.code, "writers had to wait" in answer.err) == (1, True), answer.err
    assert small.submit("greet", '"after"'), "writers go on"
    assert list(tmp_path.glob("*.tar")) + list(tmp_path.glob(".*")) == []


def test_backup_names_what_it_cannot_save(local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    local.submit("greet", '"world"')
    monkeypatch.setenv("TRELLIS_OBJECTS", "s3://bucket/here")
    answer = local("backup", str(tmp_path / "b.tar"))
    assert (answer.code, "docs/how-to/back-up.md" in answer.err) == (2, True), answer.err
    assert not (tmp_path / "b.tar").exists()


@contextlib.contextmanager
def writing(url: str, folder: Path) -> Generator[list[int]]:
    """A second writer: for each number it writes an object first, and then submits the job that names it."""
    stop, written, begun = threading.Event(), list[int](), threading.Event()

    async def write() -> None:
        ledger = await open_ledger(url)
        try:
            while not stop.is_set():
                number = len(written)
                scratch = folder / f".trellis-{number}"
                scratch.write_text(str(number))
                scratch.rename(folder / f"{number}.json")
                job = NewJob(job_id=JobId(f"w-{number}"), type="noted")
                await ledger.submit(Actor(role=Role.SUBMITTER, name="writer"), [job])
                written.append(number)
                begun.set()
        finally:
            await ledger.close()

    thread = threading.Thread(target=lambda: asyncio.run(write()))
    thread.start()
    assert begun.wait(30)
    try:
        yield written
    finally:
        stop.set()
        thread.join()


def test_backup_under_load_has_every_object_that_its_ledger_names(local: Terminal, tmp_path: Path):
    local.submit("greet", '"world"')
    folder = tmp_path / "objects" / "noted"
    folder.mkdir(parents=True)
    with writing(local.url, folder) as written:
        for number in range(3):
            began = len(written)
            assert local("backup", str(tmp_path / f"{number}.tar")).code == 0
            assert len(written) > began, "the writer went on meanwhile"
    for number in range(3):
        restored = Restored(local, tmp_path / f"elsewhere{number}")
        assert restored("restore", str(tmp_path / f"{number}.tar")).code == 0
        jobs = {job["job_id"] for job in restored("jobs", "--type", "noted", "--limit", "1000", "--json").records}
        there = {f"w-{file.stem}" for file in (restored.folder / "objects" / "noted").glob("*.json")}
        assert jobs <= there, "an object is there before the job that names it"
        assert len(there - jobs) <= 1, "at most one is on its way, as after a crash"


def test_linked_tree_follows_replaced_added_and_removed_files(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a" / "b").mkdir(parents=True)
    for name in ("a/kept", "a/replaced", "a/b/removed"):
        (source / name).write_text(name)
    assert link_tree(source, target) == 3
    assert link_tree(source, target) == 0
    (source / "new").write_text("2")
    (source / "new").rename(source / "a" / "replaced")
    (source / "a" / "b" / "removed").unlink()
    (source / "a" / "b").rmdir()
    (source / "c").write_text("3")
    assert link_tree(source, target) == 3
    assert files(target) == files(source)
    (source / "c").unlink()
    assert (target / "c").read_text() == "3", "what is kept stays"


def test_backup_is_readable_by_its_owner_alone_and_by_any_tar_program(instance: Terminal, tmp_path: Path):
    file = tmp_path / "b.tar"
    assert instance("backup", str(file)).code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        names = archive.getnames()
        about = archive.extractfile("backup.json")
        assert about is not None
        assert json.load(about)["format"] == 1
    assert names[-2:] == ["manifest.jsonl", "seal.json"]
    assert {"trellis.db", "memory.git/HEAD"} <= {*names}


def test_backup_that_cannot_be_read_or_written_is_refused_with_the_reason(small: Terminal, tmp_path: Path):
    missing = small("restore", str(tmp_path / "missing.tar"), "--check")
    assert (missing.code, "No such file" in missing.err) == (1, True), missing.err
    nowhere = small("backup", str(tmp_path / "no" / "folder" / "b.tar"))
    assert (nowhere.code, "No such file" in nowhere.err) == (1, True), nowhere.err
    assert not list(tmp_path.rglob(".trellis-backup-*")), "nothing is left behind"


APP = """
from trellis import App, Context

app = App()

@app.job("count", lease_s=30)
async def count(ctx: Context, payload: int) -> int:
    ctx.progress(0.5)
    return payload
"""
BACKUPS = 5


@contextlib.contextmanager
def processes(folder: Path, *commands: tuple[str, ...]) -> Generator[None]:
    """Trellis processes in a folder, killed at the end."""
    environment = {**os.environ, "TRELLIS_PORT": "0", "TRELLIS_NLM_PORT": "0"}
    started = [
        subprocess.Popen(
            [ready_python(), "-m", "trellis", *words], cwd=folder, env=environment, stdout=subprocess.DEVNULL
        )
        for words in commands
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


async def submit_until(url: str, stop: threading.Event, submitted: list[int]) -> None:
    """Submit jobs one after another, and begin runs, until told to stop."""
    async with connect(url) as trellis:
        while not stop.is_set():
            number = len(submitted)
            await trellis.submit_many("count", range(number, number + 20))
            submitted += range(number, number + 20)
            await asyncio.sleep(0.02)


async def all_ended(url: str) -> None:
    """Wait until no job is left to run."""
    ledger = await open_ledger(url)
    try:
        async with asyncio.timeout(120):
            while any(  # noqa: ASYNC110 - another process changes what is looked at
                queue.ready + queue.scheduled + queue.blocked + queue.held
                for queue in await ledger.queues()
                if queue.type in {"count", "agent-run"}
            ):
                await asyncio.sleep(0.2)
    finally:
        await ledger.close()


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_backups_of_a_busy_instance_restore_to_instances_that_finish_the_work(instance: Terminal, tmp_path: Path):
    (tmp_path / "app.py").write_text(APP)
    stop, submitted = threading.Event(), list[int]()
    up, worker = ("up", "--ledger", instance.url), ("worker", "app:app", "--ledger", instance.url)
    with processes(tmp_path, up, worker):
        load = threading.Thread(target=lambda: asyncio.run(submit_until(instance.url, stop, submitted)))
        load.start()
        held = list[float]()
        for number in range(BACKUPS):
            assert instance("run", VIOLIN).code == 0
            began = len(submitted)
            while len(submitted) < began + 200:
                stop.wait(0.05)
            taken = instance("backup", str(tmp_path / f"{number}.tar"), "--json")
            assert taken.code == 0, taken.err
            held.append(taken.record["held_ms"])
        stop.set()
        load.join()
    assert max(held) < BUSY_TIMEOUT_S * 1000 / 2, "no writer gave up"
    for number in range(BACKUPS):
        folder = tmp_path / f"elsewhere{number}"
        restored = Restored(instance, folder)
        done = restored("restore", str(tmp_path / f"{number}.tar"))
        assert done.code == 0, done.err
        (folder / "app.py").write_text(APP)
        with processes(folder, ("up", "--data", "."), ("worker", "app:app", "--data", ".")):
            asyncio.run(all_ended(f"sqlite:///{folder / 'trellis.db'}"))
        assert restored("verify").code == 0
        jobs = restored("jobs", "--limit", "100000", "--json").records
        counted = [job for job in jobs if job["type"] == "count"]
        assert {job["status"] for job in counted} == {"succeeded"}
        runs = restored("runs", "--limit", "1000", "--json").records
        assert len(runs) >= number + 1
        assert {run["status"] for run in runs} <= {"completed", "archived"}
