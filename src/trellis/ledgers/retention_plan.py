"""How long a ledger keeps ended jobs, and what retention would remove now, counted by what holds the rest back."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trellis.engine.records import PlannedRemoval, RetentionOptions, StateAge
from trellis.lifecycles import BY_CODE, LIFECYCLES


def stored_ages(options: RetentionOptions) -> dict[int, StateAge]:
    """How long jobs are kept, by the stored number of lifecycle and state."""
    named = ((LIFECYCLES[lifecycle], state, age) for (lifecycle, state), age in options.ages().items())
    return {one.code * 16 + one.code_of(state): age for one, state, age in named}


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Ended jobs of one state that the same facts hold back. `oldest` is a time of the ledger's own kind."""

    code: int
    jobs: int
    oldest: Any
    over: bool | None
    """Whether they are over their time; None if they are kept for ever."""
    letter: bool
    keyed: bool
    unsealed: bool
    unread: bool


def planned_removals(
    groups: Iterable[PlannedGroup], keep_s: Mapping[int, float | None], moment: Callable[[Any], datetime]
) -> list[PlannedRemoval]:
    """One row for each lifecycle and state. A job that several facts hold back is counted under the first of them."""
    by_state: dict[int, list[PlannedGroup]] = {}
    for group in groups:
        by_state.setdefault(group.code, []).append(group)
    return [_planned(code, of_state, keep_s[code], moment) for code, of_state in sorted(by_state.items())]


def _planned(
    code: int, groups: list[PlannedGroup], keep_s: float | None, moment: Callable[[Any], datetime]
) -> PlannedRemoval:
    lifecycle = BY_CODE[code // 16]
    over = [group for group in groups if group.over]
    counts = Counter[str]()
    for group in over:
        counts[_holder(group)] += group.jobs
    return PlannedRemoval(
        lifecycle=lifecycle.name,
        state=lifecycle.state_of(code % 16).name,
        keep_s=keep_s,
        ended=sum(group.jobs for group in groups),
        oldest=moment(min(group.oldest for group in groups)),
        removable=counts["removable"],
        dead_letters=counts["dead_letters"],
        keys=counts["keys"],
        unread=counts["unread"],
        unsealed=counts["unsealed"],
    )


def _holder(group: PlannedGroup) -> str:
    held = {"dead_letters": group.letter, "keys": group.keyed, "unsealed": group.unsealed, "unread": group.unread}
    return next((name for name, holds in held.items() if holds), "removable")
