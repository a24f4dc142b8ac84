"""Where the bytes of a job are: a pointer is `scheme:key`, opaque to everybody but the store that is registered for its scheme.

A pointer is checked when it is followed and never before (D53). What it can name is bounded by the store and not by who wrote it:
`objects://…` stays below one folder of the object store, `redis://…` is a key of the one server that is configured, whatever host it
may look like. What we write is named by its content: the same bytes have the same pointer, nothing is ever written over but by the same,
and a request that is repeated says the same again. Bytes that do not have the digest in their name are given to nobody: an approval is
bound to the pointer, and so to the bytes.
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

if TYPE_CHECKING:  # an optional dependency, loaded by those who have a Redis
    from redis.asyncio import Redis

OBJECTS = "objects"
REDIS = "redis"
FOLDER = "bus"
"""The folder of the object store that pointers can name."""
ASIDE_FOLDER = "bus-aside"
"""Where an object of that folder lies while it is about to be removed: its pointer still leads to it (`collecting`)."""
BYTES_MAX = 2 * 1024 * 1024
"""As much as an agent of the CAP SDK reads."""
POINTER_CHARS_MAX = 2_000
REDIS_KEY_BYTES_MAX = 1_024
REDIS_TIMEOUT_S = 5.0
KEPT_S_DEFAULT = 30 * 24 * 3600.0
"""How long a store that forgets keeps what is written, at least; as long as the ledger keeps ended jobs."""

KEEP_FOREVER = -1
"""What Redis says of a key that has no end."""
WRONG_TYPE = "WRONGTYPE"
"""What Redis says of a key that is no string. Whatever else it refuses (busy, loading, without its master) it may do later."""

DIGEST_CHARS = 64

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,31}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class PointerPart(StrEnum):
    """What the bytes are of a job; the words are those of the CAP SDK."""

    CONTEXT = "ctx"
    RESULT = "res"


_log = log_of("trellis.bus.pointers")

_NAME = re.compile(rf"({'|'.join(PointerPart)})/[0-9a-f]{{{DIGEST_CHARS}}}")


_POINTER = re.compile(rf"[^/]+://({'|'.join(PointerPart)})[/:]([0-9a-f]{{{DIGEST_CHARS}}})")


def digest_in(pointer: str) -> str | None:
    """The sha256 that a pointer of `put` says of its bytes; None for a name that somebody chose, whose content may change."""
    found = _POINTER.fullmatch(pointer)
    return None if found is None else found[2]


class PointerStore(Protocol):
    """What is behind one scheme."""

    def key(self, part: PointerPart, digest: str) -> str:
        """What bytes with this digest are called here."""
        ...

    async def read(self, key: str) -> bytes | None:
        """The bytes, None when there is nothing; raises KeyInvalid, and ObjectTooLarge without fetching them all."""
        ...

    async def write(self, key: str, body: bytes, *, keep_s: float) -> None:
        """Keep these bytes for so long at least. Nothing is there, or the same bytes are."""
        ...

    async def close(self) -> None:
        """Let go of connections that were made for this."""
        ...


class Pointers:
    """The schemes that are registered here."""

    def __init__(self) -> None:
        self._stores: dict[str, PointerStore] = {}

    def register(self, scheme: str, store: PointerStore) -> None:
        """Follow pointers of this scheme; raises OptionInvalid for a name that is none, or taken."""
        if not _SCHEME.fullmatch(scheme):
            raise OptionInvalid(option="scheme", value=scheme, expected="small letters, digits and + . -")
        if scheme in self._stores:
            raise OptionInvalid(option="scheme", value=scheme, expected="it is registered already; choose another")
        self._stores[scheme] = store

    @property
    def schemes(self) -> tuple[str, ...]:
        """What can be followed."""
        return tuple(sorted(self._stores))

    async def read(self, pointer: str, *, part: PointerPart | None = None) -> bytes:
        """What the pointer leads to, perhaps only if it is kept as this part of a job: who wrote the pointer may be anybody.

        Raises PointerUnknown, PointerInvalid, PointerGone, PointerChanged, PointerTooLarge, PointerUnavailable.
        """
        store, key = self._behind(pointer)
        if part is not None and not key.startswith((f"{part}:", f"{part}/")):
            reason = f"only what is kept as {part}:… or {part}/… is fetched here"
            raise PointerInvalid(pointer=pointer[:200], reason=reason)
        try:
            found = await store.read(key)
        except KeyInvalid as error:
            raise PointerInvalid(pointer=pointer, reason=str(error.data["reason"])) from None
        except ObjectTooLarge:
            raise PointerTooLarge(pointer=pointer, limit=BYTES_MAX) from None
        if found is None:
            raise PointerGone(pointer=pointer)
        digest = digest_in(pointer)
        if digest is not None and (actual := hashlib.sha256(found).hexdigest()) != digest:
            _log.error("content_changed", pointer=pointer, sha256=actual, size=len(found))
            raise PointerChanged(pointer=pointer)
        return found

    def may_be_kept_here(self, pointer: str, *, part: PointerPart) -> bool:
        """Whether a pointer of `put` looks so. Any other is a key that somebody chose, and may be anybody's."""
        store, key = self._behind(pointer)
        digest = key[-DIGEST_CHARS:]
        return _DIGEST.fullmatch(digest) is not None and key == store.key(part, digest)

    def pointer_to(self, body: bytes, *, part: PointerPart, scheme: str = OBJECTS) -> str:
        """Where these bytes are once they are written; raises PointerUnknown, PointerTooLarge. Nothing is written."""
        pointer = f"{scheme}://{self._store(scheme).key(part, hashlib.sha256(body).hexdigest())}"
        if len(body) > BYTES_MAX:
            raise PointerTooLarge(pointer=pointer, limit=BYTES_MAX)
        return pointer

    async def put(
        self, body: bytes, *, part: PointerPart, scheme: str = OBJECTS, keep_s: float = KEPT_S_DEFAULT
    ) -> str:
        """Keep these bytes and say where they are; twice is as once."""
        pointer = self.pointer_to(body, part=part, scheme=scheme)
        store, key = self._behind(pointer)
        await store.write(key, body, keep_s=keep_s)
        return pointer

    async def write(self, job_id: str, body: bytes, *, scheme: str = OBJECTS) -> str:
        """Keep the result of a job, as its worker does. The pointer follows from the bytes: the job is named in the report that carries it."""
        del job_id
        return await self.put(body, part=PointerPart.RESULT, scheme=scheme)

    async def close(self) -> None:
        """Let go of the stores; the object store of an instance stays open."""
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
    """`objects://ctx/…`: the object store, below one folder."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def key(self, part: PointerPart, digest: str) -> str:
        """A folder for each part."""
        return f"{part}/{digest}"

    async def read(self, key: str) -> bytes | None:
        """The object. One that is too large is not fetched."""
        at = object_key_of(key)
        for place in (
            (at, aside_key_of(key), at) if is_name(key) else (at,)
        ):  # it may be on its way to the one or to the other
            known = await self._objects.head(place)
            if known is not None and known.size > BYTES_MAX:
                raise ObjectTooLarge(key=place, size=known.size, limit=BYTES_MAX)
            found = None if known is None else await self._objects.get(place)
            if found is not None:
                return found.body
        return None

    async def write(self, key: str, body: bytes, *, keep_s: float) -> None:  # noqa: ARG002 - kept while a job names it
        """Write it, also over the same bytes: so they are young, and stay until the job that will name them is in the ledger."""
        await self._objects.put(object_key_of(key), body)

    async def close(self) -> None:
        """Nothing: the object store is not this one's own."""


def object_key_of(key: str) -> str:
    """The object that is meant; raises KeyInvalid for what would be outside the folder, or is no key."""
    return checked_key(f"{FOLDER}/{key}")


def aside_key_of(key: str) -> str:
    """Where it lies while it is about to be removed; raises KeyInvalid."""
    return checked_key(f"{ASIDE_FOLDER}/{key}")


def is_name(key: str) -> bool:
    """Whether `put` names objects so."""
    return _NAME.fullmatch(key) is not None


class RedisPointerStore:
    """`redis://ctx:…`: a key of one server, literally, as the agents of the CAP SDK read it."""

    def __init__(self, server: "Redis") -> None:
        self._server = server

    def key(self, part: PointerPart, digest: str) -> str:
        """As the SDK calls them."""
        return f"{part}:{digest}"

    async def read(self, key: str) -> bytes | None:
        """The string at this key; only as much of it as is allowed is fetched."""
        from redis.exceptions import RedisError, ResponseError

        if not key or len(key.encode(errors="replace")) > REDIS_KEY_BYTES_MAX:
            raise KeyInvalid(key=key[:200], reason=f"a key has 1 to {REDIS_KEY_BYTES_MAX} bytes")
        try:
            found = await self._server.getrange(key, 0, BYTES_MAX)
            if not found and not await self._server.exists(key):
                return None
        except (RedisError, OSError) as error:
            if isinstance(error, ResponseError) and str(error).startswith(WRONG_TYPE):
                raise KeyInvalid(key=key, reason=str(error)) from error
            raise PointerUnavailable(pointer=f"{REDIS}://{key}", reason=str(error)) from error
        if len(found) > BYTES_MAX:
            raise ObjectTooLarge(key=key, size=len(found), limit=BYTES_MAX)
        return found if isinstance(found, bytes) else found.encode()

    async def write(self, key: str, body: bytes, *, keep_s: float) -> None:
        """Keep it; what is there already is kept longer, and never shorter."""
        from redis.exceptions import RedisError

        wanted_ms = max(1, round(keep_s * 1000))
        try:
            left_ms = int(await self._server.pttl(key))
            if left_ms != KEEP_FOREVER and left_ms < wanted_ms:
                await self._server.set(key, body, px=wanted_ms)
        except (RedisError, OSError) as error:
            raise PointerUnavailable(pointer=f"{REDIS}://{key}", reason=str(error)) from error

    async def close(self) -> None:
        """End the connections."""
        await self._server.aclose()


def make_pointers(objects: ObjectStore | None, redis_url: str | None) -> Pointers:
    """The schemes of an instance; connects to nothing yet. Raises SettingsInvalid."""
    pointers = Pointers()
    if objects is not None:
        pointers.register(OBJECTS, ObjectPointerStore(objects))
    if redis_url is not None:
        pointers.register(REDIS, RedisPointerStore(_redis(redis_url)))
    return pointers


def _redis(url: str) -> "Redis":
    """A server that is asked when it is needed: one that is down now may be up then."""
    with extra_needed(Extra.BUS, "A pointer store on Redis"):
        from redis.asyncio import Redis
    try:
        return Redis.from_url(  # pyright: ignore[reportUnknownMemberType] - typed for every kind of answer
            url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S, decode_responses=False
        )
    except ValueError:  # whose text may hold a part of the password
        detail = "it is no address of a Redis server; write redis://[:password@]host:6379/0, with / # ? @ of a password as %2F %23 %3F %40"
        raise SettingsInvalid(source="redis", detail=detail) from None
