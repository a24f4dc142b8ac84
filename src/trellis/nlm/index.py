"""Ranks passages for a question: BM25 of SQLite's FTS5, in memory, over stems.

The same corpus gives the same index and ranking: passages are numbered in the order of refs and text, and equal scores
keep that order. An index is used by one thread at a time.
"""

import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, LiteralString

import apsw

from trellis.ledgers.queries import NamedQueries
from trellis.nlm.passages import Passage, passages
from trellis.nlm.provider import NlmSource
from trellis.nlm.words import stems

CONTEXT_WEIGHT = 1.5
"""The weight of a word in the headings relative to one in the text."""
QUERY_STEMS_MAX = 60


class _Queries(NamedQueries, file="trellis.nlm:passages.sql"):
    create_index: LiteralString
    add_passage: LiteralString
    best_passages: LiteralString


@dataclass(frozen=True)
class IndexedPassage:
    """A passage with its stems."""

    number: int
    passage: Passage
    context: frozenset[str]
    body: frozenset[str]

    @cached_property
    def sentence_stems(self) -> tuple[frozenset[str], ...]:
        """The stems of each sentence."""
        return tuple(frozenset(stems(sentence.shown)) for sentence in self.passage.sentences)


@dataclass(frozen=True, slots=True)
class RankedPassage:
    """A passage that shares words with the question, and its score: higher is better."""

    entry: IndexedPassage
    score: float


class PassageIndex:
    """The index of one corpus."""

    def __init__(self, sources: Sequence[NlmSource]) -> None:
        self.entries: list[IndexedPassage] = []
        self.texts = {source.ref: source.text for source in sources}
        self.chars = sum(len(source.text) for source in sources)
        self._found_in: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._database: Any = apsw.Connection(":memory:")
        self._database.execute(_Queries.create_index)
        with self._database:
            self._database.executemany(_Queries.add_passage, self._rows(sources))

    def rank(self, wanted: Iterable[str], limit: int) -> list[RankedPassage]:
        """The best passages, at most `limit`."""
        known = [stem for stem in dict.fromkeys(wanted) if self._found_in[stem]][:QUERY_STEMS_MAX]
        if not known:
            return []
        match = " OR ".join(f'"{stem}"' for stem in known)
        with self._lock:
            rows: list[tuple[int, float]] = self._database.execute(
                _Queries.best_passages, (match, CONTEXT_WEIGHT, limit)
            ).fetchall()
        return [RankedPassage(self.entries[number - 1], score) for number, score in rows]

    def weight(self, stem: str) -> float:
        """The weight of a word: the fewer passages contain it, the higher.

        A word that none contains has the highest.
        """
        count = len(self.entries)
        return math.log(1.0 + (count + 1.0) / (self._found_in[stem] + 0.5))

    def _rows(self, sources: Sequence[NlmSource]) -> Iterable[tuple[int, str, str]]:
        for source in sources:
            for passage in passages(source):
                context = stems(" ".join((_spaced(passage.ref), *passage.headings)))
                body = [stem for sentence in passage.sentences for stem in stems(sentence.shown)]
                entry = IndexedPassage(len(self.entries) + 1, passage, frozenset(context), frozenset(body))
                self.entries.append(entry)
                self._found_in.update(entry.context | entry.body)
                yield entry.number, " ".join(context), " ".join(body)


def _spaced(ref: str) -> str:
    """The words of a ref, which is a path or an address."""
    return ref.rpartition(".")[0].replace("/", " ") or ref
