"""What this process makes is nobody else's, and a secret in a file of somebody else is none."""

import asyncio
import json
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import KeySetFile
from trellis.cli import main
from trellis.engine import private_files
from trellis.engine.errors import KeyUnusable
from trellis.engine.private_files import make_private_folder, read_private, write_private
from trellis.ledgers import open_ledger
from trellis.ledgers.sqlite import ledger as sqlite_ledger
from trellis.ledgers.sqlite.connection import connect
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.updates import Operation, Update

OTHER_USER = 4_242


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(top: Path) -> dict[str, int]:
    """The modes of all files and folders below, by their paths."""
    return {str(path.relative_to(top)): stat.S_IMODE(path.stat().st_mode) for path in top.rglob("*")}


async def make_all(folder: Path) -> dict[str, int]:
    """The modes of two ledgers, an object and a commit of memory, made as an instance makes them."""
    url, settings = f"sqlite:///{folder}/trellis.db", Settings.model_validate({})
    async with open_instance(settings, url) as instance:
        await instance.objects.put("agents/violin/notes/a.md", b"secret")
        await instance.objects.put("agents/violin/notes/a.md", b"secret too")
        _commit(instance.memory)
        ledger = await open_ledger(settings.nlm_ledger_of(url))
        try:
            return modes(folder)
        finally:
            await ledger.close()


def _commit(memory: MemoryRepository) -> None:
    memory.commit(
        "violin",
        [Update(file="facts.md", operation=Operation.APPEND, content="- a secret")],
        expected_version=0,
        run_id="run_2026-01-01_000000_abcdef",
        proposal_id="prop_1",
        reason="a reason",
        auto_approved=True,
        author="a",
        at=datetime(2026, 1, 1, tzinfo=UTC),
    )


async def test_files_of_an_instance_are_unreadable_for_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sqlite_ledger, "connect", connect)  # no copy of a file that a test made before
    made = await make_all(tmp_path)
    assert {name for name, mode in made.items() if mode & 0o077} == set()
    assert {
        "trellis.db",
        "trellis.db-wal",
        "trellis.db-shm",
        "trellis.db-queue",
        "nlm.db",
        "objects",
        "memory.git",
    } <= set(made)


async def test_a_group_shares_what_the_mode_of_a_store_gives_it(tmp_path: Path):
    """Whatever the umask is, and others get nothing."""
    for name in ("objects", "memory.git"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o2775)
    (tmp_path / "trellis.db").touch()
    (tmp_path / "trellis.db").chmod(0o664)
    made = await make_all(tmp_path)
    assert made["trellis.db-queue"] == 0o660
    inside = {name: mode for name, mode in made.items() if "/" in name and "memory.git/objects" not in name}
    assert {mode & 0o077 for name, mode in inside.items() if (tmp_path / name).is_dir()} == {0o070}
    assert {mode & 0o077 for name, mode in inside.items() if (tmp_path / name).is_file()} == {0o060}
    objects = [mode for name, mode in made.items() if "memory.git/objects/" in name and (tmp_path / name).is_file()]
    assert set(objects) == {0o440}


@pytest.mark.requirement("D46")
def test_a_key_of_another_user_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where this process may read it, as root may: its owner could put another one there."""
    secret, keys = tmp_path / "secret.key", tmp_path / "keys.json"
    write_private(secret, "ab" * 32)
    write_private(keys, '{"keys": []}')
    assert read_private(secret) == b"ab" * 32
    if os.geteuid() == 0:
        os.chown(secret, OTHER_USER, -1)
        os.chown(keys, OTHER_USER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    with pytest.raises(KeyUnusable, match=r"belongs to another user \(\d+\); run: chown"):
        read_private(secret)
    with pytest.raises(KeyUnusable, match="belongs to another user"):
        KeySetFile(keys, issuer="i", monotonic=lambda: 0.0)


def test_a_secret_that_others_can_read_is_none(tmp_path: Path):
    secret = tmp_path / "secret.key"
    secret.write_text("ab")
    with pytest.raises(KeyUnusable, match="chmod 600"):
        read_private(secret)
    with pytest.raises(KeyUnusable, match="cannot be read"):
        read_private(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert read_private(tmp_path / "pipe") == b"", "nobody waits for its other end"


@pytest.mark.parametrize(
    "mode, is_secret", [(0o400, True), (0o440, True), (0o640, True), (0o444, False), (0o660, False)]
)
def test_a_secret_of_root_may_be_read_by_the_group_of_this_process(
    mode: int, is_secret: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Kubernetes gives a Secret to a pod, and systemd a credential to a service, as a file of root with mode 0440."""
    secret, real = tmp_path / "secret.key", os.fstat
    write_private(secret, "ab" * 32)

    def of_root(descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        fields[0], fields[4] = stat.S_IFREG | mode, 0
        return os.stat_result(fields)

    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    monkeypatch.setattr(private_files.os, "fstat", of_root)
    if is_secret:
        assert read_private(secret) == b"ab" * 32
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        if mode & 0o070:
            with pytest.raises(KeyUnusable, match="chmod 600"):
                read_private(secret)
        return
    with pytest.raises(KeyUnusable, match="chmod 640"):
        read_private(secret)


def test_the_doctor_names_what_others_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asyncio.run(make_all(tmp_path))
    url = f"sqlite:///{tmp_path}/trellis.db"
    tmp_path.chmod(0o755)
    assert "privacy" not in _doctor(url, capsys)
    for name, mode in (("trellis.db", 0o644), ("nlm.db", 0o644), ("objects", 0o755), ("memory.git", 0o755)):
        (tmp_path / name).chmod(mode)
    told = (_doctor(url, capsys))["privacy"]
    assert told["severity"] == "warning"
    paths = [str(tmp_path / name) for name in ("trellis.db", "nlm.db", "objects", "memory.git")]
    assert told["remedy"] == f"chmod -R o-rwx {' '.join(paths)}"
    tmp_path.chmod(0o700)
    assert "privacy" not in _doctor(url, capsys), "nobody else gets into the folder"


def _doctor(url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    capsys.readouterr()
    main(["doctor", "--json", "--ledger", url])
    records = map(json.loads, capsys.readouterr().out.splitlines())
    return {record["check"]: record for record in records if "check" in record}


def test_folders_above_a_private_folder_are_private_too_and_existing_ones_keep_their_modes(tmp_path: Path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    make_private_folder(tmp_path / "shared" / "a" / "b" / "c")
    make_private_folder(tmp_path / "shared" / "a" / "b" / "c")
    assert modes(tmp_path) == {"shared": 0o750, "shared/a": 0o700, "shared/a/b": 0o700, "shared/a/b/c": 0o700}
