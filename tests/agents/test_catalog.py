"""Which agents there are, and how the status of one changes, on a real store."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.agents.files import NOW, agent_file
from trellis.agents.catalog import (
    INDEX_BYTES_MAX,
    INDEX_KEY,
    WRITE_TRIES_MAX,
    AgentMissing,
    Catalog,
    StatusChanged,
    agent_key,
    read_index,
)
from trellis.agents.definition import AgentDefinition, AgentMalformed, AgentStatus, read_definition
from trellis.agents.errors import DefinitionContended, SlugInvalid, StatusChangeRefused
from trellis.agents.frontmatter import FILE_BYTES_MAX
from trellis.storage.objects.local import LocalObjects
from trellis.storage.objects.open import random_name
from trellis.storage.objects.store import OVERWRITE, ObjectPage, ObjectStore, PutCondition, PutRefused, PutStored


class Watched(LocalObjects):
    """The real store; counts its listings, and does something before a write to make two writers meet."""

    lists = 0
    puts = 0
    before_put: Callable[[str], Awaitable[None]] | None = None
    before_every_put: Callable[[str], Awaitable[None]] | None = None

    async def list(self, prefix: str, *, after: str | None = None, limit: int = 1000) -> ObjectPage:
        self.lists += 1
        return await super().list(prefix, after=after, limit=limit)

    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        self.puts += 1
        once, self.before_put = self.before_put, None
        for meeting in (once, self.before_every_put):
            if meeting is not None:
                await meeting(key)
        return await super().put(key, body, when=when)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    store = Watched(tmp_path / "watched", new_name=random_name, now_ns=time.time_ns)
    yield store
    await store.close()


async def put_agent(objects: ObjectStore, slug: str, **changes: str) -> bytes:
    data = agent_file(**{"slug": slug, **changes})
    await objects.put(agent_key(slug), data)
    return data


# -- loading and listing -----------------------------------------------------------------------------------------


@pytest.mark.requirement("D24")
async def test_an_agent_is_its_file_and_no_file_is_no_agent(objects: ObjectStore):
    data = await put_agent(objects, "gardener")
    await objects.put("agents/ghost/sources/a.md", b"text")
    catalog = Catalog(objects)
    assert await catalog.load("gardener") == read_definition(data)
    assert await catalog.load("ghost") == AgentMissing(slug="ghost")
    assert "agents/ghost/_agent.md" in str(await catalog.load("ghost"))
    assert [agent.slug for agent in (await catalog.list()).agents] == ["gardener"]


@pytest.mark.parametrize("slug", ["", ".", "..", "a/b", "../a", "A", "-a", "a" * 64, "a\0"])
async def test_invalid_agent_slug_never_becomes_an_object_key(objects: ObjectStore, slug: str):
    catalog = Catalog(objects)
    definition = read_definition(agent_file())
    assert isinstance(definition, AgentDefinition)
    for asked in (catalog.load(slug), catalog.sources(slug, definition)):
        with pytest.raises(SlugInvalid):
            await asked
    with pytest.raises(SlugInvalid):
        await catalog.change_status(slug, AgentStatus.PAUSED, at=NOW)


@pytest.mark.requirement("D24")
async def test_a_malformed_agent_is_listed_with_its_problems_and_stops_only_itself(objects: ObjectStore):
    await put_agent(objects, "good-a")
    await put_agent(objects, "bad", status="activ", version="1")
    await objects.put("agents/Odd Name/_agent.md", agent_file())
    await objects.put("agents/huge/_agent.md", b"x" * (FILE_BYTES_MAX + 1))
    await objects.put("agents/moved/_agent.md", agent_file(slug="elsewhere"))
    await put_agent(objects, "good-b")
    catalog = Catalog(objects)
    listed = {agent.slug: agent for agent in (await catalog.list()).agents}
    assert sorted(str(slug) for slug in listed) == ["Odd Name", "bad", "good-a", "good-b", "huge", "moved"]
    assert {slug for slug, agent in listed.items() if isinstance(agent, AgentDefinition)} == {"good-a", "good-b"}
    bad = listed["bad"]
    assert isinstance(bad, AgentMalformed)
    assert [problem.field for problem in bad.problems] == ["version", "status"]
    assert await catalog.load("bad") == bad
    assert str(FILE_BYTES_MAX) in str(listed["huge"])
    assert isinstance(await catalog.load("huge"), AgentMalformed)


async def test_names_that_begin_alike_are_all_found_in_order(objects: ObjectStore):
    slugs = ["a", "a-", "a-b", "a0", "a0-1", "aa", "b", "0", "0-0", "z" * 63]
    for slug in slugs:
        await put_agent(objects, slug)
    listed = await Catalog(objects).list()
    assert [agent.slug for agent in listed.agents] == sorted(slugs)
    assert listed.complete


async def test_finding_agents_costs_one_question_each_however_much_they_published(watched: Watched):
    for slug in ("a", "a-b", "c"):
        await put_agent(watched, slug)
        for number in range(40):
            await watched.put(f"agents/{slug}/runs/run_{number:03}/status.json", b"{}")
            await watched.put(f"agents/{slug}/Notes {number}.md", b"before the agent's file in the order of keys")
    await watched.put("agents/notes.txt", b"a file between folders")
    watched.lists = 0
    assert len((await Catalog(watched).list()).agents) == 3
    assert watched.lists == 3 + 1 + 1  # the folders, the file, the end


async def test_agent_listing_reports_when_it_left_folders_out(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trellis.agents.catalog.FOLDERS_MAX", 2)
    for slug in ("a", "b", "c"):
        await put_agent(objects, slug)
    listed = await Catalog(objects).list()
    assert ([agent.slug for agent in listed.agents], listed.complete) == (["a", "b"], False)


async def test_a_store_without_agents_has_none(objects: ObjectStore):
    listed = await Catalog(objects).list()
    assert (listed.agents, listed.complete) == ((), True)


# -- status ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D24")
async def test_a_change_of_status_is_in_the_file(objects: ObjectStore):
    await put_agent(objects, "gardener")
    changed = await Catalog(objects).change_status("gardener", AgentStatus.PAUSED, at=NOW)
    assert isinstance(changed, StatusChanged)
    assert (changed.agent.status, changed.previous) == (AgentStatus.PAUSED, AgentStatus.ACTIVE)
    assert await Catalog(objects).load("gardener") == changed.agent
    with pytest.raises(StatusChangeRefused):
        await Catalog(objects).change_status("gardener", AgentStatus.ERROR, at=NOW)


async def test_a_status_cannot_be_given_to_what_is_no_agent(objects: ObjectStore):
    await put_agent(objects, "bad", version="1")
    catalog = Catalog(objects)
    assert await catalog.change_status("none", AgentStatus.PAUSED, at=NOW) == AgentMissing(slug="none")
    assert isinstance(await catalog.change_status("bad", AgentStatus.PAUSED, at=NOW), AgentMalformed)


async def test_the_same_status_again_writes_nothing(watched: Watched):
    await put_agent(watched, "gardener")
    watched.puts = 0
    changed = await Catalog(watched).change_status("gardener", AgentStatus.ACTIVE, at=NOW)
    assert isinstance(changed, StatusChanged)
    assert (changed.previous, watched.puts) == (AgentStatus.ACTIVE, 0)


async def test_an_edit_that_came_between_is_kept(watched: Watched):
    await put_agent(watched, "gardener")

    async def owner_edits(key: str) -> None:
        await LocalObjects.put(watched, key, agent_file(body="Water, then weed.\n"))

    watched.before_put = owner_edits
    changed = await Catalog(watched).change_status("gardener", AgentStatus.PAUSED, at=NOW)
    assert isinstance(changed, StatusChanged)
    assert changed.agent.instructions == "Water, then weed."
    assert await Catalog(watched).load("gardener") == changed.agent


async def test_the_change_is_decided_again_on_what_came_between(watched: Watched):
    await put_agent(watched, "gardener")

    async def owner_archives(key: str) -> None:
        await LocalObjects.put(watched, key, agent_file(status="archived"))

    watched.before_put = owner_archives
    with pytest.raises(StatusChangeRefused):
        await Catalog(watched).change_status("gardener", AgentStatus.PAUSED, at=NOW)


async def test_a_file_that_never_holds_still_is_given_up(watched: Watched):
    await put_agent(watched, "gardener")
    edits = iter(range(100))

    async def owner_edits(key: str) -> None:
        await LocalObjects.put(watched, key, agent_file(body=f"Edit {next(edits)}\n"))

    watched.before_every_put = owner_edits
    with pytest.raises(DefinitionContended, match=str(WRITE_TRIES_MAX)):
        await Catalog(watched).change_status("gardener", AgentStatus.PAUSED, at=NOW)
    assert next(edits) == WRITE_TRIES_MAX


async def test_concurrent_pauses_change_an_agent_once(objects: ObjectStore):
    await put_agent(objects, "gardener")
    asked = (Catalog(objects).change_status("gardener", AgentStatus.PAUSED, at=NOW) for _ in range(16))
    answers = await asyncio.gather(*asked)
    assert all(isinstance(answer, StatusChanged) for answer in answers)
    previous = [answer.previous for answer in answers if isinstance(answer, StatusChanged)]
    assert previous.count(AgentStatus.ACTIVE) == 1


# -- the index ---------------------------------------------------------------------------------------------------


async def stored_index(objects: ObjectStore):
    found = await objects.get(INDEX_KEY)
    return found and read_index(found.body)


async def test_an_absent_index_is_made_from_the_files(objects: ObjectStore):
    await put_agent(objects, "gardener")
    await put_agent(objects, "bad", status="activ")
    index = await Catalog(objects).index()
    bad, gardener = index.agents
    assert (gardener.slug, gardener.status, gardener.version) == ("gardener", AgentStatus.ACTIVE, "1.2.3")
    assert (bad.slug, bad.status, bad.problem_count) == ("bad", None, 1)
    assert "did you mean 'active'" in bad.problems[0]
    assert await stored_index(objects) == index


async def test_a_fresh_index_is_read_and_not_written(watched: Watched):
    await put_agent(watched, "gardener")
    catalog = Catalog(watched)
    first = await catalog.index()
    watched.puts = 0
    assert await catalog.index() == first
    assert watched.puts == 0


async def test_the_slugs_of_a_stored_index_are_one_read(watched: Watched):
    for slug in ("gardener", "keeper"):
        await put_agent(watched, slug)
    catalog = Catalog(watched)
    assert await catalog.indexed_slugs() == ["gardener", "keeper"], "no index is stored"
    await catalog.index()
    await watched.delete(agent_key("keeper"))
    watched.lists = watched.puts = 0
    assert await catalog.indexed_slugs() == ["gardener", "keeper"], "the files are not looked at"
    assert (watched.lists, watched.puts) == (0, 0)


@pytest.mark.parametrize("change", ["edit", "add", "remove", "status"])
async def test_an_index_is_stale_when_any_file_changed(objects: ObjectStore, change: str):
    await put_agent(objects, "a")
    await put_agent(objects, "b")
    catalog = Catalog(objects)
    before = await catalog.index()
    if change == "edit":
        await put_agent(objects, "a", name="Other")
    elif change == "add":
        await put_agent(objects, "c")
    elif change == "remove":
        await objects.delete(agent_key("b"))
    else:
        await catalog.change_status("a", AgentStatus.PAUSED, at=NOW)
    after = await catalog.index()
    assert after != before
    assert [entry.slug for entry in after.agents] == [agent.slug for agent in (await catalog.list()).agents]
    assert await stored_index(objects) == after


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"null",
        b"{",
        b"[" * 100_000,
        b'{"version": 2, "updated_at": null, "agents": []}',
        b" " * (INDEX_BYTES_MAX + 1),
    ],
)
async def test_an_index_that_is_none_is_replaced(objects: ObjectStore, garbage: bytes):
    await put_agent(objects, "gardener")
    await objects.put(INDEX_KEY, garbage)
    index = await Catalog(objects).index()
    assert [entry.slug for entry in index.agents] == ["gardener"]
    assert await stored_index(objects) == index


async def test_a_forged_index_decides_nothing(objects: ObjectStore):
    await put_agent(objects, "gardener", status="paused")
    catalog = Catalog(objects)
    forged = (await catalog.index()).to_bytes().replace(b'"paused"', b'"active"')
    await objects.put(INDEX_KEY, forged)
    loaded = await catalog.load("gardener")
    assert isinstance(loaded, AgentDefinition)
    assert not loaded.may_run
    assert [agent.may_run for agent in (await catalog.list()).agents if isinstance(agent, AgentDefinition)] == [False]


async def test_the_same_files_give_the_same_bytes_whoever_makes_the_index(objects: ObjectStore):
    for slug in ("b", "a", "c-d"):
        await put_agent(objects, slug)
    first = await Catalog(objects).index()
    assert await objects.delete(INDEX_KEY)
    second = await Catalog(objects).index()
    assert first.to_bytes() == second.to_bytes()


async def test_concurrent_index_builds_agree(objects: ObjectStore):
    for number in range(12):
        await put_agent(objects, f"agent-{number}")
    made = await asyncio.gather(*(Catalog(objects).index() for _ in range(12)))
    assert len({index.to_bytes() for index in made}) == 1
    assert await stored_index(objects) == made[0]


async def test_an_index_that_others_keep_writing_is_answered_all_the_same(watched: Watched):
    await put_agent(watched, "gardener")
    numbers = iter(range(100))

    async def somebody_writes(key: str) -> None:
        await LocalObjects.put(watched, key, f"garbage {next(numbers)}".encode())

    watched.before_every_put = somebody_writes
    index = await Catalog(watched).index()
    assert [entry.slug for entry in index.agents] == ["gardener"]
