"""What is read of a memory at one commit: Layer 1 by mode, Layer 2 by explicit request.

Nothing is ever cut. Content over its limit is refused with MemoryOverLimit; Layer 2 comes in pages of whole pieces.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from trellis.engine.errors import OptionInvalid
from trellis.storage.memory import markdown
from trellis.storage.memory.applying import meta_of, version_of
from trellis.storage.memory.errors import MemoryOverLimit
from trellis.storage.memory.layout import (
    DECISIONS,
    READ_LIMITS,
    CommitId,
    DeepPart,
    ReadMode,
    TokenCounter,
)
from trellis.storage.memory.records import DeepItem, DeepView, MemoryView
from trellis.storage.memory.trees import AgentFolder


def view(folder: AgentFolder, mode: ReadMode, counter: TokenCounter, tokens_max: int | None) -> MemoryView:
    """Layer 1 in this mode. With `tokens_max` None it is shown to a person, whatever its size."""
    content = {name: folder.text(name) for name in READ_LIMITS[mode].files}
    tokens = sum(counter(text) for text in content.values())
    if tokens_max is not None and tokens > tokens_max:
        raise MemoryOverLimit(what=f"The {mode} memory", agent_id=folder.agent_id, tokens=tokens, limit=tokens_max)
    meta = meta_of(folder)
    return MemoryView(
        agent_id=folder.agent_id,
        mode=mode,
        version=0 if meta is None else meta.version,
        commit=commit_id(folder),
        content=content,
        token_count=tokens,
        last_update=None if meta is None else meta.last_update,
        last_run_id=None if meta is None else meta.last_run_id,
    )


def deep_view(
    folder: AgentFolder, part: DeepPart, counter: TokenCounter, *, before: str | None, limit: int, tokens_max: int
) -> DeepView:
    """One page of Layer 2, newest first. A single piece larger than `tokens_max` is refused, not cut."""
    names, read = _pieces(folder, part)
    if before is not None and before not in names:
        raise OptionInvalid(option="before", value=before, expected=f"use the `more` of an earlier page of {part}")
    start = 0 if before is None else names.index(before) + 1
    items: list[DeepItem] = []
    more = None
    for item in _measured(names[start:], read, counter):
        if item.token_count > tokens_max and not items:
            what = f"{part} {item.name}"
            raise MemoryOverLimit(what=what, agent_id=folder.agent_id, tokens=item.token_count, limit=tokens_max)
        if len(items) == limit or sum(kept.token_count for kept in items) + item.token_count > tokens_max:
            more = items[-1].name
            break
        items.append(item)
    return DeepView(
        agent_id=folder.agent_id,
        part=part,
        version=version_of(folder),
        commit=commit_id(folder),
        items=tuple(items),
        token_count=sum(item.token_count for item in items),
        more=more,
    )


def commit_id(folder: AgentFolder) -> CommitId | None:
    """The commit a folder is read at, as text."""
    return None if folder.commit is None else CommitId(folder.commit.decode())


def _measured(names: Sequence[str], read: Callable[[str], str], counter: TokenCounter) -> Iterator[DeepItem]:
    for name in names:
        text = read(name)
        yield DeepItem(name=name, text=text, token_count=counter(text))


def _pieces(folder: AgentFolder, part: DeepPart) -> tuple[list[str], Callable[[str], str]]:
    """The names of the pieces of a part, newest first, and how to read one."""
    if part is DeepPart.DECISIONS:
        decisions = _decisions(folder.text(DECISIONS))
        return sorted(decisions, reverse=True), decisions.__getitem__
    names = [name.removesuffix(".md") for name in folder.names(part) if name.endswith(".md")]
    return sorted(names, reverse=True), lambda name: folder.text(f"{part}/{name}.md")


def _decisions(text: str) -> dict[str, str]:
    """Each `## ` section by its number in the file; what stands before the first one is number 0."""
    lines = text.split("\n")
    starts = [heading.line for heading in markdown.outline(lines).headings if heading.level == 2]
    bounds = [0, *starts, len(lines)]
    pieces = ("\n".join(lines[first:last]).strip("\n") for first, last in pairwise(bounds))
    return {f"{number:06}": f"{piece}\n" for number, piece in enumerate(pieces) if piece.strip()}
