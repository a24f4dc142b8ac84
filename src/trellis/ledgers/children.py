"""The mark behind the children of a parent: how many there are up to a number, and the sum of their numbers. Pure.

Numbers rise and are never used twice, but one may be committed after a higher one. Equal counts and sums below the highest number that was
given mean that nobody came late and nobody was removed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import JobId
from trellis.engine.records import ChildPage

DIGITS_MAX = 40


class ChildMark(NamedTuple):
    """What was given so far."""

    many: int = 0
    total: int = 0
    last: int = 0

    @classmethod
    def read(cls, text: str | None) -> "ChildMark":
        """The mark that an answer gave, None before the first; raises OptionInvalid."""
        if text is None:
            return cls()
        parts = [int(part) for part in text.split(".") if part.isascii() and part.isdigit() and len(part) <= DIGITS_MAX]
        if text.count(".") != 2 or len(parts) != 3:
            raise OptionInvalid(option="since", value=text, expected="the mark of an earlier answer")
        return cls(*parts)

    def stands(self, many: int, total: int) -> bool:
        """Whether those up to the last are the same as when they were given."""
        return (many, total) == (self.many, self.total)


def children_after(before: ChildMark, found: Sequence[tuple[int, JobId]], *, anew: bool = False) -> ChildPage:
    """The answer with these numbers and ids, in their order, which come after those of the mark; or, anew, after nobody."""
    known = ChildMark() if anew else before
    numbers = [number for number, _ in found]
    mark = ChildMark(known.many + len(numbers), known.total + sum(numbers), numbers[-1] if numbers else known.last)
    ids = tuple(job_id for _, job_id in found)
    return ChildPage(job_ids=ids, numbers=tuple(numbers), mark=".".join(map(str, mark)), anew=anew)
