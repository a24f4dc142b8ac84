"""Refuses a lock that some platform and Python we support could not install from ready-built files.

    .venv/bin/python tools/check_locks.py

uv resolves each lock for all platforms at once and names every file of every release with its hash. For each package that
a platform needs, the lock must hold the hash of a wheel that fits the platform and the Python. What passed is remembered
in `.dev`, so the package index is asked only after a lock has changed.
"""

import hashlib
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import bootstrap
from packaging import tags
from packaging.markers import Marker
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
MANYLINUX = (
    *("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux_2_12"),
    *("manylinux2010", "manylinux_2_5", "manylinux1"),  # older and still accepted: playwright names its wheel so
)
STAMP = bootstrap.DEV / "locks-checked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """A kind of machine, as markers name it and as wheels name it."""

    system: str
    machine: str
    wheel_platforms: tuple[str, ...]

    def accepts(self, python: tuple[int, int]) -> frozenset[tags.Tag]:
        native = tags.cpython_tags(python_version=python, platforms=self.wheel_platforms)
        pure = tags.compatible_tags(
            python_version=python, interpreter=f"cp{python[0]}{python[1]}", platforms=self.wheel_platforms
        )
        return frozenset((*native, *pure))

    def environment(self, python: tuple[int, int]) -> dict[str, str]:
        version = ".".join(map(str, python))
        return {
            "sys_platform": self.system,
            "platform_machine": self.machine,
            "platform_system": "Darwin" if self.system == "darwin" else "Linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "python_version": version,
            "python_full_version": f"{version}.0",
        }


def linux(machine: str) -> Platform:
    return Platform(system="linux", machine=machine, wheel_platforms=tuple(f"{p}_{machine}" for p in MANYLINUX))


def macos(machine: str) -> Platform:
    return Platform(system="darwin", machine=machine, wheel_platforms=tuple(tags.mac_platforms((14, 0), machine)))


INTEL_MAC = macos("x86_64")
OTHERS = (linux("x86_64"), linux("aarch64"), macos("arm64"))
# The S3 server of the tests has no wheel for Intel Macs: Trellis runs there, its suite does not.
PLATFORMS: dict[str, tuple[Platform, ...]] = {
    "boot": (*OTHERS, INTEL_MAC),
    "run": (*OTHERS, INTEL_MAC),
    "dev": OTHERS,
    "bench": OTHERS,
}


def main() -> int:
    lockfiles = {level: bootstrap.REQUIREMENTS / f"{level}.txt" for level in PLATFORMS}
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for lockfile in lockfiles.values():
        digest.update(lockfile.read_bytes())
    if STAMP.is_file() and STAMP.read_text() == digest.hexdigest():
        return 0
    missing = [line for level, lockfile in lockfiles.items() for line in not_installable(level, lockfile)]
    for line in missing:
        print(line, file=sys.stderr)
    if missing:
        print("Not every platform can install these locks: run make lock, or choose versions that can", file=sys.stderr)
        return 1
    STAMP.write_text(digest.hexdigest())
    return 0


def not_installable(level: str, lockfile: Path) -> Iterator[str]:
    """One line for each package that a platform needs and cannot install from a wheel in this lock."""
    packages, accepted = resolved(lockfile), locked_hashes(lockfile.read_text())
    for platform, python in product(PLATFORMS[level], PYTHONS):
        fitting, environment = platform.accepts(python), platform.environment(python)
        for package in packages:
            if "marker" in package and not Marker(package["marker"]).evaluate(environment):
                continue
            if not has_wheel(package, fitting, accepted):
                where = f"{platform.system} {platform.machine}, Python {'.'.join(map(str, python))}"
                yield f"requirements/{level}.txt: {package['name']} {package['version']} has no locked wheel for {where}"


def has_wheel(package: dict[str, Any], fitting: frozenset[tags.Tag], accepted: frozenset[str]) -> bool:
    for wheel in package.get("wheels", ()):
        try:
            _, _, _, offered = parse_wheel_filename(wheel["url"].rpartition("/")[2])
        except InvalidWheelFilename:
            continue
        if wheel["hashes"]["sha256"] in accepted and offered & fitting:
            return True
    return False


def locked_hashes(text: str) -> frozenset[str]:
    return frozenset(part.partition(":")[2] for part in text.split() if part.startswith("--hash="))


def resolved(lockfile: Path) -> list[dict[str, Any]]:
    """Every package of a lock with all files of its release, as the package index lists them."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "pylock.toml"
        options = ["--quiet", "--universal", "--format", "pylock.toml", "--no-deps", "--no-header", "-o", output]
        python = ".".join(map(str, PYTHONS[0]))
        bootstrap.run([bootstrap.uv(), "pip", "compile", *options, "--python-version", python, lockfile])
        return tomllib.loads(output.read_text())["packages"]


if __name__ == "__main__":
    sys.exit(main())
