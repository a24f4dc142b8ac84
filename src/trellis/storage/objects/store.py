"""The object store: documents by key, each write whole, atomic and conditional.

What holds in every implementation:
- an object is its old bytes or its new bytes to every reader, never a mixture and never half;
- of any number of writers that create one key, or replace one etag, exactly one gets `PutStored`;
- once `PutStored` is returned the bytes survive a crash, and the next `get`, `head` or `list` of anybody shows them;
- `list` is in the byte order of keys, and a page goes on exactly where the last one ended;
- a key is checked before anything is asked of the store, and can name nothing outside the store's folder or prefix.

An etag is opaque: two equal ones under one key mean equal bytes, nothing more. A write that is refused is an answer and not
an error. What the store could not answer is an error, in this tree:

StoreError
├── KeyInvalid            the key is no key; nothing was asked
├── ObjectTooLarge        over the bound, on the way in or out
├── StoreUrlInvalid       the address names no store
├── StoreUnavailable      it did not answer, or not now: worth another try
├── StoreRefused          it will not answer this caller: credentials, bucket, permissions
└── StoreUnfit            it answers, but does not hold what Trellis relies on
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol, TypeAlias

from trellis.engine.errors import TrellisError

OBJECT_BYTES_MAX = 64 * 1024 * 1024
PAGE_MAX = 1000


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
    """Put whatever is there."""


@dataclass(frozen=True, slots=True)
class Create:
    """Put only where nothing is."""


@dataclass(frozen=True, slots=True)
class IfMatch:
    """Put only over exactly this version."""

    etag: str


PutCondition: TypeAlias = Overwrite | Create | IfMatch

OVERWRITE: Final = Overwrite()
CREATE: Final = Create()


def if_match(etag: str) -> IfMatch:
    """The condition that nobody has written since this etag was read."""
    return IfMatch(etag)


def holds(when: PutCondition, etag: str | None) -> bool:
    """Whether a put under this condition may go over the version that is there, None for nothing."""
    if isinstance(when, Create):
        return etag is None
    return isinstance(when, Overwrite) or when.etag == etag


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What is known of an object without its bytes."""

    key: str
    etag: str
    size: int
    modified_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object and its bytes, of one moment."""

    key: str
    body: bytes
    etag: str
    size: int
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class PutStored:
    """The bytes are there, durably, under this etag."""

    etag: str


@dataclass(frozen=True, slots=True)
class PutRefused:
    """The condition does not hold. `etag` is what is there instead, None if nothing is."""

    etag: str | None


@dataclass(frozen=True, slots=True)
class ObjectPage:
    """Some objects in the order of their keys. When there are `more`, ask again with `after` the last key."""

    items: tuple[ObjectInfo, ...]
    more: bool


class ObjectStore(Protocol):
    """The port. Every verb may raise KeyInvalid, StoreUnavailable and StoreRefused."""

    @property
    def url(self) -> str:
        """Where it is; holds no credentials."""
        ...

    async def get(self, key: str) -> StoredObject | None:
        """The object, or None; raises ObjectTooLarge."""
        ...

    async def head(self, key: str) -> ObjectInfo | None:
        """The object without its bytes, or None."""
        ...

    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        """Write the whole object if the condition holds; raises ObjectTooLarge.

        After StoreUnavailable the write may still happen later. The same conditional put again is always safe.
        """
        ...

    async def list(self, prefix: str, *, after: str | None = None, limit: int = PAGE_MAX) -> ObjectPage:
        """The objects whose keys begin with `prefix` and are greater than `after`: at most `limit`, 1 to 1000."""
        ...

    async def delete(self, key: str) -> bool:
        """Remove the object; whether there was one."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads. The store cannot be used afterwards."""
        ...

    async def probe(self) -> None:
        """Prove on this very store that conditional writes hold; raises StoreUnfit."""
        ...
