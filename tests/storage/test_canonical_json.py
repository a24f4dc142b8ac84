"""Documents as bytes: those of Python's own `json.dumps`, made faster."""

import json
from collections import OrderedDict
from enum import IntEnum, StrEnum
from typing import Any

import pytest

from trellis.storage.objects.canonical_json import encode


class Colour(StrEnum):
    RED = 'r"ed'


class Level(IntEnum):
    HIGH = 3


def by_the_standard_library(document: Any) -> bytes:
    return (json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False) + "\n").encode()


SCALARS = (
    None,
    True,
    False,
    0,
    -7,
    2**80,
    1.5,
    1e300,
    -0.0,
    "",
    'a"\\b',
    "ä\n\t\x00\x7f\u2028😀",
    Colour.RED,
    Level.HIGH,
)
EMPTY = ({}, [], ())
NESTED = (
    [*SCALARS],
    tuple(SCALARS),
    {"a\n": {"ä": [1, [2, {}], []]}, "b": [{"c": None}, ({"d": "e"}, [])]},
    {1: "a", None: ["b", {"c": {}}], False: {}, 1.5: ()},
    OrderedDict(z=1, a=[{"b": 2}]),
)


@pytest.mark.parametrize("value", [*SCALARS, *EMPTY, *NESTED], ids=range(len((*SCALARS, *EMPTY, *NESTED))))
def test_documents_have_the_bytes_of_the_standard_library(value: Any):
    for document in ({}, {"value": value}, {"outer": {"inner": [value, {"value": value}]}, "last": value}):
        assert encode(document) == by_the_standard_library(document)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_does_not_have_are_refused(number: float):
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"inner": [{"number": number}]})


def test_values_that_json_does_not_have_are_refused():
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode({"inner": {"value": object()}})
