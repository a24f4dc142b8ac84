"""`trellis init`: an embedded instance from nothing, and nothing that is there is written over."""

import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal
from trellis.app.settings import read_settings

PARTS = ("trellis.db", "objects", "memory.git")


@pytest.fixture
def empty(local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """The command line in an empty folder."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return local


def test_an_instance_is_made_once_and_is_ready_to_use(empty: Terminal):
    first = empty.bare("init", "--json").record
    assert {Path(part).name for part in first["made"]} > {*PARTS, "trellis.toml"}
    assert first["kept"] == []
    assert all(Path(part).exists() for part in PARTS)
    (key,) = Path().glob("*.key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert read_settings({}, Path()).ledger == "sqlite:///trellis.db"
    assert empty.bare("agents", "--json").code == 0
    assert empty.bare("token", "issue", "--role", "owner").out.count(".") == 2
    Path("trellis.toml").write_text("# mine\n")
    before = {path: path.read_bytes() for path in (Path("trellis.toml"), key)}
    Path("objects").rename("elsewhere")
    again = empty.bare("init")
    assert (again.code, again.out.count("made "), "trellis.toml" in again.out) == (0, 1, True)
    assert {path: path.read_bytes() for path in before} == before


def test_a_folder_of_data_needs_no_file_of_settings(empty: Terminal):
    made = empty.bare("init", "--data", "deep/garden")
    assert (made.code, "trellis up --data deep/garden" in made.err) == (0, True)
    assert all((Path("deep/garden") / part).exists() for part in PARTS)
    assert not Path("trellis.toml").exists()


def test_init_that_cannot_succeed_is_refused_with_a_remedy(empty: Terminal):
    refused = empty.bare("init", "--ledger", "postgresql://localhost/x")
    assert (refused.code, "trellis migrate" in refused.err) == (2, True)
    Path("trellis.db").write_text("the diary of somebody, which is no database at all" * 100)
    damaged = empty.bare("init")
    assert damaged.code != 0
    assert Path("trellis.db").read_text().startswith("the diary")
