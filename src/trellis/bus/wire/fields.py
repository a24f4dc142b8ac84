"""The fields of a request, and of references, between our shapes and CAP's messages: CAP has numbers where we have names."""

import importlib
from collections.abc import Mapping
from typing import Any

import pydantic

from trellis.bus.requests import Budget, Compensation, ContextHints, IdentityBinding, JobMeta, ResourceRef

PRIORITIES: Mapping[str | None, int] = {None: 0, "interactive": 1, "batch": 2, "critical": 3}
ACTOR_TYPES: Mapping[str, int] = {"": 0, "human": 1, "service": 2}
_PARTS: Mapping[str, type[pydantic.BaseModel]] = {
    "context_hints": ContextHints,
    "budget": Budget,
    "meta": JobMeta,
    "compensation": Compensation,
    "identity": IdentityBinding,
    "context_ref": ResourceRef,
}
_PRIORITY_NAMES = {number: name for name, number in PRIORITIES.items()}
_ACTOR_NAMES = {number: name for name, number in ACTOR_TYPES.items()}


def message_fields(said: Any, shape: type[pydantic.BaseModel]) -> dict[str, Any]:
    """The fields of a message that our shape has."""
    told: dict[str, Any] = {}
    for name in shape.model_fields:
        value = getattr(said, name)
        if name in _PARTS:
            if said.HasField(name):
                told[name] = message_fields(value, _PARTS[name])
        elif name == "priority":
            told[name] = _PRIORITY_NAMES.get(value, value)
        elif name == "actor_type":
            told[name] = _ACTOR_NAMES.get(value, value)
        elif name == "expires_at":
            told[name] = value.ToJsonString() if said.HasField(name) else ""
        elif isinstance(value, bytes):
            told[name] = value.hex()
        else:
            told[name] = value if isinstance(value, str | int) else _plain(value)
    return told


def _plain(value: Any) -> dict[str, str] | list[str]:
    return dict(value) if hasattr(value, "items") else list(value)


def fields_of(told: dict[str, Any]) -> dict[str, Any]:
    """What a request told of itself, with CAP's numbers for names."""
    numbered: dict[str, Any] = {name: fields_of(value) if name in _PARTS else value for name, value in told.items()}
    if "priority" in numbered:
        numbered["priority"] = PRIORITIES[numbered["priority"]]
    if "actor_type" in numbered:
        numbered["actor_type"] = ACTOR_TYPES[numbered["actor_type"]]
    if "sha256" in numbered:
        numbered["sha256"] = bytes.fromhex(numbered["sha256"])
    if "expires_at" in numbered:
        numbered["expires_at"] = _timestamp(numbered["expires_at"])
    return numbered


def _timestamp(text: str) -> Any:
    if not text:
        return None
    made = importlib.import_module("google.protobuf.timestamp_pb2").Timestamp()
    made.FromJsonString(text)
    return made
