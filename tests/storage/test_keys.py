"""A key names one object, in this store, and nothing else anywhere."""

import os
import posixpath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trellis.storage.objects.keys import (
    KEY_BYTES_MAX,
    NameKind,
    checked_key,
    checked_prefix,
    file_path,
    is_key,
    object_key,
    read_name,
)
from trellis.storage.objects.store import KeyInvalid

CLIMBING = (
    "..",
    "../x",
    "a/../../x",
    "/etc/passwd",
    "//x",
    "a//b",
    "a/./b",
    "a/",
    "./a",
    "..\\x",
    "a\\..\\b",
    "C:\\x",
    "a\0",
    "a\r\nb",
    "\x7f",
    "\x85",
    "\ud800",
    "",
)
PIECES = [
    "..",
    ".",
    "/",
    "//",
    "%2e%2e",
    "%2E",
    "%",
    "%25",
    "%file",
    "%dir",
    "%more",
    "…",
    ".trellis",
    "a",
    "й",
    "b.c",
    "~",
]

segments = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\"), min_size=1, max_size=400
).filter(lambda text: text not in {".", ".."})
composed = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join)
legal_keys = st.one_of(st.lists(segments, min_size=1, max_size=6).map("/".join), composed).filter(is_key)


@pytest.mark.parametrize("key", CLIMBING)
def test_object_key_that_climbs_or_is_ambiguous_is_refused(key: str):
    assert not is_key(key)
    with pytest.raises(KeyInvalid):
        checked_key(key)


def test_a_key_may_have_1024_bytes_and_not_one_more():
    assert is_key("k" * KEY_BYTES_MAX)
    assert not is_key("k" * (KEY_BYTES_MAX + 1))
    assert not is_key("ї" * (KEY_BYTES_MAX // 2) + "k")
    with pytest.raises(KeyInvalid, match="1024"):
        checked_key("k" * 1_000_000)


def test_a_part_cannot_become_two_segments():
    assert object_key("agents", "archivist", "_agent.md") == "agents/archivist/_agent.md"
    for part in ("../x", "a/b", "..", "", "/"):
        with pytest.raises(KeyInvalid):
            object_key("agents", part, "_agent.md")


@given(st.one_of(st.text(max_size=60), composed))
@example("a/%2e%2e/b")
def test_no_text_leads_out_of_the_prefix(text: str):
    if not is_key(text):
        return
    joined = posixpath.normpath(posixpath.join("/garden/prefix", text))
    assert joined == f"/garden/prefix/{text}"


@given(st.one_of(st.text(max_size=60), composed))
def test_every_beginning_of_a_key_is_a_prefix(text: str):
    if is_key(text):
        for end in range(len(text) + 1):
            assert checked_prefix(text[:end]) == text[:end]


@given(legal_keys)
@example("k" * 1024)
@example("%" * 1000)
@example("ї" * 500)
@example("." * 700)
def test_every_key_has_names_that_a_file_system_takes(key: str):
    path = file_path(key)
    for name in path:
        assert 0 < len(name) <= 255
        assert b"/" not in name
        assert not name.startswith(b".")
    read = [read_name(name) for name in path]
    assert all(read)
    assert "".join(name.piece for name in read if name) == key
    assert [name.kind is NameKind.FILE for name in read if name] == [False] * (len(path) - 1) + [True]


@given(legal_keys, legal_keys)
@example("a", "a/b")
@example("a.b", "a.b/c")
@example("x" * 236, "x" * 236 + "/y")
@example("x" * 236, "x" * 237)
def test_no_two_keys_map_to_one_name_as_file_and_folder(one: str, other: str):
    first, second = file_path(one), file_path(other)
    if one != other:
        assert first != second
        assert first[: len(second)] != second
        assert second[: len(first)] != first


@given(legal_keys, legal_keys)
@example("x" * 236 + "!", "x" * 236 + "/y")
@example("x" * 235 + "/y", "x" * 235 + "!" * 9)
def test_the_order_of_pieces_is_the_order_of_keys(one: str, other: str):
    """What the walk through the folders relies on: where two paths part, their pieces are in the order of the keys."""
    first = [read_name(name) for name in file_path(one)]
    second = [read_name(name) for name in file_path(other)]
    for left, right in zip(first, second, strict=False):
        assert left is not None
        assert right is not None
        if left != right:
            assert (left.piece < right.piece) == (one.encode() < other.encode())
            return


@given(st.binary(min_size=1, max_size=255).filter(lambda name: b"/" not in name and b"\0" not in name))
@example(b"%2e")
@example(b"%25file")
@example(b"a%file%file")
@example(b".trellis")
@example(b"x" * 250)
@example(b"a.b%file")
def test_a_name_is_read_as_a_key_only_if_the_key_has_that_name(name: bytes):
    read = read_name(name)
    if read is not None and read.kind is NameKind.FILE and is_key(read.text):
        assert os.fsencode(name) == file_path(read.text)[-1]
