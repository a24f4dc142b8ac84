"""What a proposal may touch, and what it makes of it. Pure.

A proposal changes a memory, the agent's logic, or a text in the agent's own folder, and nothing else: not the agent's
definition, not a run, not another proposal, not another agent.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trellis.runs.errors import TargetRefused
from trellis.runs.proposals import LOGIC_UPDATE, MEMORY_UPDATE
from trellis.storage.keys import object_key

LOGIC_FILE = "pseudocode.md"
TEXT_BYTES_MAX = 1024 * 1024
CONTENT_FILE = re.compile(r"(sources|notes|artifacts|comments)(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}){1,5}")
CONTENT_ACTIONS = frozenset(
    {"propose-edit", "propose-summary", "propose-tag", "propose-artifact", "propose-note", "propose-comment"}
)
CHANGES = frozenset({"create", "append", "replace"})


@dataclass(frozen=True, slots=True)
class FileChange:
    """A change of one text in an agent's folder."""

    key: str
    kind: str
    text: str


def checked_target(action: str, target: str) -> str:
    """The target, if this action may touch it; raises TargetRefused."""
    if action == MEMORY_UPDATE:
        return target
    if action == LOGIC_UPDATE:
        fits = target == LOGIC_FILE
    else:
        fits = action in CONTENT_ACTIONS and CONTENT_FILE.fullmatch(target) is not None
    if not fits:
        raise TargetRefused(action=action, target=target)
    return target


def file_change(slug: str, body: Mapping[str, Any]) -> FileChange:
    """What a proposal about a file asks for; raises TargetRefused."""
    target = checked_target(body["action"], body["target"])
    change: dict[str, Any] = body["content"].get("change") or {}
    kind, text = change.get("type"), change.get("text")
    if kind not in CHANGES or not isinstance(text, str) or len(text.encode()) > TEXT_BYTES_MAX:
        raise TargetRefused(action=body["action"], target=target)
    return FileChange(object_key("agents", slug, *target.split("/")), kind, text)


def changed(change: FileChange, before: bytes | None) -> bytes:
    """The file after the change."""
    text = change.text if change.text.endswith("\n") else change.text + "\n"
    if change.kind != "append" or not before:
        return text.encode()
    return before.rstrip(b"\n") + b"\n\n" + text.encode()
