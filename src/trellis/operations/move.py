"""Moves an embedded instance to PostgreSQL and S3: ledgers, objects and memory, with nothing lost.

The phases are check, close, copy, verify and open. The source is closed by its own database before anything is copied,
and stays as it was. What was copied is stored in the target with each page, so the same command goes on after a crash.
The target opens only when every row, object and file was compared. Until then the move can be undone. Both ends are
decided by one row of the target's ledger (`ledgers/moving/target.py`).
"""

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trellis.documents.audit_chain import INSTANCE_CHAIN, NLM_CHAIN
from trellis.documents.audit_verification import AuditedLedger, verify_audit
from trellis.engine.admin_acts import NewAct
from trellis.engine.closing import closing
from trellis.engine.errors import LedgerError, LedgerUrlInvalid, TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.private_files import sync_folder
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.ledgers.migration import MigratedBy
from trellis.ledgers.moving import rows
from trellis.ledgers.moving.rows import Progress
from trellis.ledgers.moving.source import MoveMark, MoveRefused, MoveStage, SqliteSource, only_move
from trellis.ledgers.moving.target import FINISHED, PostgresTarget, TargetStage, open_target, public_address
from trellis.operations.backup import SUBJECT, InstancePlaces, is_passing
from trellis.storage.objects.address import S3Address, S3Credentials, read_address
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import CREATE, ObjectInfo, ObjectStore, PutStored, StoreError

MARK_KEY = "system/move.json"
"""The object that says whose move fills this store. It is removed when the instance opens."""
OBJECTS = "objects"
OBJECTS_AT_ONCE = 16
OBJECTS_A_PAGE = 500
DISK_SPARE = 64 * 1024 * 1024
MOVED = "instance.moved"
UNDONE = "instance.move_undone"


class MoveDiffers(TrellisError):
    """The copy differs from the instance: {reason}. Nothing was opened, and the source is unchanged; `trellis move --undo {options}` removes the copy."""


class MoveUnverified(TrellisError):
    """The copy could not be verified: {reason} Nothing was opened; the same command goes on."""

    code = "UPSTREAM_UNAVAILABLE"


class MoveDecided(MoveRefused):
    """The move cannot be undone: {reason}."""


@dataclass(frozen=True, kw_only=True)
class MoveTargets:
    """Where the parts of the instance go."""

    ledger: str = field(repr=False)
    objects: str
    memory: Path | None
    nlm_ledger: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class MoveReport:
    """What was moved, or would be."""

    id: str | None
    state: str
    """`possible` after a check alone, `moved`, or `undone`."""
    rows: dict[str, int] = field(default_factory=dict[str, int])
    nlm_rows: dict[str, int] = field(default_factory=dict[str, int])
    objects: int = 0
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """By phase."""


Phase = Callable[[str], None]
"""Called with the name of a phase when it has ended."""


@dataclass(kw_only=True)
class InstanceMove:
    """One call of the command, on one instance."""

    places: InstancePlaces
    targets: MoveTargets
    actor: Actor
    version: str
    credentials: S3Credentials | None
    reason: str | None = None
    on_progress: Progress = lambda _what, _count: None
    on_phase: Phase = lambda _: None
    _seconds: dict[str, float] = field(default_factory=dict[str, float])

    # --- the three ways to call it -------------------------------------------------------------------------------

    async def check(self) -> MoveReport:
        """Check everything that can be checked without a change, here and there."""
        async with self._opened():
            with self._phase("check"):
                await self._check()
                await self._check_audit()
            counts = await asyncio.to_thread(self._count_objects)
        return MoveReport(id=None, state="possible", objects=counts[0], bytes=counts[1], seconds=self._seconds)

    async def run(self) -> MoveReport:
        """Move the instance, or go on with a move that was interrupted."""
        async with self._opened():
            with self._phase("check"):
                await self._check()
            with self._phase("close"):
                mark = await asyncio.to_thread(self._close)
            await self._prepare(mark)
            if not await self._is_open():
                with self._phase("copy objects"):
                    await self._copy_objects(mark)
                with self._phase("copy memory"):
                    await asyncio.to_thread(copy_memory, self.places.memory, self.targets.memory)
                with self._phase("copy rows"):
                    for source, target in self._ledgers():
                        await rows.copy_rows(source, target, mark.id, self.on_progress)
                with self._phase("verify"):
                    report = await self._verify(mark)
                with self._phase("open"):
                    await self._open(mark, report)
            else:
                report = MoveReport(id=mark.id, state="moved")
            await self._finish(mark)
        return replace(report, seconds=self._seconds)

    async def undo(self) -> MoveReport:
        """Remove what was copied and open the source again, unless the target is open."""
        async with self._opened():
            mark = self._source.mark()
            if mark is None:
                raise MoveRefused(reason=f"{self.places.ledger} is open; there is no move to undo")
            self._compare_targets(mark)
            if mark.stage is MoveStage.MOVED or not await self._target.undo(mark.id):
                reason = f"the instance is open at {mark.ledger}; it works there, and {self.places.ledger} stays closed"
                raise MoveDecided(reason=reason)
            self.on_phase("undo decided")
            await self._clear_objects(mark)
            await asyncio.to_thread(remove_copied_memory, self.places.memory, self.targets.memory)
            for _, target in self._ledgers():
                await target.clear(mark.id)
            self.on_phase("undo cleared")
            for source, _ in reversed(self._ledgers()):
                await asyncio.to_thread(source.reopen)
        async with closing(await open_ledger(f"sqlite:///{self.places.ledger}")) as ledger:
            await ledger.record_act(
                self.actor, NewAct(event=UNDONE, subject=SUBJECT, source=mark.ledger, cause=self.reason)
            )
        return MoveReport(id=mark.id, state="undone", seconds=self._seconds)

    def settings(self, key_file: Path) -> dict[str, str]:
        """The settings of the moved instance, without passwords."""
        mark = self._mark("")
        values = {
            "TRELLIS_LEDGER": mark.ledger,
            "TRELLIS_NLM_LEDGER": mark.nlm_ledger,
            "TRELLIS_OBJECTS": mark.objects,
            "TRELLIS_MEMORY": mark.memory,
            "TRELLIS_TOKEN_KEY_FILE": str(key_file.absolute()),
            "TRELLIS_CALLBACK_KEY_FILE": str(key_file.absolute()),
        }
        return {name: value for name, value in values.items() if value is not None}

    # --- opening what is needed ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[None]:
        try:
            self._refuse_impossible()
            async with self._opened_parts():
                yield
        except LedgerUrlInvalid as error:  # which repeats the address, and so the password in it
            address = str(error.data["url"])
            shown = public_address(address) if address.startswith("postgres") else address
            raise LedgerUrlInvalid(url=shown, reason=error.data["reason"]) from None

    @asynccontextmanager
    async def _opened_parts(self) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            stack.enter_context(only_move(self.places.ledger))
            self._source = self._open_source(stack, self.places.ledger)
            self._target = await open_target(self.targets.ledger)
            stack.push_async_callback(self._target.close)
            self._nlm: tuple[SqliteSource, PostgresTarget] | None = None
            if self.targets.nlm_ledger is not None:
                target = await open_target(self.targets.nlm_ledger)
                stack.push_async_callback(target.close)
                self._nlm = (self._open_source(stack, self.places.nlm_ledger), target)
            self._here = await open_objects(f"file://{self.places.objects}")
            stack.push_async_callback(self._here.close)
            self._there = await open_objects(self.targets.objects, credentials=self.credentials)
            stack.push_async_callback(self._there.close)
            yield

    def _open_source(self, stack: AsyncExitStack, path: Path) -> SqliteSource:
        source = SqliteSource(path)
        stack.callback(source.close_connection)
        return source

    def _ledgers(self) -> list[tuple[SqliteSource, PostgresTarget]]:
        """The ledgers with their targets. The instance's own is the first one: its mark decides."""
        return [(self._source, self._target), *([self._nlm] if self._nlm else [])]

    def _refuse_impossible(self) -> None:
        """Refuse wrong options before anything is opened."""
        for option, url in (("--to-ledger", self.targets.ledger), ("--to-nlm-ledger", self.targets.nlm_ledger)):
            if url is not None and not url.startswith(("postgresql://", "postgres://")):
                raise MoveRefused(reason=f"{option} is postgresql://user@host/name, an empty database")
        address = public_address(self.targets.ledger)
        if not isinstance(read_address(self.targets.objects), S3Address):
            raise MoveRefused(reason=f"--to-objects is s3://bucket/prefix…, not {self.targets.objects}")
        has_nlm = self.places.nlm_ledger.exists()
        if has_nlm and self.targets.nlm_ledger is None:
            reason = f"{self.places.nlm_ledger} is the ledger of the NLM backend; name a second database with --to-nlm-ledger"
            raise MoveRefused(reason=reason)
        if not has_nlm and self.targets.nlm_ledger is not None:
            raise MoveRefused(reason=f"there is no {self.places.nlm_ledger}; leave --to-nlm-ledger out")
        if self.targets.nlm_ledger is not None and public_address(self.targets.nlm_ledger) == address:
            raise MoveRefused(reason="--to-ledger and --to-nlm-ledger name one database; each ledger needs its own")
        self._refuse_impossible_memory()

    def _refuse_impossible_memory(self) -> None:
        memory = self.targets.memory
        if self.places.memory is None:
            if memory is not None:
                raise MoveRefused(reason="memory is in the object store and moves with it; leave --to-memory out")
            return
        if self.places.memory.is_dir() and memory is None:
            reason = f"{self.places.memory} is the memory of agents; name its new folder with --to-memory"
            raise MoveRefused(reason=reason)
        if memory is not None and memory.absolute() == self.places.memory.absolute():
            raise MoveRefused(
                reason="--to-memory names the folder of the source, which stays as it is; name another one"
            )

    # --- check ---------------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        mark = self._source.mark()
        if mark is not None:
            self._compare_targets(mark)
            if mark.version != self.version:
                reason = f"version {mark.version} began it and this is {self.version}; go on with that one, or undo it with it"
                raise MoveRefused(reason=reason)
        for source, target in self._ledgers():
            source.check()
            there = await target.judge(None if mark is None else mark.id)
            if there is not None and there.stage is TargetStage.UNDONE:
                options = "" if mark is None else mark.options
                raise MoveRefused(reason=f"an undo was begun; `trellis move --undo {options}` ends it")
        if mark is not None and await self._is_open():
            return  # it works there, and has objects and memory of its own by now
        await self._judge_objects(None if mark is None else mark.id)
        check_memory(self.places.memory, self.targets.memory, is_resumed=mark is not None)
        if mark is None:
            await self._check_source()

    def _compare_targets(self, mark: MoveMark) -> None:
        """Refuse other targets than those that the move began with."""
        now = self._mark(mark.id)
        if now.options != mark.options:
            reason = f"it was begun with `{mark.options}`; go on with these, or undo it with these first"
            raise MoveRefused(reason=reason)
        if self._nlm is not None:
            other = self._nlm[0].mark()
            if other is not None and other.id != mark.id:
                raise MoveRefused(reason=f"{self.places.nlm_ledger} belongs to another move; undo that one first")

    async def _check_source(self) -> None:
        """Refuse ledgers that break their own rules: their copies would too."""
        for source, _ in self._ledgers():
            async with closing(await open_ledger(source.url)) as ledger:
                report = await verify(ledger, on_progress=lambda far: self.on_progress("jobs checked", far.jobs))
            if not report.ok:
                first = report.violations[0]
                which = f"{report.found} violations, such as of job {first.job_id}: {first.detail}"
                raise MoveRefused(reason=f"`trellis verify` finds {which}")

    async def _check_audit(self) -> None:
        """Refuse audit records that differ from what was sealed. A move finds that when it verifies the copy."""
        nlm = None if self._nlm is None else self._nlm[0].url
        violations = await self._audit(self._source.url, nlm, self._here)
        if violations:
            raise MoveRefused(reason=f"`trellis audit verify` finds: {violations[0]}")

    async def _judge_objects(self, move_id: str | None) -> bool:
        """Whether the store has the mark of this move. Raises MoveRefused if it has objects of anybody else."""
        stored = await self._there.get(MARK_KEY)
        if stored is not None:
            if stored.body == _mark_body(move_id):
                return True
            raise MoveRefused(reason=f"another instance is being moved to {self._there.url}; name an empty prefix")
        if (await self._there.list("", limit=1)).items:
            raise MoveRefused(reason=f"{self._there.url} has objects; name an empty prefix")
        return False

    def _count_objects(self) -> tuple[int, int]:
        files = [file for file in self.places.objects.rglob("*") if file.is_file() and ".trellis" not in file.parts]
        return len(files), sum(file.stat().st_size for file in files)

    # --- close and prepare ---------------------------------------------------------------------------------------

    def _mark(self, move_id: str) -> MoveMark:
        targets = self.targets
        return MoveMark(
            id=move_id,
            ledger=public_address(targets.ledger),
            objects=self._there.url,
            memory=None if targets.memory is None else str(targets.memory.absolute()),
            nlm_ledger=None if targets.nlm_ledger is None else public_address(targets.nlm_ledger),
            by=self.actor.name,
            version=self.version,
        )

    def _close(self) -> MoveMark:
        """Close the ledgers that are open: the instance's own first, because its mark names the other one."""
        known = self._source.mark()
        mark = known or self._mark(uuid.uuid4().hex)
        open_ledgers = [source for source, _ in self._ledgers() if source.mark() is None]
        with ExitStack() as begun:
            for source in open_ledgers:
                source.begin_alone()
                begun.callback(source.abandon)
            begun.pop_all()
        for source in open_ledgers:
            source.close_for_writers(mark)
            self.on_phase(f"closed {source.path.name}")
        return mark

    async def _prepare(self, mark: MoveMark) -> None:
        """Write the marks into targets that are judged once more."""
        by = MigratedBy(name=self.actor.name, cause="trellis move")
        for _, target in self._ledgers():
            if await target.judge(mark.id) is None:
                await target.prepare(mark.id, by)
        if not await self._is_open():
            if not await self._judge_objects(mark.id):
                answer = await self._there.put(MARK_KEY, _mark_body(mark.id), when=CREATE)
                if not isinstance(answer, PutStored):
                    raise MoveRefused(reason=f"another move has just begun to {self._there.url}")
            await self._there.probe()
        self.on_phase("prepare")

    async def _is_open(self) -> bool:
        mark = await self._target.mark()
        return mark is not None and mark.stage is TargetStage.OPEN

    # --- copy ----------------------------------------------------------------------------------------------------

    async def _copy_objects(self, mark: MoveMark) -> None:
        place = (await self._target.places()).get(OBJECTS, "")
        copied = 0
        while place != FINISHED:
            page = await self._here.list("", after=place or None, limit=OBJECTS_A_PAGE)
            await _at_once([self._copy_object(info) for info in page.items])
            copied += len(page.items)
            place = page.items[-1].key if page.more else FINISHED
            await self._target.note(mark.id, OBJECTS, place)
            self.on_progress("objects copied", copied)

    async def _copy_object(self, info: ObjectInfo) -> None:
        stored = await self._here.get(info.key)
        if stored is not None:
            await self._there.put(info.key, stored.body)

    # --- verify --------------------------------------------------------------------------------------------------

    async def _verify(self, mark: MoveMark) -> MoveReport:
        try:
            counts, differences = list[dict[str, int]](), list[str]()
            for source, target in self._ledgers():
                compared, differing = await rows.compare_rows(source, target, self.on_progress)
                counts.append(compared)
                differences += differing
                differences += await self._verify_jobs(source, target)
            objects, size, differing = await self._compare_objects()
            differences += differing
            differences += await asyncio.to_thread(compare_memory, self.places.memory, self.targets.memory)
            differences += await self._verify_audit()
        except (LedgerError, StoreError) as error:
            raise MoveUnverified(reason=self._without_passwords(str(error))) from error
        if differences:
            raise MoveDiffers(reason="; ".join(differences[:10]), options=mark.options)
        nlm = counts[1] if len(counts) > 1 else dict[str, int]()
        return MoveReport(id=mark.id, state="moved", rows=counts[0], nlm_rows=nlm, objects=objects, bytes=size)

    async def _verify_jobs(self, source: SqliteSource, target: PostgresTarget) -> list[str]:
        """Read every job from both ledgers as readers do, compare them, and check those of the target by the rules."""
        async with AsyncExitStack() as stack:
            here, there = await open_ledger(source.url), await open_ledger(target.url)
            stack.push_async_callback(here.close)
            stack.push_async_callback(there.close)
            compared = rows.ComparedHistories(here, there)
            report = await verify(compared, on_progress=lambda far: self.on_progress("jobs verified", far.jobs))
        broken = [f"`trellis verify` there: {one.detail}" for one in report.violations[:5]]
        return [*compared.differences, *broken]

    async def _compare_objects(self) -> tuple[int, int, list[str]]:
        """Read every object from both stores and compare the bytes."""
        differences: list[str] = []
        count = size = 0
        after: str | None = None
        more = True
        while more:
            page = await self._here.list("", after=after, limit=OBJECTS_A_PAGE)
            digests = await _at_once([self._is_equal(info) for info in page.items])
            differences += [
                f"object {info.key} differs" for info, equal in zip(page.items, digests, strict=True) if not equal
            ]
            count += len(page.items)
            size += sum(info.size for info in page.items)
            self.on_progress("objects compared", count)
            more, after = page.more, page.items[-1].key if page.items else None
        there = await self._count_there()
        if there != count and not differences:
            differences.append(f"objects: {count} here and {there} there")
        return count, size, differences

    async def _is_equal(self, info: ObjectInfo) -> bool:
        here, there = await self._here.get(info.key), await self._there.get(info.key)
        bodies = [b"" if one is None else one.body for one in (here, there)]
        hashes = {hashlib.sha256(body).digest() for body in bodies}
        return here is not None and there is not None and len(hashes) == 1

    async def _count_there(self) -> int:
        """The number of objects there, without the mark."""
        count, after, more = 0, None, True
        while more:
            page = await self._there.list("", after=after)
            count += sum(info.key != MARK_KEY for info in page.items)
            more, after = page.more, page.items[-1].key if page.items else None
        return count

    async def _verify_audit(self) -> list[str]:
        """The sealed audit records against the new ledgers and the new store."""
        violations = await self._audit(self.targets.ledger, self.targets.nlm_ledger, self._there)
        return [f"`trellis audit verify` finds: {one}" for one in violations]

    async def _audit(self, url: str, nlm_url: str | None, objects: ObjectStore) -> list[str]:
        """What is wrong with the sealed audit records of an instance."""
        async with AsyncExitStack() as stack:
            audited: list[AuditedLedger] = []
            for chain, one in ((INSTANCE_CHAIN, url), (NLM_CHAIN, nlm_url)):
                ledger = None if one is None else await open_ledger(one)
                if ledger is not None:
                    stack.push_async_callback(ledger.close)
                audited.append(AuditedLedger(chain=chain, ledger=ledger))
            report = await verify_audit(audited, objects, on_progress=self.on_progress)
        return [violation.detail for violation in report.violations[:5]]

    # --- open ----------------------------------------------------------------------------------------------------

    async def _open(self, mark: MoveMark, report: MoveReport) -> None:
        facts = {"moved_from": self._source.url, "objects": report.objects, "rows": report.rows}
        if not await self._open_ledger(self._source, self._target, mark, facts):
            raise MoveRefused(reason=f"it was undone meanwhile; `trellis move --undo {mark.options}` ends that")

    async def _open_ledger(
        self, source: SqliteSource, target: PostgresTarget, mark: MoveMark, facts: Mapping[str, Any]
    ) -> bool:
        act = NewAct(event=MOVED, subject=SUBJECT, cause=self.reason, facts=facts)
        return await target.open(mark.id, source.numbers()[1], self.actor, act)

    async def _finish(self, mark: MoveMark) -> None:
        """What follows from the decision, as often as it is needed."""
        if self._nlm is not None:
            await self._open_ledger(*self._nlm, mark, {"moved_from": self._nlm[0].url})
        self.on_phase("opened")
        for source, _ in self._ledgers():
            await asyncio.to_thread(source.note_moved)
        await self._there.delete(MARK_KEY)

    def _without_passwords(self, text: str) -> str:
        for url in (self.targets.ledger, self.targets.nlm_ledger):
            text = text if url is None else text.replace(url, public_address(url))
        return text

    # --- undo ----------------------------------------------------------------------------------------------------

    async def _clear_objects(self, mark: MoveMark) -> None:
        """Delete the objects that were copied, and the mark that says so last."""
        if not await self._has_own_mark(mark):
            return
        more = True
        while more:
            page = await self._there.list("", limit=OBJECTS_A_PAGE)
            keys = [info.key for info in page.items if info.key != MARK_KEY]
            await _at_once([self._there.delete(key) for key in keys])
            more = bool(keys)
        await self._there.delete(MARK_KEY)

    async def _has_own_mark(self, mark: MoveMark) -> bool:
        stored = await self._there.get(MARK_KEY)
        return stored is not None and stored.body == _mark_body(mark.id)

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        began = time.monotonic()
        yield
        self._seconds[name] = round(time.monotonic() - began, 3)
        self.on_phase(name)


def _mark_body(move_id: str | None) -> bytes:
    return json.dumps({"move": move_id}).encode()


async def _at_once(calls: Sequence[Any]) -> list[Any]:
    """Await calls, a bounded number at a time."""
    room = asyncio.Semaphore(OBJECTS_AT_ONCE)

    async def one(call: Any) -> Any:
        async with room:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))


# --- memory ----------------------------------------------------------------------------------------------------------


def memory_files(folder: Path) -> dict[str, bytes]:
    """The files of a repository, without those of writers, with the hash of each."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).digest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not is_passing(file.name)
    }


def check_memory(source: Path | None, target: Path | None, *, is_resumed: bool) -> None:
    """Refuse a folder that holds something else than the copy, or a disk without room for it."""
    if target is None or source is None or not source.is_dir():
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not is_resumed or compare_memory(source, target):
            raise MoveRefused(
                reason=f"{target} exists and is no copy of this memory; name a folder that does not exist"
            )
        return
    parent = next(folder for folder in target.absolute().parents if folder.is_dir())
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    if shutil.disk_usage(parent).free < size + DISK_SPARE:
        raise MoveRefused(reason=f"the disk of {parent} has no room for the {size:,} bytes of memory")


def copy_memory(source: Path | None, target: Path | None) -> None:
    """Copy the repository. It appears whole or not at all."""
    if target is None or source is None or not source.is_dir() or (target.is_dir() and any(target.iterdir())):
        return
    target.parent.mkdir(0o700, parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        copied = scratch / "copy"
        shutil.copytree(source, copied, ignore=lambda _, names: {name for name in names if is_passing(name)})
        os.sync()
        if target.is_dir():
            target.rmdir()
        copied.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def compare_memory(source: Path | None, target: Path | None) -> list[str]:
    """What differs between two repositories, file by file."""
    if target is None or source is None or not source.is_dir():
        return []
    here, there = memory_files(source), memory_files(target) if target.is_dir() else {}
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    return [f"memory: {name} differs" for name in differing[:5]]


def remove_copied_memory(source: Path | None, target: Path | None) -> None:
    """Remove a copy that is still one. Anything else stays: it is not ours."""
    if (
        target is not None
        and source is not None
        and source.is_dir()
        and target.is_dir()
        and not compare_memory(source, target)
    ):
        shutil.rmtree(target)
