"""How the log of a process looks: lines for people or JSON for machines, always on standard error."""

import logging
import sys
import time
from typing import Any

from trellis.cli.output import Output, escape_terminal_codes, json_line
from trellis.engine import tracing
from trellis.engine.logs import log_of
from trellis.settings import Settings

LOGGER = "trellis"


class _Lines(logging.Formatter):
    """One line per record, times in UTC."""

    converter = time.gmtime
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("{asctime} {levelname:<7} {name}: {message}", style="{")

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line, and a traceback as more; what cannot be seen is escaped."""
        return escape_terminal_codes(super().format(record))


class _Json(_Lines):
    """One JSON object per record; an event's fields keep their names."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        line = {
            **fields,
            "ts": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", record.getMessage()),
        }
        if (trace_id := tracing.trace_id(tracing.here())) is not None:
            line["trace_id"] = trace_id
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_line(line)


class _StandardError(logging.StreamHandler[Any]):
    """Writes to whatever standard error is when a line is logged: a program that embeds us may change it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # not setStream, which flushes the one before: that may be closed
        super().emit(record)


def configure_logging(settings: Settings) -> None:
    """Send the program's own log to standard error as the settings want it; other loggers stay as they are."""
    handler = _StandardError()
    handler.setFormatter(_Json() if settings.log_format == "json" else _Lines())
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(settings.log_level.upper())
    root = logging.getLogger()
    if settings.log_format == "json" and not root.handlers:  # what libraries warn of must not break the format
        root.addHandler(handler)


def log_only(settings: Settings, out: Output) -> None:
    """Configure the log of a process that runs on; where it is for machines, everything the command says goes there."""
    configure_logging(settings)
    if settings.log_format == "json":
        out.log_to(log_of("trellis.process"))
