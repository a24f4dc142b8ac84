"""The table: medians, ratios and verdicts, from figures that are made up."""

from bench.table import Samples, add, markdown, render, shown, verdicts


def test_a_figure_is_shown_with_its_median_and_range():
    assert shown([3_000.0, 1_000.0, 2_000.0]) == "2,000 (1,000-3,000)"
    assert shown([4.25]) == "4.2"


def test_samples_of_several_rounds_are_kept_apart():
    samples: Samples = {}
    add(samples, {"a": 1.0})
    add(samples, {"a": 2.0, "b": 3.0})
    assert samples == {"a": [1.0, 2.0], "b": [3.0]}


def _drained(ours: float, peer: float, floor: float) -> dict[tuple[str, object], object]:
    names = {"trellis": ours, "peer_pgqueuer": peer, "floor_postgres": floor}
    samples = {f"drain1.pg.{name}": [value] for name, value in names.items()}
    return {(str(line["title"]), line["beside"]): line["met"] for line in verdicts(samples)}


def test_a_target_is_met_only_at_its_ratio():
    title = "drain, 1 worker process"
    met = _drained(ours=20_000.0, peer=10_000.0, floor=40_000.0)
    assert met[title, "drain1.pg.peer_pgqueuer"] is True
    assert met[title, "drain1.pg.floor_postgres"] is True
    missed = _drained(ours=19_999.0, peer=10_000.0, floor=40_000.0)
    assert missed[title, "drain1.pg.peer_pgqueuer"] is False
    assert missed[title, "drain1.pg.floor_postgres"] is False


def test_a_cost_is_judged_from_above_and_a_latency_against_the_peer():
    samples = {
        "wal1.pg.trellis": [1_501.0],
        "wal1.pg.peer_pgqueuer": [1_800.0],
        "latency50.pg.trellis": [4.0],
        "latency50.pg.peer_pgqueuer": [5.0],
    }
    wal, latency = verdicts(samples)
    assert (wal["met"], latency["met"]) == (False, True)


def test_the_better_thread_count_of_a_peer_is_the_peer():
    samples = {
        "drain1.sqlite.trellis": [9_000.0],
        "drain1.sqlite.peer_huey1": [1_000.0],
        "drain1.sqlite.peer_huey4": [3_000.0],
    }
    (line,) = verdicts(samples)
    assert line["other"] == 3_000.0


def test_lines_without_figures_are_left_out():
    assert render({}) == ""
    assert "single submit" not in render({"bulk.sqlite.trellis": [1.0]})


def test_a_table_is_readable_as_text():
    assert markdown(("a", "bb"), [("ccc", "d")]).splitlines() == ["| a   | bb |", "| ----|--- |", "| ccc | d  |"]


def test_runs_are_judged_beside_dbos_and_published_ones_only_shown():
    samples = {
        "runs.sqlite.runs": [500.0],
        "runs.sqlite.published": [50.0],
        "runs.sqlite.peer_dbos": [100.0],
        "cpu_runs.sqlite.runs": [1.5],
        "cpu_runs.sqlite.peer_dbos": [15.0],
    }
    lines = {str(line["title"]): line for line in verdicts(samples)}
    assert lines["4-step runs, 1 process"]["met"] is True
    assert lines["4-step runs, 1 process, published"]["met"] is None
    assert lines["CPU, 4-step runs, 1 process"]["ratio"] == 0.1
    slower = {str(line["title"]): line["met"] for line in verdicts({**samples, "runs.sqlite.runs": [499.0]})}
    assert slower["4-step runs, 1 process"] is False
