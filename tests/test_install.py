"""The wheel, installed by a stranger: outside the checkout, without any extra."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import bootstrap

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
INSTALL_S = 300
COMMAND_S = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """A virtual environment that holds the wheel and what the wheel itself asks for."""

    bin: Path

    def environment(self, **settings: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRELLIS_", "PYTHON"))}
        return kept | {"PATH": f"{self.bin}{os.pathsep}{kept['PATH']}"} | settings

    def trellis(self, *arguments: str, cwd: Path, **settings: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.bin / "trellis", *arguments],
            cwd=cwd,
            env=self.environment(**settings),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, ROOT / "tools" / "console.py", "build", "--strict"], check=True, timeout=INSTALL_S)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=INSTALL_S)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel beside links to the packages of this environment that the wheel asks for: they are downloaded and compiled already.

    The long proof lets pip install all of it.
    """
    place, tool = tmp_path_factory.mktemp("environment") / "venv", bootstrap.uv()
    install = ["pip", "install", "--quiet", "--no-deps", "--python", place / "bin" / "python", wheel]
    # One file of this machine is installed: where pip would download from does not matter, and to ask it costs seconds.
    offline = {**os.environ, "UV_OFFLINE": "1", "UV_NO_CACHE": "1"}
    for arguments in (["venv", "--quiet", "--python", sys.executable, place], install):
        subprocess.run([tool, *arguments], env=offline, check=True, timeout=INSTALL_S)
    (packages,) = place.glob("lib/python*/site-packages")
    (itself,) = metadata.distributions(path=[str(packages)], name="trellis-engine")
    for distribution in needed_by(itself):
        link(distribution, packages)
    return Installation(bin=place / "bin")


def needed_by(distribution: metadata.Distribution, extras: frozenset[str] = frozenset()) -> list[metadata.Distribution]:
    """What must be installed with it, of this environment; each in a version that whoever needs it takes."""
    needed: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}

    def add(one: metadata.Distribution, extras: frozenset[str]) -> None:
        for requirement in map(Requirement, one.requires or ()):
            if not _applies(requirement, extras):
                continue
            wanted = metadata.distribution(requirement.name)
            assert requirement.specifier.contains(wanted.version, prereleases=True), f"{one.name} wants {requirement}"
            key = wanted.name, frozenset(requirement.extras)
            if key not in needed:
                needed[key] = wanted
                add(wanted, key[1])

    add(distribution, extras)
    return list({one.name: one for one in needed.values()}.values())


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in ("", *extras))


def link(distribution: metadata.Distribution, packages: Path) -> None:
    """Link its packages and modules into this folder. A folder that several distributions share is made, and what is in it linked."""
    files = {file for file in distribution.files or () if ".." not in file.parts and "__pycache__" not in file.parts}
    whole = {file.parent for file in files if file.name == "__init__.py" or file.parent.suffix == ".dist-info"}
    for file in files:
        top = next((parent for parent in reversed(file.parents) if parent in whole), file)
        place = packages / top
        if not place.is_symlink():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(str(distribution.locate_file(top)))


def test_the_wheel_serves_the_demo_outside_the_checkout(installation: Installation, tmp_path: Path) -> None:
    serves_the_demo(installation, tmp_path)


@pytest.mark.prove
def test_plain_pip_installs_what_serves_the_demo(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", place], check=True, timeout=INSTALL_S)
    subprocess.run([place / "bin" / "pip", "install", "--quiet", wheel], check=True, timeout=INSTALL_S)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    serves_the_demo(Installation(bin=place / "bin"), folder)


def serves_the_demo(installation: Installation, folder: Path) -> None:
    """`up --demo` in an empty folder, one run of an agent beside it, and an orderly end."""
    command = [installation.bin / "trellis", "up", "--demo", "--port", str(free_port())]
    with subprocess.Popen(
        command, cwd=folder, env=installation.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            lines: list[str] = []
            while not lines or "stops" not in lines[-1]:
                lines.append(server.stdout.readline())
                assert lines[-1], f"it ended: {''.join(lines)}"
            link = next(line.split()[1] for line in lines if line.startswith("console "))
            with urllib.request.urlopen(link) as page:
                assert b'<div id="root">' in page.read(), "the wheel brings the console"
            ran = installation.trellis("run", "archivist-violin", "--watch", cwd=folder)
            assert ran.returncode == 0, ran.stderr
            proposals = installation.trellis("proposals", "--json", cwd=folder)
            assert '"job_id"' in proposals.stdout, proposals.stderr
        finally:
            server.send_signal(signal.SIGTERM)
            rest, _ = server.communicate(timeout=COMMAND_S)
    assert server.returncode == 0, rest


@pytest.mark.requirement("OBS-4")
def test_the_wheel_has_the_page_that_an_alert_names(wheel: Path, installation: Installation, tmp_path: Path) -> None:
    pages = {path.name: path.read_bytes() for path in (ROOT / "docs/runbooks").glob("*.md")}
    with zipfile.ZipFile(wheel) as packed:
        shipped = {name for name in packed.namelist() if "/runbook_pages/" in name}
        assert {Path(name).name: packed.read(name) for name in shipped} == pages
    printed = installation.trellis("alerts", "runbook", "jobs-wait", cwd=tmp_path)
    assert printed.stdout.encode() == pages["jobs-wait.md"], printed.stderr


def test_the_wheel_has_the_built_console(wheel: Path) -> None:
    folder = ROOT / "src/trellis/gateway/console_files"
    built = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as packed:
        shipped = {
            name: packed.read(name) for name in packed.namelist() if name.startswith("trellis/gateway/console_files/")
        }
    assert {name.partition("console_files/")[2]: body for name, body in shipped.items()} == built
    assert "index.html" in built


MISSING = {
    "postgres": (("migrate", "--ledger", "postgresql://127.0.0.1:1/nobody"), {}),
    "s3": (("up", "--port", "0"), {"TRELLIS_OBJECTS": "s3://bucket?endpoint=http://127.0.0.1:1"}),
    "bus": (("up", "--port", "0"), {"TRELLIS_BUS": "nats://127.0.0.1:1"}),
}


@pytest.mark.parametrize("extra", MISSING)
def test_a_command_that_needs_an_extra_names_it(extra: str, installation: Installation, tmp_path: Path) -> None:
    arguments, settings = MISSING[extra]
    refused = installation.trellis(*arguments, cwd=tmp_path, **settings)
    assert refused.returncode == 2, refused.stderr
    assert f"pip install 'trellis-engine[{extra}]'" in refused.stderr
    assert "Traceback" not in refused.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
