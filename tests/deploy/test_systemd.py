"""The units of systemd."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.shipped import UNITS, environment_file, systemd_roles, unit
from tests.faults.platform import STOP_S
from trellis.cli.up_process import ROLES

SERVICES = ("trellis@.service", "trellis-migrate.service")
EXPOSURE_MAX = 2.0
"""Of 10, as `systemd-analyze security` rates a unit."""
HARDENED = {
    **{key: ["yes"] for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "DynamicUser")},
    **{key: ["yes"] for key in ("MemoryDenyWriteExecute", "RestrictNamespaces", "RestrictSUIDSGID", "LockPersonality")},
    "ProtectSystem": ["strict"],
    "CapabilityBoundingSet": [""],
}


@pytest.mark.parametrize("name", SERVICES)
def test_units_run_as_no_user_of_the_machine_and_may_write_nothing_of_it(name: str):
    values = unit(name)
    assert {key: values.get(key) for key in HARDENED} == HARDENED


def test_roles_have_an_environment_each_and_time_to_drain():
    assert {path.stem for path in (UNITS / "roles").iterdir()} == set(ROLES)
    values = unit("trellis@.service")
    assert float(values["TimeoutStopSec"][0]) > STOP_S
    assert values["User"] == values["Group"] == values["StateDirectory"], "roles share the memory of the instance"


def test_the_migration_knows_both_ledgers():
    given = environment_file(UNITS / "migrate.env.example")
    named = {name for line in unit("trellis-migrate.service")["ExecStart"] for name in re.findall(r"\$\{(\w+)\}", line)}
    assert {"TRELLIS_LEDGER", *named} == set(given)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not on this machine")
def test_systemd_accepts_the_units_and_rates_them_well(tmp_path: Path):
    program = tmp_path / "trellis"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for path in (*UNITS.glob("*.service"), *UNITS.glob("*.target")):
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/trellis/bin/trellis", str(program)))
    units = [f"trellis@{role}.service" for role in systemd_roles()]
    verify = ["systemd-analyze", "verify", "--man=no", *units, "trellis-migrate.service", "trellis.target"]
    done = subprocess.run(
        [*verify[:3], *(str(tmp_path / one) for one in verify[3:])], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in SERVICES:
        rated = subprocess.run(
            ["systemd-analyze", "security", "--offline=yes", "--no-pager", tmp_path / name],
            capture_output=True,
            text=True,
            check=True,
        )
        exposure = re.search(r"Overall exposure level .*: ([\d.]+)", rated.stdout)
        assert exposure is not None
        assert float(exposure[1]) <= EXPOSURE_MAX
