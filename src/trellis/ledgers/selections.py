"""Pages of the jobs that a change selects: their cursors, alike on every ledger."""

from collections.abc import Sequence

from trellis.engine.errors import OptionInvalid

DIGITS_MAX = 18


def position_in(cursor: str | None) -> int:
    """The stored number of the last job that earlier pages looked at; 0 for the first page. Raises OptionInvalid."""
    if cursor is None:
        return 0
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > DIGITS_MAX:
        raise OptionInvalid(option="cursor", value=cursor[:50], expected="the cursor of an earlier page")
    return int(cursor)


def cursor_after(examined: Sequence[int], last_chosen: int | None, *, is_last: bool) -> str | None:
    """The cursor after a page that looked at these jobs. `last_chosen` is the last job of a full page, else None."""
    reached = (examined[-1] if examined else None) if last_chosen is None else last_chosen
    if reached is None or (is_last and reached == examined[-1]):
        return None
    return str(reached)
