"""Keeps strangers from filling the log: the first of many like events is logged at once, the others as one count."""

from collections.abc import Callable
from typing import Any

from trellis.engine.logs import Log

EVERY_S = 60.0


class LogLimit:
    """Warnings of one server, limited by event and `code`. `call_later` is the event loop's."""

    def __init__(self, log: Log, call_later: Callable[..., Any], *, every_s: float = EVERY_S) -> None:
        self._log, self._call_later, self._every_s = log, call_later, every_s
        self._counts: dict[tuple[str, str], int] = {}

    def warning(self, event: str, *, code: str, **fields: Any) -> None:
        """Log the first event of this name and code; count those that follow within the interval."""
        key = (event, code)
        if key in self._counts:
            self._counts[key] += 1
            return
        self._log.warning(event, code=code, **fields)
        self._watch(key)

    def flush(self) -> None:
        """Log the counts that no summary has named yet."""
        for key in list(self._counts):
            self._summarize(key)

    def _watch(self, key: tuple[str, str]) -> None:
        self._counts[key] = 0
        self._call_later(self._every_s, self._look, key)

    def _look(self, key: tuple[str, str]) -> None:
        """Go on counting while events come; silence ends the interval, so that the next event is logged at once."""
        if self._summarize(key):
            self._watch(key)

    def _summarize(self, key: tuple[str, str]) -> bool:
        """Log one line for all that came since the last one; whether any did."""
        (event, code), count = key, self._counts.pop(key, 0)
        if count:
            self._log.warning(f"{event}_again", code=code, count=count, within_s=self._every_s)
        return count > 0
