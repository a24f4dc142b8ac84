"""What the files in `deploy/` start, with values for what their users fill in."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.shipped import (
    ShippedProcess,
    compose_processes,
    environment_file,
    helm_processes,
    prepare,
    systemd_processes,
)

LEDGERS = {
    "TRELLIS_LEDGER": "postgresql://trellis:password@db.example:5432/trellis",
    "TRELLIS_NLM_LEDGER": "postgresql://trellis:password@db.example:5432/trellis_nlm",
}
SECRETS = {"trellis-settings": LEDGERS, "trellis-migration": LEDGERS}
WAYS = ("compose", "systemd", "helm")


@pytest.fixture(scope="session")
def compose_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder of the compose file, with what `prepare.sh` made in it."""
    folder = tmp_path_factory.mktemp("compose")
    prepare(folder)
    return folder


@pytest.fixture
def processes_of(compose_folder: Path) -> Callable[[str], list[ShippedProcess]]:
    """The processes of Trellis that a way to deploy it starts."""

    def processes(way: str) -> list[ShippedProcess]:
        match way:
            case "compose":
                return compose_processes(environment_file(compose_folder / ".env"))
            case "systemd":
                return systemd_processes()
            case _:
                return helm_processes("all", SECRETS)

    return processes
