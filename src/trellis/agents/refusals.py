"""Tool calls that were refused to an agent's model: why, and what a person can change."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class RefusalCode(StrEnum):
    """Why a tool refused a call."""

    TOOL_NOT_LISTED = "tool_not_listed"
    ACTION_NOT_ALLOWED = "action_not_allowed"
    TARGET_NOT_ALLOWED = "target_not_allowed"
    FIELD_MISSING = "field_missing"
    FIELD_INVALID = "field_invalid"
    FIELD_DROPPED = "field_dropped"
    TOO_LARGE = "too_large"
    TEXT_UNSAFE = "text_unsafe"
    UPDATE_INVALID = "update_invalid"
    TOO_MANY = "too_many"
    DUPLICATE = "duplicate"
    NOT_FOUND = "not_found"
    NOT_READABLE = "not_readable"


class CallRefused(Exception):
    """A tool call asks for more than is allowed. The model gets the code and the detail."""

    def __init__(self, code: RefusalCode, detail: str, *, approved_before: bool = False) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.approved_before = approved_before


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRefusal:
    """A refused tool call and the reason, as told to the model."""

    tool: str
    code: RefusalCode
    detail: str
    action: str | None = None
    target: str | None = None
    approved_before: bool = False
    """The same annotation was approved before: the call counts as a repeated proposal, not as a refused one.

    A field beside the code `duplicate`, because a step's result may be read by an older program: it ignores a field
    that it does not know, and fails on a code that it does not know.
    """


_ARGUMENTS = "the model got the call's arguments wrong: choose a model that is better at tool calls, or ask it for less"
ADVICE: Mapping[RefusalCode, str] = {
    RefusalCode.TOOL_NOT_LISTED: "add the tool to `tools` in its file, or tell it in its instructions to do without",
    RefusalCode.ACTION_NOT_ALLOWED: (
        "add the action to `safe_outputs` in its file, or tell it in its instructions what to propose instead"
    ),
    RefusalCode.TARGET_NOT_ALLOWED: "name in its instructions a target that the action may change",
    RefusalCode.FIELD_MISSING: _ARGUMENTS,
    RefusalCode.FIELD_INVALID: _ARGUMENTS,
    RefusalCode.FIELD_DROPPED: "nothing: the field was left out, and the call was made",
    RefusalCode.TOO_LARGE: "tell it in its instructions to write shorter texts",
    RefusalCode.TEXT_UNSAFE: "look for invisible or control characters in its sources, and remove them",
    RefusalCode.UPDATE_INVALID: "name in its instructions the files and sections of its memory",
    RefusalCode.TOO_MANY: "tell it in its instructions to propose the most important changes only",
    RefusalCode.DUPLICATE: "nothing: the same was proposed already",
    RefusalCode.NOT_FOUND: "put the text into its sources, or correct the name in its instructions",
    RefusalCode.NOT_READABLE: "shorten its memory: it is over its limit",
}
"""What a person can change so that the model is not refused this again."""


def refusal_text(refusal: Mapping[str, Any]) -> str:
    """A refusal as a run's documents have it, in words: which call, and why it was refused."""
    what = " ".join(str(refusal[name]) for name in ("tool", "action", "target") if refusal.get(name))
    return f"{what}: {refusal['detail']}"


def refusal_advice(refusal: Mapping[str, Any]) -> str | None:
    """What to change about a refusal that a run's documents have; None for a code of a newer version."""
    code = str(refusal.get("code"))
    return ADVICE[RefusalCode(code)] if code in set(RefusalCode) else None
