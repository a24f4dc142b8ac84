"""The command as people call it, with a few jobs."""

import json
from pathlib import Path

import pytest

from bench import processes
from bench.cli import main
from tests.servers.ready_python import ready_python


def test_a_run_prints_its_table_and_keeps_its_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "PYTHON", ready_python())
    file = tmp_path / "figures.json"
    assert main(["--small", "--rounds", "1", "--only", "steps", "--json", str(file)]) == 0
    printed = capsys.readouterr()
    titles = [line.split("|")[1].strip() for line in printed.out.splitlines() if line.startswith("| 4 journalled")]
    assert titles == ["4 journalled steps, 1 process", "4 journalled steps, 2 processes"]
    assert "round 1/1" in printed.err
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert set(kept["samples"]) == {"steps1.pg.trellis", "steps2.pg.trellis"}
    assert {"date", "machine", "postgresql", "durability"} <= set(kept["about"])


@pytest.mark.parametrize("arguments", [["--only", "nonsense"], ["--rounds", "0"]])
def test_bench_command_that_cannot_run_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "error" in capsys.readouterr().err
