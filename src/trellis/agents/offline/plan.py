"""Decides the offline model's next turn, as a pure function of the conversation so far, and chooses its questions."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trellis.agents.definition import SafeOutput, Tool
from trellis.agents.offline import comparison
from trellis.agents.offline.comparison import SENTENCES, WORDS, ConflictKind, Statement, StatementConflict
from trellis.nlm.passages import Block, BlockKind, blocks
from trellis.nlm.provider import language_of
from trellis.storage.memory import markdown
from trellis.storage.memory.layout import FACTS, FILE_TOKENS_MAX, OPEN_LOOPS, ReadMode, count_tokens

# Chooses the questions that the offline model asks.
#
# They come from the owner's instructions, from disagreements between sources, from open loops, and from the sources.

QUESTION_CHARS_MAX = 400
QUESTIONS_MAX = 14

_TITLES = frozenset[str](WORDS["questions"]["titles"])
_SPACE = re.compile(r"\s+(?:>\s?)*")


class Origin(StrEnum):
    """Where a question came from."""

    OWNER = "owner"
    CONFLICT = "conflict"
    LOOP = "loop"
    SOURCE = "source"


_QUESTIONS_MAX_BY_ORIGIN: Mapping[Origin, int] = {Origin.OWNER: 8, Origin.CONFLICT: 2, Origin.LOOP: 4, Origin.SOURCE: 2}


@dataclass(frozen=True, slots=True)
class QuestionToAsk:
    """A question to ask. `ref` is the source that asks it: quotes from that source do not answer it."""

    text: str
    origin: Origin
    ref: str | None = None


def questions(owner: str, sources: Mapping[str, str], memory: Mapping[str, str]) -> list[QuestionToAsk]:
    """The questions, each once, the owner's first; limited per origin and in total."""
    candidates = [
        *_first(Origin.OWNER, (QuestionToAsk(text, Origin.OWNER) for text in _listed(owner))),
        *_first(Origin.CONFLICT, (QuestionToAsk(text, Origin.CONFLICT) for text in comparison.subjects(sources))),
        *_first(Origin.LOOP, (QuestionToAsk(text, Origin.LOOP) for text in _loops(memory.get(OPEN_LOOPS, "")))),
        *_first(
            Origin.SOURCE,
            (
                QuestionToAsk(text, Origin.SOURCE, ref)
                for ref, source in sorted(sources.items())
                for text in _listed(source)
            ),
        ),
    ]
    return list({asked.text: asked for asked in reversed(candidates)}.values())[::-1][:QUESTIONS_MAX]


def _first(origin: Origin, questions_found: Iterator[QuestionToAsk]) -> list[QuestionToAsk]:
    fitting = (asked for asked in questions_found if asked.text and len(asked.text) <= QUESTION_CHARS_MAX)
    return [asked for asked, _ in zip(fitting, range(_QUESTIONS_MAX_BY_ORIGIN[origin]), strict=False)]


def _listed(text: str) -> Iterator[str]:
    """The items of lists under a title such as "Questions", or after a line that ends in "Questions:"."""
    lead = ""
    for block in blocks(text):
        if block.kind is BlockKind.LIST and (_is_title(lead) or any(map(_is_title, block.headings[-1:]))):
            yield from (_question_line(text[start:end]) for start, end in block.spans)
        lead = _last_line(text, block) if block.kind is BlockKind.PARAGRAPH else ""


def _is_title(text: str) -> bool:
    return any(part.strip(" :*_#").lower() in _TITLES for part in text.split("/"))


def _last_line(text: str, block: Block) -> str:
    start, end = block.spans[-1]
    line = text[start:end].rsplit("\n", 1)[-1]
    return line if line.rstrip(" *_").endswith(":") else ""


def _loops(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for loop in markdown.loops(text):
        if not loop.closed:
            whole = "\n".join(lines[loop.start : loop.end])
            yield _question_line(markdown.LOOP.sub("", whole, count=1))


def _question_line(text: str) -> str:
    return _SPACE.sub(" ", text).strip()


# Decides the offline model's next turn, as a pure function of the conversation so far.
#
# It reads, asks, proposes and finishes: one turn each, or fewer if the agent has fewer turns. Every sentence of a draft
# is a quote from an answer (or from a source, for an agent that cannot ask), repeats a question, or is one of the fixed
# sentences of `phrases`. What memory already holds is not proposed again.

CONFLICTS_MAX = 3
QUOTES_MAX = 3
NEAREST_MAX = 2
FACTS_TOKENS_SPARED = 100
"""Tokens reserved for the section's heading and blank lines."""
UNANSWERED_MAX = 5
EXCERPT_CHARS_MAX = 700

_BREAK = re.compile(r"\s*\n\s*(?:>\s?)*|\s+")
_DOUBTS = (
    SafeOutput.PROPOSE_COMMENT,
    SafeOutput.PROPOSE_NOTE,
    SafeOutput.PROPOSE_EDIT,
    SafeOutput.PROPOSE_SUMMARY,
    SafeOutput.PROPOSE_ARTIFACT,
)
_REPORTS = (
    SafeOutput.PROPOSE_SUMMARY,
    SafeOutput.PROPOSE_NOTE,
    SafeOutput.PROPOSE_ARTIFACT,
    SafeOutput.PROPOSE_COMMENT,
)
FINISH = "finish"


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A tool call to make."""

    tool: str
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolReply:
    """A tool call and its reply."""

    args: Mapping[str, Any]
    content: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        return "refused" not in self.content


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationState:
    """The part of the conversation that decides the next turn."""

    run_id: str
    turns: int
    owner: str
    tools: frozenset[str]
    actions: tuple[str, ...]
    memory: Mapping[str, str]
    replies: Mapping[str, Sequence[ToolReply]]

    @property
    def sources(self) -> dict[str, str]:
        read = [reply for reply in self.replies.get(Tool.READ_CONTEXT, ()) if reply.ok]
        return {source["ref"]: source["text"] for reply in read for source in reply.content["sources"]}

    @property
    def sentences(self) -> Mapping[str, str]:
        """The fixed sentences in the owner's language."""
        return SENTENCES[language_of(self.owner)]


def next_turn(view: ConversationState) -> list[PlannedCall]:
    """The calls of this turn; never empty."""
    if view.turns <= 1:
        return [PlannedCall(FINISH, {"summary": view.sentences["read_nothing"]})]
    stages = (_read, _ask, _propose)
    done = max(
        (
            number
            for number, tools in enumerate(
                ((Tool.READ_CONTEXT, Tool.READ_MEMORY), (Tool.NOTEBOOKLM_QUERY,), (Tool.CREATE_PROPOSAL,)), 1
            )
            if any(view.replies.get(tool) for tool in tools)
        ),
        default=0,
    )
    for number in range(done, len(stages)):
        calls = stages[number](view)
        if calls and number == 0 and view.turns == 2:
            calls += _ask(view)
        if calls and number == 2 and view.turns <= 3:
            calls.append(_finish(view, calls))
        if calls:
            return calls
    return [_finish(view, ())]


# -- what each stage does ------------------------------------------------------------------------------------------


def _read(view: ConversationState) -> list[PlannedCall]:
    wanted = (PlannedCall(Tool.READ_CONTEXT, {}), PlannedCall(Tool.READ_MEMORY, {"mode": ReadMode.WIDE.value}))
    return [call for call in wanted if call.tool in view.tools]


def _ask(view: ConversationState) -> list[PlannedCall]:
    if Tool.NOTEBOOKLM_QUERY not in view.tools:
        return []
    chosen = questions(view.owner, view.sources, view.memory)
    return [PlannedCall(Tool.NOTEBOOKLM_QUERY, {"question": one.text}) for one in chosen]


def _propose(view: ConversationState) -> list[PlannedCall]:
    if Tool.CREATE_PROPOSAL not in view.tools:
        return []
    answers = _answers(view)
    known = _on_one_line(" ".join(view.memory.values()))
    pairs = _conflicts(view, answers, known)
    doubts = [call for number, pair in enumerate(pairs, 1) if (call := _doubt(view, pair, number))]
    report, reported = _report(view, answers, known)
    quoted = [*(one for pair in pairs for one in (pair.first, pair.second)), *reported]
    return [*doubts, *report, *_facts(view, quoted, known)]


def _finish(view: ConversationState, calls: Sequence[PlannedCall]) -> PlannedCall:
    words, answers = view.sentences, _answers(view)
    questions_asked = [answer for answer in answers if answer.asked.origin is not Origin.CONFLICT]
    answered = [answer for answer in questions_asked if answer.full]
    lines = [words["did"].format(sources=len(view.sources), asked=len(questions_asked), answered=len(answered))]
    proposals = [reply.args for reply in view.replies.get(Tool.CREATE_PROPOSAL, ()) if reply.ok]
    proposals += [call.args for call in calls if call.tool == Tool.CREATE_PROPOSAL]
    lines += (
        ["", words["proposed"], *(f"- {args['summary']}" for args in proposals)]
        if proposals
        else ["", words["proposed_nothing"]]
    )
    refused = sum(not reply.ok for replies in view.replies.values() for reply in replies)
    lines += ["", words["refused"].format(count=refused)] if refused else []
    open_ = [f"- {answer.asked.text}" for answer in questions_asked if not answer.full][:UNANSWERED_MAX]
    lines += ["", words["unanswered"], *open_] if open_ else []
    return PlannedCall(FINISH, {"summary": "\n".join(lines)})


# -- drafts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AnsweredQuestion:
    """A question, and the quotes that answer it or at least are about it."""

    asked: QuestionToAsk
    quotes: tuple[Statement, ...]
    confident: bool

    @property
    def full(self) -> bool:
        return self.confident and bool(self.quotes)


def _answers(view: ConversationState) -> list[_AnsweredQuestion]:
    by_text = {one.text: one for one in questions(view.owner, view.sources, view.memory)}
    answers: list[_AnsweredQuestion] = []
    for reply in view.replies.get(Tool.NOTEBOOKLM_QUERY, ()):
        question = by_text.get(reply.args["question"]) or QuestionToAsk(reply.args["question"], Origin.OWNER)
        cited: list[dict[str, str]] = reply.content["citations"] if reply.ok else []
        quotes = (comparison.statement(one["ref"], one["excerpt"]) for one in cited if one["ref"] != question.ref)
        kept = tuple(quote for quote in quotes if _quotable(quote))
        answers.append(_AnsweredQuestion(question, kept, confident=reply.ok and reply.content["confident"]))
    return answers


def _conflicts(view: ConversationState, answers: Sequence[_AnsweredQuestion], known: str) -> list[StatementConflict]:
    """Pairs of quotes that a person should check, figures before denials."""
    quotes = list({(q.ref, q.excerpt): q for answer in answers for q in answer.quotes}.values())
    if Tool.NOTEBOOKLM_QUERY not in view.tools:
        quotes = [quote for quote in comparison.statements_with_figures(view.sources) if _quotable(quote)]
    conflicts = comparison.conflicts(quotes)
    seen: set[tuple[str, str]] = set()
    for answer in answers:
        if answer.asked.origin is Origin.OWNER:
            for pair in comparison.denials(answer.asked.text, answer.quotes, quotes)[:1]:
                conflicts += [] if (pair.first.excerpt, pair.second.excerpt) in seen else [pair]
                seen |= {(pair.first.excerpt, pair.second.excerpt), (pair.second.excerpt, pair.first.excerpt)}
    fresh = [
        pair for pair in conflicts if not all(_on_one_line(one.excerpt) in known for one in (pair.first, pair.second))
    ]
    return fresh[:CONFLICTS_MAX]


def _doubt(view: ConversationState, pair: StatementConflict, number: int) -> PlannedCall | None:
    words = view.sentences
    lead = words["figures"] if pair.kind is ConflictKind.FIGURES else words["denial"]
    text = "\n\n".join([lead, *(_quoted(words, one) for one in (pair.first, pair.second)), words["compare"]])
    summary = words["conflict_summary"].format(first=pair.first.ref, second=pair.second.ref)
    return _proposal(
        view, _DOUBTS, summary=summary, text=text, quotes=(pair.first, pair.second), name=f"doubt-{number}"
    )


def _report(
    view: ConversationState, answers: Sequence[_AnsweredQuestion], known: str
) -> tuple[list[PlannedCall], list[Statement]]:
    """What the sources say about the questions, as one text; and the quotes in it."""
    words = view.sentences
    parts: list[str] = []
    used: list[Statement] = []
    for answer in answers:
        quotes = answer.quotes[: QUOTES_MAX if answer.full else NEAREST_MAX]
        wanted = answer.asked.origin is Origin.OWNER or (answer.asked.origin is not Origin.CONFLICT and answer.full)
        if wanted and any(_on_one_line(one.excerpt) not in known for one in quotes):
            label = words["loop"] if answer.asked.origin is Origin.LOOP else words["question"]
            parts.append(label.format(question=answer.asked.text))
            parts += [] if answer.full else [words["nearest"]]
            parts += [_quoted(words, one) for one in quotes]
            used += quotes
    if not parts:
        return [], []
    text = "\n\n".join([words["answers_title"], words["answers_intro"], *parts])
    proposal = _proposal(view, _REPORTS, summary=words["answers_summary"], text=text, quotes=used, name="answers")
    return ([], []) if proposal is None else ([proposal], used)


def _facts(view: ConversationState, quoted: Sequence[Statement], known: str) -> list[PlannedCall]:
    """A memory update with everything quoted in this run, so that the next run does not propose it again."""
    if SafeOutput.MEMORY_UPDATE not in view.actions:
        return []
    words = view.sentences
    lines: dict[str, Statement] = {}
    room = FILE_TOKENS_MAX[FACTS] - count_tokens(view.memory.get(FACTS, "")) - FACTS_TOKENS_SPARED
    for one in quoted:
        line = f"- {_on_one_line(one.excerpt)} {words['found_in'].format(ref=one.ref)}"
        if _on_one_line(one.excerpt) not in known and line not in lines and count_tokens(line) < room:
            lines[line] = one
            room -= count_tokens(line) + 1
    if not lines:
        return []
    args = {
        "action": SafeOutput.MEMORY_UPDATE.value,
        "target": FACTS,
        "operation": "append",
        "section": words["facts_section"],
        "summary": words["facts_summary"],
        "text": "\n".join(lines),
        "reasoning": words["reasoning"],
        "citations": _cited(list(lines.values())),
    }
    return [PlannedCall(Tool.CREATE_PROPOSAL, args)]


def _proposal(
    view: ConversationState,
    wanted: Sequence[SafeOutput],
    *,
    summary: str,
    text: str,
    quotes: Sequence[Statement],
    name: str,
) -> PlannedCall | None:
    action = next((one for one in wanted if one in view.actions), None)
    if action is None:
        return None
    on_source = action in {SafeOutput.PROPOSE_COMMENT, SafeOutput.PROPOSE_EDIT}
    folder = "notes" if action is SafeOutput.PROPOSE_NOTE else "artifacts"
    args = {
        "action": action.value,
        "target": quotes[0].ref if on_source else f"{folder}/{view.run_id}-{name}.md",
        "summary": summary,
        "text": text,
        "reasoning": view.sentences["reasoning"],
        "citations": _cited(quotes),
    }
    return PlannedCall(Tool.CREATE_PROPOSAL, args)


def _quoted(words: Mapping[str, str], one: Statement) -> str:
    return f"> {_on_one_line(one.excerpt)}\n>\n> {words['found_in'].format(ref=one.ref)}"


def _cited(quotes: Sequence[Statement]) -> list[dict[str, str]]:
    unique = {(one.ref, one.excerpt): None for one in quotes}
    return [{"ref": ref, "excerpt": excerpt} for ref, excerpt in unique]


def _quotable(one: Statement) -> bool:
    """Whether it makes a statement and can be shown to a person. A question or a lead-in makes none."""
    text = _on_one_line(one.excerpt)
    return len(text) <= EXCERPT_CHARS_MAX and not text.endswith(("?", ":")) and markdown.problem_in(text) is None


def _on_one_line(text: str) -> str:
    return _BREAK.sub(" ", text).strip()
