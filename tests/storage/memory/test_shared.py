"""A memory in the object store: races between hosts, lost answers, lost objects, and replicas that know nothing."""

import asyncio
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.storage.memory.rig import AGENT, ENVIRONMENT, append, applied, apply, shared, shared_in
from trellis.storage.memory import packs, shared_repository
from trellis.storage.memory.collector import INTERVAL_S, MemoryPackCollector
from trellis.storage.memory.errors import MemoryDamaged, MemoryMissing, MemoryUnavailable
from trellis.storage.memory.layout import AlreadyApplied, Committed, ReadMode, VersionConflict
from trellis.storage.memory.repository import MemoryRepository, open_memory
from trellis.storage.memory.shared_repository import SharedStore
from trellis.storage.memory.verification import verify
from trellis.storage.objects.address import s3_credentials
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore, PutStored, StoreUnavailable

HEAD = "memory/head.json"


class WatchedStore:
    """An object store that counts requests, and fails or does something else where a test says so."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.url = inner.url
        self.requests: Counter[str] = Counter()
        self.away = False
        self.held: threading.Event | None = None
        self.before_put: Callable[[str], None] | None = None
        self.after_put: Callable[[str], None] | None = None

    async def put(self, key: str, body: bytes, **options: Any) -> Any:
        self._check("put", key)
        if self.before_put:
            await asyncio.to_thread(self.before_put, key)
        answer = await self.inner.put(key, body, **options)
        if self.after_put and isinstance(answer, PutStored):
            await asyncio.to_thread(self.after_put, key)
        return answer

    async def get(self, key: str) -> Any:
        self._check("get", key)
        if self.held is not None:
            self.held.set()
            await asyncio.Event().wait()
        return await self.inner.get(key)

    async def head(self, key: str) -> Any:
        self._check("head", key)
        return await self.inner.head(key)

    async def delete(self, key: str) -> bool:
        self._check("delete", key)
        return await self.inner.delete(key)

    def _check(self, verb: str, key: str) -> None:
        self.requests[verb] += 1
        if self.away:
            raise StoreUnavailable(verb=verb, key=key, reason="it is away")


class Hosts:
    """Hosts of one memory, each with a store and a replica of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self.opened: dict[str, MemoryRepository] = {}
        self.stores: dict[str, WatchedStore] = {}

    def __getitem__(self, name: str) -> MemoryRepository:
        if name not in self.opened:
            self.stores[name] = WatchedStore(self.objects())
            self.opened[name] = shared_in(self.stores[name], self.cache(name))  # pyright: ignore[reportArgumentType]
        return self.opened[name]

    def objects(self) -> ObjectStore:
        return asyncio.run(open_objects(self._url, credentials=s3_credentials(ENVIRONMENT)))

    def cache(self, name: str) -> Path:
        return self._folder / f"replica of {name}.git"

    def stored(self) -> list[str]:
        return [info.key for info in asyncio.run(self.objects().list("memory/")).items]

    def packs(self) -> list[str]:
        return [key for key in self.stored() if key != HEAD]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    known = Hosts((tmp_path / "objects").as_uri(), tmp_path)
    yield known
    for memory in known.opened.values():
        memory.close()


def facts(memory: MemoryRepository, agent: str = AGENT) -> str:
    return memory.read(agent, ReadMode.WIDE).content["facts.md"]


def once(action: Callable[[], object], key: str = HEAD) -> Callable[[str], None]:
    """An action at the first put of this key."""
    left = [action]

    def act(put: str) -> None:
        if put == key and left:
            left.pop()()

    return act


def unavailable() -> None:
    raise StoreUnavailable(verb="put", key=HEAD, reason="the answer is lost")


# -- two hosts ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D23", "PIPE-11")
def test_writer_that_loses_the_race_redoes_its_change_on_top(store_url: str, tmp_path: Path):
    """On a folder and on S3: the conditional put of the head decides between two hosts."""
    hosts = Hosts(store_url, tmp_path)
    here, there = hosts["here"], hosts["there"]
    hosts.stores["here"].before_put = once(
        lambda: applied(there, append("facts.md", "- there"), proposal_id="p1", agent_id="other")
    )
    assert applied(here, append("facts.md", "- here"), proposal_id="p2").version == 1
    assert [facts(memory, agent) for memory in (here, there) for agent in (AGENT, "other")] == [
        *("- here\n", "- there\n"),
        *("- here\n", "- there\n"),
    ]
    report = verify(hosts["new"])
    assert (report.commits, report.findings) == (2, ())
    assert len(hosts.packs()) == 2, "the loser removes the pack that nobody will name"


def test_writer_that_loses_the_race_for_one_memory_is_told_of_the_conflict(hosts: Hosts):
    here, there = hosts["here"], hosts["there"]
    hosts.stores["here"].before_put = once(lambda: applied(there, append("facts.md", "- there"), proposal_id="p1"))
    assert apply(here, append("facts.md", "- here"), proposal_id="p2") == VersionConflict(expected=0, current=1)
    assert facts(here) == "- there\n"
    assert len(hosts.packs()) == 1


def test_two_hosts_that_apply_one_proposal_make_one_commit(hosts: Hosts):
    here, there = hosts["here"], hosts["there"]
    twin: list[object] = []
    hosts.stores["here"].before_put = once(
        lambda: twin.append(apply(there, append("facts.md", "- a"), proposal_id="p1", version=0))
    )
    mine = apply(here, append("facts.md", "- a"), proposal_id="p1", version=0)
    assert isinstance(mine, Committed)
    assert twin == [mine]
    assert verify(hosts["new"]).commits == 1


def test_reader_with_an_old_replica_sees_an_acknowledged_change_at_once(hosts: Hosts):
    here, there = hosts["here"], hosts["there"]
    assert facts(there) == ""
    for number in range(3):
        applied(here, append("facts.md", f"- {number}"), proposal_id=f"p{number}")
        assert facts(there).endswith(f"- {number}\n")


def test_requests_of_a_read_and_of_a_change_are_few(hosts: Hosts):
    here, there = hosts["here"], hosts["there"]
    applied(here, append("facts.md", "- a"), proposal_id="p1")
    store = hosts.stores["here"]
    store.requests.clear()
    here.read(AGENT)
    assert store.requests == {"get": 1}
    store.requests.clear()
    apply(here, append("facts.md", "- b"), proposal_id="p2", version=1)
    assert store.requests == {"get": 1, "put": 2}
    hosts.stores["there"].requests.clear()
    there.read(AGENT)
    assert hosts.stores["there"].requests == {"get": 3}, "the head, and the two packs that are new here"


# -- answers that are lost, a store that is away -----------------------------------------------------------------------


@pytest.mark.requirement("PIPE-11")
def test_change_whose_answer_is_lost_is_acknowledged_if_the_head_has_it(hosts: Hosts):
    here = hosts["here"]
    hosts.stores["here"].after_put = once(unavailable)
    assert applied(here, append("facts.md", "- a"), proposal_id="p1").version == 1
    assert verify(hosts["new"]).commits == 1


@pytest.mark.requirement("PIPE-11")
def test_change_whose_answer_is_lost_is_found_under_later_ones(hosts: Hosts):
    here, there = hosts["here"], hosts["there"]

    def go_on() -> None:
        applied(there, append("facts.md", "- b"), proposal_id="p2")
        applied(there, append("facts.md", "- c"), proposal_id="p3")
        unavailable()

    hosts.stores["here"].after_put = once(go_on)
    outcome = applied(here, append("facts.md", "- a"), proposal_id="p1")
    assert outcome.version == 1
    assert facts(here) == "- a\n- b\n- c\n"
    assert verify(hosts["new"]).commits == 3
    assert len(hosts.packs()) == 3, "the pack of a change that was stored stays"


@pytest.mark.parametrize("stored", [True, False])
def test_change_of_unknown_outcome_is_not_acknowledged_and_applied_once_when_repeated(hosts: Hosts, stored: bool):
    here, store = hosts["here"], None

    def break_off() -> None:
        assert store is not None
        store.away = True
        unavailable()

    store = hosts.stores["here"]
    if stored:
        store.after_put = once(break_off)
    else:
        store.before_put = once(break_off)
    with pytest.raises(MemoryUnavailable, match="ask again with the same ids"):
        apply(here, append("facts.md", "- a"), proposal_id="p1", version=0)
    store.away = False
    again = apply(here, append("facts.md", "- a"), proposal_id="p1", version=0)
    assert isinstance(again, AlreadyApplied if stored else Committed)
    assert facts(hosts["new"]) == "- a\n"
    assert verify(hosts["new"]).commits == 1


def test_a_store_that_is_away_is_named_and_nothing_is_half_done(hosts: Hosts):
    here = hosts["here"]
    applied(here, append("facts.md", "- a"), proposal_id="p1")
    before = hosts.stored()
    hosts.stores["here"].away = True
    with pytest.raises(MemoryUnavailable, match="it is away"):
        here.read(AGENT)
    with pytest.raises(MemoryUnavailable, match="it is away"):
        apply(here, append("facts.md", "- b"), proposal_id="p2", version=1)
    hosts.stores["here"].away = False
    assert (facts(here), hosts.stored()) == ("- a\n", before)


def test_close_ends_a_call_that_the_store_does_not_answer(hosts: Hosts):
    here = hosts["here"]
    hosts.stores["here"].held = reached = threading.Event()
    problems: list[str] = []

    def read() -> None:
        try:
            here.read(AGENT)
        except MemoryUnavailable as error:
            problems.append(str(error))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    assert reached.wait(10)
    here.close()
    reading.join(5)
    assert [problem for problem in problems if "this process closed it" in problem]
    with pytest.raises(MemoryUnavailable, match="this process closed it"):
        here.read(AGENT)


class Killed(BaseException):
    """The writer ends here."""


def killed_writer(hosts: Hosts, name: str, version: int) -> str:
    """A writer stores the pack of a change and is killed before it moves the head; the key of that pack."""

    def kill() -> None:
        raise Killed

    memory, before = hosts[name], set(hosts.packs())
    hosts.stores[name].before_put = once(kill)
    with pytest.raises(Killed):
        apply(memory, append("facts.md", f"- by {name}"), proposal_id=f"by-{name}", version=version)
    (key,) = set(hosts.packs()) - before
    return key


def test_pack_of_a_killed_writer_is_named_by_nobody_and_does_no_harm(hosts: Hosts):
    killed_writer(hosts, "here", version=0)
    assert facts(hosts["there"]) == ""
    applied(hosts["there"], append("facts.md", "- b"), proposal_id="p2")
    assert (facts(hosts["here"]), len(hosts.packs())) == ("- b\n", 2)
    assert verify(hosts["new"]).findings == ()


def collecting(hosts: Hosts, *, days: float = 0.0, batch: int = 2) -> MemoryPackCollector:
    """The collector of one host, so many days from now."""

    async def now() -> datetime:
        return datetime.now(UTC) + timedelta(days=days)

    shared_there = hosts["collector"].shared
    assert shared_there is not None
    return MemoryPackCollector(objects=hosts.objects(), repository=shared_there, now=now, batch=batch)


def one_round(collector: MemoryPackCollector) -> int:
    """How many packs a whole round removed."""

    async def run() -> int:
        removed = 0
        while True:
            report = await collector.run_once()
            removed += report.removed
            if not report.more:
                assert collector.pause_s(report) == INTERVAL_S
                return removed

    return asyncio.run(run())


def test_pack_of_a_killed_writer_is_removed_after_a_day_and_no_other(hosts: Hosts, monkeypatch):
    monkeypatch.setattr(shared_repository, "JOINED", (4,))
    applied(hosts["there"], append("facts.md", "- 0"), proposal_id="p0")
    left = killed_writer(hosts, "here", version=1)
    for number in range(1, 6):
        applied(hosts["there"], append("facts.md", f"- {number}"), proposal_id=f"p{number}")
    needed = [key for key in hosts.packs() if key != left]
    assert len(needed) == 6, "replaced packs are among them"
    assert one_round(collecting(hosts, days=0.99)) == 0
    assert one_round(collecting(hosts, days=1.01)) == 1
    assert hosts.packs() == needed
    assert verify(hosts["new"]).findings == ()


def test_pack_that_a_head_may_still_name_is_not_removed(hosts: Hosts):
    applied(hosts["there"], append("facts.md", "- 0"), proposal_id="p0")
    left = killed_writer(hosts, "here", version=1)
    collector = collecting(hosts, days=2)
    assert one_round(collector) == 0, "the next change has the number of this one: its put may still be under way"
    applied(hosts["there"], append("facts.md", "- 1"), proposal_id="p1")
    assert one_round(collector) == 1
    assert left not in hosts.packs()


def test_collector_looks_again_only_at_packs_that_were_too_young_or_are_new(hosts: Hosts):
    applied(hosts["there"], append("facts.md", "- 0"), proposal_id="p0")
    killed_writer(hosts, "here", version=1)
    applied(hosts["there"], append("facts.md", "- 1"), proposal_id="p1")
    applied(hosts["there"], append("facts.md", "- 2"), proposal_id="p2")
    young = collecting(hosts, batch=100)
    assert [asyncio.run(young.run_once()).looked_at for _ in range(2)] == [4, 3]
    old = collecting(hosts, days=2, batch=100)
    assert [asyncio.run(old.run_once()).looked_at for _ in range(2)] == [4, 0]


def test_collector_removes_nothing_during_an_import(hosts: Hosts):
    applied(hosts["there"], append("facts.md", "- 0"), proposal_id="p0")
    killed_writer(hosts, "here", version=1)
    applied(hosts["there"], append("facts.md", "- 1"), proposal_id="p1")
    store = SharedStore(hosts.objects(), "memory")
    fetched = store.fetch()
    assert fetched is not None
    assert store.put_head(fetched.head.model_copy(update={"importing": True}), fetched)
    store.close()
    assert one_round(collecting(hosts, days=2)) == 0


# -- what the store lost -----------------------------------------------------------------------------------------------


def _remove(hosts: Hosts, key: str) -> None:
    assert asyncio.run(hosts.objects().delete(key))


def test_a_missing_pack_is_named(hosts: Hosts):
    for number in range(2):
        applied(hosts["here"], append("facts.md", f"- {number}"), proposal_id=f"p{number}")
    key = hosts.packs()[0]
    _remove(hosts, key)
    with pytest.raises(MemoryDamaged, match=f"{key}: the object store has no such pack"):
        hosts["new"].read(AGENT)
    with pytest.raises(MemoryDamaged, match=key):
        shared(hosts["here"]).checked_packs()


@pytest.mark.parametrize(
    "altered,problem",
    [
        (lambda body: body[: len(body) // 2], "its checksum is wrong"),
        (lambda body: body[:40] + bytes([body[40] ^ 1]) + body[41:], "its checksum is wrong"),
        (lambda _: packs.encode([(3, b"another")]), "it does not hold commit"),
        (lambda _: b"", "its checksum is wrong"),
    ],
)
def test_a_changed_pack_is_named(hosts: Hosts, altered: Callable[[bytes], bytes], problem: str):
    applied(hosts["here"], append("facts.md", "- a"), proposal_id="p1")
    objects, (key,) = hosts.objects(), hosts.packs()
    stored = asyncio.run(objects.get(key))
    assert stored
    asyncio.run(objects.put(key, altered(stored.body)))
    with pytest.raises(MemoryDamaged, match=f"{key}: {problem}"):
        hosts["new"].read(AGENT)


def test_head_that_went_back_is_not_followed(hosts: Hosts):
    here = hosts["here"]
    applied(here, append("facts.md", "- a"), proposal_id="p1")
    objects = hosts.objects()
    old = asyncio.run(objects.get(HEAD))
    assert old
    applied(here, append("facts.md", "- b"), proposal_id="p2")
    asyncio.run(objects.put(HEAD, old.body))
    for call in (lambda: here.read(AGENT), lambda: apply(here, append("facts.md", "- c"), proposal_id="p3", version=1)):
        with pytest.raises(MemoryDamaged, match="it says change 1 and this host has seen change 2"):
            call()


def test_host_follows_a_restored_store_that_went_on_beyond_what_the_host_has_seen(hosts: Hosts):
    """The commits that this host has seen after the backup are no longer part of the history."""
    here = hosts["here"]
    applied(here, append("facts.md", "- 1"), proposal_id="p1")
    backup = asyncio.run(hosts.objects().get(HEAD))
    assert backup
    for number in (2, 3):
        applied(here, append("facts.md", f"- lost {number}"), proposal_id=f"lost{number}")
    asyncio.run(hosts.objects().put(HEAD, backup.body))
    for number in range(2, 6):
        applied(hosts["there"], append("facts.md", f"- {number}"), proposal_id=f"p{number}")
    assert facts(here) == "- 1\n- 2\n- 3\n- 4\n- 5\n"
    assert len(here.history(AGENT).entries) == 5
    report = verify(here)
    assert (report.commits, report.findings) == (5, ())


def test_memory_whose_head_is_gone_is_missing_and_not_empty(hosts: Hosts):
    here = hosts["here"]
    applied(here, append("facts.md", "- a"), proposal_id="p1")
    _remove(hosts, HEAD)
    with pytest.raises(MemoryMissing, match=HEAD):
        here.read(AGENT)
    with pytest.raises(MemoryMissing, match=HEAD):
        here.version_conflict(AGENT, expected_version=0, proposal_id="p2")
    assert HEAD not in hosts.stored()


def test_head_that_is_no_head_is_named(hosts: Hosts):
    here = hosts["here"]
    asyncio.run(hosts.objects().put(HEAD, json.dumps({"format": 2}).encode()))
    with pytest.raises(MemoryDamaged, match=HEAD):
        here.read(AGENT)


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_replica_that_is_lost_is_made_again(hosts: Hosts):
    here = hosts["here"]
    for number in range(3):
        applied(here, append("facts.md", f"- {number}"), proposal_id=f"p{number}")
        shutil.rmtree(hosts.cache("here"))
        assert facts(here).endswith(f"- {number}\n")
    assert verify(here).commits == 3


def test_replica_is_not_trusted_after_the_machine_was_started_again(hosts: Hosts, monkeypatch, tmp_path: Path):
    here = hosts["here"]
    commit = applied(here, append("facts.md", "- a"), proposal_id="p1").commit
    torn = hosts.cache("here") / "objects" / commit[:2] / commit[2:]
    torn.chmod(0o600)
    torn.write_bytes(b"")
    with pytest.raises(MemoryDamaged, match=commit):
        here.read(AGENT)
    other_boot = tmp_path / "boot_id"
    other_boot.write_text("another start\n")
    monkeypatch.setattr(shared_repository, "BOOT_ID", other_boot)
    assert facts(here) == "- a\n"


def test_torn_packs_of_a_replica_are_fetched_again_after_the_machine_was_started_again(
    hosts: Hosts, monkeypatch, tmp_path: Path
):
    monkeypatch.setattr(shared_repository, "JOINED", (16,))
    for number in range(17):
        applied(hosts["here"], append("facts.md", f"- {number}"), proposal_id=f"p{number}")
    new = hosts["new"]
    assert verify(new).commits == 17
    torn = [*(hosts.cache("new") / "objects" / "pack").iterdir(), hosts.cache("new") / "refs" / "heads" / "main"]
    assert {path.suffix for path in torn} == {".pack", ".idx", ""}
    for path in torn:
        path.chmod(0o600)
        path.write_bytes(b"" if path.suffix == ".idx" else bytes(path.stat().st_size))
    other_boot = tmp_path / "boot_id"
    other_boot.write_text("another start\n")
    monkeypatch.setattr(shared_repository, "BOOT_ID", other_boot)
    report = verify(new)
    assert (report.commits, report.findings) == (17, ())
    assert applied(new, append("facts.md", "- later"), proposal_id="later").version == 18


def test_repository_that_is_no_cache_is_refused_as_one_and_kept(hosts: Hosts):
    kept = open_memory(hosts.cache("here"))
    applied(kept, append("facts.md", "- mine"), proposal_id="p1")
    with pytest.raises(MemoryUnavailable, match="no cache of this memory; set TRELLIS_MEMORY_CACHE"):
        hosts["here"].read(AGENT)
    assert facts(kept) == "- mine\n"


def test_cache_of_another_memory_is_refused(hosts: Hosts, tmp_path: Path):
    applied(hosts["here"], append("facts.md", "- a"), proposal_id="p1")
    other = Hosts((tmp_path / "others").as_uri(), tmp_path)
    store = shared(other["here"]).store
    fetched = store.fetch()
    assert fetched
    store.put_head(fetched.head.model_copy(update={"identity": "another"}), fetched)
    with pytest.raises(MemoryUnavailable, match="set TRELLIS_MEMORY_CACHE to a folder of its own"):
        other["here"].read(AGENT)


# -- packs -------------------------------------------------------------------------------------------------------------


def _spans(memory: MemoryRepository) -> list[tuple[int, int]]:
    return [(pack.first, pack.last) for pack in shared(memory).fetched().head.packs]


def test_packs_are_joined_so_that_a_new_host_fetches_few(hosts: Hosts, monkeypatch):
    monkeypatch.setattr(shared_repository, "JOINED", (8, 4))
    here = hosts["here"]
    for number in range(1, 22):
        applied(here, append("facts.md", f"- {number}"), proposal_id=f"p{number}")
        assert _spans(here)[-1][1] == number
    assert _spans(here) == [(1, 8), (9, 16), (17, 20), (21, 21)]
    new = hosts["new"]
    hosts.stores["new"].requests.clear()
    assert facts(new) == facts(here)
    assert hosts.stores["new"].requests == {"get": 5}
    report = verify(new)
    assert (report.commits, report.findings) == (21, ())


def test_packs_that_would_be_too_large_are_not_joined(hosts: Hosts, monkeypatch):
    monkeypatch.setattr(shared_repository, "JOINED", (4, 2))
    monkeypatch.setattr(packs, "PACK_BYTES_MAX", 5_000)
    for number in range(4):
        applied(hosts["here"], append("facts.md", f"- {number}"), proposal_id=f"p{number}")
    assert _spans(hosts["here"]) == [(1, 2), (3, 4)]
    assert verify(hosts["new"]).findings == ()


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 100_000, bytes(range(256)) * 300])
def test_a_pack_gives_back_what_was_put_into_it(content: bytes):
    encoded = packs.encode([(3, content), (3, b"next")])
    assert [item.as_raw_string() for item in packs.decode(encoded)] == [content, b"next"]
