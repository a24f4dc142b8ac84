"""Pages of the jobs that a change selects: their cursors, alike on every ledger."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from trellis.engine.errors import OptionInvalid

_CURSOR = re.compile(r"(w?)([0-9]{1,18})")


class SelectionPosition(NamedTuple):
    """Where a page begins: after the job with this stored number."""

    after: int = 0
    walks: bool = False
    """The jobs in question were too many to be read together: the pages go through them in the order of their ids."""


class Candidates(NamedTuple):
    """The stored numbers of the next jobs that may be meant, oldest first."""

    ids: Sequence[int]
    is_last: bool
    """No others follow."""
    walks: bool = False


def position_in(cursor: str | None) -> SelectionPosition:
    """The position of a cursor; the beginning for None. Raises OptionInvalid."""
    if cursor is None:
        return SelectionPosition()
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise OptionInvalid(option="cursor", value=cursor[:50], expected="the cursor of an earlier page")
    return SelectionPosition(int(match[2]), bool(match[1]))


def cursor_after(candidates: Candidates, last_chosen: int | None) -> str | None:
    """The cursor after a page of these jobs; None at the end. `last_chosen` is the last job of a full page, else None."""
    examined = candidates.ids[-1] if candidates.ids else None
    reached = examined if last_chosen is None else last_chosen
    if reached is None or (candidates.is_last and reached == examined):
        return None
    return f"{'w' if candidates.walks else ''}{reached}"
