"""What every way to deploy a fleet has in common: the roles, their commands, their settings and their probes."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from tests.deploy.conftest import WAYS
from tests.deploy.shipped import ShippedProcess, of_kind, parsed
from trellis.app.roles import HELPERS
from trellis.app.settings import read_settings
from trellis.cli.up import _wanted_roles as wanted_roles  # pyright: ignore[reportPrivateUsage]
from trellis.cli.up_process import ROLES
from trellis.http_server.health import ProcessHealth, health_listener

ProcessesOf = Callable[[str], list[ShippedProcess]]


@pytest.mark.requirement("D64")
@pytest.mark.parametrize("way", WAYS)
def test_every_role_is_deployed_exactly_once(way: str, processes_of: ProcessesOf):
    deployed = Counter(role for process in processes_of(way) for role in process.roles)
    assert deployed == Counter(ROLES)
    assert set(HELPERS.values()) <= set(deployed), "a service of a role that is not deployed would never run"


@pytest.mark.parametrize("way", WAYS)
def test_every_command_line_is_one_that_the_program_takes(way: str, processes_of: ProcessesOf):
    for process in processes_of(way):
        name, *words = process.arguments
        context = parsed(name, words)
        assert not context.args, process
        if process.roles:
            assert wanted_roles(context.params["roles"]) == set(process.roles)


@pytest.mark.parametrize("way", WAYS)
def test_every_setting_exists_and_has_a_value_that_is_accepted(way: str, processes_of: ProcessesOf, tmp_path: Path):
    for process in processes_of(way):
        warnings: list[str] = []
        settings = read_settings(process.environment, tmp_path, warn=warnings.append)
        assert warnings == [], process.name
        assert settings.ledger.startswith("postgresql://"), process.name


@pytest.mark.parametrize("way", WAYS)
def test_no_two_processes_of_one_machine_want_the_same_health_address(way: str, processes_of: ProcessesOf):
    addresses = Counter(process.environment["TRELLIS_HEALTH_ADDRESS"] for process in processes_of(way) if process.roles)
    if way == "systemd":  # containers have an address each
        assert max(addresses.values()) == 1
    else:
        assert set(addresses) == {"0.0.0.0:8430"}


async def test_the_paths_of_all_probes_are_answered():
    probes = {
        probe["httpGet"]["path"]
        for deployment in of_kind("all", "Deployment")
        for container in deployment["spec"]["template"]["spec"]["containers"]
        for name, probe in container.items()
        if name.endswith("Probe")
    }
    (monitor,) = of_kind("all", "ServiceMonitor")
    assert probes == {"/system/live", "/system/ready"}
    async with health_listener("127.0.0.1:0", ProcessHealth({})) as address, httpx2.AsyncClient() as client:
        for path in (*probes, monitor["spec"]["endpoints"][0]["path"]):
            assert (await client.get(f"{address}{path}")).status_code == 200
