"""How topics, pools and tenants are configured (`bus.toml`), read once and checked whole.

    [topics."job.code.>"]
    pools = ["code"]
    idempotent = true
    max_attempts = 3
    retry = ["RATE_LIMITED"]

    [pools.code]
    requires = ["gpu"]

    [tenants.acme]
    held_max = 10

`waiting_max` bounds what may wait: at the top of the file on all topics together, in a topic on each topic that the pattern fits.

The first pattern that fits a topic counts, in the file's order; `*` stands for one word, `>` for one or more at the end. A topic that
nothing fits has no pool and is its own subject (D53).
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated

import pydantic

from trellis.bus.errors import BusConfigInvalid
from trellis.engine.jobs import ATTEMPTS_MAX, DELAY_S_MAX
from trellis.engine.recent_entries import LruCache

FILE_NAME = "bus.toml"
HELD_ACTION = "bus-dispatch"
"""What the inbox calls the decision about a job that waits for a person: there is nothing to apply, the scheduler goes on by itself."""
NAMES_MAX = 1_000
FOUND_MAX = 10_000
HELD_MAX_MAX = 100_000
TENANT_KEY = "bus-tenant:"
"""Before the name of a tenant: the key under which the ledger counts what of it is under way."""
PATTERN_SHAPE = (
    "write up to 16 words of letters, digits, _ and - with dots between them, or * for a word, or > at the end"
)
_PATTERN = re.compile(r"(?:(?:[A-Za-z0-9_-]+|\*)\.){0,15}(?:[A-Za-z0-9_-]+|[*>])")
LEASE_S_DEFAULT = 30.0
RUNNING_S_DEFAULT = 3600.0
DEADLINE_S_DEFAULT = 7 * 24 * 3600.0
WAITING_MAX_DEFAULT = 100_000
WAITING_MAX_DEFAULT_ALL = 1_000_000
WAITING_MAX_MAX = 100_000_000

Name = Annotated[str, pydantic.Field(min_length=1, max_length=200)]
Names = Annotated[tuple[Name, ...], pydantic.Field(max_length=NAMES_MAX)]


class _ConfigModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Topic(_ConfigModel):
    """How jobs of one topic are handed out and what happens when they are lost."""

    pools: Names = ()
    """Pools whose workers may have them; none: whoever listens on the topic itself."""
    idempotent: bool = False
    """Doing one again does no harm: it keeps its id over attempts. Else each retry is a new, linked job (BUS-7)."""
    max_attempts: int = pydantic.Field(3, ge=1, le=ATTEMPTS_MAX)
    """Over all retries, linked ones too."""
    retry: Names = ()
    """Error codes of a FAILED result that are worth another attempt (BUS-13)."""
    lease_s: float = pydantic.Field(LEASE_S_DEFAULT, ge=0.05, le=86_400)
    """Not started, or without a sign of life, for so long: the attempt is lost (D30)."""
    running_s: float = pydantic.Field(RUNNING_S_DEFAULT, gt=0, le=7 * 86_400)
    """How long signs of life of its worker keep one attempt alive: the bound of a hung handler."""
    backoff_s: float = pydantic.Field(2.0, ge=0, le=3600)
    """Before the next attempt."""
    deadline_s: float = pydantic.Field(DEADLINE_S_DEFAULT, gt=0, le=DELAY_S_MAX)
    """For requests without a deadline of their own."""
    waiting_max: int = pydantic.Field(WAITING_MAX_DEFAULT, ge=1, le=WAITING_MAX_MAX)
    """How many jobs may wait on one topic: further requests are refused until some of them have been handed out or have ended."""
    context: str = pydantic.Field("objects", pattern="^(objects|redis)$")
    """Where a payload that comes with the request is put: `redis` for agents of the CAP SDK."""


class Pool(_ConfigModel):
    """What the workers of a pool can do."""

    requires: Names = ()
    """Every `meta.requires` of a job must be among these, or among the capabilities of the worker."""


class Tenant(_ConfigModel):
    """How much of a tenant may be under way."""

    held_max: int | None = pydantic.Field(None, ge=1, le=HELD_MAX_MAX)


class Topics(_ConfigModel):
    """The whole configuration."""

    topics: dict[Name, Topic] = pydantic.Field(default_factory=dict[str, Topic], max_length=NAMES_MAX)
    pools: dict[Name, Pool] = pydantic.Field(default_factory=dict[str, Pool], max_length=NAMES_MAX)
    tenants: dict[Name, Tenant] = pydantic.Field(default_factory=dict[str, Tenant], max_length=NAMES_MAX)
    tenant_default: Tenant = Tenant(held_max=None)
    waiting_max: Annotated[int, pydantic.Field(ge=1, le=WAITING_MAX_MAX)] = WAITING_MAX_DEFAULT_ALL
    """How many jobs may wait on all topics together, however many names there are."""

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "Topics":
        for name, topic in self.topics.items():
            if not _PATTERN.fullmatch(name):
                raise ValueError(f"topics.{name} fits no topic; {PATTERN_SHAPE}")
            missing = [pool for pool in topic.pools if pool not in self.pools]
            if missing:
                raise ValueError(f"topics.{name} names the pool {missing[0]!r}, which is not in [pools]")
        return self

    def of(self, topic: str) -> Topic:
        """The settings of a topic."""
        found = self._found.get(topic)
        if found is None:
            fitting = (settings for pattern, settings in self.topics.items() if subject_matches(pattern, topic))
            found = self._found[topic] = next(fitting, _DEFAULT_TOPIC)
        return found

    @cached_property
    def _found(self) -> LruCache[str, Topic]:
        """By topic: a file may have a thousand patterns, and a pass of the scheduler asks about thousands of jobs."""
        return LruCache(FOUND_MAX)

    def tenant(self, name: str) -> Tenant:
        """The settings of a tenant."""
        return self.tenants.get(name, self.tenant_default)


_DEFAULT_TOPIC = Topic.model_validate({})


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectPatterns:
    """Several patterns: those without `*` and `>`, of which there may be thousands, are looked up together."""

    names: frozenset[str]
    wild: tuple[str, ...]

    def fit(self, subject: str) -> bool:
        """Whether a subject fits one of them."""
        return subject in self.names or any(subject_matches(pattern, subject) for pattern in self.wild)


@lru_cache(maxsize=200)
def compile_patterns(said: tuple[str, ...]) -> SubjectPatterns:
    """These patterns, to be asked together."""
    wild = tuple(filter(has_wildcard, said))
    return SubjectPatterns(names=frozenset(said).difference(wild), wild=wild)


def has_wildcard(pattern: str) -> bool:
    """Whether it may fit more than itself."""
    return "*" in pattern or ">" in pattern


@lru_cache(maxsize=10_000)
def subject_matches(pattern: str, subject: str) -> bool:
    """Whether a subject fits a pattern: `*` is one word, `>` is the rest, at least one word."""
    wanted, words = pattern.split("."), subject.split(".")
    for number, want in enumerate(wanted):
        if want == ">":
            return number == len(wanted) - 1 and len(words) > number
        if number >= len(words) or want not in {"*", words[number]}:
            return False
    return len(wanted) == len(words)


def read_topics(file: Path | None) -> Topics:
    """The configuration in this file; without one everything is as it is by default. Raises BusConfigInvalid."""
    if file is None:
        return Topics()
    try:
        said = tomllib.loads(file.read_text(encoding="utf-8"))
        return Topics.model_validate(said)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, found["loc"]))
        raise BusConfigInvalid(file=file, detail=f"{at}: {found['msg']}" if at else found["msg"]) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BusConfigInvalid(file=file, detail=str(error)) from error
