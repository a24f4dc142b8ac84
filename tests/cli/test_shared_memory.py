"""The commands on an instance whose memory is in its object store."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal
from trellis.app.instance import open_instance
from trellis.app.settings import read_settings

VIOLIN = "archivist-violin"


@pytest.fixture
def shared(local: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Terminal:
    """A planted instance on one host."""
    monkeypatch.setenv("TRELLIS_MEMORY", "objects")

    async def plant() -> None:
        async with open_instance(read_settings({"TRELLIS_MEMORY": "objects"}, tmp_path), local.url) as instance:
            await instance.plant()

    asyncio.run(plant())
    return local


def packs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "objects" / "memory" / "packs").iterdir())


def test_another_host_reads_the_memory_after_the_first_is_gone(shared: Terminal, tmp_path: Path, monkeypatch):
    before = shared("memory", "read", VIOLIN, "--wide").out
    assert "ts-03-bass-bar" in before
    monkeypatch.setenv("TRELLIS_MEMORY_CACHE", str(tmp_path / "another host.git"))
    assert shared("memory", "read", VIOLIN, "--wide").out == before
    assert not (tmp_path / "memory.git").exists()


@pytest.mark.parametrize("memory,collects", [("objects", True), ("memory.git", False)])
def test_role_retention_collects_packs_of_a_memory_in_the_store(
    local: Terminal, tmp_path: Path, memory: str, collects: bool
):
    async def served() -> list[str]:
        settings = read_settings({"TRELLIS_MEMORY": memory}, tmp_path)
        async with open_instance(settings, local.url) as instance:
            return [service.name for service in instance.services_of(frozenset({"retention"}))]

    assert ("memory-collector" in asyncio.run(served())) is collects


def test_verify_and_doctor_check_the_memory_in_the_store(shared: Terminal, tmp_path: Path):
    verified = shared("verify")
    assert (verified.code, "memory: 2 commits: no damage" in verified.out) == (0, True), verified
    assert shared("verify", "--json").records[-1]["memory_commits"] == 2
    assert "objects:memory has 2 changes in 2 packs" in shared("doctor").out
    lost = packs(tmp_path)[0]
    lost.unlink()
    for command in ("verify", "doctor"):
        answer = shared(command)
        assert answer.code != 0
        assert lost.name in "".join((answer.out + answer.err).split())


def test_memory_that_nobody_has_used_yet_is_no_damage(local: Terminal, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TRELLIS_MEMORY", "objects")
    (tmp_path / "objects").mkdir()
    assert local("verify").code == 0
    assert "objects:memory has no change yet" in local("doctor").out


def test_backup_has_the_memory_that_is_in_the_store(shared: Terminal, tmp_path: Path):
    before = shared("memory", "history", VIOLIN, "--json").records
    assert shared("backup", str(tmp_path / "b.tar")).code == 0
    there = f"sqlite:///{tmp_path / 'elsewhere' / 'trellis.db'}"
    restored = shared("restore", str(tmp_path / "b.tar"), ledger=there)
    assert restored.code == 0, restored.err
    assert shared("memory", "history", VIOLIN, "--json", ledger=there).records == before
    assert shared("verify", ledger=there).code == 0


def test_backup_with_a_repository_is_not_restored_into_an_object_store(local: Terminal, tmp_path: Path, monkeypatch):
    assert local("init").code == 0
    assert local("backup", str(tmp_path / "b.tar")).code == 0
    monkeypatch.setenv("TRELLIS_MEMORY", "objects")
    there = f"sqlite:///{tmp_path / 'elsewhere' / 'trellis.db'}"
    refused = local("restore", str(tmp_path / "b.tar"), ledger=there)
    assert refused.code != 0
    assert "then bring it there with `trellis memory import" in " ".join(refused.err.split())


def test_memory_is_imported_and_exported_by_commands(local: Terminal, tmp_path: Path, monkeypatch):
    async def plant() -> None:
        async with open_instance(read_settings({}, tmp_path), local.url) as instance:
            await instance.plant()

    asyncio.run(plant())
    before = local("memory", "history", VIOLIN, "--json").records
    assert "set it to objects" in " ".join(local("memory", "import", str(tmp_path / "memory.git")).err.split())
    monkeypatch.setenv("TRELLIS_MEMORY", "objects")
    missing = local("memory", "read", VIOLIN)
    assert "this instance has a memory elsewhere; `trellis memory import" in " ".join(missing.err.split())
    imported = local("memory", "import", str(tmp_path / "memory.git"))
    assert (imported.code, "imported 2 commits to objects:memory" in imported.out) == (0, True), imported
    assert local("memory", "history", VIOLIN, "--json").records == before
    assert local("memory", "export", str(tmp_path / "exported.git")).code == 0
    subprocess.run(["git", "clone", "-q", tmp_path / "exported.git", tmp_path / "clone"], check=True)
    assert "ts-03-bass-bar" in (tmp_path / "clone" / "memory" / VIOLIN / "open_loops.md").read_text()
    monkeypatch.delenv("TRELLIS_MEMORY")
    refused = local("memory", "read", VIOLIN)
    assert "set TRELLIS_MEMORY" in " ".join(refused.err.split())


@pytest.mark.parametrize("wrong", ["objects:", "objects:/absolute", "objects:a/../b"])
def test_setting_that_cannot_begin_a_key_is_refused(local: Terminal, monkeypatch, wrong: str):
    monkeypatch.setenv("TRELLIS_MEMORY", wrong)
    refused = local("memory", "list")
    assert refused.code != 0
    assert "TRELLIS_MEMORY" in refused.err
