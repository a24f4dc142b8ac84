"""Keeps tests marked `quiet` away from busy ones although the suite runs in several processes.

A quiet test is judged by the clock and mostly waits. Quiet tests run beside each other, and never beside any other test.
A process holds a shared lock of a group from its first test of that group to its last before one of the other. To get in, it
waits until no process holds the lock of the other group. A gate lets one process in at a time: whoever waits behind it cannot be
overtaken, so nobody waits for ever. Waiting happens outside the test's own time limit. Quiet tests come last, and none begins before
every process has done its busy ones: then they run beside each other, and not one after the other between busy ones.
A quiet test marked `quiet(alone=True)` runs beside no other quiet test either: it is judged by short times. It is the last of
all, and waits until the others have ended: between them, every process would stand still for it.
Tests marked `long` come first: none of them is under way while the other processes wait for the quiet ones to begin.
"""

import contextlib
import fcntl
from collections.abc import Generator
from pathlib import Path
from typing import IO

import pytest

from tests.processes import is_forking

LOCK_FOLDER = pytest.StashKey[Path]()
HELD = pytest.StashKey[IO[str]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_forking(config):
        config.stash[LOCK_FOLDER] = config._tmp_path_factory.mktemp("quiet")  # type: ignore[attr-defined]
        items.sort(key=lambda item: (not _is_long(item), _is_quiet(item), _is_alone(item)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    folder = item.config.stash.get(LOCK_FOLDER, None)
    if folder is None:
        return (yield)
    if HELD not in item.config.stash:
        item.config.stash[HELD] = _entered(folder, *(("quiet", "busy") if _is_quiet(item) else ("busy", "quiet")))
    try:
        with _turn(folder, item):
            return (yield)
    finally:
        if nextitem is None or _is_quiet(nextitem) != _is_quiet(item):
            item.config.stash[HELD].close()
            del item.config.stash[HELD]


def _is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


def _is_quiet(item: pytest.Item) -> bool:
    return item.get_closest_marker("quiet") is not None


def _is_alone(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("quiet")
    return marker is not None and bool(marker.kwargs.get("alone"))


@contextlib.contextmanager
def _turn(folder: Path, item: pytest.Item) -> Generator[None]:
    """Meanwhile, a quiet test that runs alone has no other quiet test beside it."""
    if not _is_quiet(item):
        yield
        return
    with (folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX if _is_alone(item) else fcntl.LOCK_SH)
        yield


def _entered(folder: Path, own: str, other: str) -> IO[str]:
    """A file that holds the lock of a group as long as it is open."""
    ours = (folder / own).open("w")
    with (folder / "gate").open("w") as gate, (folder / other).open("w") as theirs:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(theirs, fcntl.LOCK_EX)  # once nobody of the other group runs; behind the gate nobody new begins
        fcntl.flock(theirs, fcntl.LOCK_UN)
        fcntl.flock(ours, fcntl.LOCK_SH)
    return ours
