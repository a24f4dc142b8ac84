"""The Helm chart: rendered by Helm itself, and each object held against the schema of Kubernetes."""

import json
import subprocess
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
from kubernetes_validate import utils

from tests.deploy.shipped import CHART, DEPLOY, PINNED, VALUES, containers, helm, of_kind, pods, rendered
from tests.faults.platform import STOP_S
from trellis.cli.up_process import ROLES, SAFETY_KERNEL, USES_MEMORY

OLDEST, NEWEST = "1.25.0", "1.37.0"
"""The oldest version of Kubernetes that the chart names, and the newest of the schemas."""
NOT_OF_KUBERNETES = {"ServiceMonitor", "PrometheusRule"}
SCHEMA = cache(utils.schema_contents)
"""A schema is megabytes of JSON: the library reads it again for every object."""


def refused(*values: str) -> str:
    """What Helm says of values that it does not take."""
    command = [helm(), "template", "fleet", str(CHART), *(word for one in values for word in ("--set", one))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize("values", VALUES)
def test_helm_has_no_objection(values: str):
    command = [helm(), "lint", "--strict", str(CHART), "-f", str(CHART / "ci" / f"{values}-values.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "values, version", [("all", OLDEST), ("all", NEWEST), ("minimal", NEWEST), ("external", NEWEST)]
)
def test_every_object_is_one_of_kubernetes(values: str, version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(utils, "schema_contents", SCHEMA)
    for one in rendered(values):
        if one["kind"] not in NOT_OF_KUBERNETES:
            kubernetes_validate.validate(one, version, strict=True)
    names = [(one["kind"], one["metadata"]["name"]) for one in rendered(values)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("values", VALUES)
def test_pods_are_not_root_may_not_write_and_get_no_variables_of_services(values: str):
    for name, pod in pods(values):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False, name
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] > 0, name
        for one in containers(pod):
            limits = one["securityContext"]
            assert (limits["readOnlyRootFilesystem"], limits["allowPrivilegeEscalation"]) == (True, False), name
            assert limits["capabilities"] == {"drop": ["ALL"]}, name
            assert one["resources"]["requests"].keys() >= {"cpu", "memory"}, name
            assert PINNED.fullmatch(one["image"]), one["image"]


@pytest.mark.parametrize("values", VALUES)
def test_probes_and_services_name_ports_that_the_pods_have(values: str):
    by_labels = [(pod["metadata"]["labels"], pod) for _, pod in pods(values)]
    for _, pod in pods(values):
        for one in pod["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in one.get("ports", [])}
            probes = [probe["httpGet"]["port"] for key, probe in one.items() if key.endswith("Probe")]
            assert len(probes) == (3 if ports else 0), "every process that stays has all three probes"
            assert set(probes) <= set(ports)
            assert ports.get("health", 8430) == 8430, "where TRELLIS_HEALTH_ADDRESS says"
    for service in of_kind(values, "Service"):
        selector = service["spec"]["selector"].items()
        chosen = [pod for labels, pod in by_labels if selector <= labels.items()]
        assert chosen, service["metadata"]["name"]
        for pod in chosen:
            names = {port["name"] for one in containers(pod) for port in one.get("ports", [])}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


@pytest.mark.parametrize("values", VALUES)
def test_addresses_in_the_settings_are_those_of_the_services(values: str):
    (settings,) = [one["data"] for one in of_kind(values, "ConfigMap") if one["metadata"]["name"].endswith("-settings")]
    services = {
        f"{one['metadata']['name']}:{port['port']}"
        for one in of_kind(values, "Service")
        for port in one["spec"]["ports"]
    }
    own = [settings[name] for name in ("TRELLIS_GATEWAY", "TRELLIS_NLM_BACKEND", "TRELLIS_POLICY")]
    named = {address.partition("://")[2] for address in own if "fleet-trellis" in address}
    assert named <= services
    assert len(named) == (3 if values == "all" else 2)


def test_the_safety_kernel_is_deployed_on_request_and_every_other_role_always():
    deployed = {one["metadata"]["labels"]["app.kubernetes.io/component"] for one in of_kind("minimal", "Deployment")}
    assert deployed == set(ROLES) - {SAFETY_KERNEL}


@pytest.mark.parametrize("values", VALUES)
def test_memory_is_mounted_where_a_role_uses_it(values: str):
    claims = {one["metadata"]["name"] for one in of_kind(values, "PersistentVolumeClaim")} | {"shared-memory"}
    for one in of_kind(values, "Deployment"):
        role, spec = one["metadata"]["labels"]["app.kubernetes.io/component"], one["spec"]["template"]["spec"]
        mounted = [v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v]
        assert bool(mounted) == (role in USES_MEMORY), role
        assert set(mounted) <= claims
        if values == "all" and role in USES_MEMORY - {"gateway"}:
            assert "podAffinity" in spec["affinity"], "a volume of one node holds all three on it"


@pytest.mark.parametrize("values", VALUES)
def test_a_pod_has_time_to_drain_after_requests_stop_arriving(values: str):
    for one in of_kind(values, "Deployment"):
        spec = one["spec"]["template"]["spec"]
        hooks = [
            c.get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}}) for c in spec["containers"]
        ]
        waits = max(float(hook["exec"]["command"][1]) for hook in hooks)
        assert spec["terminationGracePeriodSeconds"] > waits + STOP_S


def test_disruption_budgets_leave_every_role_with_several_pods_one_at_least():
    several = {one["metadata"]["name"] for one in of_kind("all", "Deployment") if one["spec"]["replicas"] > 1}
    budgets = of_kind("all", "PodDisruptionBudget")
    workers = {name for name in several if "-worker-" in name}
    assert {one["metadata"]["name"] for one in budgets} == several - workers
    assert {one["spec"]["maxUnavailable"] for one in budgets} == {1}


def test_the_migration_runs_before_the_new_version_and_alone_has_its_login():
    (job,) = of_kind("all", "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    login = json.dumps([one["envFrom"] for one in containers(job["spec"]["template"])])
    assert "trellis-migration" in login
    others = json.dumps([pod for name, pod in pods("all") if name != job["metadata"]["name"]])
    assert "trellis-migration" not in others
    assert of_kind("external", "Job") == []


def test_rules_and_dashboard_are_those_that_are_shipped():
    for ours, theirs in (
        ("trellis-rules.yml", "prometheus/trellis-rules.yml"),
        ("trellis.json", "grafana/trellis.json"),
    ):
        assert (CHART / "files" / ours).read_text() == (DEPLOY / theirs).read_text(), f"copy deploy/{theirs}"
    (rule,) = of_kind("all", "PrometheusRule")
    assert rule["spec"]["groups"][0]["rules"]
    assert [one for one in of_kind("all", "ConfigMap") if "trellis.json" in one["data"]]


def test_values_that_mean_nothing_are_refused_by_name():
    schema: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["roles"]["properties"]) == set(ROLES)
    assert "gatway" in refused("roles.gatway.replicas=2")
    assert "LEDGER" in refused("settings.LEDGER=x")
    assert "tls.secretName" in refused("roles.safety-kernel.replicas=1")
    assert "image" in refused("workers[0].name=a,workers[0].app=b:c")
