"""Safety policies and the decisions of a safety kernel.

A policy is an ordered list of rules; the first that matches decides. A job that matches no rule is denied.

    [[rules]]
    id = "deletes-need-a-person"
    decision = "require_human"
    reason = "somebody looks before anything is deleted"
    match = { topics = ["job.files.>"], risk_tags = ["destructive"] }

    [[rules]]
    id = "files"
    decision = "allow_with_constraints"
    match = { topics = ["job.files.>"], tenants = ["acme", "beta-*"] }
    constraints = { max_runtime_ms = 60000, network_allowlist = [] }

A rule matches when every condition in its `match` does, and a condition when one of its patterns does. In topics `*` is
one word and `>` the rest, as on the bus; in all other patterns `*` is any text. Capabilities, requirements and risk
tags are compared case-insensitively, as in placement. A request that names two tenants, or one label with two values,
matches no rule, because it is ambiguous.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, cast

import pydantic

from trellis.bus.errors import KernelUnavailable
from trellis.bus.requests import JobRequest
from trellis.engine.errors import InputError, Refused
from trellis.engine.field_names import fields_beside
from trellis.engine.text import no_such_field

# Errors.


class PolicyInvalid(InputError):
    """The safety policy {source} does not fit: {detail}"""


class NotHeld(Refused):
    """Job {job_id} does not wait for a person: {reason}."""

    code = "INVALID_TRANSITION"


class PolicyDiffers(Refused):
    """Job {job_id} is held under policy {held} and not under {given}; look at it again before you decide."""


class KernelInDoubt(KernelUnavailable):
    """The safety kernel does not answer this question: {detail}"""


class KernelRefuses(KernelUnavailable):
    """The safety kernel is there and gives no decision that can be used: {detail}"""


# Decisions, and the kernel that makes them.


class DecisionKind(StrEnum):
    """The five possible decisions."""

    ALLOW = "allow"
    DENY = "deny"
    REQUIRE_HUMAN = "require_human"
    THROTTLE = "throttle"
    ALLOW_WITH_CONSTRAINTS = "allow_with_constraints"


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetyDecision:
    """One decision, with everything that it is bound to."""

    kind: DecisionKind
    rule: str
    """The rule that decided; `default` when none matched."""
    reason: str
    policy_hash: str
    job_hash: str
    delay_s: float = 0.0
    """How long a throttled job waits before the kernel is asked again, in seconds."""
    constraints: Mapping[str, Any] = field(default_factory=dict[str, Any])
    redacted: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The context that the worker gets in place of the request's own: `context_ptr`, `context_ref` or both.

    Empty for none.
    """

    @property
    def lets_go(self) -> bool:
        """Whether the job may be dispatched without a person."""
        return self.kind in {DecisionKind.ALLOW, DecisionKind.ALLOW_WITH_CONSTRAINTS}

    def to_dict(self) -> dict[str, Any]:
        """The form stored in events."""
        fields: dict[str, Any] = {
            "decision": self.kind.value,
            "rule": self.rule,
            "reason": self.reason,
            "policy_hash": self.policy_hash,
            "job_hash": self.job_hash,
        }
        if self.kind is DecisionKind.THROTTLE:
            fields["delay_s"] = self.delay_s
        if self.constraints:
            fields["constraints"] = dict(self.constraints)
        if self.redacted:
            fields["redacted"] = dict(self.redacted)
        return fields


class DecisionKernel(Protocol):
    """A kernel as the scheduler uses it."""

    async def check(self, request: JobRequest) -> SafetyDecision:
        """Decide whether this job may be dispatched now; raises KernelUnavailable, and then the job waits."""
        ...


# Policies.

FILE_BYTES_MAX = 1024 * 1024
RULES_MAX = 1_000
PATTERNS_MAX = 1_000
"""Maximum number of patterns in one condition."""
PATTERNS_ALL_MAX = 10_000
"""Maximum number of patterns in all rules.

Every job is checked against them before dispatch, in a process that also does other work.
"""
DELAY_S_DEFAULT = 10.0
DELAY_S_MAX = 24 * 3600.0
NAME_CHARS_MAX = 200
CONSTRAINTS_CHARS_MAX = 2_000
"""Maximum length of a decision's constraints as JSON. They are sent in one value of a job's env, which is limited."""
RULE_ID_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,99}$"
RESERVED_IDS = frozenset({"default", "ambiguous"})
"""Rule ids in decisions that no rule made."""

BYTE_ORDER_MARK = "\ufeff"
"""Written by some editors at the start of a text."""
_TOPIC_WORD = re.compile(r"[A-Za-z0-9_-]+|\*")


def _topic_pattern(text: str) -> str:
    words = text.split(".")
    for number, word in enumerate(words):
        if word == ">" and number == len(words) - 1:
            continue
        if _TOPIC_WORD.fullmatch(word) is None:
            raise ValueError(
                f"{text!r} is no pattern of topics: {word!r} must be a word, * for any one, or > at the end"
            )
    return text


def _name_pattern(text: str) -> str:
    wild = next((char for char in text if char in "?[]{}" or not char.isprintable()), None)
    if wild is not None:
        raise ValueError(f"{text!r} holds {wild!r}; only * stands for something else")
    return text


Text = Annotated[str, pydantic.Field(min_length=1, max_length=NAME_CHARS_MAX)]
TopicPattern = Annotated[Text, pydantic.AfterValidator(_topic_pattern)]
NamePattern = Annotated[Text, pydantic.AfterValidator(_name_pattern)]
TopicPatterns = Annotated[tuple[TopicPattern, ...], pydantic.Field(min_length=1, max_length=PATTERNS_MAX)]
Patterns = Annotated[tuple[NamePattern, ...], pydantic.Field(min_length=1, max_length=PATTERNS_MAX)]
Allowed = Annotated[tuple[Text, ...], pydantic.Field(max_length=PATTERNS_MAX)]


class _PolicyModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, fields: Any) -> Any:
        """Converts the lists of TOML and JSON to tuples, so that the model is immutable."""
        if not isinstance(fields, Mapping):
            return fields
        pairs = cast("Mapping[str, Any]", fields)
        return {name: _list_as_tuple(value) for name, value in pairs.items()}


def _list_as_tuple(value: Any) -> Any:
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


class RuleMatch(_PolicyModel):
    """The conditions of a rule. A condition that is not set always matches."""

    topics: TopicPatterns | None = None
    tenants: Patterns | None = None
    principals: Patterns | None = None
    actor_types: Annotated[tuple[Literal["human", "service"], ...], pydantic.Field(min_length=1)] | None = None
    capabilities: Patterns | None = None
    risk_tags: Patterns | None = None
    """One matching tag of the job is enough."""
    requires: Patterns | None = None
    """One matching requirement of the job is enough."""
    labels: Annotated[dict[Text, NamePattern], pydantic.Field(min_length=1, max_length=PATTERNS_MAX)] | None = None
    """Every label must match; a job without the label does not match."""
    priorities: (
        Annotated[tuple[Literal["critical", "interactive", "batch"], ...], pydantic.Field(min_length=1)] | None
    ) = None
    adapters: Patterns | None = None
    packs: Patterns | None = None

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> "RuleMatch":
        if not self.model_fields_set:
            raise ValueError('it names no condition; write topics = [">"] when every job is meant')
        return self


class PolicyConstraints(_PolicyModel):
    """Constraints on a job. They are sent to the worker, and the scheduler limits the running time."""

    max_runtime_ms: int | None = pydantic.Field(None, ge=1, lt=2**53)
    max_retries: int | None = pydantic.Field(None, ge=0, lt=2**31)
    max_artifact_bytes: int | None = pydantic.Field(None, ge=0, lt=2**53)
    max_concurrent_jobs: int | None = pydantic.Field(None, ge=1, lt=2**31)
    redaction_level: Text | None = None
    isolated: bool | None = None
    network_allowlist: Allowed | None = None
    fs_read_only: Allowed | None = None
    fs_read_write: Allowed | None = None
    allowed_tools: Allowed | None = None
    allowed_commands: Allowed | None = None
    max_files: int | None = pydantic.Field(None, ge=0, lt=2**31)
    max_lines: int | None = pydantic.Field(None, ge=0, lt=2**31)
    deny_path_globs: Allowed | None = None

    @pydantic.model_validator(mode="after")
    def _can_be_sent(self) -> "PolicyConstraints":
        size = len(json.dumps(self.to_dict(), sort_keys=True))
        if size > CONSTRAINTS_CHARS_MAX:
            raise ValueError(
                f"they take {size} characters as JSON and a worker is told at most {CONSTRAINTS_CHARS_MAX};"
                " write shorter lists, or a pattern for what they share"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)


class PolicyRule(_PolicyModel):
    id: str = pydantic.Field(pattern=RULE_ID_PATTERN)
    decision: DecisionKind = pydantic.Field(strict=False)
    reason: str = pydantic.Field("", max_length=500)
    match: RuleMatch
    delay_s: float | None = pydantic.Field(None, gt=0, le=DELAY_S_MAX, allow_inf_nan=False)
    """Delay of a throttle before the kernel is asked again, in seconds."""
    constraints: PolicyConstraints | None = None

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "PolicyRule":
        if self.id in RESERVED_IDS:
            raise ValueError(f"the id {self.id!r} is kept for jobs that match no rule; choose another")
        if self.delay_s is not None and self.decision is not DecisionKind.THROTTLE:
            raise ValueError(f"delay_s belongs to a throttle and not to {self.decision.value}")
        constraints = {} if self.constraints is None else self.constraints.to_dict()
        if self.decision is DecisionKind.ALLOW_WITH_CONSTRAINTS and not constraints:
            raise ValueError("allow_with_constraints names no constraints; write allow when none is meant")
        if self.constraints is not None and self.decision is not DecisionKind.ALLOW_WITH_CONSTRAINTS:
            raise ValueError(f"constraints belong to allow_with_constraints and not to {self.decision.value}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """The rule as it was written, in canonical order."""
        return self.model_dump(mode="json", exclude_none=True)


class SafetyPolicy(_PolicyModel):
    """All rules, in the order in which they are checked."""

    rules: Annotated[tuple[PolicyRule, ...], pydantic.Field(min_length=1, max_length=RULES_MAX)]

    @pydantic.model_validator(mode="after")
    def _ids_are_unique(self) -> "SafetyPolicy":
        seen = dict[str, int]()
        for number, rule in enumerate(self.rules):
            if rule.id in seen:
                raise ValueError(f"rules.{seen[rule.id]} and rules.{number} both have the id {rule.id!r}")
            seen[rule.id] = number
        return self

    @pydantic.model_validator(mode="after")
    def _can_be_asked(self) -> "SafetyPolicy":
        count = sum(len(getattr(rule.match, name)) for rule in self.rules for name in rule.match.model_fields_set)
        if count > PATTERNS_ALL_MAX:
            raise ValueError(
                f"it has {count} patterns and the limit is {PATTERNS_ALL_MAX}; write * for what they share"
            )
        return self

    @cached_property
    def hash(self) -> str:
        """The hash that approvals are bound to: equal for equal rules in the same order, however they are written."""
        rules = [rule.to_dict() for rule in self.rules]
        body = json.dumps(rules, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(body.encode()).hexdigest()


ALLOW_ALL_POLICY = SafetyPolicy.model_validate(
    {
        "rules": [
            {
                "id": "embedded",
                "decision": "allow",
                "reason": "an embedded instance without a policy of its own lets every job go",
                "match": {"topics": ["job.>"]},
            }
        ]
    }
)
"""The policy of a new embedded instance (D53)."""


def read_policy(text: str, *, source: str) -> SafetyPolicy:
    """Parse a policy in TOML; `source` names it in errors. Raises PolicyInvalid."""
    try:
        if len(text.encode()) > FILE_BYTES_MAX:
            raise PolicyInvalid(source=source, detail=f"it has more than {FILE_BYTES_MAX} bytes")
        return SafetyPolicy.model_validate(tomllib.loads(text.removeprefix(BYTE_ORDER_MARK)))
    except pydantic.ValidationError as error:
        raise PolicyInvalid(source=source, detail=_problem_texts(error)) from None
    except ValueError as error:  # TOML errors, but also numbers that are too long and unpaired surrogates
        raise PolicyInvalid(source=source, detail=f"it is no TOML: {error}") from None
    except RecursionError:
        raise PolicyInvalid(source=source, detail="it is nested too deeply") from None


def read_policy_bytes(body: bytes, *, source: str) -> SafetyPolicy:
    """Parse the content of a policy file; raises PolicyInvalid."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PolicyInvalid(source=source, detail=f"it is not UTF-8 (byte {error.start})") from None
    return read_policy(text, source=source)


def read_policy_file(file: Path) -> SafetyPolicy:
    try:
        body = read_bounded(file)
    except OSError as error:
        raise cannot_read(file, error) from None
    return read_policy_bytes(body, source=str(file))


def cannot_read(file: Path, error: OSError) -> PolicyInvalid:
    """The error for a file that is missing or not readable."""
    return PolicyInvalid(source=file, detail=f"it cannot be read ({error.strerror or error})")


def read_bounded(file: Path) -> bytes:
    """Read at most one byte more than the limit, which shows that a file is too large."""
    with file.open("rb") as opened:
        return opened.read(FILE_BYTES_MAX + 1)


def _problem_texts(error: pydantic.ValidationError) -> str:
    """The first problems of a policy, as text."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    inner = [one["loc"] for one in problems]
    deepest = [one for one in problems if not any(_is_within(loc, one["loc"]) for loc in inner)]
    return "; ".join(_problem_text(one["loc"], one["type"], one["msg"]) for one in deepest[:3])


def _problem_text(location: tuple[int | str, ...], kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return no_such_field(location, fields_beside(SafetyPolicy, location))
    text = "it must be a list: [ … ]" if kind == "tuple_type" else message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, location))}: {text}" if location else text


def _is_within(location: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    """Whether a location lies within another. A list with an invalid item is also reported as too short."""
    return len(location) > len(outer) and location[: len(outer)] == outer


MAX_RUNTIME_FIELD = "max_runtime_ms"


def runtime_ms(constraints: Mapping[str, Any]) -> int | None:
    """The runtime limit in milliseconds, from the constraints or from CAP's `budgets` in them; None without one."""
    budgets: Any = constraints.get("budgets")
    places: list[Mapping[str, Any]] = [constraints, budgets if isinstance(budgets, Mapping) else {}]
    limits = (limit.get(MAX_RUNTIME_FIELD) for limit in places)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
