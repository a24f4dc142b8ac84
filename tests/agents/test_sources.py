"""What an agent reads: in order, whole, within its bounds, and with everything left out named."""

import hashlib
import time
from pathlib import Path

import pytest

from trellis.agents.definition import ContextOptions
from trellis.agents.sources import SOURCE_BYTES_MAX, SOURCES_TOKENS_MAX, AgentSource, OmissionReason, read_sources
from trellis.storage.memory.layout import count_tokens
from trellis.storage.objects.local import LocalObjects
from trellis.storage.objects.open import random_name
from trellis.storage.objects.store import ObjectStore, StoredObject

FOLDER = "agents/gardener/sources"


async def put(objects: ObjectStore, **files: bytes | str) -> None:
    for name, body in files.items():
        await objects.put(f"{FOLDER}/{name}", body.encode() if isinstance(body, str) else body)


@pytest.mark.requirement("PIPE-4")
async def test_sources_come_by_name_with_ref_text_and_digest(objects: ObjectStore):
    await put(objects, **{"b.md": "# Bed", "a.txt": "ґрунт", "c.json": '{"ph": 6}', "deep/d.md": "below"})
    read = await read_sources(objects, "gardener", ContextOptions())
    assert read.items == tuple(
        AgentSource(ref=f"sources/{name}", text=text, sha256=hashlib.sha256(text.encode()).hexdigest())
        for name, text in [("a.txt", "ґрунт"), ("b.md", "# Bed"), ("c.json", '{"ph": 6}'), ("deep/d.md", "below")]
    )
    assert (read.left_out, read.complete) == ((), True)
    assert read.tokens == sum(count_tokens(source.text) for source in read.items)


async def test_an_agent_without_sources_reads_nothing(objects: ObjectStore):
    await objects.put("agents/gardener-2/sources/a.md", b"of another agent")
    await objects.put("agents/gardener/sources.md", b"no source")
    read = await read_sources(objects, "gardener", ContextOptions())
    assert (read.items, read.left_out, read.tokens) == ((), (), 0)


async def test_a_folder_narrows_what_is_read(objects: ObjectStore):
    await put(objects, **{"a.md": "a", "letters/b.md": "b", "letters-old/c.md": "c"})
    read = await read_sources(objects, "gardener", ContextOptions(folder="sources/letters"))
    assert [source.ref for source in read.items] == ["sources/letters/b.md"]


async def test_source_that_is_no_text_is_left_out_and_named(objects: ObjectStore):
    await put(
        objects,
        **{
            "a.png": b"\x89PNG",
            "b.md": b"\xff\xfe",
            "c.md": b"nul \0 byte",
            "d.MD": "read",
            "e.md": b"\xef\xbb\xbfread",
        },
    )
    read = await read_sources(objects, "gardener", ContextOptions())
    assert [(source.ref, source.text) for source in read.items] == [("sources/d.MD", "read"), ("sources/e.md", "read")]
    assert [(one.ref, one.reason) for one in read.left_out] == [
        (f"sources/{name}", OmissionReason.NOT_TEXT) for name in ("a.png", "b.md", "c.md")
    ]


async def test_beyond_max_sources_the_later_names_are_left_out(objects: ObjectStore):
    await put(objects, **{f"{number}.md": "x" for number in range(5)}, **{"0.png": b"not counted"})
    read = await read_sources(objects, "gardener", ContextOptions(max_sources=3))
    assert [source.ref for source in read.items] == [f"sources/{number}.md" for number in range(3)]
    late = [one.ref for one in read.left_out if one.reason is OmissionReason.TOO_MANY]
    assert late == ["sources/3.md", "sources/4.md"]


@pytest.mark.requirement("D50")
async def test_a_source_over_the_budget_is_left_out_whole_and_the_next_that_fits_is_read(objects: ObjectStore):
    small = "я" * 300
    large = "x" * (3 * SOURCES_TOKENS_MAX - len(small.encode()) + 1)
    await put(objects, **{"a.md": small, "b.md": large, "c.md": large[:-1], "d.md": "d"})
    read = await read_sources(objects, "gardener", ContextOptions())
    assert [source.ref for source in read.items] == ["sources/a.md", "sources/c.md"]
    assert read.tokens == SOURCES_TOKENS_MAX
    assert [(one.ref, one.reason) for one in read.left_out] == [
        ("sources/b.md", OmissionReason.OVER_BUDGET),
        ("sources/d.md", OmissionReason.OVER_BUDGET),
    ]
    assert f"of {SOURCES_TOKENS_MAX}" in read.left_out[0].detail


async def test_a_file_beyond_every_bound_is_not_fetched(objects: ObjectStore):
    await put(objects, **{"a.md": b"x" * (SOURCE_BYTES_MAX + 1), "b.md": "b"})
    read = await read_sources(objects, "gardener", ContextOptions(), counter=len)
    assert [source.ref for source in read.items] == ["sources/b.md"]
    assert [one.reason for one in read.left_out] == [OmissionReason.TOO_LARGE]


class Vanishing(LocalObjects):
    """The real store, in which a source is removed between the listing and the reading."""

    async def get(self, key: str) -> StoredObject | None:
        if key.endswith("gone.md"):
            await self.delete(key)
        return await super().get(key)


async def test_a_source_that_is_removed_meanwhile_is_named(tmp_path: Path):
    objects = Vanishing(tmp_path, new_name=random_name, now_ns=time.time_ns)
    await put(objects, **{"gone.md": "x", "here.md": "y"})
    read = await read_sources(objects, "gardener", ContextOptions())
    await objects.close()
    assert [source.ref for source in read.items] == ["sources/here.md"]
    assert [(one.ref, one.reason) for one in read.left_out] == [("sources/gone.md", OmissionReason.GONE)]


async def test_source_reading_accepts_another_token_counter(objects: ObjectStore):
    await put(objects, **{"a.md": "one two three", "b.md": "four"})
    read = await read_sources(
        objects, "gardener", ContextOptions(), counter=lambda text: len(text.split()), tokens_max=3
    )
    assert (read.tokens, [one.ref for one in read.left_out]) == (3, ["sources/b.md"])
