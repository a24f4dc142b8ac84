"""The one way documents are written: the same document always gives the same bytes, and timestamps have one form."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def encode(document: Mapping[str, Any]) -> bytes:
    """The document as bytes. The same document always gives the same bytes."""
    return (json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False) + "\n").encode()


def timestamp(at: datetime) -> str:
    """A time in the form of documents: UTC, with milliseconds."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def sha256(body: bytes) -> str:
    """The digest used in manifests and artifacts."""
    return hashlib.sha256(body).hexdigest()
