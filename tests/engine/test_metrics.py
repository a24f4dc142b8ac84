"""The metrics of a process: what is declared, what is counted, and how it is written down."""

import re

from prometheus_client.parser import text_string_to_metric_families

from trellis.engine.metrics import (
    CLAIMED,
    HELD_SECONDS,
    LABEL_SETS_MAX,
    METRICS,
    OTHER,
    READY,
    WORK_BUCKETS_S,
    WORKERS,
    MetricKind,
    ProcessMetrics,
    Sample,
    exposition,
)


def parsed(samples: list[Sample]) -> dict[str, dict[tuple[str, ...], float]]:
    """What Prometheus reads, by sample name and label values in the order of the label names."""
    read: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(exposition(samples).decode()):
        for one in family.samples:
            read.setdefault(one.name, {})[tuple(one.labels.values())] = one.value
    return read


def test_every_metric_has_a_name_of_its_own_a_unit_where_it_has_one_and_a_sentence():
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 25
    for metric in METRICS:
        assert re.fullmatch(r"trellis_[a-z][a-z_]+[a-z]", metric.name), metric.name
        assert metric.help.endswith("."), metric.name
        assert (metric.kind is MetricKind.HISTOGRAM) == bool(metric.buckets), metric.name
        assert metric.kind is not MetricKind.HISTOGRAM or metric.name.endswith("_seconds"), metric.name
        assert list(metric.buckets) == sorted(metric.buckets), metric.name


def test_prometheus_reads_what_was_counted():
    metrics = ProcessMetrics()
    metrics.count(CLAIMED, 2, 'a "quoted"\n\\ type')
    metrics.count(CLAIMED, 3, 'a "quoted"\n\\ type')
    metrics.count(CLAIMED, 0, "nothing")
    metrics.observe(HELD_SECONDS, 0.25, "work", n=3)
    metrics.observe(HELD_SECONDS, 10_000.0, "work")
    read = parsed([*metrics.samples(), Sample(READY, ("work", "leased-job"), 7)])
    assert read["trellis_claims_total"] == {('a "quoted"\n\\ type',): 5}
    assert read["trellis_queue_ready"] == {("leased-job", "work"): 7}
    assert read["trellis_job_duration_seconds_count"] == {("work",): 4}
    assert read["trellis_job_duration_seconds_sum"] == {("work",): 10_000.75}
    at_most = read["trellis_job_duration_seconds_bucket"]
    assert [at_most[str(bound), "work"] for bound in WORK_BUCKETS_S[:3]] == [0, 0, 3], "a bound belongs to its bucket"
    assert (at_most["600.0", "work"], at_most["+Inf", "work"]) == (3, 4)


def test_label_sets_have_a_bound_and_what_exceeds_it_is_still_counted():
    metrics = ProcessMetrics()
    for number in range(LABEL_SETS_MAX + 50):
        metrics.count(CLAIMED, 1, f"type-{number}")
        metrics.observe(HELD_SECONDS, 1.0, f"type-{number}")
    assert metrics.value(CLAIMED, OTHER) == metrics.value(HELD_SECONDS, OTHER) == 50
    assert metrics.value(CLAIMED, "type-0") == metrics.value(HELD_SECONDS, f"type-{LABEL_SETS_MAX - 1}") == 1
    assert len(metrics.samples()) == 2 * (LABEL_SETS_MAX + 1)


def test_metrics_that_are_off_count_nothing():
    metrics = ProcessMetrics(enabled=False)
    metrics.count(CLAIMED, 1, "work")
    metrics.observe(HELD_SECONDS, 1.0, "work")
    assert metrics.samples() == []


def test_a_metric_without_a_sample_is_not_shown():
    shown = exposition([Sample(WORKERS, (), 2)]).decode()
    assert [line for line in shown.splitlines() if not line.startswith("#")] == ["trellis_workers 2.0"]
    assert shown.count("# TYPE") == 1
