"""The optional parts of Trellis: extras of its own, and plugins that other packages bring."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Any

from trellis.engine.errors import ExtraMissing, SettingsInvalid

# The optional parts of Trellis: who needs one that is not installed is told the name of its extra.


class Extra(StrEnum):
    """The extras of `pyproject.toml` that code asks for, by name."""

    POSTGRES = "postgres"
    S3 = "s3"
    OPENAI = "openai"
    BUS = "bus"
    OTEL = "otel"


PACKAGES: dict[Extra, frozenset[str]] = {
    Extra.POSTGRES: frozenset({"asyncpg"}),
    Extra.S3: frozenset({"obstore"}),
    Extra.OPENAI: frozenset({"openai", "tiktoken"}),
    Extra.BUS: frozenset({"cap", "google", "grpc", "nats", "redis"}),
    Extra.OTEL: frozenset({"opentelemetry"}),
}
"""The top-level modules that each extra brings and the base install lacks."""


@contextmanager
def extra_needed(extra: Extra, feature: str) -> Generator[None]:
    """Import optional packages inside; raises ExtraMissing where one of this extra's is not installed.

    Any other missing module is a fault of the installation or of the code and is raised as it is.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES[extra]:
            raise
        raise ExtraMissing(feature=feature, package=package, extra=extra.value) from error


# Parts that an installed package brings, by an entry point: its group says what kind of part it is, its name is what the setting says.


def load_plugin(group: str, name: str, *, ours: Iterable[str]) -> Any:
    """The object that one installed package brings under this name; raises SettingsInvalid, which names what can be chosen."""
    brought = entry_points(group=group)
    found = [point for point in brought if point.name == name]
    if not found:
        known = ", ".join(sorted({*ours, *(point.name for point in brought)}))
        detail = f"nobody brings it; choose one of {known}, or install the package that brings {name!r}"
        raise SettingsInvalid(source=name, detail=detail)
    if len(found) > 1:
        detail = f"{len(found)} installed packages bring one of that name; remove all but one"
        raise SettingsInvalid(source=name, detail=detail)
    try:
        return found[0].load()
    except (ImportError, AttributeError) as error:
        raise SettingsInvalid(source=name, detail=f"{found[0].value} cannot be loaded: {error}") from error
