"""The table: medians, ratios and verdicts, from figures that are made up."""

from typing import Any

import pytest

from bench.lines import NAMES, SECTIONS, Line
from bench.table import Samples, add, markdown, render, shown, verdicts

LINES = [line for lines in SECTIONS.values() for line in lines]


def judged(samples: Samples) -> dict[tuple[str, str | None], Any]:
    """By the title and what is beside: whether the target is met."""
    return {(line["title"], line["beside"]): line["met"] for line in verdicts(samples)}


def test_a_figure_is_shown_with_its_median_and_range():
    assert shown([3_000.0, 1_000.0, 2_000.0]) == "2,000 (1,000-3,000)"
    assert shown([4.25]) == "4.2"
    assert shown([0.257]) == "0.26"


def test_samples_of_several_rounds_are_kept_apart():
    samples: Samples = {}
    add(samples, {"a": 1.0})
    add(samples, {"a": 2.0, "b": 3.0})
    assert samples == {"a": [1.0, 2.0], "b": [3.0]}


@pytest.mark.parametrize("ours, peer_met, floor_met", [(30_000.0, True, True), (29_999.0, False, False)])
def test_a_target_is_met_only_at_its_ratio(ours: float, peer_met: bool, floor_met: bool):
    figures = {"trellis": ours, "peer_pgqueuer": 10_000.0, "floor_postgres": 60_000.0}
    met = judged({f"drain1.pg.{name}": [value] for name, value in figures.items()})
    assert met["drain, 1 process", "drain1.pg.peer_pgqueuer"] is peer_met
    assert met["drain, 1 process", "drain1.pg.floor_postgres"] is floor_met


def test_each_line_names_the_best_peer_by_its_median():
    rates = {"trellis": [900.0], "peer_absurd": [100.0, 300.0, 9_000.0], "peer_dbos": [200.0], "peer_pgqueuer": [50.0]}
    (line,) = verdicts({f"single16.pg.{name}": values for name, values in rates.items()})
    assert (line["name"], line["other"], line["ratio"], line["met"]) == ("Absurd", 300.0, 3.0, True)
    assert line["others"] == {
        "single16.pg.peer_absurd": 300.0,
        "single16.pg.peer_dbos": 200.0,
        "single16.pg.peer_pgqueuer": 50.0,
    }


def test_best_peer_of_a_cost_is_the_cheapest():
    waits = {"trellis": [4.0], "peer_pgqueuer": [5.0], "peer_procrastinate": [4.0]}
    (line,) = verdicts({f"latency50.pg.{name}": values for name, values in waits.items()})
    assert (line["name"], line["met"]) == ("Procrastinate", False), "equal is not ahead"


def test_the_better_thread_count_of_a_peer_is_the_peer():
    rates = {"trellis": [9_000.0], "peer_huey1": [1_000.0], "peer_huey4": [3_000.0]}
    (line,) = verdicts({f"drain1.sqlite.{name}": values for name, values in rates.items()})
    assert (line["name"], line["other"]) == ("huey, 4 threads", 3_000.0)


def test_a_limit_judges_our_own_figure_whatever_is_beside_it():
    samples = {"http_status_cpu_us.pg.gateway": [301.0], "http_status_cpu_us.plain.floor_gateway": [100.0]}
    (poll,) = verdicts(samples)
    assert (poll["met"], poll["ratio"], poll["name"]) == (False, 3.01, "bare Starlette")
    samples = {"bus_sdk_per_s.sqlite.bus": [500.0], "bus_many_per_s.plain.floor_nats": [5_000.0]}
    (trips,) = verdicts(samples)
    assert (trips["met"], trips["ratio"]) == (True, 0.1)


def test_a_limit_with_nothing_beside_it_is_what_the_ratio_refers_to():
    (line,) = verdicts({"list_runs_calls.sqlite.lists": [3.0]})
    assert (line["name"], line["other"], line["ratio"], line["met"]) == ("the target", 2.0, 1.5, False)


def test_steps_of_two_processes_are_measured_beside_those_of_one():
    met = judged({"steps1.pg.trellis": [2_000.0], "steps2.pg.trellis": [2_001.0]})
    assert met["4 journalled steps, 2 processes beside 1", "steps1.pg.trellis"] is True


def test_every_line_has_something_to_compare_with_and_a_name_for_it():
    assert [line.title for line in LINES if not line.beside and line.limit is None] == []
    assert {name.rpartition(".")[2] for line in LINES for name in line.beside} <= NAMES.keys()


def test_every_line_of_a_complete_run_has_a_ratio():
    samples: Samples = {name: [2.0] for line in LINES for name in (line.ours, *line.beside)}
    lines = verdicts(samples)
    assert len(lines) == len(LINES)
    assert [line["title"] for line in lines if line["ratio"] is None] == []
    assert [line["title"] for line in lines if line["in_summary"] and line["met"] is None] == []


def test_summary_comes_last_and_counts_the_targets():
    samples: Samples = {"single1.pg.trellis": [10.0], "single1.pg.peer_absurd": [10.0], "bulk.pg.trellis": [10.0]}
    _, _, summary = render({**samples, "list_runs_calls.pg.lists": [3.0]}).partition("### Summary")
    assert summary.endswith("1 of 2 targets met, 1 without a peer here.")
    rows = {cells[1].strip(): cells[8].strip() for row in summary.splitlines() if len(cells := row.split("|")) > 8}
    assert rows["PostgreSQL: single submit, 1 caller"] == "met"
    assert rows["PostgreSQL: bulk submit, 500 a call"] == "no peer here"
    assert rows["PostgreSQL: ledger calls of GET /runs?limit=100"] == "MISSED"


def test_every_peer_is_shown_with_its_ratio():
    rates = {"trellis": [100.0], "peer_absurd": [50.0], "peer_dbos": [20.0]}
    _, _, peers = render({f"single1.pg.{name}": values for name, values in rates.items()}).partition("### Every peer")
    head, _, row = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in peers.splitlines() if line.startswith("|")
    ][:3]
    shown_peers = dict(zip(head, row, strict=True))
    assert (shown_peers["Absurd"], shown_peers["DBOS"]) == ("50.0 (2.00x)", "20.0 (5.00x)")


def test_nothing_beside_nothing_is_equal():
    figure = "http_fan_out_idle_cpu"
    (line,) = verdicts({f"{figure}.pg.gateway": [0.0], f"{figure}.plain.floor_gateway": [0.0]})
    assert line["ratio"] == 1.0


def test_lines_without_figures_are_left_out():
    assert render({}) == ""
    assert "single submit" not in render({"bulk.sqlite.trellis": [1.0]})


def test_a_table_is_readable_as_text():
    assert markdown(("a", "bb"), [("ccc", "d")]).splitlines() == ["| a   | bb |", "| ----|--- |", "| ccc | d  |"]


def test_runs_until_readable_are_judged_beside_the_best_peer_and_durable_ones_beside_each():
    samples = {"runs.pg.runs": [499.0], "runs.pg.published": [360.0]}
    samples |= {"runs.pg.peer_dbos": [100.0], "runs.pg.peer_absurd": [120.0]}
    met = judged(samples)
    assert met["4-step runs, 2 processes, durable", "runs.pg.peer_dbos"] is False
    assert met["4-step runs, 2 processes, durable", "runs.pg.peer_absurd"] is True
    assert met["4-step runs, 2 processes, until readable", "runs.pg.peer_absurd"] is True
    slower = judged({**samples, "runs.pg.published": [359.0]})
    assert slower["4-step runs, 2 processes, until readable", "runs.pg.peer_absurd"] is False


@pytest.mark.parametrize(
    "line, target",
    [
        (Line(title="", unit="jobs/s", ours="", at_least=1.5, aim="aim 3x"), "≥ 1.5x, aim 3x"),
        (Line(title="", unit="µs", ours="", limit=300.0), "≤ 300 µs"),
        (Line(title="", unit="bytes/job", ours="", limit=1_500.0), "≤ 1,500 bytes/job"),
        (Line(title="", unit="/s", ours="", limit=500.0), "≥ 500 /s"),
        (Line(title="", unit="ms", ours="", ahead=True), "ahead"),
        (Line(title="", unit="ms", ours=""), ""),
    ],
)
def test_a_target_is_said_in_words(line: Line, target: str):
    assert line.target == target
