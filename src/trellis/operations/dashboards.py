"""The Grafana dashboard and the Prometheus alerting rules, made from the table of metrics.

Whoever adds a metric puts it into a section below; a test fails for a metric without one. `trellis metrics --grafana`
and `--rules` print what this module makes, and the files in `deploy/` are its output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from trellis.engine import metrics as m
from trellis.engine.alerts import REPORT_TYPE_PREFIX
from trellis.engine.metrics import Metric, MetricKind

RATE = "$__rate_interval"
WIDTH, HEIGHT, COLUMNS = 8, 8, 24
DOCS = "docs/runbooks"

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Alerts": (m.ALERTS,),
    "Queues": (m.READY, m.AGE, m.HELD, m.SCHEDULED, m.BLOCKED, m.PAUSED, m.WORKERS),
    "Jobs": (
        m.SUBMITTED,
        m.CLAIMED,
        m.SETTLED,
        m.HELD_SECONDS,
        m.RETRIES,
        m.FAILURES,
        m.DEAD_LETTERS,
        m.DLQ_COUNT,
    ),
    "Leases and sweeps": (
        m.RENEWALS,
        m.RENEWALS_REFUSED,
        m.LEASE_EXPIRIES,
        m.CLAIM_CONFLICTS,
        m.SWEEP_AGE,
        m.SWEPT,
        m.REMOVED,
    ),
    "Feed and gateway": (m.FEED_LAG, m.LISTENERS, m.HTTP_SECONDS),
    "Agents": (m.STEP_CALL_SECONDS,),
    "NLM backend": (
        m.NLM_JOBS,
        m.NLM_PROVIDER_CALLS,
        m.NLM_PROVIDER_SECONDS,
        m.NLM_STAGE_SECONDS,
        m.NLM_CALLBACKS,
        m.NLM_WAITING,
        m.NLM_HELD,
        m.NLM_CIRCUIT_OPEN,
    ),
    "Stores and services": (
        m.LEDGER_SECONDS,
        m.LEDGER_ERRORS,
        m.LEDGER_CALLS,
        m.STORE_SECONDS,
        m.STORE_ERRORS,
        m.PASSES,
        m.SOURCES_DOWN,
    ),
}
"""Every metric, in the order in which an operator asks."""

PER_PROCESS = frozenset({m.LISTENERS, m.LEDGER_CALLS, m.SOURCES_DOWN, m.NLM_CIRCUIT_OPEN})
"""Gauges that each process has for itself. The others are read from the ledger, and equal on every process."""

DEAD = (
    f"((sum(increase({m.DEAD_LETTERS.sample}[1h])) or vector(0)) + "
    f'(sum(increase({m.SWEPT.sample}{{kind=~"exhausted|deadlines"}}[1h])) or vector(0)))'
)
"""Dead letters of the last hour: those that holders wrote, and those of jobs whose holder died or was too late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertingRule:
    """One rule for Prometheus: when it fires, for how long the cause must last, and what to do."""

    name: str
    expr: str
    for_: str
    severity: str
    summary: str
    runbook: str


RULES: tuple[AlertingRule, ...] = (
    AlertingRule(
        name="TrellisJobsWait",
        expr=f'max by (type, lifecycle) ({m.AGE.sample}{{type!~"{REPORT_TYPE_PREFIX}.+"}}) > 300',
        for_="1m",
        severity="warning",
        summary="A job of type {{ $labels.type }} has been ready for over 5 minutes",
        runbook="jobs-wait.md",
    ),
    AlertingRule(
        name="TrellisDeadLetterRate",
        expr=f"{DEAD} > 0.01 * clamp_min(sum(increase({m.SETTLED.sample}[1h])), 1) and {DEAD} >= 3",
        for_="5m",
        severity="critical",
        summary="More than 1 % of the settled jobs became dead letters in the last hour",
        runbook="dead-letters.md",
    ),
    AlertingRule(
        name="TrellisNobodySweeps",
        expr=f"min({m.SWEEP_AGE.sample}) > 60",
        for_="1m",
        severity="critical",
        summary="No sweep for over a minute: lost jobs are not taken back, and timers do not fire",
        runbook="nobody-sweeps.md",
    ),
    AlertingRule(
        name="TrellisLeasesExpire",
        expr=f"sum(increase({m.LEASE_EXPIRIES.sample}[10m])) > 5",
        for_="0m",
        severity="warning",
        summary="More than 5 leases were lost in 10 minutes: workers die or stand still",
        runbook="leases-expire.md",
    ),
    AlertingRule(
        name="TrellisFollowerBehind",
        expr=f"max by (follower) ({m.FEED_LAG.sample}) > 60",
        for_="2m",
        severity="warning",
        summary="{{ $labels.follower }} has not read an event that is over a minute old",
        runbook="follower-behind.md",
    ),
    AlertingRule(
        name="TrellisLedgerErrors",
        expr=f'sum(rate({m.LEDGER_ERRORS.sample}{{code=~"UPSTREAM_UNAVAILABLE|OUTCOME_UNKNOWN"}}[5m])) > 0.1',
        for_="2m",
        severity="critical",
        summary="The ledger does not answer",
        runbook="ledger-down.md",
    ),
    AlertingRule(
        name="TrellisObjectStoreErrors",
        expr=f"sum(rate({m.STORE_ERRORS.sample}[5m])) > 0.1",
        for_="5m",
        severity="critical",
        summary="The object store refuses or does not answer",
        runbook="object-store-down.md",
    ),
    AlertingRule(
        name="TrellisServiceFails",
        expr=f'sum by (service) (rate({m.PASSES.sample}{{result="failed"}}[5m])) > 0.05',
        for_="5m",
        severity="warning",
        summary="Passes of the service {{ $labels.service }} fail",
        runbook="service-fails.md",
    ),
)


def alerting_rules(runbooks: str = DOCS) -> dict[str, Any]:
    """The rules as Prometheus reads them from YAML. `runbooks` is the address of the folder with their pages."""
    rules = [
        {
            "alert": rule.name,
            "expr": rule.expr,
            "for": rule.for_,
            "labels": {"severity": rule.severity},
            "annotations": {"summary": rule.summary, "runbook_url": f"{runbooks.rstrip('/')}/{rule.runbook}"},
        }
        for rule in RULES
    ]
    return {"groups": [{"name": "trellis", "rules": rules}]}


RELATIVE_RUNBOOKS = """\
# Made by `trellis metrics --rules`. Each runbook_url is a path in a checkout of Trellis. A gateway serves
# these pages, too: `trellis metrics --rules --runbooks https://gateway.example/runbooks` writes their whole addresses.
"""


def alerting_rules_text(runbooks: str | None = None) -> str:
    """The rules as a file for Prometheus. Without the address of the runbooks, a comment says how to give it."""
    rules = yaml.safe_dump(alerting_rules(runbooks or DOCS), sort_keys=False, width=120)
    return rules if runbooks else RELATIVE_RUNBOOKS + rules


def grafana_dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it: a row for each section, a panel for each metric."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, section in SECTIONS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        top += 1
        for number, metric in enumerate(section):
            place = {"x": number * WIDTH % COLUMNS, "y": top + number * WIDTH // COLUMNS * HEIGHT}
            panels.append(_panel(len(panels) + 1, metric, place | {"w": WIDTH, "h": HEIGHT}))
        top += -(-len(section) * WIDTH // COLUMNS) * HEIGHT
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "Trellis",
        "uid": "trellis",
        "tags": ["trellis"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(number: int, metric: Metric, place: dict[str, int]) -> dict[str, Any]:
    unit = "s" if metric.name.endswith("_seconds") else "ops" if metric.kind is MetricKind.COUNTER else "short"
    return {
        "id": number,
        "type": "timeseries",
        "title": metric.name.removeprefix("trellis_"),
        "description": metric.help,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expr, "legendFormat": legend}
            for at, (expr, legend) in enumerate(queries(metric))
        ],
    }


def reference() -> str:
    """The page docs/reference/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Written from the table of metrics by `trellis metrics --reference`; the suite compares.",
        "[Monitor an instance](../how-to/monitor.md) says where to read them.",
    ]
    for title, section in SECTIONS.items():
        lines += ["", f"## {title}", "", "| Name | Kind | Labels | Meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{metric.sample}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
            for metric in section
        ]
    return "\n".join(lines) + "\n"


def queries(metric: Metric) -> Sequence[tuple[str, str]]:
    """The queries of a metric's panel, each with its legend."""
    by = f" by ({', '.join(metric.labels)})" if metric.labels else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or metric.name.removeprefix("trellis_")
    if metric.kind is MetricKind.COUNTER:
        return [(f"sum{by} (rate({metric.sample}[{RATE}]))", legend)]
    if metric.kind is MetricKind.GAUGE:
        return [(f"{'sum' if metric in PER_PROCESS else 'max'}{by} ({metric.sample})", legend)]
    buckets = f"sum by ({', '.join((*metric.labels, 'le'))}) (rate({metric.sample}_bucket[{RATE}]))"
    return [(f"histogram_quantile({share}, {buckets})", f"p{share[2:]} {legend}") for share in ("0.50", "0.95")]
