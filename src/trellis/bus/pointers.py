"""Pointers to the bytes of a job. A pointer is `scheme://key`, opaque to all but the store registered for its scheme.

A pointer is checked when it is read and never before (D53). The store bounds what a pointer can name, not its author:
`objects://…` stays below one folder of the object store, and `redis://…` is a key of the one configured server,
whatever host it seems to name.

What we write is named by its content. The same bytes have the same pointer, an object is only ever overwritten with the
same bytes, and a repeated request names the same pointer. Bytes that do not match the digest in their name are never
returned: an approval is bound to the pointer, and so to the bytes.
"""

import hashlib
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from trellis.bus.errors import (
    PointerChanged,
    PointerGone,
    PointerInvalid,
    PointerTooLarge,
    PointerUnavailable,
    PointerUnknown,
)
from trellis.engine.errors import OptionInvalid, SettingsInvalid
from trellis.engine.extras import Extra, extra_needed
from trellis.engine.logs import log_of
from trellis.storage.objects.keys import checked_key
from trellis.storage.objects.store import KeyInvalid, ObjectStore, ObjectTooLarge

if TYPE_CHECKING:  # an optional dependency, loaded only where Redis is configured
    from redis.asyncio import Redis

OBJECTS = "objects"
REDIS = "redis"
FOLDER = "bus"
"""The folder of the object store that pointers can name."""
ASIDE_FOLDER = "bus-aside"
"""Folder for objects of `FOLDER` that are about to be removed. Their pointers still resolve (see `collector`)."""
BYTES_MAX = 2 * 1024 * 1024
"""As much as an agent of the CAP SDK reads."""
POINTER_CHARS_MAX = 2_000
REDIS_KEY_BYTES_MAX = 1_024
REDIS_TIMEOUT_S = 5.0
KEPT_S_DEFAULT = 30 * 24 * 3600.0
"""Minimum time to live in a store that expires its keys, in seconds. The ledger keeps ended jobs as long."""

KEEP_FOREVER = -1
"""Redis's answer for a key without expiry."""
WRONG_TYPE = "WRONGTYPE"
"""Prefix of Redis's error for a key that is not a string.

All other Redis errors (busy, loading, no master) may be temporary.
"""

DIGEST_CHARS = 64

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,31}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class PointerPart(StrEnum):
    """Which part of a job the bytes are; the values are those of the CAP SDK."""

    CONTEXT = "ctx"
    RESULT = "res"


_log = log_of("trellis.bus.pointers")

_NAME = re.compile(rf"({'|'.join(PointerPart)})/[0-9a-f]{{{DIGEST_CHARS}}}")


_POINTER = re.compile(rf"[^/]+://({'|'.join(PointerPart)})[/:]([0-9a-f]{{{DIGEST_CHARS}}})")


def digest_in(pointer: str) -> str | None:
    """The SHA-256 in a pointer made by `put`; None for a caller's own name, whose content may change."""
    match = _POINTER.fullmatch(pointer)
    return None if match is None else match[2]


class PointerStore(Protocol):
    """The store behind one scheme."""

    def key(self, part: PointerPart, digest: str) -> str:
        """The key for bytes with this digest."""
        ...

    async def read(self, key: str) -> bytes | None:
        """The bytes, or None when there are none. Raises KeyInvalid, and ObjectTooLarge without fetching everything."""
        ...

    async def write(self, key: str, body: bytes, *, keep_s: float) -> None:
        """Store the bytes for at least `keep_s` seconds. The key is either free or holds the same bytes."""
        ...

    async def close(self) -> None:
        """Close the store's own connections."""
        ...


class Pointers:
    """Registry of pointer stores by scheme."""

    def __init__(self) -> None:
        self._stores: dict[str, PointerStore] = {}

    def register(self, scheme: str, store: PointerStore) -> None:
        """Register the store of a scheme; raises OptionInvalid for an invalid or registered name."""
        if not _SCHEME.fullmatch(scheme):
            raise OptionInvalid(option="scheme", value=scheme, expected="small letters, digits and + . -")
        if scheme in self._stores:
            raise OptionInvalid(option="scheme", value=scheme, expected="it is registered already; choose another")
        self._stores[scheme] = store

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(sorted(self._stores))

    async def read(self, pointer: str, *, part: PointerPart | None = None) -> bytes:
        """Read the bytes behind a pointer.

        With `part`, only keys of that part are read: the pointer's author is not trusted.

        Raises PointerUnknown, PointerInvalid, PointerGone, PointerChanged, PointerTooLarge, PointerUnavailable.
        """
        store, key = self._behind(pointer)
        if part is not None and not key.startswith((f"{part}:", f"{part}/")):
            reason = f"only what is kept as {part}:… or {part}/… is fetched here"
            raise PointerInvalid(pointer=pointer[:200], reason=reason)
        try:
            body = await store.read(key)
        except KeyInvalid as error:
            raise PointerInvalid(pointer=pointer, reason=str(error.data["reason"])) from None
        except ObjectTooLarge:
            raise PointerTooLarge(pointer=pointer, limit=BYTES_MAX) from None
        if body is None:
            raise PointerGone(pointer=pointer)
        digest = digest_in(pointer)
        if digest is not None and (actual := hashlib.sha256(body).hexdigest()) != digest:
            _log.error("content_changed", pointer=pointer, sha256=actual, size=len(body))
            raise PointerChanged(pointer=pointer)
        return body

    def may_be_kept_here(self, pointer: str, *, part: PointerPart) -> bool:
        """Whether the pointer has the form that `put` gives. Any other form is a caller's own key."""
        store, key = self._behind(pointer)
        digest = key[-DIGEST_CHARS:]
        return _DIGEST.fullmatch(digest) is not None and key == store.key(part, digest)

    def pointer_to(self, body: bytes, *, part: PointerPart, scheme: str = OBJECTS) -> str:
        """The pointer these bytes will have; writes nothing. Raises PointerUnknown, PointerTooLarge."""
        pointer = f"{scheme}://{self._store(scheme).key(part, hashlib.sha256(body).hexdigest())}"
        if len(body) > BYTES_MAX:
            raise PointerTooLarge(pointer=pointer, limit=BYTES_MAX)
        return pointer

    async def put(
        self, body: bytes, *, part: PointerPart, scheme: str = OBJECTS, keep_s: float = KEPT_S_DEFAULT
    ) -> str:
        """Store the bytes and return their pointer. Idempotent."""
        pointer = self.pointer_to(body, part=part, scheme=scheme)
        store, key = self._behind(pointer)
        await store.write(key, body, keep_s=keep_s)
        return pointer

    async def write(self, job_id: str, body: bytes, *, scheme: str | None = None) -> str:
        """Store a job's result, as its worker does: in the object store, or on Redis where there is none.

        The pointer depends on the bytes alone; the report that carries it names the job.
        """
        del job_id
        own = OBJECTS if OBJECTS in self._stores else REDIS
        return await self.put(body, part=PointerPart.RESULT, scheme=scheme or own)

    async def close(self) -> None:
        """Close all stores. The instance's object store stays open."""
        for store in self._stores.values():
            await store.close()

    def _behind(self, pointer: str) -> tuple[PointerStore, str]:
        scheme, mark, key = pointer.partition("://")
        if not mark or len(pointer) > POINTER_CHARS_MAX:
            reason = "it has no scheme" if not mark else f"it has more than {POINTER_CHARS_MAX} characters"
            raise PointerInvalid(pointer=pointer[:200], reason=reason)
        return self._store(scheme), key

    def _store(self, scheme: str) -> PointerStore:
        if scheme not in self._stores:
            known = ", ".join(self.schemes) or "none"
            raise PointerUnknown(scheme=scheme[:40], known=known)
        return self._stores[scheme]


class ObjectPointerStore:
    """Pointers `objects://ctx/…`: the object store, below one folder."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def key(self, part: PointerPart, digest: str) -> str:
        """One folder per part."""
        return f"{part}/{digest}"

    async def read(self, key: str) -> bytes | None:
        """Read the object. An object that is too large is not fetched."""
        at = object_key_of(key)
        for place in (
            (at, aside_key_of(key), at) if is_name(key) else (at,)
        ):  # the collector may be moving it in either direction
            known = await self._objects.head(place)
            if known is not None and known.size > BYTES_MAX:
                raise ObjectTooLarge(key=place, size=known.size, limit=BYTES_MAX)
            stored = None if known is None else await self._objects.get(place)
            if stored is not None:
                return stored.body
        return None

    async def write(self, key: str, body: bytes, *, keep_s: float) -> None:  # noqa: ARG002 - kept while a job names it
        """Write the object, also over the same bytes.

        That renews its age, so it stays until the job that names it is in the ledger.
        """
        await self._objects.put(object_key_of(key), body)

    async def close(self) -> None:
        """Does nothing: the store does not own the object store."""


def object_key_of(key: str) -> str:
    """The object's key in the folder; raises KeyInvalid for a key outside the folder or an invalid one."""
    return checked_key(f"{FOLDER}/{key}")


def aside_key_of(key: str) -> str:
    """The key of an object that is set aside for removal; raises KeyInvalid."""
    return checked_key(f"{ASIDE_FOLDER}/{key}")


def is_name(key: str) -> bool:
    """Whether the key has the form that `put` gives."""
    return _NAME.fullmatch(key) is not None


class RedisPointerStore:
    """Pointers `redis://ctx:…`: literal keys of one server, as agents of the CAP SDK read them."""

    def __init__(self, server: "Redis") -> None:
        self._server = server

    def key(self, part: PointerPart, digest: str) -> str:
        """Keys as the SDK names them."""
        return f"{part}:{digest}"

    async def read(self, key: str) -> bytes | None:
        """Read the string at this key. Fetches at most `BYTES_MAX` + 1 bytes."""
        from redis.exceptions import RedisError, ResponseError

        if not key or len(key.encode(errors="replace")) > REDIS_KEY_BYTES_MAX:
            raise KeyInvalid(key=key[:200], reason=f"a key has 1 to {REDIS_KEY_BYTES_MAX} bytes")
        try:
            body = await self._server.getrange(key, 0, BYTES_MAX)
            if not body and not await self._server.exists(key):
                return None
        except (RedisError, OSError) as error:
            if isinstance(error, ResponseError) and str(error).startswith(WRONG_TYPE):
                raise KeyInvalid(key=key, reason=str(error)) from error
            raise PointerUnavailable(pointer=f"{REDIS}://{key}", reason=str(error)) from error
        if len(body) > BYTES_MAX:
            raise ObjectTooLarge(key=key, size=len(body), limit=BYTES_MAX)
        return body if isinstance(body, bytes) else body.encode()

    async def write(self, key: str, body: bytes, *, keep_s: float) -> None:
        """Store the bytes. Extends the expiry of an existing key and never shortens it."""
        from redis.exceptions import RedisError

        wanted_ms = max(1, round(keep_s * 1000))
        try:
            left_ms = int(await self._server.pttl(key))
            if left_ms != KEEP_FOREVER and left_ms < wanted_ms:
                await self._server.set(key, body, px=wanted_ms)
        except (RedisError, OSError) as error:
            raise PointerUnavailable(pointer=f"{REDIS}://{key}", reason=str(error)) from error

    async def close(self) -> None:
        await self._server.aclose()


def make_pointers(objects: ObjectStore | None, redis_url: str | None) -> Pointers:
    """The registry with the schemes of an instance. Does not connect. Raises SettingsInvalid."""
    pointers = Pointers()
    if objects is not None:
        pointers.register(OBJECTS, ObjectPointerStore(objects))
    if redis_url is not None:
        pointers.register(REDIS, RedisPointerStore(_redis(redis_url)))
    return pointers


def _redis(url: str) -> "Redis":
    """A Redis client that connects on first use: a server that is down now may be up by then."""
    with extra_needed(Extra.BUS, "A pointer store on Redis"):
        from redis.asyncio import Redis
    try:
        return Redis.from_url(  # pyright: ignore[reportUnknownMemberType] - typed for every kind of answer
            url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S, decode_responses=False
        )
    except ValueError:  # the error's text may contain part of the password
        detail = "it is no address of a Redis server; write redis://[:password@]host:6379/0, with / # ? @ of a password as %2F %23 %3F %40"
        raise SettingsInvalid(source="TRELLIS_REDIS", detail=detail) from None
