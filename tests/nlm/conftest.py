"""Sources to ask about, and a model's endpoint on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nlm.endpoint import Endpoint, running_endpoint
from trellis.nlm.provider import NlmQuestion, NlmSource

CORPUS = Path(__file__).parent / "corpus"
LEASES = "leases.md"
LASTS = "The lease lasts thirty seconds unless the job type says otherwise."


@pytest.fixture(scope="session")
def sources() -> tuple[NlmSource, ...]:
    return tuple(NlmSource(path.name, path.read_text(encoding="utf-8")) for path in sorted(CORPUS.glob("*.md")))


@pytest.fixture
def question(sources: tuple[NlmSource, ...]) -> NlmQuestion:
    return NlmQuestion(text="How long does a lease last?", sources=sources)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with running_endpoint() as running:
        yield running
