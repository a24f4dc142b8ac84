"""What a proposal may touch, and what it makes of it. Pure.

A proposal changes a memory, the agent's logic, or a text in the agent's own folder, and nothing else: not the agent's
definition, not a run, not another proposal, not another agent.
"""

import hashlib
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
NEWLINES_MAX = 100
"""A text with more of them at its end is not recognized in what was appended to it."""
CHANGES = frozenset({"create", "append", "replace"})
_EMPTY = hashlib.sha256().hexdigest()


@dataclass(frozen=True, slots=True)
class AgentFileChange:
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


def file_change(slug: str, body: Mapping[str, Any]) -> AgentFileChange:
    """What a proposal about a file asks for; raises TargetRefused."""
    target = checked_target(body["action"], body["target"])
    change: dict[str, Any] = body["content"].get("change") or {}
    kind, text = change.get("type"), change.get("text")
    if kind not in CHANGES or not isinstance(text, str) or len(text.encode()) > TEXT_BYTES_MAX:
        raise TargetRefused(action=body["action"], target=target)
    return AgentFileChange(object_key("agents", slug, *target.split("/")), kind, text)


def apply_change(change: AgentFileChange, before: bytes | None) -> bytes:
    """The file after the change."""
    if change.kind != "append" or not before:
        return _change_bytes(change)
    return before.rstrip(b"\n") + b"\n\n" + _change_bytes(change)


def is_changed(change: AgentFileChange, expected: str | None, there: bytes) -> bool:
    """Whether the file is what the change makes of the one with the expected sha256, None for no file."""
    end = b"\n\n" + _change_bytes(change)
    if change.kind != "append" or expected in {None, _EMPTY}:
        return there == _change_bytes(change)
    if not there.endswith(end):
        return False
    # What it was appended to ended in any number of newlines, and only the digest still tells in how many.
    before = hashlib.sha256(there.removesuffix(end))
    for _ in range(NEWLINES_MAX):
        if before.hexdigest() == expected:
            return True
        before.update(b"\n")
    return False


def changes_nothing(change: AgentFileChange, there: str | None) -> bool:
    """Whether the file with this sha256, None for no file, is already what the change makes of it."""
    return change.kind != "append" and there == hashlib.sha256(_change_bytes(change)).hexdigest()


def _change_bytes(change: AgentFileChange) -> bytes:
    return (change.text if change.text.endswith("\n") else change.text + "\n").encode()
