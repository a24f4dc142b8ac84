"""An instance has one memory: a process that is pointed at another one does not start."""

import subprocess
from pathlib import Path

import pytest

from tests.gateway.serving import settings_in
from trellis.app.instance import open_instance
from trellis.app.wiring import new_id
from trellis.storage.memory.bare_repository import id_of_identity, repository_identity
from trellis.storage.memory.errors import MemoryOfAnother
from trellis.storage.memory.repository import open_memory


async def start(folder: Path, memory: str, *, uses_memory: bool = True) -> None:
    settings = settings_in(folder).model_copy(update={"memory": folder / memory})
    async with open_instance(settings, f"sqlite:///{folder}/t.db", uses_memory=uses_memory):
        pass


def clone(source: Path, target: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", "--mirror", source, target], check=True, capture_output=True)


async def test_a_process_with_another_memory_does_not_start(tmp_path: Path):
    await start(tmp_path, "memory.git")
    with pytest.raises(MemoryOfAnother, match="not the one of this instance: set TRELLIS_MEMORY"):
        await start(tmp_path, "elsewhere.git")
    await start(tmp_path, "memory.git")


async def test_a_process_that_does_not_use_memory_may_have_any(tmp_path: Path):
    await start(tmp_path, "memory.git")
    await start(tmp_path, "elsewhere.git", uses_memory=False)


async def test_a_mirrored_clone_is_the_same_memory(tmp_path: Path):
    await start(tmp_path, "memory.git")
    clone(tmp_path / "memory.git", tmp_path / "restored.git")
    await start(tmp_path, "restored.git")


def test_a_repository_has_one_id_and_no_other_has_it(tmp_path: Path):
    paths = [open_memory(tmp_path / name).path for name in ("a.git", "b.git")]
    first, second = (id_of_identity(repository_identity(path, new_id)) for path in paths)
    assert id_of_identity(repository_identity(paths[0], new_id)) == first != second
