"""What one pass of the scheduler takes on, and what it says that it did."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """How much one pass takes on."""

    poll_s: float = 0.5
    validate_max: int = 100
    newest_max: int = 500
    """Where more wait to be validated than that: how many of the newest it looks at for urgent ones."""
    each: int = 100
    """Ready jobs of each topic and priority that a pass looks at."""
    at_once: int = 16
    pass_s: float = 2.0
    """How long it goes on with what it saw at its beginning: what has come since may be more urgent."""
    subject_max: int = 1_000
    """How many attempts may be under way at a topic's own subject, where nobody says how busy it is."""


class DispatchOutcome(StrEnum):
    """What became of one job in a pass."""

    VALIDATED = "validated"
    REFUSED = "refused"
    DISPATCHED = "dispatched"
    LOST = "lost"
    """Another process was faster, or its key is full."""
    GIVEN_BACK = "given_back"
    """Nobody had it, or it does no harm if somebody has it twice."""
    UNCERTAIN = "uncertain"
    """The bus broke under it, and somebody may have it who must not have it twice: its lease decides."""
    DENIED = "denied"
    HELD = "held"
    DEFERRED = "deferred"
    CANCELLED = "cancelled"
    UNASKED = "unasked"
    """The kernel did not answer."""
    WAITING = "waiting"
    """Nobody has room, or nobody is there."""


_NO_PROGRESS_OUTCOMES = frozenset(
    {
        DispatchOutcome.LOST,
        DispatchOutcome.GIVEN_BACK,
        DispatchOutcome.UNCERTAIN,
        DispatchOutcome.UNASKED,
        DispatchOutcome.WAITING,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerReport:
    """What one pass did, by what it did; and what was away."""

    did: Counter[DispatchOutcome]
    bus_away: bool = False

    @property
    def dispatched(self) -> int:
        """How many jobs went out."""
        return self.did[DispatchOutcome.DISPATCHED]

    @property
    def kernel_away(self) -> bool:
        """Whether the kernel left a question without an answer."""
        return self.did[DispatchOutcome.UNASKED] > 0

    @property
    def moved(self) -> bool:
        """Whether it brought anything on: there may be more."""
        return any(count for what, count in self.did.items() if what not in _NO_PROGRESS_OUTCOMES) and not self.bus_away
