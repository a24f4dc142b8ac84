"""Ours beside ours in another checkout: who runs what, and when a figure is called worse."""

import json
from pathlib import Path

import pytest

from bench import beside, processes
from bench.beside import compare, is_worse, open_checkout, ratio, render
from bench.cli import main
from bench.groups import GROUPS
from bench.lines import SECTIONS
from bench.peers import ours_alone, present
from bench.processes import ROOT, Checkout, children_from
from tests.servers.ready_python import ready_python

DRAIN, CPU, POLL = "drain1.pg.trellis", "cpu1.pg.trellis", "http_status_cpu_us.pg.gateway"


@pytest.mark.parametrize(
    "name, here, there, worse",
    [
        (DRAIN, [94.0], [100.0], True),
        (DRAIN, [96.0], [100.0], False),
        (CPU, [106.0], [100.0], True),
        (CPU, [104.0], [100.0], False),
        (CPU, [50.0], [100.0], False),
    ],
)
def test_figure_is_worse_from_five_percent_on_rate_or_cost(
    name: str, here: list[float], there: list[float], *, worse: bool
):
    (row,) = compare({name: here}, {name: there})
    assert is_worse(row) is worse
    assert ("Nothing is worse" in render([row])) is not worse


def test_ratio_is_that_of_figures_that_were_taken_side_by_side():
    (row,) = compare({CPU: [10.0, 200.0, 33.0]}, {CPU: [10.0, 100.0, 30.0]})
    assert ratio(row) == pytest.approx(1.1)
    assert "1.10x" in render([row])


def test_only_lines_that_both_have_are_compared():
    assert [line.ours for _, line, _, _ in compare({CPU: [1.0], POLL: [1.0]}, {CPU: [1.0], DRAIN: [1.0]})] == [CPU]
    every = {line.ours: [1.0] for lines in SECTIONS.values() for line in lines}
    assert len(compare(every, every)) == len(every)


def test_child_runs_from_the_other_checkout_with_the_options_that_it_knows(tmp_path: Path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/bin/echo")
    there = Checkout(tmp_path, frozenset({"url"}))
    with children_from(there):
        child = processes.Child("trellis", "bulk", {"url": "here", "poll_s": 1.0}, tmp_path)
    said, _ = child.process.communicate(timeout=10)
    assert said == '-m bench.child trellis bulk {"url": "here"}\n'


def test_both_checkouts_take_turns_and_only_ours_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "PYTHON", ready_python())
    monkeypatch.setattr(beside, "open_checkout", lambda folder: None)  # the other checkout is this one
    file = tmp_path / "figures.json"
    assert main(["--beside", str(ROOT), "--small", "--rounds", "1", "--only", "sqlite,help", "--json", str(file)]) == 0
    kept = json.loads(file.read_text(encoding="utf-8"))
    ours = {f"{what}1.sqlite.{subject}" for what in ("drain", "cpu") for subject in ("trellis", "ledger")}
    assert kept["here"].keys() == kept["there"].keys() == ours
    printed = capsys.readouterr()
    assert "| drain, 1 process " in printed.out
    assert printed.err.count("round 1") == 2


def test_options_of_a_checkout_are_asked_of_its_own_program():
    assert "url" in open_checkout(ROOT).options


def test_folder_without_an_environment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--beside", str(tmp_path)])
    assert "bootstrap.py bench" in capsys.readouterr().err


def test_groups_that_only_their_own_checkout_knows_are_groups():
    assert GROUPS.keys() > beside.UNKNOWN_THERE


def test_subject_that_the_other_checkout_does_not_have_is_left_out(tmp_path: Path):
    subjects = tmp_path / "bench/subjects"
    subjects.mkdir(parents=True)
    (subjects / "trellis.py").touch()
    left_out = beside._unknown_to(Checkout(tmp_path, frozenset()))
    with ours_alone(left_out):
        assert present("trellis", "workflows", "peer_dbos", "floor_postgres") == ["trellis"]
    assert "floor_postgres" in present("floor_postgres")
