"""The optional parts of Trellis: who needs one that is not installed is told the name of its extra."""

from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum

from trellis.engine.errors import ExtraMissing


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
