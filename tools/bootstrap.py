"""Makes `.venv/` from the locked requirement files. Needs python3 with pip or venv, and nothing else.

    python3 tools/bootstrap.py [run|dev|bench]    make or repair the environment up to that level
    python3 tools/bootstrap.py lock [--upgrade]   compile the requirement files again

What holds:
- every file that is installed is named by hash in `requirements/`; no address is written anywhere, so the
  package index, its certificate and its proxy are the ones pip is set up with on this machine;
- a lock names the files of every platform: it is compiled without its old output, because uv keeps the hashes that
  it finds there, and `tools/check_locks.py` looks for the files of each platform and Python;
- levels only rise: asking for `run` in a `bench` environment leaves it a `bench` environment;
- a stamp over the locks, `pyproject.toml`, the interpreter and the checkout's place is written last, so an
  interrupted, moved or stale environment is repaired by the next call and a good one costs a few milliseconds.
"""

from __future__ import annotations  # an older python3 must get as far as being told that it is too old

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
DEV = ROOT / ".dev"
BOOT = DEV / "boot"
VENV = ROOT / ".venv"
STAMP = VENV / "trellis-stamp.json"
LEVELS = ("run", "dev", "bench")
PYTHON_MIN = (3, 11)
APT_LINE = "sudo apt-get install -y python3 python3-pip python3-venv"

# pip setting -> the variable by which uv takes the same thing.
PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}


class Unmet(Exception):
    """This machine lacks something that only its owner can install."""


def main(arguments: list[str]) -> int:
    if sys.version_info < PYTHON_MIN:
        raise Unmet(f"python3 is {sys.version.split()[0]}; {'.'.join(map(str, PYTHON_MIN))} or newer is needed")
    command = arguments[0] if arguments else "dev"
    if command == "lock":
        with one_at_a_time():
            lock(uv(), upgrade="--upgrade" in arguments)
        return 0
    if command not in LEVELS:
        print(f"unknown level {command!r}; choose one of {', '.join(LEVELS)} or lock", file=sys.stderr)
        return 2
    if not is_ready(command):
        with one_at_a_time():
            if not is_ready(command):
                build(command)
    return 0


# -- the environment ---------------------------------------------------------------------------------------------


def is_ready(level: str) -> bool:
    stamp = read_stamp()
    installed = stamp.get("level")
    if installed not in LEVELS or LEVELS.index(installed) < LEVELS.index(level):
        return False
    return stamp.get("fingerprint") == fingerprint(installed) and works(VENV / "bin" / "python")


def build(level: str) -> None:
    started = time.monotonic()
    installed = read_stamp().get("level")
    if installed in LEVELS:
        level = max(level, installed, key=LEVELS.index)
    print(f"Preparing .venv ({level}) …", file=sys.stderr, flush=True)
    STAMP.unlink(missing_ok=True)
    tool = uv()
    if installed is None or not made_here() or not works(VENV / "bin" / "python"):
        shutil.rmtree(VENV, ignore_errors=True)  # half made, moved or broken: nothing in it can be trusted
        run([tool, "venv", "--quiet", "--python", sys.executable, "--prompt", "trellis", VENV])
    python = VENV / "bin" / "python"
    lockfile = REQUIREMENTS / f"{level}.txt"
    # The suite starts many interpreters at once: what each of them loads is compiled here, once and on every core.
    compiled = [] if level == "run" else ["--compile-bytecode"]
    run([tool, "pip", "sync", "--quiet", "--python", python, "--require-hashes", *compiled, lockfile])
    run(
        [tool, "pip", "install", "--quiet", "--python", python, "--no-deps", "--no-build-isolation", "--editable", ROOT]
    )
    STAMP.write_text(json.dumps({"level": level, "fingerprint": fingerprint(level), "root": str(ROOT)}))
    print(f"Ready in {time.monotonic() - started:.1f} s.", file=sys.stderr, flush=True)


def fingerprint(level: str) -> str:
    digest = hashlib.sha256()
    for part in (REQUIREMENTS / f"{level}.txt", ROOT / "pyproject.toml", Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(f"{sys.version_info[:2]} {ROOT}".encode())
    return digest.hexdigest()


def read_stamp() -> dict[str, str]:
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def made_here() -> bool:
    """Scripts inside an environment hold its absolute path: one that was moved or copied is made anew."""
    activate = VENV / "bin" / "activate"
    return activate.is_file() and str(VENV) in activate.read_text()


def works(python: Path) -> bool:
    probe = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    try:
        return subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


# -- uv ----------------------------------------------------------------------------------------------------------


def uv() -> Path:
    """The locked uv, inside the checkout: nothing of the machine's own Python is touched."""
    lockfile = REQUIREMENTS / "boot.txt"
    wanted = hashlib.sha256(lockfile.read_bytes()).hexdigest()
    stamp, tool = BOOT / "stamp", BOOT / "bin" / "uv"
    if stamp.is_file() and stamp.read_text() == wanted and tool.is_file():
        return tool
    shutil.rmtree(BOOT, ignore_errors=True)
    pip = pip_command()
    options = ["--quiet", "--disable-pip-version-check", "--no-warn-script-location", "--root-user-action=ignore"]
    run([*pip, "install", *options, "--no-deps", "--require-hashes", "--target", BOOT, "-r", lockfile])
    stamp.write_text(wanted)
    return tool


def pip_command() -> list[str | Path]:
    if succeeds([sys.executable, "-m", "pip", "--version"]):
        return [sys.executable, "-m", "pip"]
    helper = DEV / "pip"
    if not succeeds([helper / "bin" / "python", "-m", "pip", "--version"]):
        shutil.rmtree(helper, ignore_errors=True)
        if not succeeds([sys.executable, "-m", "venv", helper]):
            raise Unmet("python3 has neither pip nor a working venv")
    return [helper / "bin" / "python", "-m", "pip"]


def uv_environment() -> dict[str, str]:
    environment = dict(os.environ)
    for key, value in pip_settings().items():
        if key in PIP_TO_UV:
            environment.setdefault(PIP_TO_UV[key], value.replace(" ", ",") if key == "find-links" else value)
    environment["UV_PYTHON_DOWNLOADS"] = "never"
    environment["UV_NO_PROGRESS"] = "1"
    # Every file is checked against its hash, so it does not matter which index offers it.
    environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    environment.pop("VIRTUAL_ENV", None)
    if not can_write(Path.home()):
        environment.setdefault("UV_CACHE_DIR", str(DEV / "cache"))
    return environment


def pip_settings() -> dict[str, str]:
    """The settings pip has in force: files first, `PIP_*` variables over them; pip's own answer, not a guess."""
    listing = subprocess.run([*pip_command(), "config", "list"], capture_output=True, text=True, check=False).stdout
    settings: dict[str, str] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in {"global", "install", ":env:"} and len(value) > 2:
            settings[key.replace("_", "-")] = value[1:-1].replace("\\n", " ")
    for key in PIP_TO_UV:
        from_environment = os.environ.get("PIP_" + key.upper().replace("-", "_"))
        if from_environment:
            settings[key] = from_environment
    return settings


# -- locks -------------------------------------------------------------------------------------------------------


def lock(tool: Path, *, upgrade: bool) -> None:
    """Resolve `bench` first and hold the smaller ones to it, so that a package has one version in every level."""
    held = ["--constraints", "requirements/bench.txt"]
    compile_lock(tool, "bench", ["pyproject.toml", "--all-extras", "--group", "bench"], upgrade=upgrade)
    compile_lock(tool, "dev", ["pyproject.toml", "--all-extras", "--group", "dev", *held], upgrade=upgrade)
    compile_lock(tool, "run", ["pyproject.toml", "--all-extras", "--group", "build", *held], upgrade=upgrade)
    compile_lock(tool, "boot", ["requirements/boot.in"], upgrade=upgrade)


def compile_lock(tool: Path, name: str, source: list[str], *, upgrade: bool) -> None:
    """Write one lock anew. uv prefers the versions, and keeps the hashes, of the output file that it finds.

    Hence it finds the old versions without their hashes, and fetches the hashes of all files of each release.
    """
    lockfile = REQUIREMENTS / f"{name}.txt"
    fresh = DEV / f"{name}.lock"
    fresh.write_text("" if upgrade else pins(lockfile))
    options = ["--quiet", "--universal", "--python-version", ".".join(map(str, PYTHON_MIN)), "--generate-hashes"]
    options += ["--no-emit-index-url", "--no-emit-find-links", "--no-header", "--no-annotate"]
    run([tool, "pip", "compile", *options, "-o", fresh, *source])
    fresh.replace(lockfile)
    print(f"requirements/{name}.txt", file=sys.stderr)


def pins(lockfile: Path) -> str:
    """The versions of a lock without their hashes."""
    lines = lockfile.read_text().splitlines() if lockfile.is_file() else []
    return "".join(line.rstrip("\\ ") + "\n" for line in lines if line and not line.startswith((" ", "#")))


# -- the machine -------------------------------------------------------------------------------------------------


def run(command: list[str | Path]) -> None:
    environment = uv_environment() if command[0] == BOOT / "bin" / "uv" else None
    if environment and "compile" in command:
        for local in ("UV_INDEX", "UV_FIND_LINKS"):
            environment.pop(local, None)  # hashes of files that only this machine has are of no use to another
    finished = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if finished.returncode:
        raise SystemExit(f"failed ({finished.returncode}): {' '.join(map(str, command))}")


def succeeds(command: list[str | Path]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def can_write(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    DEV.mkdir(exist_ok=True)
    with (DEV / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Unmet as missing:
        print(f"{missing}. Install it, then try again:\n  {APT_LINE}", file=sys.stderr)
        sys.exit(2)
