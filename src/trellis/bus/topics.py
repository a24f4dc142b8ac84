"""The configuration of topics, pools and tenants (`bus.toml`), read once and validated as a whole.

    [topics."job.code.>"]
    pools = ["code"]
    idempotent = true
    max_attempts = 3
    retry = ["RATE_LIMITED"]

    [pools.code]
    requires = ["gpu"]

    [tenants.acme]
    held_max = 10

`waiting_max` limits how many jobs may wait: at the top of the file for all topics together, in a topic for each topic
that the pattern matches.

The first matching pattern in the file applies; `*` matches one word, `>` one or more words at the end. A topic that no
pattern matches has no pool, and its jobs go to the subject of its own name (D53).
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
"""The inbox action of a job held for approval. There is nothing to apply; the scheduler continues by itself."""
NAMES_MAX = 1_000
CACHED_MAX = 10_000
HELD_MAX_MAX = 100_000
TENANT_KEY = "bus-tenant:"
"""Prefix of the concurrency key under which the ledger counts a tenant's running jobs."""
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
    """How jobs of one topic are dispatched, and what happens when they are lost."""

    pools: Names = ()
    """Pools whose workers may get the jobs. Without pools, workers subscribe to the topic itself."""
    idempotent: bool = False
    """Whether jobs may safely run twice. If so, a job keeps its id over attempts.

    If not, each retry is a new, linked job (BUS-7).
    """
    max_attempts: int = pydantic.Field(3, ge=1, le=ATTEMPTS_MAX)
    """Maximum number of attempts, over all retries, including linked jobs."""
    retry: Names = ()
    """Error codes of FAILED results that are retried (BUS-13)."""
    lease_s: float = pydantic.Field(LEASE_S_DEFAULT, ge=0.05, le=86_400)
    """Lease length in seconds. An attempt that does not start or send a heartbeat for this long is lost (D30)."""
    running_s: float = pydantic.Field(RUNNING_S_DEFAULT, gt=0, le=7 * 86_400)
    """Maximum length of one attempt in seconds, however long its worker sends heartbeats. Ends hung handlers."""
    backoff_s: float = pydantic.Field(2.0, ge=0, le=3600)
    """Delay before the next attempt, in seconds."""
    deadline_s: float = pydantic.Field(DEADLINE_S_DEFAULT, gt=0, le=DELAY_S_MAX)
    """Deadline in seconds for requests that set none."""
    waiting_max: int = pydantic.Field(WAITING_MAX_DEFAULT, ge=1, le=WAITING_MAX_MAX)
    """How many jobs may wait on one topic. Further requests are refused until some jobs are dispatched or end."""
    context: str = pydantic.Field("objects", pattern="^(objects|redis)$")
    """Where a payload given with the request is stored: `redis` for agents of the CAP SDK."""


class Pool(_ConfigModel):
    requires: Names = ()
    """Capabilities of the pool.

    Every `meta.requires` of a job must be among these or among the worker's capabilities.
    """


class Tenant(_ConfigModel):
    """Limits of a tenant: `held_max` jobs may be dispatched or running at the same time."""

    held_max: int | None = pydantic.Field(None, ge=1, le=HELD_MAX_MAX)


class Topics(_ConfigModel):
    """The whole configuration of the bus."""

    topics: dict[Name, Topic] = pydantic.Field(default_factory=dict[str, Topic], max_length=NAMES_MAX)
    pools: dict[Name, Pool] = pydantic.Field(default_factory=dict[str, Pool], max_length=NAMES_MAX)
    tenants: dict[Name, Tenant] = pydantic.Field(default_factory=dict[str, Tenant], max_length=NAMES_MAX)
    tenant_default: Tenant = Tenant(held_max=None)
    waiting_max: Annotated[int, pydantic.Field(ge=1, le=WAITING_MAX_MAX)] = WAITING_MAX_DEFAULT_ALL
    """How many jobs may wait on all topics together."""

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
        """The settings of a topic: the first pattern that matches, else the defaults."""
        known = self._settings.get(topic)
        if known is None:
            fitting = (settings for pattern, settings in self.topics.items() if subject_matches(pattern, topic))
            known = self._settings[topic] = next(fitting, _DEFAULT_TOPIC)
        return known

    @cached_property
    def _settings(self) -> LruCache[str, Topic]:
        """Cache of settings by topic.

        A file may have a thousand patterns, and a scheduler pass looks up thousands of jobs.
        """
        return LruCache(CACHED_MAX)

    def tenant(self, name: str) -> Tenant:
        return self.tenants.get(name, self.tenant_default)


_DEFAULT_TOPIC = Topic.model_validate({})


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectPatterns:
    """Compiled patterns. Patterns without wildcards, of which there may be thousands, are looked up in one set."""

    names: frozenset[str]
    wild: tuple[str, ...]

    def fit(self, subject: str) -> bool:
        return subject in self.names or any(subject_matches(pattern, subject) for pattern in self.wild)


@lru_cache(maxsize=200)
def compile_patterns(patterns: tuple[str, ...]) -> SubjectPatterns:
    wild = tuple(filter(has_wildcard, patterns))
    return SubjectPatterns(names=frozenset(patterns).difference(wild), wild=wild)


def has_wildcard(pattern: str) -> bool:
    return "*" in pattern or ">" in pattern


@lru_cache(maxsize=10_000)
def subject_matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches a pattern: `*` is one word, `>` is the rest, at least one word."""
    wanted, words = pattern.split("."), subject.split(".")
    for number, want in enumerate(wanted):
        if want == ">":
            return number == len(wanted) - 1 and len(words) > number
        if number >= len(words) or want not in {"*", words[number]}:
            return False
    return len(wanted) == len(words)


def read_topics(file: Path | None) -> Topics:
    """Read the configuration file; without a file, the defaults. Raises BusConfigInvalid."""
    if file is None:
        return Topics()
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
        return Topics.model_validate(config)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, problem["loc"]))
        raise BusConfigInvalid(file=file, detail=f"{at}: {problem['msg']}" if at else problem["msg"]) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BusConfigInvalid(file=file, detail=str(error)) from error
