"""How the tools look to a model: a sentence each, and a JSON schema of what they take."""

from typing import Any

from trellis.agents.definition import SafeOutput, Tool
from trellis.agents.drafting import REASONING_CHARS_MAX, SUMMARY_CHARS_MAX
from trellis.agents.output import DraftChange
from trellis.storage.memory.layout import DeepPart, ReadMode

DEEP_LIMIT_MAX = 20

DESCRIPTIONS: dict[Tool, str] = {
    Tool.READ_CONTEXT: "Read sources, whole. Without refs: all of them.",
    Tool.READ_MEMORY: "Read your memory: basic is the snapshot and the open loops, wide adds the facts.",
    Tool.READ_MEMORY_DEEP: "Read older memory, newest first: decisions, timeline or runs. Only if you need it.",
    Tool.NOTEBOOKLM_QUERY: "Ask a question about the sources. The answer comes with word-for-word citations.",
    Tool.CREATE_PROPOSAL: (
        "Draft one proposal for a person to decide. target: a source for edit, tag and comment; a new notes/….md for a note; "
        "a new artifacts/….md for a summary or artifact; a memory file such as facts.md for a memory-update "
        "(operation append, replace or close; close needs loop_id and resolution instead of text); _agent.md for a "
        "logic-update."
    ),
}


def schema(tool: Tool, safe_outputs: tuple[SafeOutput, ...]) -> dict[str, Any]:
    """The arguments of a tool."""
    properties, required = _FIELDS[tool]
    if tool is Tool.CREATE_PROPOSAL:
        properties = {"action": _one_of(*safe_outputs), **properties}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _text(description: str, *, length_max: int | None = None) -> dict[str, Any]:
    limit = {} if length_max is None else {"maxLength": length_max}
    return {"type": "string", "description": description, **limit}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [str(value) for value in values]}


def _list_of(item: dict[str, Any], description: str) -> dict[str, Any]:
    return {"type": "array", "items": item, "description": description}


_CITATION: dict[str, Any] = {
    "type": "object",
    "properties": {"ref": _text("the source"), "excerpt": _text("its words, exactly")},
    "required": ["ref", "excerpt"],
    "additionalProperties": False,
}
_FIELDS: dict[Tool, tuple[dict[str, Any], list[str]]] = {
    Tool.READ_CONTEXT: ({"refs": _list_of({"type": "string"}, "names of sources")}, []),
    Tool.READ_MEMORY: ({"mode": _one_of(*ReadMode)}, []),
    Tool.READ_MEMORY_DEEP: (
        {
            "what": _one_of(*DeepPart),
            "limit": {"type": "integer", "minimum": 1, "maximum": DEEP_LIMIT_MAX},
            "before": _text("the `more` of an earlier answer"),
        },
        ["what"],
    ),
    Tool.NOTEBOOKLM_QUERY: (
        {
            "question": _text("one question"),
            "sources": _list_of({"type": "string"}, "names of sources; all without it"),
        },
        ["question"],
    ),
    Tool.CREATE_PROPOSAL: (
        {
            "target": _text("what it is about"),
            "summary": _text("one sentence for the list of proposals", length_max=SUMMARY_CHARS_MAX),
            "text": _text("the proposed text, as Markdown"),
            "reasoning": _text("why", length_max=REASONING_CHARS_MAX),
            "citations": _list_of(_CITATION, "what it rests on"),
            "operation": {
                **_one_of(*DraftChange),
                "description": "append (the default) adds the text below what is there; replace takes its place, so give all of it",
            },
            "section": _text("a section of a memory file"),
            "loop_id": _text("the open loop to close"),
            "resolution": _text("how the loop was resolved"),
        },
        ["action", "target", "summary"],
    ),
}
