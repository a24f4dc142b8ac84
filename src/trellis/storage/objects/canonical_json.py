"""How documents are written, everywhere: the same document always gives the same bytes, and a moment always reads the same."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def encode(document: Mapping[str, Any]) -> bytes:
    """The one way documents become bytes: the same document always gives the same ones."""
    return (json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False) + "\n").encode()


def timestamp(at: datetime) -> str:
    """A moment as documents write it."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def sha256(body: bytes) -> str:
    """The digest that manifests and artifacts carry."""
    return hashlib.sha256(body).hexdigest()
