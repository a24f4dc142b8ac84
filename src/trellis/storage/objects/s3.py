"""The object store in an S3-compatible bucket, through obstore.

- A write is sent once. If its answer is lost, or reports a server error, the object is read back. The same bytes mean
  that the write happened; bytes that break the condition mean that it is refused; otherwise the outcome is unknown and
  StoreUnavailable is raised.
- Reads are safe to repeat, so they are retried a few times within the timeout.
- A refusal (412, and 409 for two concurrent conditional writes) is an answer, not an error.
- `list` returns byte order, whatever the server does. A single page is read only if `probe` proved that the server
  lists in byte order and continues after any key. Otherwise the whole prefix is read and sorted, with one page in
  memory.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from trellis.storage.objects.address import S3Address, S3Credentials
from trellis.storage.objects.keys import KEY_BYTES_MAX, checked_key, checked_page, is_key, object_key
from trellis.storage.objects.probe import PROBE_FOLDER, prove_conditional_writes
from trellis.storage.objects.store import (
    OVERWRITE,
    PAGE_MAX,
    Create,
    IfMatch,
    KeyInvalid,
    ObjectInfo,
    ObjectPage,
    ObjectPut,
    ObjectTooLarge,
    Overwrite,
    PutAnswer,
    PutCondition,
    PutRefused,
    PutStored,
    StoredObject,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    StoreUnfit,
    holds,
    measured_store,
    put_one_by_one,
)

CONNECT_TIMEOUT_S = 5.0
BYTES_PER_S_MIN = 1024 * 1024
"""Assumed transfer rate: a large body gets that much more time than the timeout."""
READ_TRIES = 3
READ_BACKOFF_S = 0.1
LISTED_MAX = 1_000_000
REASON_MAX = 300

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_ADDRESS = re.compile(r"\(?\bhttps?://[^\s)]+\)?")
"""The store's internal address. It is removed from messages to callers and from documents."""
_CLOCK = "set the clock of this machine, if it differs from the store's"
_SKEW_CODES = {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
_TRANSIENT_STATUS = {"408", "425", "429"}
_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "OperationAborted", "ServiceUnavailable", "InternalError"}

_Failures = (BaseError, OSError)  # obstore raises FileNotFoundError for 404; a timeout is an OSError too

T = TypeVar("T")

if TYPE_CHECKING:  # obstore has these names for type checkers only
    from obstore import ObjectMeta, PutMode
    from obstore.store import ClientConfig, RetryConfig, S3Config


@measured_store
class S3Objects:
    """The object store in one S3 bucket."""

    def __init__(
        self,
        address: S3Address,
        *,
        credentials: S3Credentials | None,
        new_name: Callable[[], str],
        object_bytes_max: int,
        timeout_s: float,
    ) -> None:
        self._address = address
        self._new_name = new_name
        self._bytes_max = object_bytes_max
        self._timeout_s = timeout_s
        self._base = f"{address.prefix}/" if address.prefix else ""
        self._s3 = self._connect(credentials)
        self._ordered = False

    def _connect(self, credentials: S3Credentials | None) -> S3Store:
        address = self._address
        config: S3Config = {"region": address.region, "conditional_put": "etag", "disable_bulk_delete": True}
        if address.endpoint is not None:
            config["endpoint"] = address.endpoint
        if credentials is not None:
            config["access_key_id"] = credentials.access_key_id
            config["secret_access_key"] = credentials.secret_access_key
            if credentials.session_token is not None:
                config["session_token"] = credentials.session_token
        client: ClientConfig = {
            "allow_http": (address.endpoint or "").startswith("http://"),
            "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, self._timeout_s)),
            "timeout": timedelta(seconds=self._limit_s(self._bytes_max)),
        }
        retry: RetryConfig = {"max_retries": 0}  # retries are decided here, per verb
        return S3Store(address.bucket, config=config, client_options=client, retry_config=retry)

    @property
    def url(self) -> str:
        return self._address.url

    async def get(self, key: str) -> StoredObject | None:
        place = self._place(key)

        async def read() -> StoredObject:
            async with asyncio.timeout(self._timeout_s):
                answer = await obstore.get_async(self._s3, place)
            info = self._info(answer.meta)
            if info.size > self._bytes_max:
                raise ObjectTooLarge(key=key, size=info.size, limit=self._bytes_max)
            async with asyncio.timeout(self._limit_s(info.size)):
                body = bytes(await answer.bytes_async())
            return StoredObject(key=key, body=body, etag=info.etag, size=info.size, modified_at=info.modified_at)

        return await self._read("get", key, read)

    async def head(self, key: str) -> ObjectInfo | None:
        place = self._place(key)

        async def look() -> ObjectInfo:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return self._info(await obstore.head_async(self._s3, place))
                except FileNotFoundError:
                    # The response to HEAD has no body that says whether the object or the bucket is missing. GET's
                    # does.
                    return self._info((await obstore.get_async(self._s3, place)).meta)

        return await self._read("head", key, look)

    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        place = self._place(key)
        if len(body) > self._bytes_max:
            raise ObjectTooLarge(key=key, size=len(body), limit=self._bytes_max)
        try:
            async with asyncio.timeout(self._limit_s(len(body))):
                put = await obstore.put_async(self._s3, place, body, mode=_mode(when), use_multipart=False)
        except (AlreadyExistsError, PreconditionError, NotModifiedError) as error:
            if isinstance(when, Overwrite):
                return await self._look_back(key, body, when, _unavailable(error, "put", key))
            return PutRefused(await self._etag(key))
        except _Failures as error:
            problem = _store_error(error, "put", key)
            if isinstance(problem, StoreUnavailable):
                return await self._look_back(key, body, when, problem)
            if isinstance(error, FileNotFoundError) and isinstance(when, IfMatch) and not _no_bucket(error):
                return PutRefused(None)
            raise problem from error
        return PutStored(self._checked_etag(put["e_tag"]))

    async def put_many(self, sequences: Sequence[Sequence[ObjectPut]]) -> list[list[PutAnswer]]:
        return await put_one_by_one(self.put, sequences)

    async def list(self, prefix: str, *, after: str | None = None, limit: int = PAGE_MAX) -> ObjectPage:
        checked_page(prefix, after, limit)
        select = self._next if self._ordered else self._smallest
        infos = await self._read("list", prefix, partial(select, prefix, after, limit + 1)) or ()
        return ObjectPage(tuple(infos[:limit]), more=len(infos) > limit)

    async def delete(self, key: str) -> bool:
        """Delete the object. Returns whether there was one just before."""
        if await self.head(key) is None:
            return False
        try:
            async with asyncio.timeout(self._timeout_s):
                await obstore.delete_async(self._s3, self._place(key))
        except _Failures as error:
            if isinstance(error, FileNotFoundError) and not _no_bucket(error):
                return False
            raise _store_error(error, "delete", key) from error
        return True

    async def probe(self) -> None:
        """Check that this bucket honours the conditions of writes, and whether it lists in byte order."""
        name = self._new_name()
        await prove_conditional_writes(self, name)
        self._ordered = await self._lists_in_order(name)

    async def close(self) -> None:
        """Does nothing: idle connections close by themselves."""

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _place(self, key: str) -> str:
        place = self._base + checked_key(key)
        if len(place.encode()) > KEY_BYTES_MAX:
            reason = f"with the prefix {self._address.prefix!r} it has more than {KEY_BYTES_MAX} bytes"
            raise KeyInvalid(key=key, reason=reason)
        return place

    def _limit_s(self, size: int) -> float:
        return self._timeout_s + size / BYTES_PER_S_MIN

    async def _read(self, verb: str, key: str, read: Callable[[], Awaitable[T]]) -> T | None:
        """The result of `read`; None if the object does not exist.

        Retried while that may help and the timeout lasts.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout_s
        for tries in count(1):
            try:
                return await read()
            except _Failures as error:
                if isinstance(error, FileNotFoundError) and not _no_bucket(error):
                    return None
                problem = _store_error(error, verb, key)
                if tries == READ_TRIES or loop.time() > until or not isinstance(problem, StoreUnavailable):
                    raise problem from error
            await asyncio.sleep(READ_BACKOFF_S * tries)
        return None

    def _info(self, meta: "ObjectMeta") -> ObjectInfo:
        return ObjectInfo(
            key=meta["path"].removeprefix(self._base),
            etag=self._checked_etag(meta["e_tag"]),
            size=meta["size"],
            modified_at=meta["last_modified"],
        )

    def _checked_etag(self, etag: str | None) -> str:
        if not etag:
            raise StoreUnfit(url=self.url, reason="it answers without an ETag")
        return etag

    async def _etag(self, key: str) -> str | None:
        there = await self.head(key)
        return there.etag if there else None

    async def _look_back(
        self, key: str, body: bytes, when: PutCondition, problem: StoreUnavailable
    ) -> PutStored | PutRefused:
        """Find the outcome of a write whose answer was lost."""
        try:
            there = await self.get(key)
        except StoreError as error:
            raise problem from error
        if there is not None and there.body == body:
            return PutStored(there.etag)
        etag = there.etag if there else None
        if not holds(when, etag):
            return PutRefused(etag)
        raise problem

    # -- listing -------------------------------------------------------------------------------------------------

    async def _stream(self, prefix: str, offset: str | None, chunk: int = PAGE_MAX) -> AsyncIterator[ObjectInfo]:
        """The objects that the server lists, in its own order, `chunk` at a time."""
        folder = (self._base + prefix).rpartition("/")[0] or None
        start = None if offset is None else self._base + offset
        pages = obstore.list(  # pyright: ignore[reportUnknownMemberType] - one overload needs a package we do not use
            self._s3, folder, offset=start, chunk_size=chunk
        )
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    page = await anext(pages)
            except StopAsyncIteration:
                return
            for meta in page:
                if meta["path"].startswith(self._base + prefix):
                    yield self._info(meta)

    async def _smallest(self, prefix: str, after: str | None, number: int) -> Sequence[ObjectInfo]:
        """The first `number` keys after `after`, from a listing of the whole prefix."""
        kept: dict[str, ObjectInfo] = {}
        seen = 0
        async for info in self._stream(prefix, None):
            seen += 1
            if seen > LISTED_MAX:
                reason = f"the prefix has more than {LISTED_MAX} objects and this server does not list in byte order"
                raise StoreRefused(verb="list", key=prefix, reason=reason)
            if (after is None or info.key > after) and is_key(info.key):
                kept[info.key] = info
            if len(kept) > 4 * PAGE_MAX + number:
                kept = {key: kept[key] for key in sorted(kept)[:number]}
        return [kept[key] for key in sorted(kept)[:number]]

    async def _next(self, prefix: str, after: str | None, number: int) -> Sequence[ObjectInfo]:
        """The first `number` keys after `after`, if the server lists in byte order."""
        by_key: dict[str, ObjectInfo] = {}
        start = after
        if prefix and (after is None or after < prefix):
            start = prefix.rstrip("/")
            if is_key(prefix) and (info := await self.head(prefix)):
                by_key[prefix] = info
        async for info in self._stream(prefix, start, chunk=min(number, PAGE_MAX)):
            if is_key(info.key) and (after is None or info.key > after):
                by_key[info.key] = info
            if len(by_key) >= number:
                break
        return list(by_key.values())

    async def _lists_in_order(self, name: str) -> bool:
        """Whether the server lists in byte order.

        Some file-based servers list `a/b` before `a-b`, and skip `a/b` after `a`.
        """
        keys = [object_key(PROBE_FOLDER, name, *rest) for rest in (("a",), ("a-b",), ("a", "b"))]
        try:
            for key in keys:
                await self.put(key, b"order")
            prefix = f"{PROBE_FOLDER}/{name}/"
            for index, offset in enumerate([None, *keys]):
                if [info.key async for info in self._stream(prefix, offset)] != keys[index:]:
                    return False
            return True
        finally:
            for key in keys:
                with suppress(StoreError):
                    await self.delete(key)


def _mode(when: PutCondition) -> "PutMode":
    if isinstance(when, IfMatch):
        return {"e_tag": when.etag}
    return "create" if isinstance(when, Create) else "overwrite"


def _no_bucket(error: BaseException) -> bool:
    return "<Code>NoSuchBucket</Code>" in str(error)


def _store_error(error: BaseException, verb: str, key: str) -> StoreError:
    text = _ADDRESS.sub("the store", str(error).partition("\n\nDebug source")[0])
    status = (_STATUS.findall(text) or [""])[-1]
    code = (_CODE.findall(text) or [""])[-1]
    reason = " ".join(filter(None, (status, code))) or text[:REASON_MAX] or "no answer in time"
    if code == "KeyTooLongError":
        return KeyInvalid(key=key, reason="the store takes no key, or no segment of a key, that is so long")
    if code == "NoSuchBucket":
        return StoreRefused(verb=verb, key=key, reason="there is no such bucket; make it, or correct the address")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in {"401", "403"}:
        remedy = _CLOCK if code in _SKEW_CODES else f"check the credentials and their permissions; or {_CLOCK}"
        return StoreRefused(verb=verb, key=key, reason=f"{reason}; {remedy}")
    if "redirect" in text:
        return StoreRefused(verb=verb, key=key, reason="it redirects; check the region and the endpoint")
    if status[:1] == "4" and status not in _TRANSIENT_STATUS and code not in _TRANSIENT_CODES:
        return StoreRefused(verb=verb, key=key, reason=reason)
    return StoreUnavailable(verb=verb, key=key, reason=reason)


def _unavailable(error: BaseException, verb: str, key: str) -> StoreUnavailable:
    reason = _ADDRESS.sub("the store", str(error).partition("\n")[0])[:REASON_MAX]
    return StoreUnavailable(verb=verb, key=key, reason=reason)
