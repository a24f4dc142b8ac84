"""Work grows with the text and not with its square: what nobody would write must not stop whoever reads it."""

from collections import Counter

import pytest

from tests.artifacts.structuring.tasks import snapshot
from trellis.agents.offline import comparison
from trellis.artifacts.drafts import material
from trellis.artifacts.drafts.material import SourceMaterial

WORDS = 60_000


def test_word_with_many_hyphens_is_scanned_once():
    assert comparison.names_in("a-" * WORDS) == frozenset(), "with the square of its length this takes minutes"
    assert comparison.names_in("TS-03 and a-b, 1-2: x1-y") == {"ts-03", "x1-y"}


def test_question_is_analysed_once_for_all_sentences(monkeypatch: pytest.MonkeyPatch):
    read: Counter[str] = Counter()
    usual = material.stems

    def stems(text: str) -> list[str]:
        read[text] += 1
        return usual(text)

    made, part = SourceMaterial(snapshot().corpus()), "who of all people made this very violin"
    told = list(made.all())
    monkeypatch.setattr(material, "stems", stems)
    assert len({made.share(one, part) for one in told}) > 1
    assert (len(told) > 20, read[part]) == (True, 1)
