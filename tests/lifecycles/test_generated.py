"""The committed pages and pictures are those the tables make, and the glossary has every word once."""

import re
from pathlib import Path

import pytest

from tests.lifecycles.generated import ROOT, documents
from trellis.lifecycles import LIFECYCLES, Phase, Role

TERM = re.compile(r"^\*\*(.+?)\*\* — ", re.MULTILINE)
NOUNS = """
lifecycle phase rank trigger role version generation attempt epoch turn sweep amnesty place slot stage journal signal feed
position ledger fingerprint progress extension projection snooze release requeue cancel orphan parked ready resting held
ended waiting
"""


@pytest.mark.parametrize("path", list(documents()), ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path):
    assert path.read_text(encoding="utf-8") == documents()[path], "run python -m tests.lifecycles.generated"


def test_no_picture_of_a_lifecycle_that_is_gone():
    made = {path.name for path in documents() if path.suffix == ".mmd"}
    assert {path.name for path in (ROOT / "docs/lifecycles").iterdir()} == made


def glossary() -> list[str]:
    return TERM.findall((ROOT / "docs/glossary.md").read_text(encoding="utf-8"))


def test_the_glossary_defines_each_word_once_in_order():
    terms = glossary()
    assert sorted(terms, key=str.lower) == terms
    assert len(set(terms)) == len(terms)


def test_glossary_defines_every_special_word_of_the_engine():
    terms = set(glossary())
    wanted = {*NOUNS.split(), *(phase.value for phase in Phase), *LIFECYCLES}
    wanted |= {"concurrency key", "dead letter", "reason code", "claim id", "lease holder"}
    assert wanted - terms == set()


def test_the_glossary_names_every_role():
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    assert [role.value for role in Role if f"`{role.value}`" not in text] == []
