"""Decides whether the arguments of a create-proposal call become a draft. Pure functions.

The action must be one that the agent's file allows. The target must be a place that this action may change, below the
agent's own folder. Sizes are bounded. Text contains only visible characters. Citations must be found in the sources
that were read. Unknown fields are dropped and reported, so a model cannot set a priority, a status or an id.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

from trellis.agents.definition import SafeOutput, Tool
from trellis.agents.refusals import CallRefused, RefusalCode, ToolRefusal
from trellis.agents.run_io import DraftChange, ProposalDraft
from trellis.agents.sources import ANNOTATION_KINDS, CHANGEABLE_EXPECTED, Annotation, is_changeable
from trellis.engine.text import is_storable
from trellis.nlm.citations import CITATIONS_MAX, EXCERPT_CHARS_MAX, FLAG_REF_CHARS_MAX, verify
from trellis.nlm.provider import Citation, NlmAnswer, NlmSource
from trellis.storage.memory import markdown
from trellis.storage.memory.updates import AppliedUpdates, ProblemCode, RejectedUpdates, apply_updates
from trellis.storage.objects.keys import checked_key
from trellis.storage.objects.store import KeyInvalid

SUMMARY_CHARS_MAX = 500
REASONING_CHARS_MAX = 4_000
TEXT_BYTES_MAX = 64 * 1024
TARGET_CHARS_MAX = 200
DETAIL_CHARS_MAX = 300
NOT_FOUND_MAX = 10
NOT_FOUND_CHARS_MAX = 500
DROPPED_MAX = 20
DEFINITION_FILE = "_agent.md"

FIELDS = (
    "action",
    "target",
    "summary",
    "text",
    "reasoning",
    "citations",
    "operation",
    "section",
    "loop_id",
    "resolution",
)
_ALIASES = {"file": "target", "content": "text"}
"""Names of the same fields in memory updates."""
_NEEDS_FILES = frozenset({ProblemCode.SECTION_MISSING, ProblemCode.LOOP_MISSING, ProblemCode.NOTHING_CHANGED})
_STAND_IN_TIME = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _ActionRule:
    """What an action may change: new files below some folders, or one of the sources; and how."""

    changes: tuple[DraftChange, ...]
    folders: tuple[str, ...] = ()
    on_source: bool = False


_ACTION_RULES: Mapping[SafeOutput, _ActionRule] = {
    SafeOutput.PROPOSE_EDIT: _ActionRule((DraftChange.APPEND, DraftChange.REPLACE), on_source=True),
    SafeOutput.PROPOSE_TAG: _ActionRule((DraftChange.APPEND,), on_source=True),
    SafeOutput.PROPOSE_COMMENT: _ActionRule((DraftChange.APPEND,), on_source=True),
    SafeOutput.PROPOSE_NOTE: _ActionRule((DraftChange.CREATE,), folders=("notes", "sources")),
    SafeOutput.PROPOSE_SUMMARY: _ActionRule((DraftChange.CREATE,), folders=("artifacts",)),
    SafeOutput.PROPOSE_ARTIFACT: _ActionRule((DraftChange.CREATE,), folders=("artifacts",)),
    SafeOutput.MEMORY_UPDATE: _ActionRule((DraftChange.APPEND, DraftChange.REPLACE, DraftChange.CLOSE)),
    SafeOutput.LOGIC_UPDATE: _ActionRule((DraftChange.REPLACE, DraftChange.APPEND)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftingContext:
    """What a draft is checked against."""

    run_id: str
    safe_outputs: tuple[SafeOutput, ...]
    sources: tuple[NlmSource, ...]
    """Every source that the agent may read."""
    read: tuple[NlmSource, ...]
    """The sources that it has read so far."""
    memory: Mapping[str, str]
    drafts: Sequence[ProposalDraft]
    proposals_max: int
    annotations: Sequence[Annotation] = ()


def check_draft(args: Mapping[str, Any], context: DraftingContext) -> ProposalDraft | ToolRefusal:
    """The draft, or the refusal."""
    given = {_ALIASES.get(name, name): value for name, value in args.items()}
    try:
        draft = _draft(given, context)
    except CallRefused as no:
        return ToolRefusal(
            tool=Tool.CREATE_PROPOSAL.value,
            code=no.code,
            detail=no.detail[:DETAIL_CHARS_MAX],
            action=_short_repr(given.get("action")),
            target=_short_repr(given.get("target")),
            approved_before=no.approved_before,
        )
    return replace(draft, flags=(*draft.flags, *dropped_field_flags(given)))


def dropped_field_flags(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Flags that name the unknown fields."""
    unknown = [name for name in given if name not in FIELDS]
    return tuple(f"{RefusalCode.FIELD_DROPPED}:{_short_repr(name)}" for name in unknown[:DROPPED_MAX])


def _draft(given: Mapping[str, Any], context: DraftingContext) -> ProposalDraft:
    action = _action(given.get("action"), context)
    rule = _ACTION_RULES[action]
    change = _change(given.get("operation"), action, rule)
    closing = change is DraftChange.CLOSE
    draft = ProposalDraft(
        action=action,
        target=_target(_text(given, "target", chars_max=TARGET_CHARS_MAX), action, rule, context),
        change=change,
        summary=" ".join(_text(given, "summary", chars_max=SUMMARY_CHARS_MAX).split()),
        text=_text(given, "text", bytes_max=TEXT_BYTES_MAX, required=not closing),
        reasoning=_text(given, "reasoning", chars_max=REASONING_CHARS_MAX, required=False),
        section=_text(given, "section", chars_max=SUMMARY_CHARS_MAX, required=False) or None,
        loop_id=_text(given, "loop_id", chars_max=TARGET_CHARS_MAX, required=False) or None,
        resolution=_text(given, "resolution", chars_max=REASONING_CHARS_MAX, required=False) or None,
    )
    if action is SafeOutput.MEMORY_UPDATE:
        _check_update(draft, context)
    else:
        draft = replace(draft, section=None, loop_id=None, resolution=None)
    draft = _with_citations(draft, given.get("citations"), context)
    same = [(one.action, one.target, one.change, one.text, one.loop_id) for one in context.drafts]
    if (draft.action, draft.target, draft.change, draft.text, draft.loop_id) in same:
        raise CallRefused(RefusalCode.DUPLICATE, "the same proposal was made in this run already")
    if any(
        (ANNOTATION_KINDS.get(action), draft.target, draft.text) == (one.kind, one.target, one.text)
        for one in context.annotations
    ):
        detail = "the same annotation stands beside that source already"
        raise CallRefused(RefusalCode.DUPLICATE, detail, approved_before=True)
    if len(context.drafts) >= context.proposals_max:
        raise CallRefused(RefusalCode.TOO_MANY, f"a run makes at most {context.proposals_max} proposals; finish now")
    return draft


def _action(value: object, context: DraftingContext) -> SafeOutput:
    allowed = ", ".join(context.safe_outputs)
    if isinstance(value, str) and value in context.safe_outputs:
        return SafeOutput(value)
    raise CallRefused(
        RefusalCode.ACTION_NOT_ALLOWED,
        f"{_short_repr(value)!r} is not among the agent's safe_outputs; use one of {allowed}",
    )


def _change(value: object, action: SafeOutput, rule: _ActionRule) -> DraftChange:
    if value is None:
        return rule.changes[0]
    if isinstance(value, str) and value in rule.changes:
        return DraftChange(value)
    allowed = ", ".join(rule.changes)
    raise CallRefused(
        RefusalCode.FIELD_INVALID, f"operation {_short_repr(value)!r} does not fit {action}; use {allowed}"
    )


def _target(target: str, action: SafeOutput, rule: _ActionRule, context: DraftingContext) -> str:
    """The target as given, if this action may change it. Nothing is normalized: an unusual name is refused."""
    if action is SafeOutput.MEMORY_UPDATE:
        return target
    if action is SafeOutput.LOGIC_UPDATE:
        if target != DEFINITION_FILE:
            raise CallRefused(
                RefusalCode.TARGET_NOT_ALLOWED, f"a logic-update changes {DEFINITION_FILE} and nothing else"
            )
        return target
    refs = [source.ref for source in context.sources]
    if rule.on_source:
        if target not in refs:
            raise CallRefused(
                RefusalCode.TARGET_NOT_ALLOWED, f"there is no source {target!r}; use one of {', '.join(refs)}"
            )
        return _changeable(target)
    try:
        checked_key(target)
    except KeyInvalid as invalid:
        raise CallRefused(RefusalCode.TARGET_NOT_ALLOWED, str(invalid)) from None
    folder, slash, _ = target.partition("/")
    if not slash or folder not in rule.folders:
        places = " or ".join(f"{name}/…" for name in rule.folders)
        raise CallRefused(RefusalCode.TARGET_NOT_ALLOWED, f"{action} makes {places}, not {target!r}")
    if not target.isprintable() or not target.endswith((".md", ".txt", ".json")):
        raise CallRefused(
            RefusalCode.TARGET_NOT_ALLOWED, f"{target!r} is no name of a text; end it in .md, .txt or .json"
        )
    if target in refs:
        raise CallRefused(RefusalCode.TARGET_NOT_ALLOWED, f"{target!r} is there already; choose another name")
    return _changeable(target)


def _changeable(target: str) -> str:
    if not is_changeable(target):
        detail = f"no proposal may be about {target!r}, only about {CHANGEABLE_EXPECTED}"
        raise CallRefused(RefusalCode.TARGET_NOT_ALLOWED, detail)
    return target


def _text(given: Mapping[str, Any], name: str, *, chars_max: int = 0, bytes_max: int = 0, required: bool = True) -> str:
    value = given.get(name)
    if value is None or value == "":
        if required:
            raise CallRefused(RefusalCode.FIELD_MISSING, f"{name} is missing")
        return ""
    if not isinstance(value, str):
        raise CallRefused(RefusalCode.FIELD_INVALID, f"{name} must be text")
    text = value.replace("\r\n", "\n")
    if problem := markdown.problem_in(text):
        raise CallRefused(RefusalCode.TEXT_UNSAFE, f"{name} cannot be kept: {problem}")
    if required and not text.strip():
        raise CallRefused(RefusalCode.FIELD_MISSING, f"{name} is empty")
    if chars_max and len(text) > chars_max:
        raise CallRefused(RefusalCode.TOO_LARGE, f"{name} has {len(text)} characters and the limit is {chars_max}")
    if bytes_max and len(text.encode()) > bytes_max:
        raise CallRefused(RefusalCode.TOO_LARGE, f"{name} has {len(text.encode())} bytes and the limit is {bytes_max}")
    return text


def _check_update(draft: ProposalDraft, context: DraftingContext) -> None:
    """Check the update as the memory would, as far as the files that the agent read allow."""
    tried = apply_updates(context.memory, (draft.update(),), _STAND_IN_TIME, run_id=context.run_id)
    match tried:
        case AppliedUpdates():
            return
        case RejectedUpdates(problems=problems):
            known = draft.target in context.memory
            counted = [str(problem) for problem in problems if known or problem.code not in _NEEDS_FILES]
            if counted:
                raise CallRefused(RefusalCode.UPDATE_INVALID, "; ".join(counted))


def _with_citations(draft: ProposalDraft, value: object, context: DraftingContext) -> ProposalDraft:
    """The draft with the citations that are found in the sources read, flags about the others, and the others."""
    claimed = _claimed_citations(value)
    unread = tuple(source for source in context.sources if source not in context.read)
    verified = verify(NlmAnswer(text="", citations=claimed), context.read, unread=unread)
    lost = [one for one in claimed if not _is_found(one, context.read)]
    return replace(
        draft,
        citations=verified.citations,
        flags=verified.flags,
        not_found=_shortened(one for one in lost if not _is_found(one, unread)),
        not_read=_shortened(one for one in lost if _is_found(one, unread)),
    )


def _claimed_citations(value: object) -> tuple[Citation, ...]:
    if value is None:
        value = []
    if not isinstance(value, list):
        raise CallRefused(RefusalCode.FIELD_INVALID, "citations must be a list of {ref, excerpt}")
    items = cast("list[object]", value)
    claimed: list[Citation] = []
    for item in items[: CITATIONS_MAX + 1]:
        one = cast("dict[str, object]", item) if isinstance(item, dict) else {}
        ref, excerpt = one.get("ref"), one.get("excerpt")
        if not isinstance(ref, str) or not isinstance(excerpt, str) or not is_storable(ref + excerpt):
            raise CallRefused(RefusalCode.FIELD_INVALID, "each citation needs ref and excerpt, both text")
        claimed.append(Citation(ref[:FLAG_REF_CHARS_MAX], excerpt[: EXCERPT_CHARS_MAX + 1]))
    return tuple(claimed)


def _is_found(citation: Citation, sources: tuple[NlmSource, ...]) -> bool:
    return bool(verify(NlmAnswer(text="", citations=(citation,)), sources).citations)


def _shortened(citations: Iterable[Citation]) -> tuple[Citation, ...]:
    short = (Citation(one.ref, one.excerpt[:NOT_FOUND_CHARS_MAX]) for one in citations)
    return tuple(dict.fromkeys(short))[:NOT_FOUND_MAX]


def _short_repr(value: object) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else type(value).__name__
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:80])
