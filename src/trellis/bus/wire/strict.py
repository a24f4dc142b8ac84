"""What CAP asks of a packet's bytes beyond what a protobuf parser does: one way to write each packet, and one payload.

A parser takes numbers that are written longer than they need be, and of two payloads the last. Two receivers that read the same bytes in
two ways could be told two things with one signature, so such packets are refused. The order of fields is free, and fields that nobody
knows are passed over, as protobuf allows.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

FIELDS_MAX = 50_000
"""How many fields a packet may have, with those of its parts: reading each costs time."""
VARINT_BYTES_MAX = 10
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_FIXED = {_I64: 8, _I32: 4}


class NotStrict(ValueError):
    """Why the bytes of a packet are refused."""


def check_strict(data: bytes, descriptor: Any) -> frozenset[int]:
    """The numbers of the fields at the top of a message of this type; raises NotStrict.

    Every field and part is looked at once, with a bound on their number: the bytes come from anybody.
    """
    top: set[int] = set()
    oneofs: set[str] = set()
    waiting: list[tuple[int, int, Any, bool]] = [(0, len(data), descriptor, True)]
    fields = 0
    while waiting:
        start, end, kind, is_top = waiting.pop()
        for number, at, stop in _fields(data, start, end):
            fields += 1
            if fields > FIELDS_MAX:
                raise NotStrict(f"it has more than {FIELDS_MAX} fields")
            part, oneof = _known(kind).get(number, (None, ""))
            if part is not None:
                waiting.append((at, stop, part, False))
            if is_top:
                top.add(number)
                if oneof and oneof in oneofs:
                    raise NotStrict(f"it has more than one {oneof}")
                oneofs.add(oneof)
    return frozenset(top)


@cache
def _known(descriptor: Any) -> dict[int, tuple[Any, str]]:
    """By field number: the type of a part, None for every other field, and the oneof it belongs to."""
    return {
        field.number: (field.message_type, field.containing_oneof.name if field.containing_oneof else "")
        for field in descriptor.fields
    }


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number of each field, and where the bytes behind its tag begin and end."""
    while at < end:
        tag, at = _varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            stop = _varint(data, at, end)[1]
        elif wire == _LEN:
            size, at = _varint(data, at, end)
            stop = at + size
        elif wire in _FIXED:
            stop = at + _FIXED[wire]
        else:
            raise NotStrict(f"field {number} has the wire type {wire}, which is none of proto3")
        if stop > end or not number:
            raise NotStrict(f"field {number} does not fit into what it is part of")
        yield number, at, stop
        at = stop


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = shift = 0
    for place in range(at, min(end, at + VARINT_BYTES_MAX)):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if byte == 0 and place > at:
                raise NotStrict("a number is not in its shortest form")
            return value, place + 1
        shift += 7
    raise NotStrict("a number does not end")
