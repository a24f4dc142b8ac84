"""Logging for a library: event names with fields, through the standard library, so that the host program decides.

A record's message has the fields in it for people; `record.event` and `record.fields` are there for machines.
"""

import logging
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger


def log_of(name: str) -> Any:
    """The logger of a part: `log.warning("turn_failed", failures=2)`."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )


def _to_record(_: WrappedLogger, name: str, fields: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    event = str(fields.pop("event"))
    exc_info = fields.pop("exc_info", name == "exception")
    text = " ".join([event, *(f"{key}={value!r}" for key, value in fields.items())])
    # `%` in a value must not be taken for a placeholder: the standard library formats only when there are arguments.
    return (text,), {"exc_info": exc_info or None, "extra": {"event": event, "fields": dict(fields)}}
