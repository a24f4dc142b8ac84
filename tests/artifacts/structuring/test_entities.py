"""How sure a text names an entity."""

import pytest

from trellis.artifacts.drafts.entities import EntityFinder, with_unknown
from trellis.artifacts.payloads import SnapshotEntity

KNOWN = EntityFinder(
    (
        SnapshotEntity(slug="olena-hrab", name="Олена Граб", aliases=("пані Олена",)),
        SnapshotEntity(slug="jacob-s", name="Jacob Stainer"),
        SnapshotEntity(slug="ts-01", name="TS-01"),
        SnapshotEntity(slug="north", name="Holub", aliases=("the doctor",)),
        SnapshotEntity(slug="south", name="HOLUB"),
    )
)


@pytest.mark.parametrize(
    "text, slug, confidence",
    [
        ("Олена Граб", "olena-hrab", 1.0),
        ("ОЛЕНА ГРАБ", "olena-hrab", 0.95),
        ("Олені Граб", "olena-hrab", 0.9),
        ("пані Олена", "olena-hrab", 0.95),
        ("пані Олену", "olena-hrab", 0.85),
        ("olena-hrab", "olena-hrab", 1.0),
        ("Jacob Stainer", "jacob-s", 1.0),
        ("jacob stainer", "jacob-s", 0.95),
        ("Jacob Stainers", "jacob-s", 0.9),
        ("TS-01", "ts-01", 1.0),
        ("TS 01", "ts-01", 0.95),
        ("the doctor", "north", 0.95),
    ],
)
def test_the_confidence_follows_from_how_a_name_is_written(text: str, slug: str, confidence: float) -> None:
    found = KNOWN.matches(f"About {text} here")
    assert [(match.text, match.slug, match.confidence) for match in found] == [
        (text, slug, pytest.approx(confidence, abs=0.011))
    ]


def test_a_slip_of_the_pen_counts_less_than_any_form_of_the_name() -> None:
    (found,) = KNOWN.matches("About Jakob Stainer here")
    assert found.slug == "jacob-s"
    assert 0.6 < found.confidence < 0.8
    assert KNOWN.matches("About Jakob Stainer here", fuzzy=False) == []
    assert KNOWN.occurring("About Jakob Stainer here") == []


@pytest.mark.parametrize(
    "text", ["TS-02", "TS-011", "Олег Граб", "Stainer", "Jacob Steinway", "", "illegal", "Holubets"]
)
def test_entity_is_not_matched_in_other_words(text: str) -> None:
    assert KNOWN.matches(text) == []


def test_a_text_that_names_two_entities_equally_well_is_half_sure_of_each() -> None:
    found = KNOWN.matches("holub")
    assert [(match.slug, match.confidence) for match in found] == [("north", 0.47), ("south", 0.47)]
    assert KNOWN.occurring("holub") == []


def test_the_longest_name_wins_and_no_word_counts_twice() -> None:
    known = EntityFinder(
        (SnapshotEntity(slug="graz", name="Graz"), SnapshotEntity(slug="cousin", name="cousin in Graz"))
    )
    assert [match.slug for match in known.matches("my cousin in Graz")] == ["cousin"]


def test_unknown_entity_slug_is_used_as_its_name_in_the_requested_order() -> None:
    entities = with_unknown((SnapshotEntity(slug="b", name="B"), SnapshotEntity(slug="a", name="A")), ("x", "a"))
    assert [(entity.slug, entity.name) for entity in entities] == [("x", "x"), ("a", "A"), ("b", "B")]
