"""Reads git trees without trusting them, and builds changed trees without touching other content.

Only regular files and folders are followed. A symbolic link, a submodule or a name that means `.git` on some system
makes the memory damaged and is never used as a path. Trees are built in memory; there is no work tree.
"""

import re
import stat
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from dulwich.errors import ChecksumMismatch, FileFormatException
from dulwich.index import validate_path_element_hfs, validate_path_element_ntfs
from dulwich.object_store import BaseObjectStore
from dulwich.objects import Blob, Commit, ObjectID, ShaFile, Tree

from trellis.storage.memory.errors import MemoryDamaged
from trellis.storage.memory.layout import APPLIED, FILE_BYTES_MAX, ROOT, AgentId

_Kind = TypeVar("_Kind", bound=ShaFile)

FILE_MODE = stat.S_IFREG | 0o644
FOLDER_MODE = stat.S_IFDIR
PLAIN_NAME = re.compile(rb"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
"""Names that are safe everywhere, which is nearly every name. Others are checked as git does."""
Changes = Mapping[str, bytes | None]
"""Path -> new content. None removes the file."""


def load(objects: BaseObjectStore, name: ObjectID, kind: type[_Kind]) -> _Kind:
    """An object of this kind; raises MemoryDamaged."""
    with damaged_at(name):
        stored = objects[name]
        if not isinstance(stored, kind):
            raise MemoryDamaged(where=name.decode(), reason=f"a {kind.__name__.lower()} was expected")
        return stored


@contextmanager
def damaged_at(name: ObjectID) -> Generator[None]:
    """Convert the errors of reading a broken or missing object to MemoryDamaged."""
    try:
        yield
    except KeyError as error:
        raise MemoryDamaged(where=name.decode(), reason="the object is missing") from error
    except (FileFormatException, ChecksumMismatch, ValueError, AssertionError, EOFError, zlib.error) as error:
        reason = f"the object cannot be read ({type(error).__name__})"
        raise MemoryDamaged(where=name.decode(), reason=reason) from error


class AgentFolder:
    """`memory/{agentId}/` at one commit; empty if it does not exist."""

    def __init__(self, objects: BaseObjectStore, commit: ObjectID | None, agent_id: AgentId) -> None:
        self.objects = objects
        self._read: dict[ObjectID, dict[str, tuple[int, ObjectID]]] = {}
        self.commit = commit
        self.agent_id = agent_id
        self.tree = None if commit is None else self._find(load(objects, commit, Commit).tree)

    def at(self, commit: ObjectID | None) -> "AgentFolder":
        """The folder of the same agent at another commit."""
        return AgentFolder(self.objects, commit, self.agent_id)

    def read(self, file: str) -> bytes | None:
        """The content of a file; None if it does not exist."""
        *folders, name = file.split("/")
        entry = self._folder(folders).get(name)
        if entry is None:
            return None
        mode, object_id = entry
        if stat.S_ISDIR(mode):
            raise MemoryDamaged(where=self._where(file), reason="a file was expected and a folder is there")
        content = load(self.objects, object_id, Blob).as_raw_string()
        if len(content) > FILE_BYTES_MAX:
            raise MemoryDamaged(
                where=self._where(file), reason=f"it has {len(content)} bytes, more than {FILE_BYTES_MAX}"
            )
        return content

    def text(self, file: str) -> str:
        """The text of a file; empty if it does not exist."""
        try:
            return (self.read(file) or b"").decode()
        except UnicodeDecodeError as error:
            raise MemoryDamaged(where=self._where(file), reason="it is not UTF-8") from error

    def names(self, folder: str) -> list[str]:
        """The names of the files in a subfolder, sorted."""
        return sorted(name for name, (mode, _) in self._folder([folder]).items() if not stat.S_ISDIR(mode))

    def files(self) -> dict[str, ObjectID]:
        """Every file except the markers, with its blob id: equal ids mean equal content."""
        return dict(self._walk([]))

    def _walk(self, folders: list[str]) -> Iterator[tuple[str, ObjectID]]:
        for name, (mode, object_id) in self._folder(folders).items():
            if name == APPLIED and not folders:
                continue
            if stat.S_ISDIR(mode):
                yield from self._walk([*folders, name])
            else:
                yield "/".join([*folders, name]), object_id

    def _find(self, root: ObjectID) -> ObjectID | None:
        """The tree of this agent, from the root tree of a commit."""
        object_id: ObjectID = root
        for name in (ROOT, self.agent_id):
            entries = _entries(self.objects, object_id)
            if name not in entries:
                return None
            mode, object_id = entries[name]
            if not stat.S_ISDIR(mode):
                raise MemoryDamaged(where=f"{ROOT}/{self.agent_id}", reason=f"{name} is no folder")
        return object_id

    def _folder(self, folders: list[str]) -> dict[str, tuple[int, ObjectID]]:
        """The entries of a subfolder. Each must be a regular file or a folder."""
        tree = self.tree
        for name in folders:
            mode, tree = ({} if tree is None else self._plain(tree)).get(name, (FOLDER_MODE, None))
            if not stat.S_ISDIR(mode):
                raise MemoryDamaged(where=self._where("/".join(folders)), reason="a folder was expected")
        return {} if tree is None else self._plain(tree)

    def _plain(self, tree: ObjectID) -> dict[str, tuple[int, ObjectID]]:
        if tree not in self._read:
            entries = _entries(self.objects, tree)
            for name, (mode, _) in entries.items():
                if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                    raise MemoryDamaged(where=self._where(name), reason="only files and folders may be here, no links")
            self._read[tree] = entries
        return self._read[tree]

    def _where(self, file: str) -> str:
        return f"{ROOT}/{self.agent_id}/{file}"


def with_changes(objects: BaseObjectStore, root: ObjectID | None, changes: Changes) -> tuple[ObjectID, list[ShaFile]]:
    """The root tree after the changes, and every new object. Paths are relative to the root."""
    new_objects: list[ShaFile] = []
    tree = _rebuilt(objects, root, {tuple(path.split("/")): content for path, content in changes.items()}, new_objects)
    return tree.id, new_objects


def _rebuilt(
    objects: BaseObjectStore,
    root: ObjectID | None,
    changes: Mapping[tuple[str, ...], bytes | None],
    new_objects: list[ShaFile],
) -> Tree:
    entries = {} if root is None else _entries(objects, root)
    for first in sorted({path[0] for path in changes}):
        below = {path[1:]: content for path, content in changes.items() if path[0] == first}
        if () in below:
            _place_file(entries, first, below[()], new_objects)
            continue
        mode, inner = entries.get(first, (FOLDER_MODE, None))
        if not stat.S_ISDIR(mode):
            raise MemoryDamaged(where=first, reason="a folder was expected and something else is there")
        tree = _rebuilt(objects, inner, below, new_objects)
        entries[first] = (FOLDER_MODE, tree.id)
        if not len(tree):
            del entries[first]
    tree = Tree()
    for name, (mode, object_id) in entries.items():
        tree.add(name.encode(), mode, object_id)
    new_objects.append(tree)
    return tree


def _place_file(
    entries: dict[str, tuple[int, ObjectID]], name: str, content: bytes | None, objects: list[ShaFile]
) -> None:
    if content is None:
        entries.pop(name, None)
        return
    blob = Blob.from_string(content)
    objects.append(blob)
    entries[name] = (FILE_MODE, blob.id)


def _entries(objects: BaseObjectStore, tree: ObjectID) -> dict[str, tuple[int, ObjectID]]:
    by_name: dict[str, tuple[int, ObjectID]] = {}
    for entry in load(objects, tree, Tree).iteritems():
        if not _is_safe(entry.path):
            raise MemoryDamaged(where=tree.decode(), reason=f"the name {entry.path!r} is not allowed")
        by_name[entry.path.decode()] = (entry.mode, entry.sha)
    return by_name


def _is_safe(name: bytes) -> bool:
    if PLAIN_NAME.fullmatch(name):
        return True
    if not name or b"/" in name or b"\\" in name or b"\0" in name:
        return False
    return validate_path_element_ntfs(name) and validate_path_element_hfs(name)
