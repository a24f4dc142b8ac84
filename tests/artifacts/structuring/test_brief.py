"""Briefs: as long as they should be, about the entities they should be about, counted right."""

# ruff: noqa: RUF001 - Ukrainian

from typing import Any

import pytest

from tests.artifacts.structuring.tasks import GUARDIAN, drafted, says, scripted, snapshot, task
from trellis.artifacts.content import ArtifactDraft, ArtifactType, JobType
from trellis.artifacts.payloads import Snapshot
from trellis.nlm.provider import NlmProvider

VISION = (
    "Виставка «Дві скрипки». Ми хочемо показати поруч TS-02 і скрипку Петрика: одну з гучним ярликом і одну зі скромним. "
    "Відвідувач має зрозуміти, що ярлик нічого не доводить."
)


async def brief(
    vision: str = VISION,
    refs: tuple[str, ...] = ("ts-02", "ts-03"),
    made: Snapshot | None = None,
    provider: NlmProvider | None = None,
    **style: Any,
) -> ArtifactDraft:
    payload: dict[str, Any] = {"vision_text": vision, "entity_refs": list(refs)}
    if style:
        payload["style_guide"] = style
    return await drafted(task(JobType.BRIEF, payload, made), provider)


@pytest.mark.requirement("JQ-13", "NLM-8")
async def test_brief_contains_source_statements_about_its_entities_and_not_the_vision() -> None:
    made = await brief()
    body = made.content["body"]
    assert made.type is ArtifactType.BRIEF
    assert made.content["title"] == "Виставка «Дві скрипки»"
    assert "Ми хочемо показати" not in body
    assert "Куплена в самого майстра" in body.partition("Скрипка Петрика:")[2]
    assert "lion's head instead of a scroll" in body
    assert "Верхня дека знімалася" in body
    assert 150 <= made.content["word_count"] <= 350
    assert made.content["word_count"] == len(body.split())
    names = {"ts-02": "TS-02", "ts-03": "Скрипка Петрика", "onufriy-petryk": "Онуфрій Петрик"}
    assert made.content["entity_map"] == names
    assert set(made.entity_refs) == set(names)


async def test_sources_named_in_a_brief_are_among_the_artifacts_sources() -> None:
    made = await brief()
    known = {source.ref: source.text for source in snapshot().sources}
    assert all(source.excerpt in known[source.ref] for source in made.sources)
    shown = {" ".join(source.excerpt.split()) for source in made.sources}
    assert "The varnish is golden brown and worn where the hand touches." in shown


@pytest.mark.parametrize("words", [30, 60, 120, 800])
async def test_a_brief_is_never_longer_than_its_style_guide_wants(words: int) -> None:
    made = await brief(words=words)
    assert 0.4 * min(words, 350) <= made.content["word_count"] <= words


async def test_an_entity_that_no_source_knows_is_named_as_such() -> None:
    made = await brief(refs=("ts-02", "ts-99"))
    assert made.content["body"].endswith("Джерела нічого не кажуть про ts-99.")
    assert "sources-silent" in made.tags


async def test_an_entity_known_by_its_slug_alone_is_called_as_the_sources_write_it() -> None:
    made = await brief("A guide to one violin of the archive.", ("ts-04",), snapshot(entities=()))
    assert made.content["entity_map"] == {"ts-04": "TS-04"}
    assert "A trade instrument in good condition." in made.content["body"]


async def test_style_decides_title_language_and_what_is_avoided() -> None:
    made = await brief(title="Two violins", language="en", avoid=["вологість смички", "golden varnish"])
    assert made.content["title"] == "Two violins"
    assert "golden" not in made.content["body"]
    assert "en" in made.tags


async def test_without_sources_the_vision_is_all_there_is() -> None:
    made = await brief(made=snapshot(sources={}))
    assert made.content["body"].startswith(VISION)
    assert made.content["body"].endswith("Джерела нічого не кажуть про TS-02, Скрипка Петрика.")
    assert made.sources == ()


async def test_brief_begins_with_grounded_sentences_of_the_model_and_drops_the_others() -> None:
    excerpt = "The varnish is\ngolden brown and worn where the hand touches."
    said = "The varnish of TS-02 is golden brown and worn where the hand touches. Napoleon owned it in 1811."
    made = await brief(provider=scripted(says(said, ("sources/02-instruments.md", excerpt))))
    assert "The varnish of TS-02 is golden brown" in made.content["body"]
    assert "Napoleon" not in made.content["body"]
    assert "ungrounded-dropped" in made.tags


@pytest.mark.parametrize(
    "vision, title, slug, told",
    [
        ("A short leaflet for visitors about TS-02 and its label", "TS-02 and its label", "ts-02", "Oenipontum 1665"),
        (
            "Буклет для дітей про гуцульську скрипку з баранячою головою",
            "Про гуцульську скрипку з баранячою головою",
            "ts-05",
            "без імені й без року",
        ),
    ],
)
async def test_entity_named_in_the_vision_counts_like_a_requested_entity(
    vision: str, title: str, slug: str, told: str
) -> None:
    made = await brief(vision, (), snapshot(entities=()))
    assert made.content["title"] == title
    assert vision not in made.content["body"]
    assert told in made.content["body"]
    assert list(made.content["entity_map"]) == [slug]
    assert 120 <= made.content["word_count"] <= 350


@pytest.mark.parametrize(
    "vision, title, told",
    [
        ("Explain the amnesty to an operator.", "Amnesty", "the first sweep extends leases"),
        ("Something about bananas", "Something about bananas", "Something about bananas"),
    ],
)
async def test_brief_of_a_vision_without_entities_contains_matching_source_statements(
    vision: str, title: str, told: str
) -> None:
    made = await brief(vision, (), snapshot(GUARDIAN, entities=()))
    assert (made.content["title"], told in made.content["body"]) == (title, True)
    assert ("sources-silent" in made.tags) is (told == vision)


async def test_the_same_task_gives_the_same_bytes() -> None:
    assert (await brief()).model_dump_json() == (await brief()).model_dump_json()
