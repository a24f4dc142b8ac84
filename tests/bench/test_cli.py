"""The command as people call it, with a few jobs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import cli, peers, processes
from bench.cli import BEGIN, END, main
from bench.groups import Figures, Sizes
from bench.lines import SECTIONS
from bench.peers import PEERS
from bench.processes import ChildFailed
from bench.stores import Stores
from bench.task import LISTED_STATES
from tests.servers.ready_python import ready_python


def test_a_run_prints_its_tables_keeps_its_samples_and_fills_in_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "PYTHON", ready_python())
    monkeypatch.setattr(peers, "find_spec", lambda _: None)
    file, document = tmp_path / "figures.json", tmp_path / "figures.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    arguments = ["--small", "--rounds", "1", "--only", "lists", "--json", str(file), "--write", str(document)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    titles = [line.split("|")[1].strip() for line in printed.out.splitlines() if line.startswith("| 100 jobs by state")]
    assert [title.rpartition(" ")[2] for title in titles] == [*LISTED_STATES, *LISTED_STATES], "on both stores"
    assert "### Summary" in printed.out
    assert "DBOS is left out" in printed.out
    assert "round 1/1" in printed.err
    kept = json.loads(file.read_text(encoding="utf-8"))
    pages = {f"list_{state}" for state in LISTED_STATES}
    ours = {
        f"{what}.{store}.lists" for what in pages | {"list_runs_calls", "list_runs_ms"} for store in ("pg", "sqlite")
    }
    by_hand = {f"{what}.{store}.floor_lists" for what in pages for store in ("pg", "sqlite")}
    assert kept["samples"].keys() == ours | by_hand
    assert all(value > 0 for values in kept["samples"].values() for value in values)
    assert all(line["ratio"] > 0 for line in kept["lines"])
    assert {"date", "machine", "postgresql", "durability"} <= set(kept["about"])
    assert len(kept["left out"]) == len(peers.PEERS)
    written = document.read_text(encoding="utf-8")
    assert written.startswith(f"before\n{BEGIN}\n\n- command: `make bench ARGS='--rounds 1 --small --only lists'`\n")
    assert written.endswith(f"\n\n{END}\nafter\n")
    assert "### Summary" in written
    assert "old" not in written.splitlines()


def test_figures_of_a_run_that_breaks_are_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def broken(stores: Stores, sizes: Sizes) -> Iterator[Figures]:
        yield {"list_runs_calls.pg.lists": 2.0}
        raise ChildFailed("the worker ended")

    @contextmanager
    def no_stores() -> Iterator[Any]:
        yield SimpleNamespace(server=None, folder=tmp_path)

    monkeypatch.setattr(cli, "GROUPS", {"lists": broken})
    monkeypatch.setattr(cli, "open_stores", no_stores)
    monkeypatch.setattr(cli, "describe", lambda *_: {})
    file, document = tmp_path / "figures.json", tmp_path / "figures.md"
    document.write_text(f"{BEGIN}\nold\n{END}\n", encoding="utf-8")
    assert main(["--rounds", "1", "--only", "lists", "--json", str(file), "--write", str(document)]) == 1
    printed = capsys.readouterr()
    assert "ledger calls of GET /runs" in printed.out
    assert "complete: no" in printed.out
    assert "the worker ended" in printed.err
    assert json.loads(file.read_text(encoding="utf-8"))["samples"] == {"list_runs_calls.pg.lists": [2.0]}
    assert "old" in document.read_text(encoding="utf-8"), "a document gets complete runs only"


@pytest.mark.prove
@pytest.mark.timeout(1_800)
def test_a_complete_run_measures_every_line_with_a_ratio(tmp_path: Path):
    file = tmp_path / "figures.json"
    assert main(["--small", "--rounds", "1", "--json", str(file)]) == 0
    kept = json.loads(file.read_text(encoding="utf-8"))
    lines = [line for lines in SECTIONS.values() for line in lines]
    assert {line.ours for line in lines} - kept["samples"].keys() == set()
    here = {name for line in lines for name in line.beside if name.rpartition(".")[2].rstrip("0123456789") not in PEERS}
    assert here - kept["samples"].keys() == set()
    if not kept["left out"]:
        assert {name for line in lines for name in line.beside} - kept["samples"].keys() == set()


@pytest.mark.parametrize("arguments", [["--only", "nonsense"], ["--rounds", "0"]])
def test_bench_command_that_cannot_run_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "error" in capsys.readouterr().err


def test_a_document_without_a_place_for_figures_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    document = tmp_path / "figures.md"
    document.write_text(f"{END}\n{BEGIN}\n", encoding="utf-8")
    for refused, why in ((document, "has no line"), (tmp_path / "absent.md", "cannot be read")):
        with pytest.raises(SystemExit):
            main(["--write", str(refused)])
        assert why in capsys.readouterr().err
