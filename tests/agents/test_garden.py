"""The garden that is shipped: good files within every bound, planted without touching what is there."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.agents.files import NOW
from trellis.agents.catalog import Catalog, agent_key
from trellis.agents.definition import AgentDefinition, read_definition
from trellis.agents.garden import AGENTS, memory_seed, objects_of, plant
from trellis.nlm.extractive import ExtractiveProvider
from trellis.nlm.provider import AnswerFlag, NlmQuestion, NlmSource
from trellis.storage.memory.layout import LAYER_1, READ_LIMITS, ReadMode, count_tokens
from trellis.storage.memory.markdown import loops
from trellis.storage.memory.updates import AppliedUpdates, Operation, Update, apply_updates
from trellis.storage.objects.store import ObjectStore

ROOT = Path(__file__).resolve().parents[2]
QUOTE = re.compile(r"((?:^>.*\n)+)", re.MULTILINE)
ATTRIBUTION = "— docs/"
BOTH_SIDES = {
    "archivist-violin": {"04-repairs.md", "08-letters.md", "05-provenance.md", "06-humidity-and-storage.md"},
    "architect-guardian": {"03-time-and-recovery.md", "04-storage-and-events.md", "05-throughput-and-promises.md"},
}
"""What an agent has to be led to, or it cannot notice what does not agree."""


def definition(slug: str) -> AgentDefinition:
    read = read_definition(objects_of(slug)[agent_key(slug)], slug=slug)
    assert isinstance(read, AgentDefinition), read
    return read


def questions(slug: str) -> list[str]:
    section = definition(slug).instructions.partition("# Questions\n")[2].partition("\n# ")[0]
    return [line.removeprefix("- ") for line in section.splitlines() if line.startswith("- ")]


# -- planting ----------------------------------------------------------------------------------------------------


async def test_planting_makes_agents_that_run_offline_with_all_their_sources(objects: ObjectStore):
    planted = await plant(objects)
    assert not planted.kept
    catalog = Catalog(objects)
    listed = await catalog.list()
    assert [agent.slug for agent in listed.agents] == sorted(AGENTS)
    for agent in listed.agents:
        assert isinstance(agent, AgentDefinition)
        assert (agent.may_run, agent.model, agent.warnings) == (True, "offline", ())
        sources = await catalog.sources(agent.slug, agent)
        assert (sources.left_out, sources.complete) == ((), True)
        assert len(sources.items) == len(objects_of(agent.slug)) - 1 >= 6


async def test_planting_again_changes_nothing_and_keeps_what_the_owner_changed(objects: ObjectStore):
    first = await plant(objects)
    await objects.put(agent_key("archivist-violin"), b"mine")
    await objects.delete(first.created[0])
    again = await plant(objects)
    assert again.created == (first.created[0],)
    assert set(again.kept) == set(first.created[1:])
    kept = await objects.get(agent_key("archivist-violin"))
    assert kept is not None
    assert kept.body == b"mine"


async def test_concurrent_garden_setup_creates_each_object_once(objects: ObjectStore):
    planted = await asyncio.gather(*(plant(objects) for _ in range(6)))
    created = [key for one in planted for key in one.created]
    assert sorted(created) == sorted(key for slug in AGENTS for key in objects_of(slug))


@pytest.mark.parametrize("slug", AGENTS)
def test_an_agents_file_is_planted_after_its_sources(slug: str):
    assert list(objects_of(slug))[-1] == agent_key(slug)


# -- what is in it -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("D23")
@pytest.mark.parametrize("slug", AGENTS)
def test_the_first_memory_keeps_its_limits_and_can_be_applied(slug: str):
    seed = memory_seed(slug)
    assert tuple(seed) == LAYER_1
    updates = [Update(file=name, operation=Operation.REPLACE, content=text) for name, text in seed.items()]
    applied = apply_updates({}, updates, NOW)
    assert isinstance(applied, AppliedUpdates), applied
    assert applied.files == seed
    for mode in ReadMode:
        assert sum(count_tokens(seed[name]) for name in READ_LIMITS[mode].files) <= READ_LIMITS[mode].tokens_max
    assert len(loops(seed["open_loops.md"])) >= 4


@pytest.mark.parametrize("slug", AGENTS)
async def test_every_question_of_the_instructions_is_answered_from_the_sources(objects: ObjectStore, slug: str):
    await plant(objects)
    read = await Catalog(objects).sources(slug, definition(slug))
    sources = tuple(NlmSource(ref=source.ref, text=source.text) for source in read.items)
    provider = ExtractiveProvider()
    prepared = await provider.prepare(sources)
    cited: set[str] = set()
    for text in questions(slug):
        answer = await provider.query(prepared, NlmQuestion(text=text, sources=sources), deadline_s=10)
        assert answer.citations, text
        assert AnswerFlag.NO_ANSWER not in answer.flags, text
        cited.update(citation.ref for citation in answer.citations)
    assert {f"sources/{name}" for name in BOTH_SIDES[slug]} <= cited


def test_each_of_the_two_contradictions_is_in_two_notes():
    notes = {key.rpartition("/")[2]: body.decode() for key, body in objects_of("archivist-violin").items()}
    assert "Fitted a new bass bar" in notes["04-repairs.md"]
    assert "nobody has opened it" in notes["08-letters.md"]
    assert "60 to 65 percent at all times" in notes["05-provenance.md"]
    assert "keep a relative humidity of 45\N{EN DASH}55 %" in notes["06-humidity-and-storage.md"]


def test_the_garden_is_written_in_one_language():
    """Whoever tries the demonstration can judge what an agent quotes."""
    files = {key: body.decode() for slug in AGENTS for key, body in objects_of(slug).items()}
    files |= {f"{slug}/{name}": text for slug in AGENTS for name, text in memory_seed(slug).items()}
    assert [key for key, text in files.items() if re.search("[\u0400-\u04ff]", text)] == []


def test_invented_items_are_recognisable():
    """A note that tells of numbered items says that they are invented, or numbers nothing but what the first note says is."""
    notes = {key: body.decode() for key, body in objects_of("archivist-violin").items() if "/sources/" in key}
    first = notes["agents/archivist-violin/sources/01-about-the-archive.md"]
    assert "every item with a number TS-… or TB-…" in first
    told = [key for key in notes if re.search(r"fiction|invented", notes[key], re.IGNORECASE)]
    general = {"03-makers-and-labels.md", "06-humidity-and-storage.md"}
    assert {key.rpartition("/")[2] for key in set(notes) - set(told)} <= general


def test_quotations_in_the_guardians_sources_match_the_documents():
    """Each quotation ends with the document it is from, and stands there word for word."""
    quoted = 0
    for key, body in objects_of("architect-guardian").items():
        for block in QUOTE.findall(body.decode()) if "/sources/" in key else ():
            *lines, source = (line.removeprefix(">").strip() for line in block.splitlines())
            assert source.startswith(ATTRIBUTION), block
            document = (ROOT / source.removeprefix("— ")).read_text(encoding="utf-8")
            assert " ".join(" ".join(lines).split()) in " ".join(document.split()), f"{key}: {block}"
            quoted += 1
    assert quoted >= 20
