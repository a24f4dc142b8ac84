"""The one way documents are written: the same document always gives the same bytes, and timestamps have one form."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import Any, cast


def encode(document: Mapping[str, Any]) -> bytes:
    """The document as bytes: those of `json.dumps` with an indent of 2. The same document always gives the same bytes.

    With an indent, `json.dumps` is written in Python and takes twice as long.
    """
    return (_text(document, "\n") + "\n").encode()


def _text(value: Any, line: str) -> str:
    """A value as JSON, its further lines behind `line`: a line break and the indent of the value."""
    if type(value) is dict:
        inner, texts = line + "  ", list[str]()
        for name, one in cast("dict[Any, Any]", value).items():
            if type(name) is not str:
                break
            if type(one) is str:
                texts.append(f"{encode_basestring(name)}: {encode_basestring(one)}")
            elif one is None:
                texts.append(f"{encode_basestring(name)}: null")
            elif type(one) is int:
                texts.append(f"{encode_basestring(name)}: {one}")
            else:
                texts.append(f"{encode_basestring(name)}: {_text(one, inner)}")
        else:
            return f"{{{inner}{f',{inner}'.join(texts)}{line}}}" if texts else "{}"
    elif type(value) is list:
        inner, texts = line + "  ", [_text(one, line + "  ") for one in cast("list[Any]", value)]
        return f"[{inner}{f',{inner}'.join(texts)}{line}]" if texts else "[]"
    elif type(value) is str:
        return encode_basestring(value)
    return json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False).replace("\n", line)


def timestamp(at: datetime) -> str:
    """A time in the form of documents: UTC, with milliseconds."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def sha256(body: bytes) -> str:
    """The digest used in manifests and artifacts."""
    return hashlib.sha256(body).hexdigest()
