"""The installed package: its version, its optional parts (extras), and plugins that other packages provide."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from importlib.metadata import entry_points, version
from typing import Any

from trellis.engine.errors import ExtraMissing, SettingsInvalid

PACKAGE = "trellis-engine"


@cache
def program_version() -> str:
    """The version of Trellis that this process runs."""
    return version(PACKAGE)


class Extra(StrEnum):
    """The extras of `pyproject.toml` that code needs."""

    POSTGRES = "postgres"
    S3 = "s3"
    OPENAI = "openai"
    BUS = "bus"
    OTEL = "otel"
    APPRISE = "apprise"
    TEMPORAL = "temporal"


PACKAGES: dict[Extra, frozenset[str]] = {
    Extra.POSTGRES: frozenset({"asyncpg"}),
    Extra.S3: frozenset({"obstore"}),
    Extra.OPENAI: frozenset({"openai", "tiktoken"}),
    Extra.BUS: frozenset({"cap", "google", "grpc", "nats", "redis"}),
    Extra.OTEL: frozenset({"opentelemetry"}),
    Extra.APPRISE: frozenset({"apprise"}),
    Extra.TEMPORAL: frozenset({"temporalio"}),
}
"""The top-level modules that each extra adds to the base install."""


@contextmanager
def extra_needed(extra: Extra, feature: str) -> Generator[None]:
    """Import optional packages inside. Raises ExtraMissing, with the extra's name, when one of its packages is missing.

    Any other missing module is a fault of the installation or the code and is raised unchanged.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES[extra]:
            raise
        raise ExtraMissing(feature=feature, package=package, extra=extra.value) from error


# Plugins are entry points: the group is the kind of plugin, the name is the value of the setting.


def load_plugin(group: str, name: str, *, ours: Iterable[str]) -> Any:
    """The plugin that an installed package provides under this name.

    Raises SettingsInvalid, which lists the known names.
    """
    brought = entry_points(group=group)
    named = [point for point in brought if point.name == name]
    if not named:
        known = ", ".join(sorted({*ours, *(point.name for point in brought)}))
        detail = f"nobody brings it; choose one of {known}, or install the package that brings {name!r}"
        raise SettingsInvalid(source=name, detail=detail)
    if len(named) > 1:
        detail = f"{len(named)} installed packages bring one of that name; remove all but one"
        raise SettingsInvalid(source=name, detail=detail)
    try:
        return named[0].load()
    except (ImportError, AttributeError) as error:
        raise SettingsInvalid(source=name, detail=f"{named[0].value} cannot be loaded: {error}") from error
