"""Generated sentences in English and Ukrainian, and the cue words that classify source sentences (`words.toml`)."""

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from trellis.nlm.provider import Language


def _read() -> dict[str, Any]:
    folder = resources.files("trellis.artifacts.drafts")
    return tomllib.loads(folder.joinpath("words.toml").read_text(encoding="utf-8"))


def _phrases(phrases: list[str]) -> re.Pattern[str]:
    longest = sorted(phrases, key=lambda phrase: (-len(phrase), phrase))
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)")


_WORDS = _read()
SENTENCES: Mapping[Language, Mapping[str, str]] = {
    Language(language): sentences for language, sentences in _WORDS["sentences"].items()
}
_CUES: dict[str, list[str]] = _WORDS["cues"]
OPEN = _phrases(_CUES["open"])
CONCLUDING = _phrases(_CUES["concluding"])
LEANING = _phrases(_CUES["leaning"])
ABOUT = re.compile(_phrases(_CUES["about"]).pattern, re.IGNORECASE)
PLACEHOLDERS = _phrases(_CUES["placeholders"])
RATIONALE = frozenset(_CUES["rationale"])


def filled_sentence(language: Language, what: str, **data: object) -> str:
    """Returns one of the generated sentences, filled in."""
    return SENTENCES[language][what].format(**data)


def clipped(text: str, chars_max: int) -> str:
    """Returns the text on one line of at most `chars_max` characters, cut between words if possible."""
    flat = " ".join(text.split())
    if len(flat) <= chars_max:
        return flat
    cut = flat[: chars_max - 1]
    at = cut.rfind(" ")
    return (cut[:at] if at > chars_max // 2 else cut).rstrip(" ,;:-") + "…"
