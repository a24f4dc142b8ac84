"""Git packs of whole objects: how the object store keeps changes of memory, and what belongs to a span of commits.

A pack is in git's own format (version 2, no deltas), so `git unpack-objects` reads it. Reading is bounded: an object
that is larger than it says, or than any object of a memory, is not inflated.
"""

import hashlib
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence

from dulwich.object_store import BaseObjectStore
from dulwich.objects import Commit, ObjectID, ShaFile, Tree

from trellis.storage.memory.bare_repository import OBJECT_BYTES_MAX
from trellis.storage.memory.history import walk
from trellis.storage.memory.trees import load

PACK_BYTES_MAX = 32 * 1024 * 1024
"""No larger pack is written. An object store takes 64 MiB."""
_START = struct.Struct(">4sII")
_DIGEST_BYTES = 20
_ZLIB_BYTES = 128
"""More than zlib adds to a content that it cannot make shorter."""
_KINDS = {1, 2, 3}  # commit, tree, blob


class PackInvalid(ValueError):
    """Bytes that are no pack of whole objects; the message says what is wrong."""


def encode(objects: Iterable[tuple[int, bytes]]) -> bytes:
    """A pack of these objects: the number of each one's kind, and its content."""
    parts = [_header(kind, len(content)) + zlib.compress(content) for kind, content in objects]
    body = _START.pack(b"PACK", 2, len(parts)) + b"".join(parts)
    return body + hashlib.sha1(body, usedforsecurity=False).digest()


def decode(pack: bytes) -> Iterator[ShaFile]:
    """The objects of a pack, each with the id that its content gives. Raises PackInvalid."""
    body, digest = memoryview(pack)[:-_DIGEST_BYTES], pack[-_DIGEST_BYTES:]
    if len(body) < _START.size or hashlib.sha1(body, usedforsecurity=False).digest() != digest:
        raise PackInvalid("its checksum is wrong")
    magic, version, count = _START.unpack_from(body)
    if (magic, version) != (b"PACK", 2):
        raise PackInvalid("it is no git pack of version 2")
    at = _START.size
    for _ in range(count):
        kind, size, at = _read_header(body, at)
        content, at = _inflated(body, at, size)
        yield ShaFile.from_raw_string(kind, content)
    if at != len(body):
        raise PackInvalid("it has more objects than it says")


def raw(objects: BaseObjectStore, names: Iterable[ObjectID]) -> Iterator[tuple[int, bytes]]:
    """The kind and the content of each object. Raises MemoryDamaged."""
    for name in names:
        item = load(objects, name, ShaFile)
        yield item.type_num, item.as_raw_string()


def introduced(objects: BaseObjectStore, head: ObjectID, base: ObjectID | None) -> Iterator[ObjectID]:
    """Every object that `head` needs and `base`, one of its first parents, does not bring. Each is named once.

    An object that was there before under another path may be among them.
    """
    seen: set[ObjectID] = set()
    older: set[ObjectID] | None = None
    for name, commit in walk(objects, head):
        if name == base:
            return
        yield from _of_commit(objects, name, commit, seen)
        if len(commit.parents) > 1:  # a person merged: the other side comes along, without what `base` has
            older = _ancestors(objects, [] if base is None else [base], set()) if older is None else older
            for other in sorted(_ancestors(objects, [ObjectID(one) for one in commit.parents[1:]], older)):
                yield from _of_commit(objects, other, load(objects, other, Commit), seen)


def _of_commit(objects: BaseObjectStore, name: ObjectID, commit: Commit, seen: set[ObjectID]) -> Iterator[ObjectID]:
    if name in seen:
        return
    seen.add(name)
    yield name
    before = load(objects, ObjectID(commit.parents[0]), Commit).tree if commit.parents else None
    yield from _of_tree(objects, commit.tree, before, seen)


def _of_tree(
    objects: BaseObjectStore, tree: ObjectID, before: ObjectID | None, seen: set[ObjectID]
) -> Iterator[ObjectID]:
    if tree == before or tree in seen:
        return
    seen.add(tree)
    yield tree
    old = {} if before is None else {entry.path: entry for entry in load(objects, before, Tree).iteritems()}
    for entry in load(objects, tree, Tree).iteritems():
        same = old.get(entry.path)
        if same is not None and same.sha == entry.sha:
            continue
        if stat.S_ISDIR(entry.mode):
            inner = same.sha if same is not None and stat.S_ISDIR(same.mode) else None
            yield from _of_tree(objects, entry.sha, inner, seen)
        elif (stat.S_ISREG(entry.mode) or stat.S_ISLNK(entry.mode)) and entry.sha not in seen:
            seen.add(entry.sha)
            yield entry.sha


def _ancestors(objects: BaseObjectStore, starts: Sequence[ObjectID], known: set[ObjectID]) -> set[ObjectID]:
    """These commits and all that they came from, without the known ones."""
    reached: set[ObjectID] = set()
    waiting = list(starts)
    while waiting:
        name = waiting.pop()
        if name not in reached and name not in known:
            reached.add(name)
            waiting += [ObjectID(parent) for parent in load(objects, name, Commit).parents]
    return reached


def _header(kind: int, size: int) -> bytes:
    first, size = (kind << 4) | (size & 0x0F), size >> 4
    written = bytearray()
    while size:
        written.append(first | 0x80)
        first, size = size & 0x7F, size >> 7
    written.append(first)
    return bytes(written)


def _read_header(body: memoryview, at: int) -> tuple[int, int, int]:
    """The kind and the size of the object that begins here, and where its content begins."""
    try:
        byte = body[at]
        kind, size, shift = (byte >> 4) & 0x07, byte & 0x0F, 4
        while byte & 0x80:
            at += 1
            byte = body[at]
            size |= (byte & 0x7F) << shift
            shift += 7
    except IndexError:
        raise PackInvalid("it ends early") from None
    if kind not in _KINDS or size > OBJECT_BYTES_MAX:
        raise PackInvalid(f"it has an object of kind {kind} and {size} bytes, which no memory has")
    return kind, size, at + 1


def _inflated(body: memoryview, at: int, size: int) -> tuple[bytes, int]:
    """The content of the object whose bytes begin here, and where the next one begins."""
    given = body[at : at + size + (size >> 8) + _ZLIB_BYTES]  # no more than its bytes can be
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(given, size + 1)
        if len(content) == size and not reader.eof:  # the end of its bytes may still be ahead
            content += reader.decompress(reader.unconsumed_tail, 1)
    except zlib.error as error:
        raise PackInvalid("an object cannot be read") from error
    if len(content) != size or not reader.eof:
        raise PackInvalid("an object has not the size that it says")
    return content, at + len(given) - len(reader.unused_data)
