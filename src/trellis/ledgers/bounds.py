"""What a ledger refuses before it looks: questions without a bound, and words that mean nothing. The same in every ledger."""

import re
from collections.abc import Sequence

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import ATTEMPTS_MAX, CLAIM_MAX, DELAY_S_MAX, PAYLOAD_BYTES_MAX, TYPE_PATTERN, JobId
from trellis.engine.type_options import DECLARED_MAX, TypeOptions
from trellis.lifecycles import REMARK_TYPES, SIGNAL_TYPES

SIGNALS_MAX = 1_000
CHILDREN_MAX = 1_000
HOLDER_SIGNAL_TYPES = tuple(word for word in SIGNAL_TYPES if word not in REMARK_TYPES)


def check_signals(signals: Sequence[tuple[str, bytes | None]]) -> None:
    """Nothing for signals that a holder may write; raises OptionInvalid."""
    if len(signals) > SIGNALS_MAX:
        raise OptionInvalid(option="signals", value=len(signals), expected=f"at most {SIGNALS_MAX} in one call")
    for type_, _ in signals:
        if type_ not in HOLDER_SIGNAL_TYPES:
            raise OptionInvalid(option="signal type", value=type_, expected=f"one of {', '.join(HOLDER_SIGNAL_TYPES)}")


def check_annotation(type_: str, body: bytes) -> None:
    """Nothing for a remark that can be kept; raises OptionInvalid."""
    if type_ not in REMARK_TYPES:
        raise OptionInvalid(option="remark type", value=type_, expected=f"one of {', '.join(REMARK_TYPES)}")
    if len(body) > PAYLOAD_BYTES_MAX:
        raise OptionInvalid(option="remark", value=len(body), expected=f"at most {PAYLOAD_BYTES_MAX} bytes")


def check_declared(types: Sequence[TypeOptions]) -> None:
    """Nothing for as many types as may be declared at once; raises OptionInvalid."""
    if len(types) > DECLARED_MAX:
        raise OptionInvalid(option="types", value=len(types), expected=f"at most {DECLARED_MAX} in one call")
    for one in types:
        _check_type_options(one)


def _check_type_options(one: TypeOptions) -> None:
    """The bounds that a submit of such a job has."""
    checks = {
        "max_attempts": (one.max_attempts, 1 <= one.max_attempts <= ATTEMPTS_MAX, f"from 1 to {ATTEMPTS_MAX}"),
        "max_deaths": (one.max_deaths, 0 <= one.max_deaths <= ATTEMPTS_MAX, f"from 0 to {ATTEMPTS_MAX}"),
        "deadline_s": (one.deadline_s, one.deadline_s is None or one.deadline_s > 0, "more than 0, or none"),
        "concurrency_limit": (one.concurrency_limit, one.concurrency_limit >= 1, "at least 1"),
        "compensation": (
            one.compensation,
            one.compensation is None or bool(re.match(TYPE_PATTERN, one.compensation)),
            "a job type",
        ),
    }
    for option, (value, is_right, expected) in checks.items():
        if not is_right:
            raise OptionInvalid(option=f"{option} of {one.type}", value=str(value)[:50], expected=expected)


def check_peek_limit(each: int) -> None:
    """Nothing for a number of jobs of each kind that may be asked for; raises OptionInvalid."""
    if not 1 <= each <= CLAIM_MAX:
        raise OptionInvalid(option="each", value=each, expected=f"from 1 to {CLAIM_MAX}")


def check_children(limit: int) -> None:
    """Nothing for as many children as may be asked for at once; raises OptionInvalid."""
    if not 1 <= limit <= CHILDREN_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"from 1 to {CHILDREN_MAX}")


def check_ids(job_ids: Sequence[JobId]) -> None:
    """Nothing for as many ids as may be asked about at once; raises OptionInvalid."""
    if len(job_ids) > CLAIM_MAX:
        raise OptionInvalid(option="job_ids", value=len(job_ids), expected=f"at most {CLAIM_MAX} in one call")


def check_expiring(within_s: float, limit: int) -> None:
    """Nothing for a look ahead that has an end; raises OptionInvalid."""
    if not 0 <= within_s <= DELAY_S_MAX:
        raise OptionInvalid(option="within_s", value=within_s, expected=f"from 0 to {DELAY_S_MAX:.0f}")
    if not 1 <= limit <= CLAIM_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"from 1 to {CLAIM_MAX}")
