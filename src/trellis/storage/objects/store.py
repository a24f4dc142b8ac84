"""The object store interface: documents by key, with atomic and conditional writes.

Every implementation guarantees:
- A reader sees an object's old bytes or its new bytes, never a mixture or a part.
- Of any number of writers that create one key, or replace one etag, exactly one gets `PutStored`.
- Once `PutStored` is returned, the bytes survive a crash, and every later `get`, `head` or `list` shows them.
- `list` is in the byte order of keys, and each page continues exactly where the last one ended.
- A key is validated before any request, and cannot refer to anything outside the store's folder or prefix.

An etag is opaque: equal etags under one key mean equal bytes, nothing more. A refused write is a return value, not an
error. If the store could not answer, one of these is raised:

    StoreError
    ├── KeyInvalid            the key is invalid; no request was made
    ├── ObjectTooLarge        over the limit, on write or read
    ├── StoreUrlInvalid       the address names no store
    ├── StoreUnavailable      it did not answer, or not now: worth a retry
    ├── StoreRefused          it refuses this caller: credentials, bucket, permissions
    └── StoreUnfit            it answers, but lacks a guarantee that Trellis relies on
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias, TypeVar

from trellis.engine.errors import TrellisError
from trellis.engine.metrics import STORE_ERRORS, STORE_SECONDS, Counted, measured_class, process_metrics

OBJECT_BYTES_MAX = 64 * 1024 * 1024
PAGE_MAX = 1000
PUTS_AT_ONCE = 16
"""Most puts of one `put_many` that wait for the answer of a server at the same time."""


class StoreError(TrellisError):
    """{detail}"""

    code = "UPSTREAM_UNAVAILABLE"
    shown = "The object store cannot answer now; try again in a while."


class KeyInvalid(StoreError):
    """{key!r} is no object key: {reason}."""

    code = "VALIDATION_FAILED"


class ObjectTooLarge(StoreError):
    """Object {key!r} has {size} bytes and the limit is {limit}; split it, or raise the limit of the object store."""

    code = "PAYLOAD_TOO_LARGE"


class StoreUrlInvalid(StoreError):
    """{url!r} is no object store address: {reason}. Use file:///path/to/folder or s3://bucket/prefix?endpoint=…&region=…"""

    code = "VALIDATION_FAILED"


class StoreUnavailable(StoreError):
    """The object store did not answer {verb} {key!r}: {reason}; try again."""


class StoreRefused(StoreError):
    """The object store refused {verb} {key!r}: {reason}."""


class StoreUnfit(StoreError):
    """The object store {url} cannot be used: {reason}."""


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Write unconditionally."""


@dataclass(frozen=True, slots=True)
class Create:
    """Write only if the key does not exist."""


@dataclass(frozen=True, slots=True)
class IfMatch:
    """Write only over exactly this version."""

    etag: str


PutCondition: TypeAlias = Overwrite | Create | IfMatch

OVERWRITE: Final = Overwrite()
CREATE: Final = Create()


def if_match(etag: str) -> IfMatch:
    """The condition that the object was not written since this etag was read."""
    return IfMatch(etag)


def holds(when: PutCondition, etag: str | None) -> bool:
    """Whether a put under this condition may replace the version with this etag (None: no object)."""
    if isinstance(when, Create):
        return etag is None
    return isinstance(when, Overwrite) or when.etag == etag


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object's metadata."""

    key: str
    etag: str
    size: int
    modified_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object with its bytes, from one consistent read."""

    key: str
    body: bytes
    etag: str
    size: int
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class PutStored:
    """The bytes are stored durably under this etag."""

    etag: str


@dataclass(frozen=True, slots=True)
class PutRefused:
    """The condition does not hold. `etag` is the current version, None if there is no object."""

    etag: str | None


@dataclass(frozen=True, slots=True)
class ObjectPut:
    """One object that `ObjectStore.put_many` writes."""

    key: str
    body: bytes
    when: PutCondition | None
    """None replaces exactly what the put of this key before it in the same sequence stored."""


PutAnswer: TypeAlias = PutStored | PutRefused | StoreError


@dataclass(frozen=True, slots=True)
class ObjectPage:
    """Objects in key order. If `more` is set, call again with `after` set to the last key."""

    items: tuple[ObjectInfo, ...]
    more: bool


class ObjectStore(Protocol):
    """The interface of object stores. Every method may raise KeyInvalid, StoreUnavailable and StoreRefused."""

    @property
    def url(self) -> str:
        """The store's address, without credentials."""
        ...

    async def get(self, key: str) -> StoredObject | None:
        """The object with its bytes; None if it does not exist. Raises ObjectTooLarge."""
        ...

    async def head(self, key: str) -> ObjectInfo | None:
        """The object's metadata; None if it does not exist."""
        ...

    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        """Write the whole object if the condition holds; raises ObjectTooLarge.

        After StoreUnavailable the write may still happen later. Repeating the same conditional put is always safe.
        """
        ...

    async def put_many(self, sequences: Sequence[Sequence[ObjectPut]]) -> list[list[PutAnswer]]:
        """Write many objects. Returns the answers to the puts of every sequence, in order. Raises no StoreError.

        The objects of one sequence become visible in its order. It ends at the first put that is refused or fails, so
        its last answer may be a PutRefused or a StoreError. The sequences do not wait for each other.
        """
        ...

    async def list(self, prefix: str, *, after: str | None = None, limit: int = PAGE_MAX) -> ObjectPage:
        """The objects whose keys begin with `prefix` and are greater than `after`: at most `limit`, 1 to 1000."""
        ...

    async def delete(self, key: str) -> bool:
        """Delete the object. Returns whether there was one."""
        ...

    async def close(self) -> None:
        """Close connections and threads. The store cannot be used afterwards."""
        ...

    async def probe(self) -> None:
        """Check on this store that conditional writes work; raises StoreUnfit."""
        ...


async def listed_pages(objects: ObjectStore, prefix: str, *, after: str | None = None) -> AsyncGenerator[ObjectPage]:
    """The pages of a listing, one after the other. Objects that are added behind the last key meanwhile are listed."""
    while True:
        page = await objects.list(prefix, after=after)
        yield page
        if not page.more:
            return
        after = page.items[-1].key


async def put_one_by_one(
    put: Callable[..., Awaitable[PutStored | PutRefused]], sequences: Sequence[Sequence[ObjectPut]]
) -> list[list[PutAnswer]]:
    """`put_many` of a store without a faster way: one call of its `put` for each object, PUTS_AT_ONCE at a time."""
    room = asyncio.Semaphore(PUTS_AT_ONCE)

    async def write(sequence: Sequence[ObjectPut]) -> list[PutAnswer]:
        answers, etags = list[PutAnswer](), dict[str, str]()
        async with room:
            for one in sequence:
                try:
                    answer = await put(one.key, one.body, when=one.when or if_match(etags[one.key]))
                except StoreError as error:
                    answer = error
                answers.append(answer)
                if not isinstance(answer, PutStored):
                    break
                etags[one.key] = answer.etag
        return answers

    return await asyncio.gather(*map(write, sequences))


STORE_VERBS = ("get", "head", "put", "put_many", "list", "delete")
StoreT = TypeVar("StoreT")


def measured_store(store: type[StoreT], counted: Mapping[str, Counted] = MappingProxyType({})) -> type[StoreT]:
    """Wrap the calls of a store class, so that their time and errors are counted."""
    return measured_class(store, STORE_VERBS, STORE_SECONDS, STORE_ERRORS, counted)


def count_failed_puts(_: object, __: Sequence[object], answers: Sequence[Sequence[PutAnswer]]) -> None:
    """Counts the errors in the answers of `put_many`, for a store whose `put_many` does not call its `put`."""
    for error in (one for sequence in answers for one in sequence if isinstance(one, StoreError)):
        process_metrics.count(STORE_ERRORS, 1, "put", error.code)
