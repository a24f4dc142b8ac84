"""Structured logging for a library: event names with fields, through `logging`, so that the host program configures it.

The message of a record includes the fields for people; `record.event` and `record.fields` hold them for machines.
"""

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

from trellis.engine.text import safe_repr, storable

_CORRELATION: ContextVar[str | None] = ContextVar("trellis.correlation", default=None)
CALLER = 3
"""The `stacklevel` at which a record names the line of the caller of `Log`."""


class Log:
    """The logger of one component: `log.warning("turn_failed", failures=2)`."""

    __slots__ = ("_bound", "_logger")

    def __init__(self, logger: logging.Logger, bound: Mapping[str, Any]) -> None:
        self._logger, self._bound = logger, bound

    def bind(self, **fields: Any) -> Self:
        """A logger that adds these fields to every event."""
        return type(self)(self._logger, {**self._bound, **fields})

    def debug(self, event: str, /, **fields: Any) -> None:
        self._tell(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        self._tell(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self._tell(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self._tell(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """Log at ERROR level, with the exception being handled."""
        self._tell(logging.ERROR, event, {"exc_info": True, **fields})

    def _tell(self, level: int, event: str, fields: Mapping[str, Any]) -> None:
        if not self._logger.isEnabledFor(level):
            return
        name, fields_shown = storable(safe_repr(event, str)) or "", {**_correlation(), **self._bound, **fields}
        exc_info = fields_shown.pop("exc_info", None) or None
        text = " ".join([name, *(f"{key}={safe_repr(value)}" for key, value in fields_shown.items())])
        # `logging` interpolates `%` only when there are arguments: pass none, so that a `%` in a value is kept.
        extra = {"event": name, "fields": fields_shown}
        self._logger.log(level, text, exc_info=exc_info, stacklevel=CALLER, extra=extra)


@contextmanager
def correlated(correlation_id: str | None) -> Generator[None]:
    """Add this correlation id to every event logged inside, also by tasks started there. None adds none (OBS-6)."""
    token = _CORRELATION.set(correlation_id)
    try:
        yield
    finally:
        _CORRELATION.reset(token)


def _correlation() -> dict[str, Any]:
    correlation_id = _CORRELATION.get()
    return {} if correlation_id is None else {"correlation_id": correlation_id}


def log_of(name: str) -> Log:
    return Log(logging.getLogger(name), {})
