"""The compose file and what `prepare.sh` makes for it."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.shipped import COMPOSE, PINNED, compose_file, environment_file, interpolated, is_of_trellis
from trellis.app.wiring import read_key
from trellis.bus.safety.policy import read_policy_file

OWN_USER = {"temporal"}
"""Services whose image names a user that is not root, and needs it."""
NEVER_RUN = {"migrate", "migrate-nlm", "bucket"}
"""Services that end by themselves."""


def services() -> dict[str, dict[str, Any]]:
    return compose_file()["services"]


def test_every_image_has_a_version():
    for name, service in services().items():
        assert PINNED.fullmatch(service["image"]), name


def test_nothing_runs_as_root_and_nothing_gains_privileges(compose_folder: Path):
    variables = environment_file(compose_folder / ".env")
    for name, service in services().items():
        assert "no-new-privileges:true" in service["security_opt"], name
        if name not in OWN_USER:
            user, _, group = interpolated(service["user"], variables).partition(":")
            assert min(int(user), int(group)) > 0, name


def test_processes_of_trellis_write_to_their_volumes_and_tmp_alone_and_have_time_to_drain():
    for name, service in services().items():
        if is_of_trellis(service):
            assert service["read_only"], name
            assert service["cap_drop"] == ["ALL"], name
            assert [place.split(":")[0] for place in service["tmpfs"]] == ["/tmp"], name
            assert int(service["stop_grace_period"].removesuffix("s")) > 35, name


def test_only_this_machine_reaches_the_published_ports():
    published = [port for service in services().values() for port in service.get("ports", [])]
    assert published
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []


def test_memory_is_mounted_where_a_role_uses_it():
    from trellis.cli.up_process import uses_memory

    for name, service in services().items():
        if is_of_trellis(service) and "--roles" in service["command"]:
            mounted = any("/var/lib/trellis/memory" in volume for volume in service.get("volumes", []))
            assert mounted == uses_memory(frozenset(service["command"][2].split(","))), name


def test_every_mounted_file_and_every_service_that_is_waited_for_exists(compose_folder: Path):
    declared = compose_file()["secrets"]
    for name, service in services().items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            base = COMPOSE if source.startswith("..") else compose_folder
            assert (base / source).exists(), (name, source)
        assert set(service.get("secrets", [])) <= set(declared), name
        assert set(service.get("depends_on", [])) <= set(services()), name
    for secret in declared.values():
        assert (compose_folder / secret["file"]).is_file(), secret


def test_prometheus_reads_every_process_and_the_rules_that_are_shipped():
    read = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    ((targets,),) = [[one["targets"] for one in job["static_configs"]] for job in read["scrape_configs"]]
    running = {name for name, one in services().items() if is_of_trellis(one)} - NEVER_RUN
    assert sorted(targets) == sorted(f"{name}:8430" for name in running)
    mounts = services()["prometheus"]["volumes"]
    assert "../prometheus/trellis-rules.yml:/etc/prometheus/trellis-rules.yml:ro" in mounts
    assert read["rule_files"] == ["trellis-rules.yml"]
    assert "../grafana/trellis.json:/etc/grafana/dashboards/trellis.json:ro" in services()["grafana"]["volumes"]


def test_prepared_keys_are_ones_that_the_program_takes_and_a_second_run_changes_nothing(
    compose_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    owner = (compose_folder / "secrets" / "token.key").stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert len({read_key(compose_folder / "secrets" / name) for name in ("token.key", "callback.key")}) == 2
    before = {path: path.read_bytes() for path in (compose_folder / ".env", *(compose_folder / "secrets").iterdir())}
    subprocess.run([compose_folder / "prepare.sh"], check=True, capture_output=True, timeout=60)
    assert {
        path: path.read_bytes() for path in (compose_folder / ".env", *(compose_folder / "secrets").iterdir())
    } == before
    assert [path for path in before if path.stat().st_mode & 0o077] == []


def test_the_kernels_certificate_is_signed_for_its_name_by_the_fleets_authority(compose_folder: Path):
    secrets = compose_folder / "secrets"
    for host in ("safety-kernel", "localhost"):
        check = ["openssl", "verify", "-CAfile", secrets / "ca.pem", "-verify_hostname", host, secrets / "kernel.pem"]
        subprocess.run(check, check=True, capture_output=True, timeout=30)


def test_the_shipped_policy_is_one():
    assert read_policy_file(COMPOSE / "policy.toml").rules


def test_required_variables_are_exactly_those_that_are_prepared(compose_folder: Path):
    text = (COMPOSE / "compose.yaml").read_text()
    required = set(re.findall(r"\$\{(\w+):\?", text))
    used = set(re.findall(r"\$\{(\w+)", text)) - set(re.findall(r"\$\{(\w+):-", text))
    assert required == used == set(environment_file(compose_folder / ".env"))
