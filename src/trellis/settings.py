"""Settings: `TRELLIS_*` in the environment, or keys of `trellis.toml`; read once, at the edge, into a frozen value.

The environment wins over the file. A key that does not exist is refused with the nearest one that does: a setting that
silently does nothing is found at three in the morning.
"""

import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pydantic

from trellis.engine.errors import SettingsInvalid
from trellis.worker.options import CONCURRENCY_DEFAULT, CONCURRENCY_MAX, DRAIN_S_DEFAULT, WorkerOptions

PREFIX = "TRELLIS_"
TESTS_PREFIX = "TRELLIS_TEST_"
FILE_NAME = "trellis.toml"
LEDGER_DEFAULT = "sqlite:///trellis.db"


class Settings(pydantic.BaseModel):
    """Everything that can be set."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    ledger: str = LEDGER_DEFAULT
    """`sqlite:///path` or `postgresql://…`."""
    concurrency: int = pydantic.Field(CONCURRENCY_DEFAULT, ge=1, le=CONCURRENCY_MAX)
    """Handlers that run at the same time in one worker."""
    prefetch: int | None = pydantic.Field(None, ge=0)
    """Jobs a worker holds beyond those running; by default chosen by concurrency."""
    threads: int | None = pydantic.Field(None, ge=1)
    """Threads for sync handlers."""
    hints: bool = True
    """Whether workers listen for hints or only poll."""
    drain_s: float = pydantic.Field(DRAIN_S_DEFAULT, ge=0)
    """How long running handlers may go on after the first signal."""
    objects: str | None = None
    """`file:///path` or `s3://bucket/prefix?endpoint=…`; by default a folder beside an SQLite ledger."""
    memory: Path | None = None
    """The git repository of agents' memory; by default beside an SQLite ledger."""
    nlm: str = "extractive"
    """Who answers grounded questions: `extractive`, `openai`, or the name of a plug-in."""
    nlm_base_url: str | None = None
    nlm_model: str | None = None
    nlm_key: pydantic.SecretStr | None = None
    model_base_url: str | None = None
    """The server behind agents' `openai:` models."""
    model_key: pydantic.SecretStr | None = None
    runs: int = pydantic.Field(10, ge=1, le=1_000)
    """Runs that may be under way at the same time, over all processes."""
    token: pydantic.SecretStr | None = None
    """A token to act with, as text; only from the environment."""
    token_file: Path | None = None
    """A file that holds the token instead."""
    token_key_file: Path | None = None
    """The key that signs and verifies tokens; by default the development key beside an SQLite ledger."""
    log_level: str = pydantic.Field("info", pattern="^(debug|info|warning|error)$")
    log_format: str = pydantic.Field("text", pattern="^(text|json)$")

    def shown_token(self) -> str | None:
        """The token this process acts with, if it has one; raises SettingsInvalid."""
        if self.token is not None or self.token_file is None:
            return None if self.token is None else self.token.get_secret_value().strip()
        try:
            return self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsInvalid(source="token_file", detail=f"{self.token_file} cannot be read: {error}") from error

    def worker_options(self, name: str) -> WorkerOptions:
        """The part that workers get."""
        return WorkerOptions(
            name=name,
            concurrency=self.concurrency,
            prefetch=self.prefetch,
            threads=self.threads,
            hints=self.hints,
            drain_s=self.drain_s,
        )


def read_settings(environment: Mapping[str, str], folder: Path) -> Settings:
    """The settings in force; raises SettingsInvalid."""
    file = folder / FILE_NAME
    values: dict[str, Any] = {}
    if _is_there(file):
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise SettingsInvalid(source=str(file), detail=str(error)) from error
        _refuse_unknown(values, source=str(file), written=str)
        if "token" in values:
            detail = (
                "a token does not belong in this file; set TRELLIS_TOKEN, or token_file to a private file that holds it"
            )
            raise SettingsInvalid(source=str(file), detail=detail)
    named = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and not name.startswith(TESTS_PREFIX)
    }
    _refuse_unknown(named, source="environment", written=lambda key: PREFIX + key.upper())
    try:
        return Settings.model_validate({**values, **named})
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        source = f"{PREFIX}{key.upper()}" if key in named else f"{file}, {key}"
        raise SettingsInvalid(source=source, detail=f"{problem['msg']}, not {problem['input']!r}") from error


def _is_there(file: Path) -> bool:
    try:
        return file.is_file()
    except PermissionError:
        return False  # a folder that may not be looked into


def _refuse_unknown(values: Mapping[str, Any], *, source: str, written: Callable[[str], str]) -> None:
    known = list(Settings.model_fields)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {written(near[0])}?" if near else f"known: {', '.join(written(k) for k in known)}"
            raise SettingsInvalid(source=source, detail=f"there is no setting {written(key)}; {hint}")
