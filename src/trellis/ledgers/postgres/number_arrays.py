"""Lists of whole numbers as arrays in PostgreSQL's binary form, and back, all elements at once.

The driver looks at each element of a list with four checks before it writes it. A turn sends and receives a dozen lists
with an element for each job.

The form is a head of five numbers (dimensions, whether there are nulls, the type of the elements, how many there are,
the first index), then the elements, each behind its length in bytes. Without nulls all elements are equally long, so
their bytes are a row of words (of two bytes for smallint, of four otherwise), of which every second or third is a value,
or in a bigint its higher and its lower half.
"""

import struct
import sys
from array import array
from collections.abc import Collection
from contextlib import suppress
from typing import Literal, cast

HEAD = struct.Struct(">iiIii")
EMPTY_HEAD = struct.Struct(">iiI")
LENGTH = struct.Struct(">i")
NULL = -1
"""The length that stands for a null."""
LITTLE_ENDIAN = sys.byteorder == "little"


class NumberArrays:
    """Encodes and decodes the arrays of one type, by the number of its elements' type and their code in a `struct`."""

    def __init__(self, element_oid: int, code: Literal["h", "i", "q"]) -> None:
        self._element_oid = element_oid
        self._code: Literal["h", "i", "q"] = code
        self._one = struct.Struct(f">i{code}")
        self._list_of_one = struct.Struct(f"{HEAD.format}i{code}")
        self._size = self._one.size - LENGTH.size
        self._word: Literal["h", "i"] = "h" if code == "h" else "i"
        self._zero = self._in_words(self._one.pack(self._size, 0))
        """The words of an element that is 0."""

    def encode(self, numbers: Collection[float | None]) -> bytes:
        """The array of a list. Raises TypeError or OverflowError for what is no number, or too large for this type.

        The fraction of a float is left out, as the driver does.
        """
        count = len(numbers)
        if count == 1:  # as in most turns of a worker that is not busy
            (number,) = numbers
            if type(number) is int:
                with suppress(struct.error):  # too large: refused below
                    return self._list_of_one.pack(1, 0, self._element_oid, 1, 1, self._size, number)
        elif not count:
            return EMPTY_HEAD.pack(0, 0, self._element_oid)
        try:
            values = array(self._code, cast("Collection[int]", numbers))
        except TypeError:
            elements = (LENGTH.pack(NULL) if n is None else self._alone(n) for n in numbers)
            return HEAD.pack(1, None in numbers, self._element_oid, count, 1) + b"".join(elements)
        words, width = self._zero * count, len(self._zero)
        if self._code == "q":
            halves = array(self._word, values.tobytes())
            words[1::width], words[2::width] = halves[LITTLE_ENDIAN::2], halves[not LITTLE_ENDIAN :: 2]
        else:
            words[width - 1 :: width] = values
        if LITTLE_ENDIAN:
            words.byteswap()
        return HEAD.pack(1, 0, self._element_oid, count, 1) + words.tobytes()

    def _alone(self, number: float) -> bytes:
        whole = int(number) if isinstance(number, float) else number
        return self._one.pack(self._size, *array(self._code, (whole,)))

    def decode(self, body: bytes) -> list[int] | list[int | None]:
        """The list of an array. Raises ValueError if it has several dimensions."""
        if len(body) == self._list_of_one.size:
            dimensions, has_nulls, _, _, _, _, number = self._list_of_one.unpack(body)
            if dimensions == 1 and not has_nulls:
                return [number]
        elif len(body) == EMPTY_HEAD.size:
            return []
        dimensions, has_nulls, _, count, _ = HEAD.unpack_from(body)
        if dimensions != 1:
            raise ValueError(f"an array of {dimensions} dimensions is no list of numbers")
        if has_nulls:
            return self._with_nulls(body, count)
        elements = body[HEAD.size :]
        first = elements[: self._one.size]
        if elements == first * count:  # most columns of a turn
            return [self._one.unpack(first)[1]] * count
        words, width = self._in_words(elements), len(self._zero)
        if self._code != "q":
            return words[width - 1 :: width].tolist()
        halves = array(self._word, bytes(self._size * count))
        halves[LITTLE_ENDIAN::2], halves[not LITTLE_ENDIAN :: 2] = words[1::width], words[2::width]
        return array(self._code, halves.tobytes()).tolist()

    def _with_nulls(self, body: bytes, count: int) -> list[int | None]:
        numbers: list[int | None] = []
        at = HEAD.size
        for _ in range(count):
            is_null = LENGTH.unpack_from(body, at)[0] == NULL
            numbers.append(None if is_null else self._one.unpack_from(body, at)[1])
            at += LENGTH.size if is_null else self._one.size
        return numbers

    def _in_words(self, body: bytes) -> "array[int]":
        words = array(self._word, body)
        if LITTLE_ENDIAN:
            words.byteswap()
        return words
