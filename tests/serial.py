"""Lets tests marked `serial` run alone although the suite runs in several processes.

Every test holds a lock while it runs: shared, or exclusive if it is marked. A gate in front of the lock keeps
an exclusive test from waiting for ever: while it waits, no other test gets in. Waiting happens outside the test's
own time limit. Marked tests come last, so that nobody waits in front of one for a long test of another process.
"""

import contextlib
import fcntl
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

LOCK_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[LOCK_FOLDER] = Path(config.workerinput["serial_locks"])  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """The process that hands out the tests makes the folder; its workers are told where it is."""
    config: pytest.Config = node.config
    if LOCK_FOLDER not in config.stash:
        config.stash[LOCK_FOLDER] = config._tmp_path_factory.mktemp("serial")  # type: ignore[attr-defined]
    node.workerinput["serial_locks"] = str(config.stash[LOCK_FOLDER])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if LOCK_FOLDER in config.stash:
        items.sort(key=_is_serial)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    folder = item.config.stash.get(LOCK_FOLDER, None)
    if folder is None:
        return (yield)
    with _held(folder, alone=_is_serial(item)):
        return (yield)


def _is_serial(item: pytest.Item) -> bool:
    return item.get_closest_marker("serial") is not None


@contextlib.contextmanager
def _held(folder: Path, *, alone: bool) -> Iterator[None]:
    with (folder / "gate").open("w") as gate, (folder / "running").open("w") as running:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
