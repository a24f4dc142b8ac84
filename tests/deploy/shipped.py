"""What the files in `deploy/` would start: the processes of Trellis in the compose file, the units and the chart."""

import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from trellis.cli.program import LISTED, commands_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
UNITS = DEPLOY / "systemd"
CHART = DEPLOY / "helm" / "trellis"
CREDENTIALS = "/run/credentials"
"""Where systemd puts the credentials of a unit, for these tests."""
VALUES = ("minimal", "all", "external")
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+(\.\d+)?(-[a-z0-9]+)*")
"""An image with a version, neither without a tag nor with a moving one."""
_VARIABLE = re.compile(r"\$(?:\$|\{(\w+)(?::([-?])([^}]*))?\})")


@dataclass(frozen=True)
class ShippedProcess:
    """A process of Trellis as a file in `deploy/` starts it: what follows the name of the program, and its environment."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of `trellis up` that it serves."""
        return tuple(self.arguments[2].split(",")) if self.arguments[:2] == ("up", "--roles") else ()


# --- compose ---------------------------------------------------------------------------------------------------------


@cache
def compose_file() -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """The text with the variables that the compose file takes from `.env`; a required one that is missing is an error."""

    def value(match: re.Match[str]) -> str:
        name, operator, default = match[1], match[2], match[3]
        if name is None:
            return "$"
        if name not in variables:
            assert operator == "-", f"{name} is in no .env"
            return default
        return variables[name]

    return _VARIABLE.sub(value, text)


def is_of_trellis(service: Mapping[str, Any]) -> bool:
    return str(service["image"]).startswith("trellis:")


def compose_processes(variables: Mapping[str, str]) -> list[ShippedProcess]:
    return [
        ShippedProcess(
            name,
            tuple(interpolated(word, variables) for word in service["command"]),
            {key: interpolated(str(value), variables) for key, value in service["environment"].items()},
        )
        for name, service in compose_file()["services"].items()
        if is_of_trellis(service)
    ]


def prepare(folder: Path) -> None:
    """Copy the folder of the compose file, and run its `prepare.sh` there."""
    shutil.copytree(COMPOSE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("data", "secrets", ".env"))
    subprocess.run([folder / "prepare.sh"], check=True, capture_output=True, timeout=60)


# --- systemd ---------------------------------------------------------------------------------------------------------


def environment_file(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def unit(name: str) -> dict[str, list[str]]:
    """The values of each key of a unit, over all its sections, in their order."""
    values: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            values.setdefault(key, []).append(value)
    return values


def systemd_roles() -> list[str]:
    wanted = re.findall(r"^Wants=trellis@(.+)\.service$", (UNITS / "trellis.target").read_text(), re.MULTILINE)
    return [str(role) for role in wanted]


def systemd_processes() -> list[ShippedProcess]:
    """The roles, as their template unit starts them with the example of the settings."""
    template, processes = unit("trellis@.service"), list[ShippedProcess]()
    for role in systemd_roles():
        given = dict(one.split("=", 1) for one in template["Environment"])
        environment = {key: value.replace("%d", CREDENTIALS) for key, value in given.items()}
        environment |= environment_file(UNITS / "trellis.env.example")
        environment |= environment_file(UNITS / "roles" / f"{role}.env")
        words = shlex.split(template["ExecStart"][0].replace("%i", role))
        processes.append(ShippedProcess(role, tuple(words[1:]), environment))
    return processes


# --- Helm ------------------------------------------------------------------------------------------------------------


def helm() -> str:
    """Helm: of the wheel beside this Python, or in the PATH."""
    beside = Path(sys.executable).parent / "helm"
    path = str(beside) if beside.exists() else shutil.which("helm")
    if path is None and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("no helm in the PATH, and its wheel exists for Linux on x86_64 only")
    assert path is not None, "helm is missing: make setup"
    return path


@cache
def rendered(values: str) -> tuple[dict[str, Any], ...]:
    """The objects that Helm makes of the chart with these values."""
    command = [helm(), "template", "fleet", str(CHART), "-f", str(CHART / "ci" / f"{values}-values.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(one for one in yaml.load_all(done.stdout, Loader=_Strict) if one)


class _Strict(yaml.SafeLoader):
    """Refuses a key that is written twice: YAML libraries take either."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"written twice: {sorted(key for key in keys if keys.count(key) > 1)}"
        return super().construct_mapping(node, deep=deep)


def of_kind(values: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in rendered(values) if one["kind"] == kind]


def pods(values: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The template of each pod, by the name of its object."""
    for one in rendered(values):
        if one["kind"] in {"Deployment", "Job"}:
            yield one["metadata"]["name"], one["spec"]["template"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def helm_processes(values: str, secrets: Mapping[str, Mapping[str, str]]) -> list[ShippedProcess]:
    """The containers of the chart, with the variables of the Secrets that it names."""
    settings = {one["metadata"]["name"]: one["data"] for one in of_kind(values, "ConfigMap")}
    processes: list[ShippedProcess] = []
    for _, pod in pods(values):
        for one in containers(pod):
            environment: dict[str, str] = {}
            for source in one.get("envFrom", []):
                given = settings if "configMapRef" in source else secrets
                environment |= given[(source.get("configMapRef") or source["secretRef"])["name"]]
            environment |= {item["name"]: item["value"] for item in one.get("env", [])}
            arguments = [
                re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word)  # noqa: B023 - called at once
                for word in one["args"]
            ]
            processes.append(ShippedProcess(one["name"], tuple(arguments), environment))
    return processes


def parsed(name: str, words: list[str]) -> Any:
    """What a command of the program understands by these words; raises if it does not take them.

    The command is made anew: one that is parsed outside of the program keeps other names of its options.
    """
    return commands_of.__wrapped__(LISTED[name][0])[name].make_context(name, words)
