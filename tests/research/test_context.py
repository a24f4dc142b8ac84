"""What a snapshot is made of, and that making one keeps nobody waiting."""

import asyncio
import threading

import pytest

from tests.gateway.conftest import VIOLIN
from tests.research.rig import Rig
from trellis.research import context
from trellis.research.context import title_of


@pytest.mark.parametrize(
    "text, title",
    [
        ("# The violin\ntext", "The violin"),
        ("text\n\n#   The violin ##  \n# Another", "The violin"),
        ("## Second\n#none\n #neither", None),
        ("# \n# ###\n# Third #3", "Third #3"),
        ("", None),
        ("# " + "x" * 5_000, "x" * context.TITLE_CHARS_MAX),
    ],
)
def test_the_title_of_a_text_is_its_first_heading_that_says_something(text: str, title: str | None):
    assert title_of(text) == title


@pytest.mark.parametrize("run", [" ", "\t", "#", "# ", "#\t", "\n", "#\n", "[", '"', "# #"])
def test_a_title_is_found_in_a_time_that_grows_with_the_text(run: str):
    assert title_of("#" + run * 250_000 + "x\n# Title") is not None, "with the square of its length this takes minutes"


@pytest.mark.requirement("D4")
async def test_a_snapshot_is_made_beside_the_loop_that_renews_leases(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    going_on, usual = threading.Event(), context.title_of
    loop = asyncio.get_running_loop()

    def slow(text: str) -> str | None:
        loop.call_soon_threadsafe(going_on.set)
        assert going_on.wait(timeout=10.0), "the loop stands still while a snapshot is made"
        return usual(text)

    monkeypatch.setattr(context, "title_of", slow)
    job = await rig.work(await rig.submit(agent_slug=VIOLIN), "COMPLETE", "FAILED", "RETRY_BACKOFF")
    assert job["status"] == "COMPLETE", job["error"]
