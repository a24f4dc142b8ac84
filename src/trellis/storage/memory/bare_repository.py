"""The bare git repository that holds the memory of an instance."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

from dulwich.errors import NotGitRepository
from dulwich.object_store import DiskObjectStore
from dulwich.objects import Blob, ObjectID, ShaFile
from dulwich.refs import DiskRefsContainer, Ref
from dulwich.repo import Repo, UnsupportedExtension, UnsupportedVersion

from trellis.engine.private_files import PRIVATE_FOLDER, file_mode, folder_mode, open_beside, sync_folder
from trellis.storage.memory.errors import (
    MemoryBusy,
    MemoryDamaged,
    MemoryMissing,
    MemoryMoved,
    MemoryOfAnother,
    MemoryUnavailable,
)
from trellis.storage.memory.layout import FILE_BYTES_MAX
from trellis.storage.objects.store import CREATE, ObjectStore, PutRefused, if_match

# A bare repository with one writer at a time, durable across power loss.
#
# Objects are complete and synced before the branch names them, and the branch is synced before the caller gets an
# answer. A writer that is killed leaves nothing that blocks the next one. dulwich's own writers do not guarantee this:
# when killed they leave `<object>.lock` and `<branch>.lock` behind, and they never sync a folder. dulwich is used for
# reading.
#
# Writers are serialized by a lock of the operating system, which ends with its holder. The branch moves by git's own
# protocol (`main.lock`, compare, rename), so a concurrent git process is neither overwritten nor confused.

BRANCH = "refs/heads/main"
OBJECT_BYTES_MAX = 16 * FILE_BYTES_MAX
"""A larger object is not inflated. Trees can be larger than files."""
LOCK_WAIT_S = 15.0
LOCK_PAUSE_S = 0.005

MOVE_ATTEMPTS_MAX = 8
"""How often a commit is rebuilt because another git process moved the branch meanwhile."""

_LOCK = "trellis.lock"
MOVED = "trellis.moved"
"""A file in a repository whose history goes on elsewhere: where that is."""
_CANDIDATE = "trellis.ref"
_TEMPORARY = "tmp_obj_trellis_"  # git ignores and prunes files with the prefix tmp_obj_
# For pushes with git: objects are synced there too, and history can only be extended.
_SETTINGS = {
    (b"core", b"fsync"): b"all",
    (b"receive", b"denyNonFastForwards"): b"true",
    (b"receive", b"denyDeletes"): b"true",
    (b"receive", b"fsckObjects"): b"true",
}


class BareRepository:
    """One branch of one bare repository, for any number of threads and processes."""

    attempts_max = MOVE_ATTEMPTS_MAX

    def __init__(self, path: Path, pause: Callable[[float], None], *, durable: bool = True) -> None:
        self.path = path
        self._pause = pause
        self.durable = durable
        """Whether writes are synced. Without, they survive the death of a process, and not a loss of power."""

    @property
    def place(self) -> str:
        """Where the memory is, as the setting says it."""
        return str(self.path)

    def identity(self, new_id: Callable[[], str]) -> str:
        """What makes this repository the one that it is. Created if there is none."""
        return repository_identity(self.path, new_id)

    def check(self) -> None:
        """Raise MemoryMissing unless there is a usable repository, and MemoryMoved if it goes on elsewhere."""
        check_repository(self.path)
        self.check_not_moved()

    def check_not_moved(self) -> None:
        """Raise MemoryMoved if this repository was imported to another place."""
        try:
            place = (self.path / MOVED).read_text("utf-8").strip()
        except FileNotFoundError:
            return
        except OSError as error:
            raise MemoryUnavailable(reason=error.strerror or str(error)) from error
        raise MemoryMoved(path=self.path, place=place)

    def branch(self) -> ObjectID | None:
        """The commit that the branch names now; None before the first one. Raises MemoryMoved."""
        self.check_not_moved()
        return self.read_branch()

    def read_branch(self) -> ObjectID | None:
        """The commit that the branch names, also in a repository that goes on elsewhere."""
        refs = DiskRefsContainer(self.path)
        name = Ref(BRANCH.encode())
        with unavailable_on_os_error():
            commit = refs.read_loose_ref(name) or refs.get_packed_refs().get(name)
        return ObjectID(commit) if commit else None

    @contextlib.contextmanager
    def objects(self) -> Generator[DiskObjectStore]:
        """The object store, for reading. Opened for each use, because packs may change."""
        store = DiskObjectStore(self.path / "objects", loose_object_size_limit=OBJECT_BYTES_MAX)
        try:
            yield store
        finally:
            store.close()

    @contextlib.contextmanager
    def locked(self, *, moved: bool = False) -> Generator[None]:
        """Hold the writers' lock. First clears what a killed writer left behind.

        Raises MemoryMoved, unless `moved`: an import that is run again holds the lock of what it moved.
        """
        with host_lock(self.path, _LOCK, self._pause):
            if not moved:
                self.check_not_moved()
            with unavailable_on_os_error():
                self._clear_leftovers()
            yield

    def publish(self, objects: Iterable[ShaFile], old: ObjectID | None, new: ObjectID) -> bool:
        """Write the objects of a commit and move the branch to it. Needs the lock.

        Returns False if the branch no longer names `old`.
        """
        self.write(objects)
        return self.move_branch(old, new)

    def write(self, objects: Iterable[ShaFile]) -> None:
        """Write and sync objects.

        Needs the lock. An existing object is written again, because it may not be synced yet.
        """
        folder = self.path / "objects"
        with unavailable_on_os_error(), contextlib.ExitStack() as cleanup:
            top = self.path.stat().st_mode
            placed: list[tuple[Path, Path]] = []
            for item in objects:
                handle, temporary_path = tempfile.mkstemp(prefix=_TEMPORARY, dir=folder)
                temporary = Path(temporary_path)
                cleanup.callback(temporary.unlink, missing_ok=True)
                with os.fdopen(handle, "wb") as file:
                    file.write(item.as_legacy_object())
                    file.flush()
                    os.fchmod(file.fileno(), file_mode(top) & 0o444)
                    self._sync(file.fileno())
                name = item.id.decode()
                placed.append((temporary, folder / name[:2] / name[2:]))
            for temporary, place in placed:
                _make_folder(place.parent, top)
                temporary.replace(place)
            if self.durable:
                for shard in sorted({place.parent for _, place in placed}):
                    sync_folder(shard)
                sync_folder(folder)

    def write_pack(self, body: bytes) -> None:
        """Write the objects of a git pack as a pack. Needs the lock."""
        folder = self.path / "objects" / "pack"
        with unavailable_on_os_error():
            for left in (*folder.glob("*.lock"), *folder.glob("tmp*")):  # of a process that was killed
                left.unlink(missing_ok=True)
            with contextlib.closing(DiskObjectStore(self.path / "objects", fsync_object_files=self.durable)) as store:
                file, commit, abort = store.add_pack()
                try:
                    file.write(body)
                except OSError:
                    abort()
                    raise
                commit()
            restrict_tree(folder, self.path.stat().st_mode)
            if self.durable:
                sync_folder(folder)

    def move_branch(self, old: ObjectID | None, new: ObjectID) -> bool:
        """Move the branch from `old` to `new` durably.

        Needs the lock. Returns False if the branch names something else.
        """
        place = self.path / BRANCH
        lock, candidate = place.with_name(f"{place.name}.lock"), self.path / _CANDIDATE
        with unavailable_on_os_error():
            _make_folder(place.parent, top := self.path.stat().st_mode)
            with candidate.open("xb") as file:
                os.fchmod(file.fileno(), file_mode(top))
                file.write(new + b"\n")
                file.flush()
                self._sync(file.fileno())
            try:
                lock.hardlink_to(candidate)
            except FileExistsError:
                candidate.unlink()
                raise MemoryBusy(reason=f"{BRANCH}.lock exists; another git works there, or was killed") from None
            if self.branch() != old:
                lock.unlink()
                candidate.unlink()
                return False
            lock.replace(place)
            candidate.unlink()
            self.sync_branch()
        return True

    def clear(self) -> None:
        """Remove the branch and every object. For a replica, which can be fetched again. Needs the lock."""
        place = self.path / BRANCH
        with unavailable_on_os_error():
            for name in (place, place.with_name(f"{place.name}.lock")):
                name.unlink(missing_ok=True)
            for folder in (self.path / "objects").iterdir():
                if len(folder.name) == 2:
                    shutil.rmtree(folder)
            for file in (self.path / "objects" / "pack").glob("*"):
                file.unlink(missing_ok=True)

    def mark_moved(self, place: str) -> None:
        """Refuse every use from now on, also by processes that have the repository open: it goes on at `place`."""
        with unavailable_on_os_error():
            temporary = self.path / f"{MOVED}.new"
            temporary.write_text(f"{place}\n", "utf-8")
            temporary.chmod(file_mode(self.path.stat().st_mode))
            temporary.replace(self.path / MOVED)
            sync_folder(self.path)

    def sync_branch(self) -> None:
        """Sync the branch. Needed before an answer relies on another writer's move."""
        if self.durable:
            with unavailable_on_os_error():
                sync_folder((self.path / BRANCH).parent)

    def _sync(self, file: int) -> None:
        if self.durable:
            os.fsync(file)

    def close(self) -> None:
        """Does nothing: files are opened for each use."""

    def _clear_leftovers(self) -> None:
        """Remove files of a killed writer. A branch lock is ours only if it is the same file as our candidate."""
        place = self.path / BRANCH
        lock, candidate = place.with_name(f"{place.name}.lock"), self.path / _CANDIDATE
        with contextlib.suppress(FileNotFoundError):
            if candidate.samefile(lock):
                lock.unlink()
        candidate.unlink(missing_ok=True)
        for temporary in (self.path / "objects").glob(f"{_TEMPORARY}*"):
            temporary.unlink(missing_ok=True)


def make_repository(path: Path) -> None:
    """Create an empty bare repository unless one exists. It appears completely or not at all, also in a race."""
    with unavailable_on_os_error():
        if path.exists() and any(path.iterdir()):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent))
        top = path.stat().st_mode if path.exists() else PRIVATE_FOLDER  # an empty folder's mode is kept
        try:
            with contextlib.closing(
                Repo.init_bare(temporary, default_branch=BRANCH.rsplit("/", 1)[-1].encode())
            ) as repo:
                config = repo.get_config()
                for (section, name), value in _SETTINGS.items():
                    config.set((section,), name, value)
                config.write_to_path()
            restrict_tree(temporary, top)
            sync_tree(temporary)
            rename_unless_taken(temporary, path)
            sync_folder(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def check_repository(path: Path) -> None:
    """Raise MemoryMissing unless there is a usable bare repository."""
    try:
        with contextlib.closing(Repo(path, bare=True)) as repo:
            usable = (path / "objects").is_dir() and (path / "HEAD").is_file() and repo.object_format.name == "sha1"
    except (NotGitRepository, UnsupportedExtension, UnsupportedVersion, OSError, ValueError) as error:
        raise MemoryMissing(path=path, reason=str(error) or type(error).__name__) from error
    if not usable:
        raise MemoryMissing(path=path, reason="it is no bare git repository with SHA-1 names")


@contextlib.contextmanager
def host_lock(folder: Path, name: str, pause: Callable[[float], None]) -> Generator[None]:
    """Hold a lock of this host, which ends with its holder. Raises MemoryBusy after LOCK_WAIT_S."""
    with unavailable_on_os_error():
        handle = open_beside(folder / name, folder, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(int(LOCK_WAIT_S / LOCK_PAUSE_S)):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pause(LOCK_PAUSE_S)
            else:
                break
        else:
            raise MemoryBusy(reason=f"no turn within {LOCK_WAIT_S:g} s")
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def unavailable_on_os_error() -> Generator[None]:
    """Convert an OSError to MemoryUnavailable."""
    try:
        yield
    except OSError as error:
        raise MemoryUnavailable(reason=error.strerror or str(error)) from error


def _make_folder(folder: Path, top: int) -> None:
    try:
        folder.mkdir(folder_mode(top), parents=True)
    except FileExistsError:
        return
    folder.chmod(folder_mode(top))


def restrict_tree(tree: Path, top: int) -> None:
    """Set the modes of a folder and everything in it as in a repository whose top folder has the mode `top`."""
    for folder, _, names in os.walk(tree):
        Path(folder).chmod(folder_mode(top))
        for name in names:
            (Path(folder) / name).chmod(file_mode(top))


def sync_tree(top: Path) -> None:
    """Sync a folder and everything in it."""
    for folder, _, names in os.walk(top, topdown=False):
        for name in names:
            with (Path(folder) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(folder))


def rename_unless_taken(source: Path, path: Path) -> bool:
    """Rename a folder. Returns False if there is another one at its new path, which is not empty."""
    try:
        source.replace(path)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        return False
    return True


# The instance's memory repository: its id is recorded once in the object store and compared at every start.
#
# Without this, a gateway with a wrong path would create an empty repository there and serve from it unnoticed. The id
# is stored as a ref in the repository, so a mirrored, moved or restored clone keeps it.

KEY = "system/memory.json"
REF = Ref(b"refs/trellis/id")


def id_of_identity(identity: str) -> str:
    """The id of a repository with this identity: the name of the git object that holds it."""
    return Blob.from_string(identity.encode()).id.decode()


def repository_identity(path: Path, new_id: Callable[[], str]) -> str:
    """The text that makes a repository this one and no other, which its clones have too.

    Created if there is none; concurrent callers get the same one.
    """
    with unavailable_on_os_error(), contextlib.closing(Repo(path, bare=True)) as repo:
        if REF not in repo.refs:
            blob = Blob.from_string(new_id().encode())
            repo.object_store.add_object(blob)
            repo.refs.add_if_new(REF, blob.id)
            top, name = path.stat().st_mode, blob.id.decode()
            restrict_tree(path / "refs" / "trellis", top)
            shard = path / "objects" / name[:2]
            shard.chmod(folder_mode(top))
            (shard / name[2:]).chmod(file_mode(top) & 0o444)
        name = repo.refs[REF]
        try:
            return repo.object_store[name].as_raw_string().decode()
        except (KeyError, UnicodeDecodeError) as error:
            raise MemoryDamaged(where=REF.decode(), reason="its object cannot be read") from error


_AT = " at "
"""Between a repository's id and its place in the record. Programs from before there were places compare the whole
text with the id of their folder, and so refuse a folder whose memory goes on in the object store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecord:
    """Which repository is the instance's. `place` is set if it is in the object store, where no host has it alone."""

    repository: str
    place: str | None = None

    def to_bytes(self) -> bytes:
        if self.place is None:
            return json.dumps({"repository": self.repository}).encode()
        return json.dumps({"repository": f"{self.repository}{_AT}{self.place}", "place": self.place}).encode()


async def recorded(objects: ObjectStore) -> MemoryRecord | None:
    """The repository that is recorded as the instance's; None before the first start."""
    stored = await objects.get(KEY)
    if stored is None:
        return None
    fields = json.loads(stored.body)
    place = fields.get("place")
    repository = str(fields.get("repository"))
    return MemoryRecord(repository=repository.removesuffix(f"{_AT}{place}"), place=place)


async def record_memory(objects: ObjectStore, record: MemoryRecord) -> None:
    """Record where the instance's memory is, in place of what was recorded. Raises MemoryBusy in a race."""
    stored = await objects.get(KEY)
    when = CREATE if stored is None else if_match(stored.etag)
    if isinstance(await objects.put(KEY, record.to_bytes(), when=when), PutRefused):
        raise MemoryBusy(reason=f"another process changed {KEY} at the same time")


async def check_belonging(objects: ObjectStore, record: MemoryRecord, path: Path | str) -> None:
    """Record this repository as the instance's, if none is recorded. Raises MemoryOfAnother if another one is."""
    known = await recorded(objects)
    if known is None:
        await objects.put(KEY, record.to_bytes(), when=CREATE)
        known = await recorded(objects)  # another process may have recorded its own first
    if known is not None and known != record:
        raise MemoryOfAnother(path=path, key=KEY)
