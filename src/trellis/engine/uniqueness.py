"""Unique jobs: of all jobs of a type with the same unique key, one at a time may wait, or be unfinished.

A rule is declared with a job type or given with a submit. The ledger resolves it, stores the job's key with the job and
lets one job hold it: a unique index of the database refuses a second holder, whichever processes submit. Invariants:

- A job holds its key while it waits (`while_="waiting"`), or until it has ended (`while_="unfinished"`); with a window,
  also until so many seconds after its submit.
- A job that was replaced was waiting. It is cancelled in the transaction that submits its replacement; a running job is
  never touched.
- A debounced job replaces the waiting one and starts `debounce_s` after the last submit, but at most `debounce_max_s`
  after the first of those that were replaced.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any, TypeVar, cast

from trellis.engine.errors import OptionInvalid
from trellis.engine.option_values import SECONDS, check_number, check_text
from trellis.engine.text import is_storable

ARGS = "args"
"""The unique key that stands for the payload: equal payloads have equal keys."""
KEY_CHARS_MAX = 200
WINDOW_S_MAX = 366 * 24 * 3600.0
DEBOUNCE_FACTOR = 10
"""A debounced job waits at most this many times `debounce_s`, unless `debounce_max_s` says otherwise."""
DIGITS_MAX, DECIMALS_MAX = 131_072, 16_383
"""The most digits before and after the point that a number of PostgreSQL has."""
DEPTH_MAX = 200
"""Payloads that are nested deeper are compared byte by byte."""

MemberT = TypeVar("MemberT", bound=StrEnum)


class WhileHeld(StrEnum):
    """How long a job holds its unique key."""

    WAITING = "waiting"
    """While it waits to begin, for its first attempt or the next one."""
    UNFINISHED = "unfinished"
    """Until it has ended."""


class OnConflict(StrEnum):
    """What a submit does whose unique key another job holds."""

    RETURN = "return"
    """Return the job that holds the key."""
    REPLACE = "replace"
    """Cancel the waiting job that holds the key, and submit this one."""
    RAISE = "raise"
    """Raise UniqueConflict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UniqueRule:
    """What a submit or a job type says about uniqueness. None leaves the choice to the type, or to the default."""

    key: str | None = None
    """`args` for the payload, or a key. Keys of different job types are different."""
    while_: WhileHeld | None = None
    window_s: float | None = None
    on_conflict: OnConflict | None = None
    debounce_s: float | None = None
    debounce_max_s: float | None = None
    computed: bool = False
    """Of a type: a function of the application computes the key of each job."""

    def text(self) -> str:
        """The rule as a ledger stores it: JSON of the values that are set. PostgreSQL reads the same names."""
        return json.dumps({name: value for name, value in asdict(self).items() if value not in {None, False}})


class UniqueClaim:
    """A resolved rule: the values that hold for one job."""

    __slots__ = ("debounce_max_s", "debounce_s", "key", "on_conflict", "while_", "window_s")

    def __init__(self, rule: UniqueRule, key: str) -> None:
        self.key = key
        self.on_conflict = rule.on_conflict or (OnConflict.RETURN if rule.debounce_s is None else OnConflict.REPLACE)
        replaces = self.on_conflict is OnConflict.REPLACE
        self.while_ = rule.while_ or (WhileHeld.WAITING if replaces else WhileHeld.UNFINISHED)
        self.window_s = rule.window_s
        self.debounce_s = rule.debounce_s
        longest = None if rule.debounce_s is None else DEBOUNCE_FACTOR * rule.debounce_s
        self.debounce_max_s = longest if rule.debounce_max_s is None else rule.debounce_max_s


def rule_from_text(text: str | None) -> UniqueRule | None:
    """The rule that a ledger has stored; None for none."""
    if text is None:
        return None
    values: dict[str, Any] = json.loads(text)
    for name, kind in (("while_", WhileHeld), ("on_conflict", OnConflict)):
        if name in values:
            values[name] = kind(values[name])
    return UniqueRule(**values)


def checked_rule(
    *,
    unique: str | None = None,
    while_: str | None = None,
    window_s: float | None = None,
    on_conflict: str | None = None,
    debounce_s: float | None = None,
    debounce_max_s: float | None = None,
    computed: bool = False,
) -> UniqueRule | None:
    """The rule of these settings, each checked; None if none is set. Raises OptionInvalid."""
    given = (unique, while_, window_s, on_conflict, debounce_s, debounce_max_s)
    if not computed and all(value is None for value in given):
        return None
    return UniqueRule(
        key=None if unique is None else _checked_key(unique),
        while_=_member(WhileHeld, "while_", while_),
        window_s=_seconds("window_s", window_s),
        on_conflict=_member(OnConflict, "on_conflict", on_conflict),
        debounce_s=_seconds("debounce_s", debounce_s),
        debounce_max_s=_seconds("debounce_max_s", debounce_max_s),
        computed=computed,
    )


def merged(rule: UniqueRule | None, declared: UniqueRule | None) -> UniqueRule | None:
    """The rule of a submit, with what the type declares for the values that it leaves out."""
    if rule is None or declared is None:
        return rule or declared
    given, rest = asdict(rule), asdict(declared)
    return UniqueRule(**{name: rest[name] if given[name] in {None, False} else given[name] for name in given})


def resolve(rule: UniqueRule, payload: bytes, type_: str) -> UniqueClaim:
    """The rule as it holds for a job with this payload. Raises OptionInvalid. PostgreSQL resolves alike."""
    if rule.key is None:
        expected = (
            f"the application of {type_} computes it: submit with the application, or give the key"
            if rule.computed
            else f"give a key or {ARGS!r}: {type_} declares none, and the other options need one"
        )
        raise OptionInvalid(option="unique", value=None, expected=expected)
    refusal = _refusal(rule)
    if refusal is not None:
        option, expected = refusal
        raise OptionInvalid(option=option, value=getattr(rule, option), expected=expected)
    return UniqueClaim(rule, args_key(payload) if rule.key == ARGS else f"key:{rule.key}")


def rule_refused(*, type: str, rule: dict[str, Any], option: str, expected: str) -> OptionInvalid:  # noqa: A002 - as stored
    """The error for a rule that PostgreSQL refused, in the words of this module."""
    try:
        resolve(rule_from_text(json.dumps(rule)) or UniqueRule(), b"null", type)
    except OptionInvalid as error:
        return error
    except ValueError:  # a value that only SQL can have given
        pass
    return OptionInvalid(option=option, value=rule.get(option), expected=expected)


def check_declared_rule(rule: UniqueRule, type_: str) -> None:
    """Check a rule that a type declares: it has a key, and its values fit together. Raises OptionInvalid."""
    if not rule.computed:
        resolve(rule, b"null", type_)
    elif (refusal := _refusal(rule)) is not None:
        raise OptionInvalid(option=refusal[0], value=getattr(rule, refusal[0]), expected=refusal[1])


def _refusal(rule: UniqueRule) -> tuple[str, str] | None:
    """The option that does not fit the others, and what is expected; None if all fit."""
    debounced = rule.debounce_s is not None
    if debounced and rule.on_conflict not in {None, OnConflict.REPLACE}:
        return "on_conflict", "leave it out: a debounced job replaces the waiting one"
    if rule.debounce_max_s is not None and not debounced:
        return "debounce_max_s", "it bounds debounce_s, so give that too"
    if debounced and rule.debounce_max_s is not None and rule.debounce_max_s < cast("float", rule.debounce_s):
        return "debounce_max_s", f"it must be at least debounce_s, {rule.debounce_s:g}"
    if debounced or rule.on_conflict is OnConflict.REPLACE:
        if rule.while_ is WhileHeld.UNFINISHED:
            return "while_", "only a waiting job is replaced, never a running one: leave it out, or say waiting"
        if rule.window_s is not None:
            return "window_s", "only a waiting job is replaced, and the window is about jobs that began: leave it out"
    return None


def _checked_key(key: str) -> str:
    check_text("unique", key, f"it must be a text: {ARGS!r} for the payload, or a key")
    if not 1 <= len(key) <= KEY_CHARS_MAX:
        expected = f"it must have 1 to {KEY_CHARS_MAX} characters"
        raise OptionInvalid(option="unique", value=key[:40], expected=expected)
    if not is_storable(key):
        expected = "it must be text without NUL characters and halves of surrogate pairs"
        raise OptionInvalid(option="unique", value=ascii(key[:40]), expected=expected)
    return key


def _seconds(option: str, value: float | None) -> float | None:
    if value is None:
        return None
    check_number(option, value, of=SECONDS)
    if not 0 < value <= WINDOW_S_MAX:
        raise OptionInvalid(option=option, value=value, expected=f"more than 0 and at most {WINDOW_S_MAX:g} seconds")
    return float(value)


def _member(kind: type[MemberT], option: str, value: str | None) -> MemberT | None:
    try:
        return None if value is None else kind(value)
    except ValueError:
        raise OptionInvalid(option=option, value=value, expected=f"choose one of {', '.join(kind)}") from None


# The key of a payload. It is the same for equal JSON values, however they are written, and the same in both ledgers, so
# that a moved ledger finds the keys of its jobs: the text is that of PostgreSQL's jsonb.


def args_key(payload: bytes) -> str:
    """The unique key of a payload: a digest of its JSON value; of its bytes where PostgreSQL has no such value."""
    try:
        value = json.loads(payload, parse_float=Decimal, parse_int=Decimal, parse_constant=_refuse_constant)
        text = _jsonb_text(value, DEPTH_MAX).encode()
    except (ValueError, RecursionError, MemoryError):
        return f"bytes:{hashlib.sha256(payload).hexdigest()}"
    return f"args:{hashlib.sha256(text).hexdigest()}"


def _jsonb_text(value: Any, depth: int) -> str:
    """A JSON value as PostgreSQL writes jsonb: keys by length and then by bytes, numbers without exponent."""
    if depth == 0:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        ordered = sorted(members, key=lambda name: (len(name.encode()), name.encode()))
        return f"{{{', '.join(f'{_text(name)}: {_jsonb_text(members[name], depth - 1)}' for name in ordered)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_jsonb_text(one, depth - 1) for one in cast('list[Any]', value))}]"
    if isinstance(value, Decimal):
        return _number(value)
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _number(value: Decimal) -> str:
    if value.adjusted() >= DIGITS_MAX or -int(value.as_tuple().exponent) > DECIMALS_MAX:
        raise ValueError("PostgreSQL has no such number")
    return format(value.copy_abs() if value == 0 else value, "f")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("jsonb has no NUL characters")
    return json.dumps(value, ensure_ascii=False)
