"""Files of agents for tests."""

from collections.abc import Mapping
from datetime import UTC, datetime

FIELDS: Mapping[str, str] = {
    "name": "Gardener",
    "slug": "gardener",
    "version": "1.2.3",
    "description": "Looks after the beds.",
    "model": "offline",
    "tools": "[read-context, notebooklm-query, create-proposal]",
    "safe_outputs": "[propose-edit, memory-update]",
    "status": "active",
    "created_at": "2026-02-14T08:00:00Z",
    "updated_at": "2026-02-15T08:00:00+02:00",
    "created_by": "owner",
}
NOW = datetime(2026, 11, 15, 7, 30, 15, 123456, tzinfo=UTC)


def agent_file(*, body: str = "Weed, then water.\n", without: str | None = None, **changes: str) -> bytes:
    """An `_agent.md` with these fields changed or added; a value may span lines."""
    fields = {name: value for name, value in {**FIELDS, **changes}.items() if name != without}
    lines = [f"{name}: {value}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---", "", body]).encode()


def line_of(data: bytes, beginning: str) -> int:
    """The number of the first line that begins so."""
    lines = data.decode().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.startswith(beginning))
