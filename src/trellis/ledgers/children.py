"""The mark of a child listing: how many children there are up to a number, and the sum of their numbers. Pure.

Numbers rise and are never reused, but a lower number may be committed after a higher one. If count and sum up to the
last returned number are unchanged, no child came late and none was removed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import JobId
from trellis.engine.records import ChildPage

DIGITS_MAX = 40


class ChildMark(NamedTuple):
    """How far a child listing has been read."""

    many: int = 0
    total: int = 0
    last: int = 0

    @classmethod
    def read(cls, text: str | None) -> "ChildMark":
        """Parse a returned mark; None means the beginning. Raises OptionInvalid."""
        if text is None:
            return cls()
        parts = [int(part) for part in text.split(".") if part.isascii() and part.isdigit() and len(part) <= DIGITS_MAX]
        if text.count(".") != 2 or len(parts) != 3:
            raise OptionInvalid(option="since", value=text, expected="the mark of an earlier answer")
        return cls(*parts)

    def stands(self, many: int, total: int) -> bool:
        """Whether the children up to the last one are unchanged since they were returned."""
        return (many, total) == (self.many, self.total)


def children_after(before: ChildMark, children: Sequence[tuple[int, JobId]], *, anew: bool = False) -> ChildPage:
    """The page of these numbers and ids, in order, and its mark.

    They follow those of `before`, or with `anew` start the listing again.
    """
    known = ChildMark() if anew else before
    numbers = [number for number, _ in children]
    mark = ChildMark(known.many + len(numbers), known.total + sum(numbers), numbers[-1] if numbers else known.last)
    ids = tuple(job_id for _, job_id in children)
    return ChildPage(job_ids=ids, numbers=tuple(numbers), mark=".".join(map(str, mark)), anew=anew)
