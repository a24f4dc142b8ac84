"""A memory repository of its own for every test."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.storage.memory.rig import KINDS, open_kind
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.verification import verify


@pytest.fixture(params=KINDS)
def memory_kind(request: pytest.FixtureRequest) -> str:
    """The kinds that every promise of a memory is tested on. A test of one kind's own means sets it by parametrize."""
    return request.param


@pytest.fixture
def memory(tmp_path: Path, memory_kind: str) -> Iterator[MemoryRepository]:
    opened = open_kind(memory_kind, tmp_path / "memory.git")
    yield opened
    opened.close()


@pytest.fixture
def git(memory: MemoryRepository) -> Callable[..., str]:
    """The git program on the repository; the test is skipped where there is none."""
    program = shutil.which("git")
    if program is None:
        pytest.skip("no git program on this machine")

    def run(*arguments: str) -> str:
        memory._bare.branch()  # a replica is brought to what the object store has
        done = subprocess.run(
            [program, "-C", str(memory.path), *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def sound(memory: MemoryRepository) -> Callable[[], None]:
    """Nothing is wrong with the repository: by our own check, and by git's where there is one."""

    def check() -> None:
        verified = verify(memory)
        assert verified.complete
        assert verified.findings == ()
        if program := shutil.which("git"):
            done = subprocess.run(
                [program, "-C", str(memory.path), "fsck", "--strict", "--full", "--no-dangling"],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert (done.returncode, done.stdout) == (0, ""), done.stderr

    return check
