"""The interface of grounded answers: a question about sources goes in, an answer with citations comes out.

For every provider: sources are data and give no instructions. The same sources in any order are the same corpus. A
prepared corpus is only a cache, so a provider that lost it still answers. A citation counts only after
`citations.verify` found it in its source. Offsets count the characters (code points) of `NlmSource.text`.
"""

# ruff: noqa: RUF001 - Ukrainian

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol

from trellis.engine.errors import TrellisError
from trellis.engine.text import is_storable

# Errors of the NLM package. The docstring is the message; `retries` says whether the caller may retry.
#
# NlmError
# ├── NlmInputInvalid         the input is invalid; nothing was sent
# ├── NlmSettingInvalid       the provider cannot be opened with these settings
# ├── NlmUnavailable          the provider does not answer now: retry, after `retry_after_s` if given
# │   └── NlmTimeout          the time for the question is over: 504 over HTTP (RUN-7)
# ├── NlmRefused              the provider refuses the question, and would again
# └── NlmGarbage              the provider's response is not an answer: retry


class NlmError(TrellisError):
    """{detail}."""

    code: ClassVar[str] = "NLM_UNAVAILABLE"
    retries: ClassVar[bool] = False
    """Whether the same question is worth a retry (D7: only the caller's tool retries)."""


class NlmInputInvalid(NlmError):
    """{what} cannot be taken: {detail}."""

    code = "VALIDATION_FAILED"


class NlmSettingInvalid(NlmError):
    """NLM provider {setting!r} cannot be opened: {detail}."""

    code = "VALIDATION_FAILED"


class NlmUnavailable(NlmError):
    """NLM provider {provider} does not answer: {reason}."""

    retries = True

    def __init__(
        self, *, provider: str, reason: str, retry_after_s: float | None = None, status: int | None = None
    ) -> None:
        self.retry_after_s = retry_after_s
        self.status = status
        """The HTTP status of the response, if there was one."""
        super().__init__(provider=provider, reason=reason, retry_after_s=retry_after_s)


class NlmTimeout(NlmUnavailable):
    """NLM provider {provider} did not answer in time: {reason}."""

    code = "AGENT_TIMEOUT"
    retries = False


class NlmRefused(NlmError):
    """NLM provider {provider} refused the question: {reason}. Check its address, model and key."""


class NlmGarbage(NlmError):
    """NLM provider {provider} sent no usable answer: {reason}."""

    retries = True


SOURCES_MAX = 200
SOURCE_CHARS_MAX = 1_000_000
CORPUS_CHARS_MAX = 4_000_000
REF_CHARS_MAX = 500
QUESTION_CHARS_MAX = 4_000
PASSAGES_DEFAULT = 5
PASSAGES_MAX = 20
_NO_TEXT = "it holds a zero byte or half a surrogate pair, which is no text"


class Language(StrEnum):
    """The language of the provider's own text. Sources are quoted unchanged."""

    ENGLISH = "en"
    UKRAINIAN = "uk"


class AnswerFlag(StrEnum):
    """Warnings about an answer. `NOT_FOUND`, `NOT_READ` and `TOO_SHORT` are followed by `:` and the ref."""

    NO_ANSWER = "no_answer"
    """Nothing in the sources answers the question."""
    UNGROUNDED = "ungrounded"
    """No citation was left: nothing shows that the sources say this."""
    NOT_FOUND = "citation_not_found"
    """A citation was dropped: its source does not contain that text, or there is no such source."""
    NOT_READ = "citation_not_read"
    """A citation was dropped: its source contains that text, but the agent did not read the source in this run."""
    TOO_SHORT = "citation_too_short"
    """A citation was dropped: such a short text would be found anywhere."""
    CITATIONS_CUT = "citations_cut"
    """There were more citations than are kept."""
    SOURCES_CUT = "sources_cut"
    """The model got only the passages that fit the question best: the sources were longer than its limit."""
    TEXT_CUT = "text_cut"
    """The answer was longer than the limit and was truncated."""


@dataclass(frozen=True, slots=True)
class NlmSource:
    """A text that may be cited, with a name that is unique in its corpus."""

    ref: str
    text: str


@dataclass(frozen=True, slots=True)
class Citation:
    """A piece of a source. Once verified, `source.text[start:end] == excerpt`; `start == end` means not located yet."""

    ref: str
    excerpt: str
    start: int = 0
    end: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NlmUsage:
    """The tokens of an answer, as the provider counted them."""

    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NlmQuestion:
    """A question and its sources. Without `language`, the letters of the question decide."""

    text: str
    sources: tuple[NlmSource, ...]
    language: Language | None = None
    max_passages: int = PASSAGES_DEFAULT
    agent: str | None = None
    """The agent that asks. The NLM backend asks one question of an agent at a time."""

    def __post_init__(self) -> None:
        if not self.text.strip() or len(self.text) > QUESTION_CHARS_MAX:
            raise NlmInputInvalid(what="the question", detail=f"write 1 to {QUESTION_CHARS_MAX} characters")
        if not is_storable(self.text):
            raise NlmInputInvalid(what="the question", detail=_NO_TEXT)
        if not 1 <= self.max_passages <= PASSAGES_MAX:
            raise NlmInputInvalid(what="max_passages", detail=f"choose 1 to {PASSAGES_MAX}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NlmAnswer:
    """The provider's answer. `confident` is the provider's own claim, and holds only while a citation is left."""

    text: str
    citations: tuple[Citation, ...] = ()
    flags: tuple[str, ...] = ()
    confident: bool = False
    usage: NlmUsage = field(default_factory=NlmUsage)
    model: str = ""


@dataclass(frozen=True, slots=True)
class PreparedCorpus:
    """A corpus that a provider has prepared: the hash of its content, and its sources in order of their refs."""

    key: str
    sources: tuple[NlmSource, ...]


@dataclass(frozen=True, slots=True)
class ProviderHealth:
    """Whether the provider would answer now, and if not, why."""

    ok: bool
    detail: str


class NlmProvider(Protocol):
    """The interface of providers of grounded answers. Raises only the errors of `nlm.provider`."""

    @property
    def name(self) -> str:
        """The provider's name in settings, logs and errors."""
        ...

    async def prepare(self, sources: tuple[NlmSource, ...]) -> PreparedCorpus:
        """Prepare for questions about these sources. Preparing the same content again is free while it is cached."""
        ...

    async def query(self, prepared: PreparedCorpus, question: NlmQuestion, *, deadline_s: float) -> NlmAnswer:
        """Answer within `deadline_s` seconds; raises NlmTimeout."""
        ...

    async def health(self) -> ProviderHealth:
        """Whether it would answer now. Never raises."""
        ...

    async def release(self, prepared: PreparedCorpus) -> None:
        """Mark the corpus as unused for now; it is the first to be dropped from the cache."""
        ...

    async def close(self) -> None:
        """Release connections and memory."""
        ...


def corpus(sources: tuple[NlmSource, ...]) -> PreparedCorpus:
    """The sources in canonical order with their hash; raises NlmInputInvalid."""
    _check(sources)
    ordered = tuple(sorted(sources, key=lambda source: source.ref))
    digest = hashlib.sha256()
    for source in ordered:
        for part in (source.ref.encode(), source.text.encode()):
            # Prefixed with the length, so that different lists of parts never give the same bytes.
            digest.update(len(part).to_bytes(8, "big") + part)
    return PreparedCorpus(digest.hexdigest(), ordered)


def check_fits(prepared: PreparedCorpus, question: NlmQuestion) -> None:
    """Check that the question's sources are the prepared ones; raises NlmInputInvalid."""
    if corpus(question.sources).key != prepared.key:
        raise NlmInputInvalid(what="the question", detail="its sources are not the prepared ones; prepare them first")


def language_of(text: str) -> Language:
    """The language of most letters of a text."""
    cyrillic = sum("\u0400" <= letter <= "\u04ff" for letter in text)
    latin = sum("a" <= letter <= "z" for letter in text.lower())
    return Language.UKRAINIAN if cyrillic > latin else Language.ENGLISH


def answer_language(question: NlmQuestion) -> Language:
    """The requested language, or the one that the question is written in."""
    return question.language or language_of(question.text)


_NO_ANSWER_TEXT = {
    Language.ENGLISH: "Nothing in the sources answers this.",
    Language.UKRAINIAN: "У джерелах немає відповіді на це запитання.",
}


def no_answer(question: NlmQuestion, *, model: str = "", usage: NlmUsage | None = None) -> NlmAnswer:
    """The answer if the sources do not contain one."""
    flags = (AnswerFlag.NO_ANSWER.value, AnswerFlag.UNGROUNDED.value)
    return NlmAnswer(
        text=_NO_ANSWER_TEXT[answer_language(question)], flags=flags, model=model, usage=usage or NlmUsage()
    )


def _check(sources: tuple[NlmSource, ...]) -> None:
    if len(sources) > SOURCES_MAX:
        raise NlmInputInvalid(what="the sources", detail=f"there are {len(sources)}; give at most {SOURCES_MAX}")
    if len({source.ref for source in sources}) != len(sources):
        raise NlmInputInvalid(what="the sources", detail="two have the same ref; give each its own")
    for source in sources:
        if not source.ref.strip() or len(source.ref) > REF_CHARS_MAX or not source.ref.isprintable():
            detail = f"write 1 to {REF_CHARS_MAX} printable characters"
            raise NlmInputInvalid(what=f"ref {source.ref[:80]!r}", detail=detail)
        if len(source.text) > SOURCE_CHARS_MAX:
            raise NlmInputInvalid(
                what=f"source {source.ref!r}", detail=f"it has more than {SOURCE_CHARS_MAX} characters"
            )
        if not is_storable(source.text):
            raise NlmInputInvalid(what=f"source {source.ref!r}", detail=_NO_TEXT)
    if sum(len(source.text) for source in sources) > CORPUS_CHARS_MAX:
        raise NlmInputInvalid(what="the sources", detail=f"together they have more than {CORPUS_CHARS_MAX} characters")
