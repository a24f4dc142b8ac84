"""The dashboard and the alerting rules speak of metrics that exist, and are the files that people install."""

import json
import re
from pathlib import Path

import yaml

from trellis.engine.metrics import METRICS, MetricKind, Sample, exposition
from trellis.operations.alerts import ALERTS
from trellis.operations.dashboards import (
    RULES,
    SECTIONS,
    alerting_rules,
    alerting_rules_text,
    grafana_dashboard,
    queries,
    reference,
)
from trellis.operations.runbooks import runbook

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\btrellis_[a-z_]+")
GRID = 24


def shown_names() -> set[str]:
    """The names of all samples that a process can show."""
    samples = [
        Sample(metric, ("x",) * len(metric.labels), 1.0, (1,) * (len(metric.buckets) + 1) if metric.buckets else ())
        for metric in METRICS
    ]
    return set(NAME.findall("\n".join(re.findall(r"^trellis_\w+", exposition(samples).decode(), re.MULTILINE))))


def test_every_metric_has_one_panel_and_every_query_names_a_metric_that_is_shown():
    shown = shown_names()
    panels = [panel for panel in grafana_dashboard()["panels"] if panel["type"] == "timeseries"]
    assert [panel["description"] for panel in panels] == [one.help for part in SECTIONS.values() for one in part]
    assert sorted(panel["description"] for panel in panels) == sorted(metric.help for metric in METRICS)
    asked = [target["expr"] for panel in panels for target in panel["targets"]] + [rule.expr for rule in RULES]
    names = {name for expr in asked for name in NAME.findall(expr)}
    assert names <= shown
    assert {metric.name for metric in METRICS} <= {re.sub(r"_(total|bucket)$", "", name) for name in names}


def test_panels_do_not_cover_each_other():
    taken: set[tuple[int, int]] = set()
    for panel in grafana_dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < GRID
        taken |= cells


def test_rates_are_asked_of_counters_and_quantiles_of_histograms():
    for metric in METRICS:
        for expr, _ in queries(metric):
            assert ("rate(" in expr) == (metric.kind is not MetricKind.GAUGE)
            assert ("histogram_quantile" in expr) == (metric.kind is MetricKind.HISTOGRAM)
            assert all(label in expr for label in metric.labels)


def test_every_alert_has_a_runbook():
    for rule in alerting_rules()["groups"][0]["rules"]:
        page = (ROOT / rule["annotations"]["runbook_url"]).read_text()
        assert f"`{rule['alert']}`" in page
        assert "## What to do" in page
    pages = {path.name for path in (ROOT / "docs/runbooks").glob("*.md")}
    assert pages == {rule.runbook for rule in RULES} | {alert.runbook for alert in ALERTS.values()}


def test_every_alert_is_in_the_guide_with_its_setting_its_action_and_its_runbook():
    guide = (ROOT / "docs/how-to/alerts.md").read_text()
    rows = [
        f"| `{one.name}` | {one.watches} | {'' if one.setting is None else f'`TRELLIS_{one.setting.upper()}`'} | {one.action} | "
        f"[{one.runbook}](../runbooks/{one.runbook}) |"
        for one in ALERTS.values()
    ]
    assert guide.rpartition("|---|---|---|---|---|\n")[2].splitlines() == rows
    for one in ALERTS.values():
        assert f"`{one.name}`" in runbook(one.page), "its page names it"


def test_the_files_that_people_install_are_those_that_this_version_makes():
    """`trellis metrics --grafana`, `--rules` and `--reference` write them again."""
    assert json.loads((ROOT / "deploy/grafana/trellis.json").read_text()) == grafana_dashboard()
    assert (ROOT / "deploy/prometheus/trellis-rules.yml").read_text() == alerting_rules_text()
    assert (ROOT / "docs/reference/metrics.md").read_text() == reference()
    assert yaml.safe_load(alerting_rules_text()) == alerting_rules()
