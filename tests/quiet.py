"""Keeps tests marked `quiet` away from busy ones although the suite runs in several processes.

A quiet test is judged by the clock and mostly waits. Quiet tests run beside each other, and never beside any other test.
Each test holds a shared lock of its own group while it runs. To get in, a test waits until no test of the other group
runs. A gate lets one test in at a time: whoever waits behind it cannot be overtaken, so nobody waits for ever. Waiting happens
outside the test's own time limit. Quiet tests come last, so that the two groups change places once.
"""

import contextlib
import fcntl
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

LOCK_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[LOCK_FOLDER] = Path(config.workerinput["quiet_locks"])  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """The process that hands out the tests makes the folder; its workers are told where it is."""
    config: pytest.Config = node.config
    if LOCK_FOLDER not in config.stash:
        config.stash[LOCK_FOLDER] = config._tmp_path_factory.mktemp("quiet")  # type: ignore[attr-defined]
    node.workerinput["quiet_locks"] = str(config.stash[LOCK_FOLDER])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if LOCK_FOLDER in config.stash:
        items.sort(key=_is_quiet)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    folder = item.config.stash.get(LOCK_FOLDER, None)
    if folder is None:
        return (yield)
    own, other = ("quiet", "busy") if _is_quiet(item) else ("busy", "quiet")
    with _held(folder, own, other):
        return (yield)


def _is_quiet(item: pytest.Item) -> bool:
    return item.get_closest_marker("quiet") is not None


@contextlib.contextmanager
def _held(folder: Path, own: str, other: str) -> Iterator[None]:
    with (folder / "gate").open("w") as gate, (folder / own).open("w") as ours, (folder / other).open("w") as theirs:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(theirs, fcntl.LOCK_EX)  # once nobody of the other group runs; behind the gate nobody new begins
        fcntl.flock(theirs, fcntl.LOCK_UN)
        fcntl.flock(ours, fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
