"""Backup and restore of an embedded instance: SQLite ledgers, the folder of objects, and the repository of memory.

A backup is the state at one instant, as a crash at that instant would have left it: every writer of the ledgers is
held off while the files of objects and memory are kept by hard links. So an instance goes on from a backup as it goes
on after a crash.
Most files are linked before that instant, so writers wait only while folders are compared: about 6 ms for 1,000
objects. Copying into the archive comes after it. A ledger that SQLite finds damaged is not saved: whoever removes old
backups by their number would keep only such ones.

Keys are not in a backup: whoever has a backup can read everything, but cannot act in the name of the instance.
"""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from trellis.engine.admin_acts import NewAct
from trellis.engine.closing import closing
from trellis.engine.errors import Refused, TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.private_files import make_private_folder, sync_folder
from trellis.engine.verify import VerifyReport, verify
from trellis.ledgers import open_ledger
from trellis.ledgers.moving.source import read_mark
from trellis.ledgers.sqlite.connection import BUSY_TIMEOUT_S
from trellis.ledgers.sqlite.snapshot import SqliteSnapshot, damage_of
from trellis.operations.archives import ArchiveReader, ArchiveReport, ArchiveWriter, BackupDamaged, is_empty
from trellis.storage.linked_tree import link_tree

FORMAT = 1
ABOUT = "backup.json"
LEDGER = "trellis.db"
NLM_LEDGER = "nlm.db"
OBJECTS = "objects"
MEMORY = "memory.git"
HOLD_S_MAX = 5.0
"""How long writers may be held off; half of what they wait before they report the ledger as unavailable."""
BACKED_UP = "instance.backed_up"
RESTORED = "instance.restored"
SUBJECT = "instance"
SCRATCH = ".trellis-backup-"
SQLITE_SUFFIXES = ("", "-wal", "-shm", "-journal")
"""What belongs to an SQLite file: a log that was left behind would be replayed into a restored file."""
MEMORY_FOLDERS = ("refs/heads", "objects/info", "objects/pack")
"""Folders that a repository needs, also when they are empty, which an archive of files does not show."""

Progress = Callable[[str, int], None]


class BackupTooSlow(TrellisError):
    """The backup was given up: writers had to wait more than {limit_s:g} s. Take it when less is written, or stop them."""


class BackupRefused(Refused):
    """The backup {file} was not {done}: {reason}."""

    code = "VALIDATION_FAILED"


class SavedLedgerDamaged(BackupDamaged):
    """In the backup {file}, {place} was damaged when it was saved: {reason}. Nothing was restored; use an older backup."""


@contextlib.contextmanager
def _reported(file: Path, done: str) -> Generator[None]:
    """Turn an error of the operating system into one that says what was not done."""
    try:
        yield
    except OSError as error:
        raise BackupRefused(file=file, done=done, reason=f"{error.strerror}: {error.filename or file}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class InstancePlaces:
    """Where the parts of an embedded instance are. The NLM backend's ledger may not exist."""

    ledger: Path
    nlm_ledger: Path
    objects: Path
    memory: Path | None
    """None if the memory is among the objects."""

    @property
    def parts(self) -> dict[str, Path]:
        """The parts by their name in a backup. The ledger is the last one, because it makes the others an instance."""
        memory = {} if self.memory is None else {MEMORY: self.memory}
        return {OBJECTS: self.objects, **memory, NLM_LEDGER: self.nlm_ledger, LEDGER: self.ledger}


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupReport(ArchiveReport):
    """A backup that was taken. `held_ms` is how long writers had to wait."""

    file: str
    taken_at: datetime
    held_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport(ArchiveReport):
    """A backup that was checked or restored. The counts are those of `verify`; None if it was only checked."""

    taken_at: datetime
    jobs: int | None = None
    events: int | None = None
    violations: int | None = None
    moved_to: str | None = None
    """The ledger to which this instance was moving, or had moved, when it was saved. It is closed then."""


async def take_backup(
    places: InstancePlaces, file: Path, actor: Actor, *, version: str, reason: str | None, on_progress: Progress
) -> BackupReport:
    """Save the instance into a new file while it runs, and record it as an administrative act.

    A damaged ledger is refused. Raises BackupRefused, BackupTooSlow and LedgerError. Nothing is left behind by a
    backup that fails.
    """
    with _reported(file, "taken"):
        report = await asyncio.to_thread(_take, places, file, version, on_progress)
    if read_mark(f"sqlite:///{places.ledger}") is not None:
        return report  # a ledger that is closed by a move records nothing more
    async with closing(await open_ledger(f"sqlite:///{places.ledger}")) as ledger:
        facts = {"digest": report.digest, "files": report.files, "bytes": report.bytes}
        act = NewAct(event=BACKED_UP, subject=SUBJECT, target=file.name, cause=reason, facts=facts)
        await ledger.record_act(actor, act)
    return report


def _take(places: InstancePlaces, file: Path, version: str, on_progress: Progress) -> BackupReport:
    if file.exists():
        raise BackupRefused(file=file, done="taken", reason="the file exists already; choose another name")
    with contextlib.ExitStack() as cleanup:
        kept = _scratch_beside(cleanup, places.objects)
        memory = None if places.memory is None else _scratch_beside(cleanup, places.memory)
        ledgers = {NLM_LEDGER: places.nlm_ledger, LEDGER: places.ledger}
        snapshots = {
            name: cleanup.enter_context(contextlib.closing(SqliteSnapshot(path)))
            for name, path in ledgers.items()
            if path.exists()
        }

        def link(check: Callable[[], None]) -> None:
            link_objects(places.objects, kept / OBJECTS, check)
            if places.memory is not None and memory is not None:
                link_memory(places.memory, memory / MEMORY, check)

        on_progress("files kept", 0)
        link(lambda: None)
        with _held(list(snapshots.values())) as held:
            link(held.check)
            taken_at = datetime.now(UTC)
        writer = cleanup.enter_context(contextlib.closing(ArchiveWriter(file)))
        work = _scratch_beside(cleanup, file)
        about = work / ABOUT
        about.write_text(
            json.dumps({"format": FORMAT, "taken_at": taken_at.isoformat(), "version": version, "parts": [*snapshots]})
        )
        writer.add(ABOUT, about)
        for number, (name, snapshot) in enumerate(snapshots.items()):
            snapshot.copy_to(work / name, lambda pages: on_progress("pages of the ledger copied", pages))
            snapshot.close()
            on_progress("ledgers checked", number)
            if (damage := damage_of(work / name)) is not None:
                cure = "restore the last backup that is whole" if name == LEDGER else "move it away to save the rest"
                why = f"{ledgers[name]} is damaged: {damage}; keep it, and {cure}"
                raise BackupRefused(file=file, done="taken", reason=why)
            writer.add(name, work / name)
            (work / name).unlink()
        for name, folder in ((MEMORY, memory), (OBJECTS, kept)):
            if folder is None:
                continue
            writer.add_tree(name, folder / name, lambda files: on_progress("files saved", files))
        done = writer.finish()
    return BackupReport(**asdict(done), file=str(file), taken_at=taken_at, held_ms=held.took_s * 1000)


def link_objects(source: Path, target: Path, check: Callable[[], None]) -> int:
    """Keep the objects of a local store. Scratch files and locks are left out.

    Of a memory among them, `head.json` is kept before the folder `packs`, by the order of names: what it names is there.
    """
    if not source.is_dir():
        target.mkdir(exist_ok=True)
        return 0
    return link_tree(source, target, skip=lambda name: name == ".trellis", check=check)


def link_memory(source: Path, target: Path, check: Callable[[], None]) -> int:
    """Keep a bare repository. References come first: what they name was complete before they named it."""
    if not source.is_dir():
        target.mkdir(exist_ok=True)
        return 0
    return link_tree(source, target, first=("refs", "packed-refs", "HEAD"), skip=is_passing, check=check)


def is_passing(name: str) -> bool:
    """Whether a file of a repository belongs to a writer that has not ended, or was killed."""
    return name.endswith(".lock") or name.startswith("tmp_obj_") or name == "trellis.ref"


@dataclass(kw_only=True, slots=True)
class _Hold:
    """How long writers have been held off."""

    began: float
    took_s: float = 0.0

    def check(self) -> None:
        """Raise BackupTooSlow when they have waited long enough."""
        self.took_s = time.monotonic() - self.began
        if self.took_s > HOLD_S_MAX:
            raise BackupTooSlow(limit_s=HOLD_S_MAX)


@contextlib.contextmanager
def _held(snapshots: list[SqliteSnapshot]) -> Generator[_Hold]:
    """Hold the writers of all ledgers off, for HOLD_S_MAX at most."""
    hold: _Hold | None = None
    try:
        for snapshot in snapshots:
            snapshot.hold(wait_s=BUSY_TIMEOUT_S if hold is None else HOLD_S_MAX)
            hold = hold or _Hold(began=time.monotonic())
        hold = hold or _Hold(began=time.monotonic())
        hold.check()
        yield hold
        hold.check()
    finally:
        for snapshot in snapshots:
            snapshot.release()


def _scratch_beside(cleanup: contextlib.ExitStack, path: Path) -> Path:
    """A private folder on the same file system as `path`, removed at the end. Those of killed processes go first."""
    for left in path.parent.glob(f"{SCRATCH}*"):
        number = left.name.removeprefix(SCRATCH).partition("-")[0]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
    scratch = tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-", dir=path.parent)
    return Path(cleanup.enter_context(scratch))


async def check_backup(file: Path, *, digest: str | None, on_progress: Progress) -> RestoreReport:
    """Read a backup from its beginning to its end, and check its ledgers as `restore_backup` does. Restores nothing.

    The ledgers are unpacked into the machine's temporary folder, and removed. Raises BackupRefused and BackupDamaged.
    """
    with _reported(file, "checked"), tempfile.TemporaryDirectory() as folder:
        scratch = {name: Path(folder) / name for name in (ABOUT, NLM_LEDGER, LEDGER)}
        reader = ArchiveReader(
            path=file,
            place_of=lambda name: scratch[name] if name in scratch else _refuse_unknown(name),
            on_files=lambda files: on_progress("files read", files),
        )
        archive = await asyncio.to_thread(reader.read)
        report = _checked(file, archive, scratch[ABOUT], digest)
        await asyncio.to_thread(_refuse_damaged, file, scratch, on_progress)
        return report


async def restore_backup(
    places: InstancePlaces,
    file: Path,
    actor: Actor,
    *,
    digest: str | None,
    reason: str | None,
    accept_violations: bool = False,
    on_progress: Progress,
) -> RestoreReport:
    """Make the instance of a backup at places where there is none, after every check has passed.

    The archive is checked byte by byte, the ledger by SQLite and by `verify`. A violation that the ledger had when it
    was saved is refused unless `accept_violations`. Raises BackupRefused and BackupDamaged.
    """
    beside = [path.with_name(path.name + end) for path in (places.ledger, places.nlm_ledger) for end in SQLITE_SUFFIXES]
    for path in (places.objects, *([] if places.memory is None else [places.memory]), *beside):
        if not is_empty(path):
            why = f"{path} exists already; restore into an empty folder, or move it away first"
            raise BackupRefused(file=file, done="restored", reason=why)
    with contextlib.ExitStack() as cleanup, _reported(file, "restored"):
        scratch: dict[str, Path] = {}
        for name, path in places.parts.items():
            make_private_folder(path.parent)
            scratch[name] = _scratch_beside(cleanup, path) / name
        about = scratch[LEDGER].with_name(ABOUT)
        reader = ArchiveReader(
            path=file,
            place_of=lambda name: about if name == ABOUT else _place_of(name, scratch, file),
            on_files=lambda files: on_progress("files restored", files),
        )
        archive = await asyncio.to_thread(reader.read)
        report = _checked(file, archive, about, digest)
        for folder in MEMORY_FOLDERS if MEMORY in scratch and scratch[MEMORY].exists() else ():
            make_private_folder(scratch[MEMORY] / folder)
        verification = await _check_ledgers(
            file, scratch, actor, reason, report, on_progress, strict=not accept_violations
        )
        await asyncio.to_thread(os.sync)
        _put_in_place(places, scratch)
    return RestoreReport(
        **asdict(archive),
        taken_at=report.taken_at,
        jobs=verification.jobs,
        events=verification.events,
        violations=verification.found,
        moved_to=None if (mark := read_mark(f"sqlite:///{places.ledger}")) is None else mark.ledger,
    )


def _place_of(name: str, scratch: dict[str, Path], file: Path) -> Path:
    part, _, rest = name.partition("/")
    _refuse_unknown(name)
    if part not in scratch:
        why = (
            "its memory is a repository of its own and TRELLIS_MEMORY names the object store; restore without that "
            "setting, then bring it there with `trellis memory import`"
        )
        raise BackupRefused(file=file, done="restored", reason=why)
    return scratch[part] / rest if rest else scratch[part]


def _refuse_unknown(name: str) -> None:
    part, _, rest = name.partition("/")
    if (part in {OBJECTS, MEMORY}) != bool(rest) or (not rest and name not in {LEDGER, NLM_LEDGER}):
        raise ValueError("no part of an instance has this name")


def _checked(file: Path, report: ArchiveReport, about: Path, digest: str | None) -> RestoreReport:
    if digest is not None and digest.lower() != report.digest:
        raise BackupDamaged(file=file, place="its digest", reason=f"it is {report.digest}, not {digest}")
    try:
        contents = json.loads(about.read_bytes())
        taken_at = datetime.fromisoformat(contents["taken_at"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackupDamaged(file=file, place=ABOUT, reason="it is missing or cannot be read") from error
    if contents.get("format") != FORMAT:
        reason = f"it has format {contents.get('format')}, and this version reads format {FORMAT}"
        raise BackupRefused(file=file, done="read", reason=reason)
    return RestoreReport(**asdict(report), taken_at=taken_at)


def _refuse_damaged(file: Path, scratch: dict[str, Path], on_progress: Progress) -> None:
    """Let SQLite check the ledgers that were unpacked. Raises BackupDamaged."""
    there = [name for name in (LEDGER, NLM_LEDGER) if scratch[name].exists()]
    for number, name in enumerate(there):
        on_progress("ledgers checked", number)
        if (damage := damage_of(scratch[name])) is not None:
            raise SavedLedgerDamaged(file=file, place=name, reason=damage)
    if LEDGER not in there:
        raise BackupDamaged(file=file, place=LEDGER, reason="it is missing")


async def _check_ledgers(
    file: Path,
    scratch: dict[str, Path],
    actor: Actor,
    reason: str | None,
    report: RestoreReport,
    on_progress: Progress,
    *,
    strict: bool,
) -> VerifyReport:
    """Check the restored ledgers, and record the restore in the instance's own."""
    await asyncio.to_thread(_refuse_damaged, file, scratch, on_progress)
    async with closing(await open_ledger(f"sqlite:///{scratch[LEDGER]}")) as ledger:
        verification = await verify(ledger, on_progress=lambda far: on_progress("jobs checked", far.jobs))
        if strict and not verification.ok:
            first = verification.violations[0]
            why = (
                f"the archive is whole, but job {first.job_id} broke a rule when it was saved ({first.detail}); "
                "--accept-violations restores it as it was"
            )
            raise BackupRefused(file=file, done="restored", reason=why)
        facts = {"digest": report.digest, "taken_at": report.taken_at.isoformat()}
        if read_mark(f"sqlite:///{scratch[LEDGER]}") is None:
            await ledger.record_act(actor, NewAct(event=RESTORED, subject=SUBJECT, cause=reason, facts=facts))
    return verification


def _put_in_place(places: InstancePlaces, scratch: dict[str, Path]) -> None:
    """Rename every part to its place, the ledger last: only with a ledger the others are an instance."""
    for name, path in places.parts.items():
        if not scratch[name].exists():
            continue
        if path.is_dir():
            path.rmdir()
        scratch[name].rename(path)
        sync_folder(path.parent)
