"""When S3 fails: nothing is stored twice, nothing is believed without a look, and every error says what it is."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest

from tests.pace import Pace
from tests.servers.seaweedfs import SeaweedServer
from tests.storage.conftest import CREDENTIALS
from tests.storage.proxy import Fault, Kind, Proxy, proxied
from tests.storage.test_store import CLASHING, fill, keys_of
from trellis.storage.objects.address import S3Credentials, read_address
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.s3 import READ_TRIES
from trellis.storage.objects.store import (
    CREATE,
    OVERWRITE,
    KeyInvalid,
    ObjectStore,
    PutCondition,
    PutRefused,
    PutStored,
    StoreRefused,
    StoreUnavailable,
    if_match,
)

SHORT_S = 1.0
AMBIGUOUS = [Kind.STORED_ANSWER, Kind.STORED_SILENT, Kind.STORED_RESET]
UNDONE = [Kind.ANSWER, Kind.SILENT]


@pytest.fixture
async def proxy(seaweedfs: SeaweedServer) -> AsyncIterator[Proxy]:
    async with proxied(seaweedfs.endpoint) as proxy:
        yield proxy


@pytest.fixture
async def direct(s3_url: str) -> ObjectStore:
    """The same prefix, past the proxy."""
    return await open_objects(s3_url, credentials=CREDENTIALS)


@pytest.fixture
def through(proxy: Proxy, seaweedfs: SeaweedServer, s3_url: str) -> str:
    return s3_url.replace(seaweedfs.endpoint, proxy.endpoint)


@pytest.fixture
async def impatient(through: str) -> ObjectStore:
    """A store behind the proxy that does not wait long for an answer that will not come."""
    return await open_objects(through, credentials=CREDENTIALS, timeout_s=SHORT_S)


@pytest.fixture
async def store(through: str, impatient: ObjectStore, request: pytest.FixtureRequest) -> ObjectStore:
    """A store behind the proxy; impatient where the test's fault is silence."""
    silent = _kind_of(request) in {Kind.SILENT, Kind.STORED_SILENT}
    return impatient if silent else await open_objects(through, credentials=CREDENTIALS)


def _kind_of(request: pytest.FixtureRequest) -> Kind | None:
    callspec = getattr(request.node, "callspec", None)
    return callspec.params.get("kind") if callspec else None


async def condition(name: str, direct: ObjectStore) -> PutCondition:
    if name == "if_match":
        return if_match((await direct.put("k", b"old")).etag or "")
    return CREATE if name == "create" else OVERWRITE


async def body_of(store: ObjectStore, key: str) -> bytes | None:
    found = await store.get(key)
    return found.body if found else None


# -- writes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", AMBIGUOUS)
@pytest.mark.parametrize("when", ["create", "if_match", "overwrite"])
async def test_a_put_whose_answer_is_lost_is_found_stored_and_not_sent_again(
    store: ObjectStore, direct: ObjectStore, proxy: Proxy, kind: Kind, when: str
):
    chosen = await condition(when, direct)
    proxy.faults.append(Fault(kind, "PUT", "/k", status=500, code="InternalError", times=9))
    stored = await store.put("k", b"new", when=chosen)
    info = await direct.head("k")
    assert info is not None
    assert stored == PutStored(info.etag)
    assert await body_of(direct, "k") == b"new"
    assert proxy.count("PUT") == 1


@pytest.mark.parametrize("kind", UNDONE)
@pytest.mark.parametrize("when", ["create", "if_match", "overwrite"])
async def test_a_put_that_never_arrived_is_unavailable_and_not_sent_again(
    store: ObjectStore, direct: ObjectStore, proxy: Proxy, kind: Kind, when: str
):
    chosen = await condition(when, direct)
    before = await body_of(direct, "k")
    proxy.faults.append(Fault(kind, "PUT", "/k"))
    with pytest.raises(StoreUnavailable):
        await store.put("k", b"new", when=chosen)
    assert proxy.count("PUT") == 1
    assert await body_of(direct, "k") == before
    assert isinstance(await store.put("k", b"new", when=chosen), PutStored)


@pytest.mark.parametrize("kind", [*UNDONE, *AMBIGUOUS])
@pytest.mark.parametrize("when", ["create", "if_match"])
async def test_a_put_without_an_answer_over_anothers_object_is_refused(
    store: ObjectStore, direct: ObjectStore, proxy: Proxy, kind: Kind, when: str
):
    chosen = await condition(when, direct)
    theirs = await direct.put("k", b"theirs")
    proxy.faults.append(Fault(kind, "PUT", "/k"))
    assert await store.put("k", b"mine", when=chosen) == PutRefused(theirs.etag)
    assert await body_of(direct, "k") == b"theirs"


async def test_an_overwrite_without_an_answer_is_not_believed(store: ObjectStore, direct: ObjectStore, proxy: Proxy):
    await direct.put("k", b"theirs")
    proxy.faults.append(Fault(Kind.ANSWER, "PUT", "/k"))
    with pytest.raises(StoreUnavailable):
        await store.put("k", b"mine")


async def test_a_put_that_arrives_late_wins_or_loses_but_never_tears(
    store: ObjectStore, impatient: ObjectStore, direct: ObjectStore, proxy: Proxy
):
    proxy.faults.append(Fault(Kind.LATE, "PUT", "/k"))
    with pytest.raises(StoreUnavailable):
        await impatient.put("k", b"late", when=CREATE)
    theirs = await direct.put("k", b"theirs", when=CREATE)
    await proxy.deliver()
    assert await body_of(direct, "k") == b"theirs"
    assert await store.put("k", b"late", when=CREATE) == PutRefused(theirs.etag)


@pytest.mark.parametrize("status", [409, 412])
@pytest.mark.parametrize("when", ["create", "if_match"])
async def test_a_conflict_of_conditional_writes_is_an_answer(
    store: ObjectStore, direct: ObjectStore, proxy: Proxy, status: int, when: str
):
    chosen = await condition(when, direct)
    info = await direct.head("k")
    proxy.faults.append(Fault(Kind.ANSWER, "PUT", "/k", status=status, code="ConditionalRequestConflict"))
    assert await store.put("k", b"new", when=chosen) == PutRefused(info.etag if info else None)
    assert proxy.count("PUT") == 1


async def test_put_is_unavailable_when_its_check_read_fails_too(store: ObjectStore, proxy: Proxy):
    proxy.faults += [Fault(Kind.STORED_ANSWER, "PUT", "/k", status=500), Fault(Kind.ANSWER, "GET", "/k", times=9)]
    with pytest.raises(StoreUnavailable) as unavailable:
        await store.put("k", b"new", when=CREATE)
    assert unavailable.value.data["verb"] == "put"


@pytest.mark.requirement("D14")
async def test_with_answers_lost_and_writes_refused_8_counters_lose_no_step(
    through: str, direct: ObjectStore, proxy: Proxy
):
    """Each body is unique, so that what is read back tells whose it was."""
    store = await open_objects(through, credentials=CREDENTIALS)
    kinds = [Kind.STORED_ANSWER, Kind.STORED_RESET, Kind.ANSWER]
    proxy.faults += [Fault(kinds[number % 3], "PUT", "/count", status=500) for number in range(18)]
    await direct.put("count", b"0 start")

    async def step(number: int) -> None:
        for attempt in range(200):
            found = await store.get("count")
            assert found is not None
            more = f"{int(found.body.split()[0]) + 1} {number} {attempt}".encode()
            with contextlib.suppress(StoreUnavailable):
                if isinstance(await store.put("count", more, when=if_match(found.etag)), PutStored):
                    return
        pytest.fail("never stored")

    await asyncio.gather(*(step(number) for number in range(8)))
    # One whose answer was lost and that was passed before it could look back is refused and counts again: never fewer.
    assert int((await body_of(direct, "count") or b"").split()[0]) >= 8


# -- reads -------------------------------------------------------------------------------------------------------


READ_FAULTS = [
    *((verb, kind) for verb in ("get", "head", "list") for kind in (Kind.ANSWER, Kind.STORED_RESET)),
    *((verb, Kind.CUT) for verb in ("get", "list")),  # an answer to HEAD has no body to cut
]


@pytest.mark.parametrize("verb,kind", READ_FAULTS)
async def test_a_read_that_fails_once_is_tried_again(
    store: ObjectStore, direct: ObjectStore, proxy: Proxy, kind: Kind, verb: str
):
    body = bytes(range(256)) * 1000
    await direct.put("k", body)
    proxy.faults.append(Fault(kind, "HEAD" if verb == "head" else "GET"))
    found = await {"get": lambda: store.get("k"), "head": lambda: store.head("k"), "list": lambda: store.list("")}[
        verb
    ]()
    assert found
    if verb == "get":
        assert await body_of(store, "k") == body


@pytest.mark.parametrize("kind", [Kind.ANSWER, Kind.STORED_RESET, Kind.CUT])
async def test_a_read_that_keeps_failing_ends_after_a_few_tries(
    store: ObjectStore, direct: ObjectStore, proxy: Proxy, kind: Kind
):
    await direct.put("k", b"0123456789" * 10_000)
    proxy.faults.append(Fault(kind, "GET", "/k", times=100))
    with pytest.raises(StoreUnavailable):
        await store.get("k")
    assert proxy.count("GET") == READ_TRIES


async def test_a_silent_server_is_waited_for_no_longer_than_promised(impatient: ObjectStore, proxy: Proxy, pace: Pace):
    proxy.faults += [Fault(Kind.SILENT, method, times=100) for method in ("GET", "HEAD", "PUT", "DELETE")]
    calls: list[Callable] = [
        lambda: impatient.get("k"),
        lambda: impatient.head("k"),
        lambda: impatient.list(""),
        lambda: impatient.put("k", b"1"),
        lambda: impatient.delete("k"),
    ]

    async def wait_for(call: Callable) -> float:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await call()
        return time.monotonic() - begun

    waited = await asyncio.gather(*map(wait_for, calls))
    assert max(waited) < 5 * SHORT_S + pace.stood_still_s


async def test_a_server_that_is_gone_is_unavailable(seaweedfs: SeaweedServer):
    store = await open_objects(seaweedfs.url(endpoint="http://127.0.0.1:1"), credentials=CREDENTIALS, timeout_s=SHORT_S)
    for call in (
        store.get("k"),
        store.head("k"),
        store.put("k", b""),
        store.list(""),
        store.delete("k"),
        store.probe(),
    ):
        with pytest.raises(StoreUnavailable):
            await call


# -- refusals ----------------------------------------------------------------------------------------------------


async def test_wrong_credentials_are_refused_by_name_and_never_shown(s3_url: str):
    wrong = S3Credentials(access_key_id="trellis-tests", secret_access_key="canary-7d1f", session_token=None)
    store = await open_objects(s3_url, credentials=wrong)
    for call in (
        store.get("k"),
        store.head("k"),
        store.put("k", b""),
        store.list(""),
        store.delete("k"),
        store.probe(),
    ):
        with pytest.raises(StoreRefused, match="credentials") as refused:
            await call
        assert "canary" not in f"{refused.value!r} {refused.value} {refused.value.__cause__}"
    assert "canary" not in f"{wrong!r} {store.url} {vars(store)}"


async def test_a_missing_bucket_is_refused_by_name(seaweedfs: SeaweedServer):
    store = await open_objects(seaweedfs.url(bucket="nobody-made-this"), credentials=CREDENTIALS)
    calls = [store.get("k"), store.head("k"), store.put("k", b""), store.list(""), store.delete("k"), store.probe()]
    calls += [store.put("k", b"", when=CREATE), store.put("k", b"", when=if_match('"x"'))]
    for call in calls:
        with pytest.raises(StoreRefused, match="no such bucket"):
            await call


async def test_a_key_that_this_server_cannot_take_is_invalid(direct: ObjectStore):
    with pytest.raises(KeyInvalid):
        await direct.put("n" * 256, b"1")
    with pytest.raises(KeyInvalid, match="prefix"):
        await direct.put("/".join(["n" * 100] * 10), b"1")


async def test_s3_retryable_errors_are_unavailable_and_refusals_are_not(store: ObjectStore, proxy: Proxy):
    for status, code, expected in (
        (429, "SlowDown", StoreUnavailable),
        (400, "RequestTimeout", StoreUnavailable),
        (400, "InvalidArgument", StoreRefused),
        (301, "PermanentRedirect", StoreRefused),
        (403, "AccessDenied", StoreRefused),
        (501, "NotImplemented", StoreUnavailable),
    ):
        proxy.faults[:] = [Fault(Kind.ANSWER, "PUT", "/k", status=status, code=code)]
        with pytest.raises(expected):
            await store.put("k", b"1")


# -- listings of a server in byte order --------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
async def test_on_a_server_in_byte_order_a_page_is_read_alone(
    store: ObjectStore, s3_url: str, proxy: Proxy, limit: int
):
    address = read_address(s3_url)
    base = f"{address.prefix}/"  # type: ignore[union-attr]
    probed = [f"{base}trellis-probe/name/{rest}" for rest in ("a", "a-b", "a/b")]
    proxy.ordered_keys = lambda: probed
    store._new_name = lambda: "name"  # type: ignore[attr-defined]
    await store.probe()
    proxy.ordered_keys = lambda: [base + key for key in CLASHING]
    assert await keys_of(store, limit=limit) == sorted(CLASHING, key=str.encode)
    proxy.requests.clear()
    page = await store.list("", after="a/b", limit=1)
    assert [info.key for info in page.items] == ["a/b/c"]
    assert proxy.count("GET") == 1
    for prefix in ("a", "a/", "a/b", "a-", "b", "c", "a0/"):
        expected = sorted(key for key in CLASHING if key.startswith(prefix))
        assert [info.key for info in (await store.list(prefix)).items if info.key in expected] == [
            key for key in expected if key != prefix
        ]


async def test_listings_are_right_before_and_after_a_probe(direct: ObjectStore):
    await fill(direct, CLASHING)
    before = await keys_of(direct, limit=3)
    await direct.probe()
    assert await keys_of(direct, limit=3) == before == sorted(CLASHING, key=str.encode)


async def test_a_wrong_clock_is_not_reported_as_wrong_credentials(store: ObjectStore, proxy: Proxy):
    proxy.faults.append(Fault(Kind.ANSWER, "GET", "/k", status=403, code="RequestTimeTooSkewed"))
    with pytest.raises(StoreRefused, match="RequestTimeTooSkewed; set the clock of this machine") as refused:
        await store.get("k")
    assert "credentials" not in str(refused.value)


@pytest.mark.parametrize("kind", [Kind.STORED_RESET, Kind.CUT])
async def test_store_error_hides_the_address(store: ObjectStore, proxy: Proxy, kind: Kind):
    await store.put("k", b"v" * 1_000)
    proxy.faults.append(Fault(kind, "GET", "/k", times=100))
    with pytest.raises(StoreUnavailable) as unavailable:
        await store.get("k")
    assert "http" not in str(unavailable.value).replace("HTTP error", "")
    assert str(urlsplit(proxy.endpoint).port) not in str(unavailable.value)
