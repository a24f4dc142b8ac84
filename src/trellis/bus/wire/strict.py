"""What CAP asks of a packet's bytes beyond what a protobuf parser does: one way to write each packet, and one payload.

A parser takes numbers that are written longer than they need be, and of two payloads the last. Two receivers that read the same bytes in
two ways could be told two things with one signature, so such packets are refused. The order of fields is free, and fields that nobody
knows are passed over, as protobuf allows.
"""

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
    known = _known_fields(descriptor)
    left, top = _read_fields(data, 0, len(data), FIELDS_MAX)
    oneofs = [oneof for number, _, _ in top if (oneof := known.get(number, _UNKNOWN)[1])]
    if len(oneofs) != len(set(oneofs)):
        raise NotStrict(f"it has more than one {oneofs[0]}")
    waiting = [(at, end, part) for number, at, end in top if (part := known.get(number, _UNKNOWN)[0])]
    while waiting:
        at, end, part = waiting.pop()
        inside = _known_fields(part)
        left, found = _read_fields(data, at, end, left)
        waiting += [(start, stop, kind) for number, start, stop in found if (kind := inside.get(number, _UNKNOWN)[0])]
    return frozenset(number for number, _, _ in top)


_UNKNOWN: tuple[Any, str] = (None, "")


@cache
def _known_fields(descriptor: Any) -> dict[int, tuple[Any, str]]:
    """By field number: the type of a part, None for every other field, and the oneof it belongs to."""
    return {
        field.number: (field.message_type, field.containing_oneof.name if field.containing_oneof else "")
        for field in descriptor.fields
    }


def _read_fields(data: bytes, at: int, end: int, left: int) -> tuple[int, list[tuple[int, int, int]]]:
    """How many more fields a packet may have, and each field of this part: its number, and where the bytes behind its tag are."""
    found: list[tuple[int, int, int]] = []
    while at < end:
        tag = data[at]
        if tag < 0x80:  # nearly every number is that short
            at += 1
        else:
            tag, at = _varint(data, at, end)
        wire = tag & 7
        if wire == _LEN:
            size, at = (data[at], at + 1) if at < end and data[at] < 0x80 else _varint(data, at, end)
            stop = at + size
        elif wire == _VARINT:
            stop = at + 1 if at < end and data[at] < 0x80 else _varint(data, at, end)[1]
        elif wire in _FIXED:
            stop = at + _FIXED[wire]
        else:
            raise NotStrict(f"field {tag >> 3} has the wire type {wire}, which is none of proto3")
        if stop > end or tag < 8:
            raise NotStrict(f"field {tag >> 3} does not fit into what it is part of")
        found.append((tag >> 3, at, stop))
        at = stop
        left -= 1
        if left < 0:
            raise NotStrict(f"it has more than {FIELDS_MAX} fields")
    return left, found


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
