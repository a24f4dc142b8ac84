"""Event types that a caller names, as the numbers that every ledger stores."""

from trellis.engine.errors import OptionInvalid
from trellis.lifecycles.events import EVENT_TYPES, event_code


def known_event_code(type_: str) -> int:
    """The stored number of an event type that a caller named. Raises OptionInvalid."""
    if type_ not in EVENT_TYPES:
        raise OptionInvalid(option="type", value=type_, expected="an event type of a lifecycle")
    return event_code(type_)


def event_codes(types: frozenset[str] | None) -> list[int] | None:
    """The stored numbers of these event types; None stays None, for all. Raises OptionInvalid."""
    return None if types is None else sorted(map(known_event_code, types))
