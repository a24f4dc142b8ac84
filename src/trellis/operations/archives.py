"""The file format of a backup: a tar file that ends with a manifest, so that any change or cut is found.

The members are the saved files in order. Then follows `manifest.jsonl` with one line per file: path, bytes, SHA-256.
The last member, `seal.json`, holds the SHA-256 of the manifest and of every byte of the archive before the seal. Any
`tar` program can read the files. The manifest's SHA-256 is the digest of the backup: kept elsewhere, it also proves that
nobody exchanged the whole archive.
"""

import contextlib
import errno
import hashlib
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from trellis.engine.errors import TrellisError
from trellis.engine.private_files import PRIVATE_FILE, make_private_folder, sync_folder

MANIFEST = "manifest.jsonl"
SEAL = "seal.json"
CHUNK = 1024 * 1024
SEAL_BYTES_MAX = 4_096
NAME_CHARS_MAX = 4_096


class BackupDamaged(TrellisError):
    """The backup {file} is damaged at {place}: {reason}. Nothing was restored; use another copy of it."""

    code = "VALIDATION_FAILED"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveReport:
    """What an archive holds. `digest` is the SHA-256 of its manifest."""

    files: int
    bytes: int
    digest: str


class _Hashed:
    """A file that hashes what goes through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.bytes = 0

    def read(self, size: int = -1) -> bytes:
        return self._passed(self._file.read(size))

    def write(self, data: bytes) -> int:
        self._passed(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.bytes

    def _passed(self, data: bytes) -> bytes:
        self.hash.update(data)
        self.bytes += len(data)
        return data


class ArchiveWriter:
    """Writes an archive. It appears under its name when it is complete, and not before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        self._scratch = Path(scratch)
        self._file = os.fdopen(descriptor, "wb")
        self._raw = _Hashed(self._file)
        self._tar = tarfile.TarFile(fileobj=self._raw, mode="w", format=tarfile.PAX_FORMAT)  # pyright: ignore[reportArgumentType]
        self._manifest = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 - closed with the writer
        self.files = self.bytes = 0

    def add(self, name: str, path: Path) -> None:
        """Add one file."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            hashed = _Hashed(file)
            self._put(name, hashed, size)
        self._manifest.write(_line(name, size, hashed.hash.hexdigest()))
        self.files += 1
        self.bytes += size

    def add_tree(self, name: str, folder: Path, on_files: Callable[[int], None]) -> None:
        """Add every file below a folder, in the order of their paths."""
        for path in files_below(folder):
            self.add(f"{name}/{path.relative_to(folder).as_posix()}", path)
            on_files(self.files)

    def finish(self) -> ArchiveReport:
        """Write manifest and seal, sync the archive, and give it its name. Raises FileExistsError."""
        size = self._manifest.tell()
        self._manifest.seek(0)
        manifest = _Hashed(self._manifest)
        self._put(MANIFEST, manifest, size)
        digest = manifest.hash.hexdigest()
        seal = json.dumps({"manifest": digest, "archive": self._raw.hash.hexdigest(), "bytes": self._raw.bytes})
        with tempfile.TemporaryFile() as file:
            file.write(seal.encode())
            file.seek(0)
            self._put(SEAL, file, len(seal))
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        try:
            os.link(self._scratch, self.path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if self.path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path)) from None
            self._scratch.rename(self.path)
        sync_folder(self.path.parent)
        return ArchiveReport(files=self.files, bytes=self.bytes, digest=digest)

    def close(self) -> None:
        """Remove what is not finished."""
        self._manifest.close()
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    def _put(self, name: str, file: Any, size: int) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, PRIVATE_FILE
        self._tar.addfile(member, file)
        self._tar.members = []  # pyright: ignore[reportAttributeAccessIssue] - they would fill memory


def files_below(folder: Path) -> Iterator[Path]:
    """Every regular file below a folder, in the order of names."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _line(name: str, size: int, digest: str) -> bytes:
    return json.dumps({"path": name, "bytes": size, "sha256": digest}).encode() + b"\n"


@dataclass(kw_only=True)
class ArchiveReader:
    """Reads an archive from its beginning to its end and checks every byte of it. Raises BackupDamaged."""

    path: Path
    place_of: Callable[[str], Path | None]
    """Where a file is to be written; None to check it only. Raises ValueError for a name that no backup has."""
    on_files: Callable[[int], None] = lambda _: None
    _last: str = field(default="its beginning", init=False)

    def read(self) -> ArchiveReport:
        """Write every file to its place, and check manifest and seal."""
        with self.path.open("rb") as file, tempfile.TemporaryFile() as lines:
            try:
                tar = tarfile.TarFile(fileobj=file, mode="r")
            except (tarfile.TarError, EOFError) as error:
                raise self._damaged("its beginning", "it is no tar file, or an empty one") from error
            report = self._read_files(tar, lines)
            seal = self._next(tar)
            if seal is None or seal.name != SEAL or seal.size > SEAL_BYTES_MAX:
                raise self._damaged("its end", "the seal is missing: the archive was cut or added to")
            self._check_seal(tar, seal, report.digest)
            self._check_end(file, seal)
        return report

    def _read_files(self, tar: tarfile.TarFile, lines: IO[bytes]) -> ArchiveReport:
        files = size = 0
        while (member := self._next(tar)) is not None:
            if member.name == MANIFEST:
                return ArchiveReport(files=files, bytes=size, digest=self._check_manifest(tar, member, lines))
            try:
                place = self.place_of(_checked_name(member))
            except ValueError as error:
                raise self._damaged(member.name, str(error)) from error
            lines.write(_line(member.name, member.size, self._copy(tar, member, place)))
            files, size = files + 1, size + member.size
            self.on_files(files)
        raise self._damaged(f"what follows {self._last}", "it ends there, or cannot be read further")

    def _next(self, tar: tarfile.TarFile) -> tarfile.TarInfo | None:
        try:
            member = tar.next()
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            raise self._damaged(f"what follows {self._last}", str(error)) from error
        tar.members = []  # pyright: ignore[reportAttributeAccessIssue] - they would fill memory
        if member is not None:
            self._last = member.name
        return member

    def _copy(self, tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path | None) -> str:
        digest = hashlib.sha256()
        with _written(place) as target:
            for chunk in self._chunks(tar, member):
                digest.update(chunk)
                if target is not None:
                    target.write(chunk)
        return digest.hexdigest()

    def _chunks(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
        content = tar.extractfile(member)
        left = member.size
        while left and content is not None:
            try:
                chunk = content.read(min(CHUNK, left))
            except (tarfile.TarError, OSError) as error:
                raise self._damaged(member.name, str(error)) from error
            if not chunk:
                break
            left -= len(chunk)
            yield chunk
        if left:
            raise self._damaged(member.name, f"{left} of its {member.size} bytes are missing")

    def _check_manifest(self, tar: tarfile.TarFile, member: tarfile.TarInfo, lines: IO[bytes]) -> str:
        """Compare the manifest with the lines of the files that were read. Returns its SHA-256."""
        lines.seek(0)
        content = tar.extractfile(member)
        digest = hashlib.sha256()
        while content is not None:
            try:
                recorded = content.readline()
            except (tarfile.TarError, OSError) as error:
                raise self._damaged(MANIFEST, str(error)) from error
            line = lines.readline()
            if recorded != line:
                raise self._damaged(*_difference(recorded, line))
            if not recorded:
                break
            digest.update(recorded)
        return digest.hexdigest()

    def _check_seal(self, tar: tarfile.TarFile, seal: tarfile.TarInfo, manifest: str) -> None:
        try:
            recorded = json.loads(b"".join(self._chunks(tar, seal)))
            parts = (recorded["manifest"], recorded["archive"], recorded["bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(SEAL, "it cannot be read") from error
        with self.path.open("rb") as file:
            hashed = _Hashed(file)
            while hashed.bytes < seal.offset and hashed.read(min(CHUNK, seal.offset - hashed.bytes)):
                pass
        if parts != (manifest, hashed.hash.hexdigest(), hashed.bytes):
            raise self._damaged(SEAL, "the bytes between the files are not those that were sealed")

    def _check_end(self, file: IO[bytes], seal: tarfile.TarInfo) -> None:
        """The seal is followed by zeros: to the end of its block, two blocks, and the rest of a record."""
        blocks = -(-seal.size // tarfile.BLOCKSIZE) + 2
        records = -(-(seal.offset_data + blocks * tarfile.BLOCKSIZE) // tarfile.RECORDSIZE)
        size, wanted = os.fstat(file.fileno()).st_size, records * tarfile.RECORDSIZE
        if size != wanted:
            raise self._damaged("its end", f"it has {size} bytes and should have {wanted}")
        file.seek(seal.offset_data + seal.size)
        if any(file.read()):
            raise self._damaged("its end", "something was written behind the seal")

    def _damaged(self, place: str, reason: str) -> BackupDamaged:
        return BackupDamaged(file=self.path, place=place, reason=reason)


def _checked_name(member: tarfile.TarInfo) -> str:
    """The name of a member that can be written below a folder. Raises ValueError."""
    name = PurePosixPath(member.name)
    if not member.isreg() or member.issparse():
        raise ValueError("it is not a regular file")
    if name.is_absolute() or ".." in name.parts or name.as_posix() != member.name or len(member.name) > NAME_CHARS_MAX:
        raise ValueError("its path leads out of the backup")
    return member.name


def _difference(recorded: bytes, stored: bytes) -> tuple[str, str]:
    """The file in which manifest and archive differ, and how."""
    try:
        known, seen = (str(json.loads(line)["path"]) if line else None for line in (recorded, stored))
    except (ValueError, KeyError, TypeError):
        return MANIFEST, "a line of it cannot be read"
    if known is None:
        return str(seen), "the manifest does not have it"
    if known != seen:
        return known, "the manifest has it and the archive does not, or not at this place"
    return known, "its content is not what the manifest recorded"


@contextlib.contextmanager
def _written(place: Path | None) -> Generator[IO[bytes] | None]:
    """A new private file, not synced; None without a place."""
    if place is None:
        yield None
        return
    make_private_folder(place.parent)
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
    except OSError as error:  # of writing: errors of reading were translated
        raise OSError(error.errno, error.strerror, str(place)) from error


def is_empty(path: Path) -> bool:
    """Whether nothing is at this path but perhaps an empty folder."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(status.st_mode) and not any(path.iterdir())
