"""The fixed sentences of the offline model, in English and Ukrainian (`words.toml`). They contain no facts."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from trellis.nlm.provider import Language


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """The sentences of one language. Braces hold a number, the name of a source, or a quotation."""

    figures: str
    denial: str
    compare: str
    conflict_summary: str
    answers_title: str
    answers_intro: str
    answers_summary: str
    question: str
    loop: str
    nearest: str
    facts_summary: str
    facts_section: str
    found_in: str
    reasoning: str
    did: str
    proposed: str
    proposed_nothing: str
    refused: str
    unanswered: str
    read_nothing: str


def _read() -> dict[str, Any]:
    return tomllib.loads(resources.files("trellis.agents.offline").joinpath("words.toml").read_text(encoding="utf-8"))


WORDS = _read()
"""The whole file: sentences, titles and comparison words."""
WORDINGS: Mapping[Language, Wording] = {
    Language(language): Wording(**sentences) for language, sentences in WORDS["sentences"].items()
}
