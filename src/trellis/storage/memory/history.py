"""The history of a memory: its commits, diffs between versions, and the check of a whole repository."""

import difflib
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice

from dulwich.object_store import BaseObjectStore
from dulwich.objects import Commit, ObjectID

from trellis.engine.errors import OptionInvalid
from trellis.storage.memory import commit_plan, markdown
from trellis.storage.memory.errors import MemoryDamaged, MemoryOverLimit, MemoryVersionNotFound
from trellis.storage.memory.layout import (
    ChangeKind,
    CommitId,
    CommittedFileChange,
    HistoryEntry,
    HistoryPage,
    count_tokens,
    is_readable,
    layer,
)
from trellis.storage.memory.markdown import lines_of
from trellis.storage.memory.trees import AgentFolder, damaged_at, load

# History and diffs.
#
# History follows first parents, in bounded steps. It shows every commit that changed a memory, including commits that
# no proposal explains.

SCAN_MAX = 5_000
"""Commits that one page of history reads at most."""
SEARCH_MAX = 1_000_000
"""Commits that the search for one version or proposal reads at most: more than any repository is expected to have."""
DIFF_TOKENS_MAX = 500_000
BEFORE_EXPECTED = "use the `more` of an earlier page"


def walk(objects: BaseObjectStore, head: ObjectID | None) -> Iterator[tuple[ObjectID, Commit]]:
    """Commits from `head` back along first parents."""
    name = head
    while name is not None:
        commit = load(objects, name, Commit)
        yield name, commit
        name = ObjectID(commit.parents[0]) if commit.parents else None


def parent(objects: BaseObjectStore, name: ObjectID) -> ObjectID | None:
    """The parent of a commit that a caller names; raises OptionInvalid if there is no such commit."""
    with damaged_at(name):
        is_there = name in objects
        commit = objects[name] if is_there else None
    if not isinstance(commit, Commit):
        raise OptionInvalid(option="before", value=name.decode(), expected=BEFORE_EXPECTED)
    return ObjectID(commit.parents[0]) if commit.parents else None


def find_proposal(folder: AgentFolder, proposal_id: str) -> ObjectID:
    """The commit that applied a proposal whose marker is in the folder. Searches from the newest commit."""
    for name, message in _own_messages(folder):
        if message.proposal_id == proposal_id:
            return name
    reason = f"proposal {proposal_id} is marked as applied and no commit names it"
    raise MemoryDamaged(where=folder.agent_id, reason=reason)


def at_version(folder: AgentFolder, version: int) -> AgentFolder:
    """The folder as it was at an earlier version; empty for version 0. Raises MemoryVersionNotFound."""
    newest = commit_plan.version_of(folder)
    if version == 0:
        return folder.at(None)
    if 0 < version <= newest:
        for name, message in _own_messages(folder):
            if message.version == version:
                return folder.at(name)
    raise MemoryVersionNotFound(agent_id=folder.agent_id, version=version, newest=newest)


def _own_messages(folder: AgentFolder) -> Iterator[tuple[ObjectID, commit_plan.CommitMessage]]:
    """The commits of applied proposals of this memory, from the folder's commit back, with their messages."""
    for name, commit in islice(walk(folder.objects, folder.commit), SEARCH_MAX):
        message = commit_plan.parse(commit.message)
        if message and message.agent_id == folder.agent_id:
            yield name, message


def page(newest: AgentFolder, limit: int) -> HistoryPage:
    """The commits from this one back that changed the folder: at most `limit`, reading at most SCAN_MAX."""
    entries: list[HistoryEntry] = []
    seen, after = None, newest
    for name, commit in islice(walk(newest.objects, newest.commit), SCAN_MAX):
        if len(entries) == limit:
            return HistoryPage(entries=tuple(entries), more=seen)
        seen = CommitId(name.decode())
        before = newest.at(ObjectID(commit.parents[0]) if commit.parents else None)
        if after.tree != before.tree:
            entries.append(_entry(seen, commit, before, after))
        after = before
    more = seen if seen is not None and load(newest.objects, ObjectID(seen.encode()), Commit).parents else None
    return HistoryPage(entries=tuple(entries), more=more)


def unified_diff(before: AgentFolder, after: AgentFolder, labels: tuple[str, str], *, deep: bool) -> str:
    """The diff of the readable files of two versions; Layer 1 alone unless `deep`."""
    old, new = before.files(), after.files()
    names = sorted(file for file in {*old, *new} if is_readable(file) and (deep or layer(file) == 1))
    text = "".join(
        markdown.unified_diff(
            before.text(file),
            after.text(file),
            f"{labels[0]}/{file}" if file in old else None,
            f"{labels[1]}/{file}" if file in new else None,
        )
        for file in names
        if old.get(file) != new.get(file)
    )
    if (tokens := count_tokens(text)) > DIFF_TOKENS_MAX:
        what = f"The difference of {labels[0]} and {labels[1]}"
        raise MemoryOverLimit(what=what, agent_id=after.agent_id, tokens=tokens, limit=DIFF_TOKENS_MAX)
    return text


def _entry(name: CommitId, commit: Commit, before: AgentFolder, after: AgentFolder) -> HistoryEntry:
    message = commit_plan.parse(commit.message)
    own = message if message and message.agent_id == after.agent_id else None
    return HistoryEntry(
        commit=name,
        at=datetime.fromtimestamp(commit.author_time, UTC),
        author=commit.author.rpartition(b" <")[0].decode("utf-8", "replace"),
        version=own and own.version,
        proposal_id=own and own.proposal_id,
        run_id=own and own.run_id,
        auto_approved=own and own.auto_approved,
        reason=own and own.reason,
        files=tuple(_file_changes(before, after)),
    )


def _file_changes(before: AgentFolder, after: AgentFolder) -> Iterator[CommittedFileChange]:
    old, new = before.files(), after.files()
    for file in sorted(file for file in {*old, *new} if is_readable(file) and old.get(file) != new.get(file)):
        kind = ChangeKind.CHANGED if file in old and file in new else ChangeKind.ADDED
        added, removed = _line_counts(lines_of(before.text(file)), lines_of(after.text(file)))
        yield CommittedFileChange(
            file=file, kind=ChangeKind.REMOVED if file not in new else kind, added=added, removed=removed
        )


def _line_counts(old: list[str], new: list[str]) -> tuple[int, int]:
    """Lines added and removed. The equal beginning is skipped first, because most changes are at the end."""
    head = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    old, new = old[head:], new[head:]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=True)
    equal = sum(block.size for block in matcher.get_matching_blocks())
    return len(new) - equal, len(old) - equal
