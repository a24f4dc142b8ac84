"""What a ledger refuses before it looks: questions without a bound, and words that mean nothing. The same in every ledger."""

from collections.abc import Sequence

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import CLAIM_MAX, DELAY_S_MAX, PAYLOAD_BYTES_MAX, JobId
from trellis.engine.type_options import DECLARED_MAX, TypeOptions
from trellis.lifecycles import REMARK_TYPES, SIGNAL_TYPES

SIGNALS_MAX = 1_000
CHILDREN_MAX = 1_000
HOLDERS_WORDS = tuple(word for word in SIGNAL_TYPES if word not in REMARK_TYPES)


def check_signals(signals: Sequence[tuple[str, bytes | None]]) -> None:
    """Nothing for signals that a holder may write; raises OptionInvalid."""
    if len(signals) > SIGNALS_MAX:
        raise OptionInvalid(option="signals", value=len(signals), expected=f"at most {SIGNALS_MAX} in one call")
    for type_, _ in signals:
        if type_ not in HOLDERS_WORDS:
            raise OptionInvalid(option="signal type", value=type_, expected=f"one of {', '.join(HOLDERS_WORDS)}")


def check_remark(type_: str, body: bytes) -> None:
    """Nothing for a remark that can be kept; raises OptionInvalid."""
    if type_ not in REMARK_TYPES:
        raise OptionInvalid(option="remark type", value=type_, expected=f"one of {', '.join(REMARK_TYPES)}")
    if len(body) > PAYLOAD_BYTES_MAX:
        raise OptionInvalid(option="remark", value=len(body), expected=f"at most {PAYLOAD_BYTES_MAX} bytes")


def check_declared(types: Sequence[TypeOptions]) -> None:
    """Nothing for as many types as may be declared at once; raises OptionInvalid."""
    if len(types) > DECLARED_MAX:
        raise OptionInvalid(option="types", value=len(types), expected=f"at most {DECLARED_MAX} in one call")


def check_each(each: int) -> None:
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
