"""The repository of agent memory: reading it, and committing applied proposals."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from dulwich.object_store import BaseObjectStore
from dulwich.objects import ObjectID

from trellis.engine.errors import OptionInvalid
from trellis.storage.memory import commit_plan, history, markdown
from trellis.storage.memory.bare_repository import BareRepository, check_repository, make_repository
from trellis.storage.memory.commit_plan import MemoryCommitOrder, meta_of, version_of
from trellis.storage.memory.errors import MemoryBusy, MemoryOverLimit, ProposalReused
from trellis.storage.memory.layout import (
    DECISIONS,
    DEEP_TOKENS_MAX,
    READ_LIMITS,
    AlreadyApplied,
    CommitId,
    Committed,
    DeepItem,
    DeepPart,
    DeepView,
    HistoryPage,
    MemoryView,
    ReadMode,
    TokenCounter,
    VersionConflict,
    checked_agent_id,
    checked_count,
    checked_name,
    checked_time,
    count_tokens,
)
from trellis.storage.memory.shared_repository import BOOT_ID, SharedRepository, SharedStore
from trellis.storage.memory.trees import AgentFolder
from trellis.storage.memory.updates import Update, digest
from trellis.storage.memory_place import SharedMemory
from trellis.storage.objects.store import ObjectStore

# Reading a memory at one commit: Layer 1 by mode, Layer 2 on explicit request.
#
# Nothing is truncated. Content over its limit raises MemoryOverLimit; Layer 2 comes in pages of complete pieces.


def view(folder: AgentFolder, mode: ReadMode, counter: TokenCounter, tokens_max: int | None) -> MemoryView:
    """Layer 1 in this mode. With `tokens_max` None there is no limit, for display to a person."""
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
    """One page of Layer 2, newest first. A single piece larger than `tokens_max` is refused, not truncated."""
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
    """The commit at which a folder is read, as text."""
    return None if folder.commit is None else CommitId(folder.commit.decode())


def _measured(names: Sequence[str], read: Callable[[str], str], counter: TokenCounter) -> Iterator[DeepItem]:
    for name in names:
        text = read(name)
        yield DeepItem(name=name, text=text, token_count=counter(text))


def _pieces(folder: AgentFolder, part: DeepPart) -> tuple[list[str], Callable[[str], str]]:
    """The names of the pieces of a part, newest first, and a function that reads one."""
    if part is DeepPart.DECISIONS:
        decisions = _decisions(folder.text(DECISIONS))
        return sorted(decisions, reverse=True), decisions.__getitem__
    names = [name.removesuffix(".md") for name in folder.names(part) if name.endswith(".md")]
    return sorted(names, reverse=True), lambda name: folder.text(f"{part}/{name}.md")


def _decisions(text: str) -> dict[str, str]:
    """Each `## ` section by its number in the file. Text before the first one has number 0."""
    lines = text.split("\n")
    starts = [heading.line for heading in markdown.outline(lines).headings if heading.level == 2]
    bounds = [0, *starts, len(lines)]
    pieces = ("\n".join(lines[first:last]).strip("\n") for first, last in pairwise(bounds))
    return {f"{number:06}": f"{piece}\n" for number, piece in enumerate(pieces) if piece.strip()}


# Agent memory in one git repository: on a disk, or in the object store. Only applied proposals change it.
#
# Reads take no lock: they read one commit, and the same commit always gives the same answer. A commit holds the
# writers' lock, moves the branch by compare-and-set, and returns when everything is durable. Applying a proposal again
# returns the first commit. Calls block for milliseconds; call them from a thread, not from an event loop.

HISTORY_LIMIT_MAX = 200
DEEP_LIMIT_MAX = 100


def open_memory(
    path: Path | str,
    *,
    create: bool = True,
    counter: TokenCounter = count_tokens,
    pause: Callable[[float], None] = time.sleep,
) -> "MemoryRepository":
    """Open the memory repository at a path. An absent or empty folder becomes one unless `create` is False."""
    place = Path(path).absolute()
    if create:
        make_repository(place)
    check_repository(place)
    return MemoryRepository(BareRepository(place, pause), counter)


def open_shared_memory(
    objects: ObjectStore, place: SharedMemory, *, counter: TokenCounter = count_tokens, **options: Any
) -> "MemoryRepository":
    """Open the memory in the object store, with its replica on this host; options as of `open_shared_repository`."""
    return MemoryRepository(open_shared_repository(objects, place, **options), counter)


def open_shared_repository(
    objects: ObjectStore,
    place: SharedMemory,
    *,
    pause: Callable[[float], None] = time.sleep,
    importing: bool = False,
) -> SharedRepository:
    """Open the repository in the object store. Sends no request; `close` it at the end.

    With `importing`, also one whose import is under way.
    """
    replica = BareRepository(place.cache.absolute(), pause, durable=not BOOT_ID.exists())
    return SharedRepository(SharedStore(objects, place.prefix), replica, pause, importing=importing)


class MemoryRepository:
    """The memories of all agents, opened by `open_memory` or `open_shared_memory`.

    Safe for any number of threads and processes; a shared one also for any number of hosts.
    """

    def __init__(self, bare: BareRepository | SharedRepository, counter: TokenCounter) -> None:
        self.path = bare.path
        self.place = bare.place
        self._bare = bare
        self._counter = counter

    def close(self) -> None:
        """Close what belongs to this process."""
        self._bare.close()

    @property
    def shared(self) -> SharedRepository | None:
        """The repository in the object store; None if the memory is in a folder."""
        return self._bare if isinstance(self._bare, SharedRepository) else None

    def identity(self, new_id: Callable[[], str]) -> str:
        """What makes this repository the one that it is, also after it was moved. Created if there is none."""
        return self._bare.identity(new_id)

    def head(self) -> ObjectID | None:
        """The current commit of all memories together; None before the first one."""
        return self._bare.branch()

    def objects(self) -> AbstractContextManager[BaseObjectStore]:
        """The git objects, for reading. Ask for the head first: a shared memory then has what the head needs."""
        return self._bare.objects()

    @contextmanager
    def _folder(self, agent_id: str) -> Generator[AgentFolder]:
        """The memory of an agent at the current commit. Raises AgentIdInvalid."""
        agent, head = checked_agent_id(agent_id), self._bare.branch()
        with self._bare.objects() as objects:
            yield AgentFolder(objects, head, agent)

    def read(self, agent_id: str, mode: ReadMode = ReadMode.BASIC) -> MemoryView:
        """Layer 1 as it is now. Raises MemoryOverLimit if it is larger than the mode allows."""
        with self._folder(agent_id) as folder:
            return view(folder, ReadMode(mode), self._counter, READ_LIMITS[mode].tokens_max)

    def read_deep(
        self,
        agent_id: str,
        part: DeepPart,
        *,
        before: str | None = None,
        limit: int = 5,
        tokens_max: int = DEEP_TOKENS_MAX,
    ) -> DeepView:
        """Layer 2, newest first. For explicit requests only; nothing in this package calls it (AUTH-4, PIPE-5)."""
        limit = checked_count(limit, "limit", DEEP_LIMIT_MAX)
        tokens_max = checked_count(tokens_max, "tokens_max", DEEP_TOKENS_MAX)
        with self._folder(agent_id) as folder:
            return deep_view(folder, DeepPart(part), self._counter, before=before, limit=limit, tokens_max=tokens_max)

    def show(self, agent_id: str, version: int) -> MemoryView:
        """All of Layer 1 at one version, for display to a person, without a limit."""
        with self._folder(agent_id) as folder:
            return view(history.at_version(folder, version), ReadMode.WIDE, self._counter, None)

    def history(self, agent_id: str, *, limit: int = 50, before: CommitId | None = None) -> HistoryPage:
        """The commits that changed a memory, newest first. `before` is the `more` of the previous page."""
        limit = checked_count(limit, "limit", HISTORY_LIMIT_MAX)
        with self._folder(agent_id) as newest:
            start = newest if before is None else newest.at(history.parent(newest.objects, _object_id(before)))
            return history.page(start, limit)

    def diff(self, agent_id: str, from_version: int, to_version: int, *, deep: bool = False) -> str:
        """A unified diff between two versions of Layer 1; with `deep`, of Layer 2 too."""
        with self._folder(agent_id) as folder:
            before, after = (history.at_version(folder, version) for version in (from_version, to_version))
            return history.unified_diff(before, after, (f"v{from_version}", f"v{to_version}"), deep=deep)

    def preview(self, agent_id: str, updates: Sequence[Update], *, run_id: str, at: datetime) -> str:
        """What these updates would change in the memory as it is now, as a unified diff; raises UpdatesRefused."""
        with self._folder(agent_id) as folder:
            return commit_plan.preview(folder, updates, run_id, at, self._counter)

    def version_conflict(
        self, agent_id: str, *, expected_version: int | None, proposal_id: str
    ) -> VersionConflict | None:
        """The conflict for which `commit` would refuse a proposal now; None if its version fits or it was applied.

        Raises MemoryMissing: a repository that is away must not look like one without a version.
        """
        self._bare.check()
        with self._folder(agent_id) as folder:
            current = commit_plan.version_of(folder)
            if expected_version is None or current == expected_version:
                return None
            was_applied = commit_plan.marker_of(folder, proposal_id) is not None
        return None if was_applied else VersionConflict(expected=expected_version, current=current)

    def commit(
        self,
        agent_id: str,
        updates: Sequence[Update],
        *,
        expected_version: int | None,
        run_id: str,
        proposal_id: str,
        reason: str,
        auto_approved: bool,
        author: str,
        at: datetime,
    ) -> Committed | VersionConflict | AlreadyApplied:
        """Apply an approved proposal as exactly one commit. Only the apply engine calls this (AUTH-6).

        Without an expected version it is applied to whatever version there is.
        Raises UpdatesRefused if the updates do not fit the memory, and ProposalReused if the proposal was applied with
        other updates. After MemoryUnavailable or a crash, call again: a proposal is never applied twice.
        """
        order = MemoryCommitOrder(
            agent_id=checked_agent_id(agent_id),
            updates=tuple(updates),
            run_id=checked_name(run_id, "run_id"),
            proposal_id=checked_name(proposal_id, "proposal_id"),
            reason=commit_plan.checked_text(reason, "reason", commit_plan.REASON_CHARS_MAX),
            auto_approved=auto_approved,
            author=commit_plan.checked_text(author, "author", commit_plan.AUTHOR_CHARS_MAX, forbidden="<>\n\t"),
            at=checked_time(at),
        )
        with self._bare.locked():
            for _ in range(self._bare.attempts_max):
                outcome = self._attempt(order, expected_version)
                if outcome is not None:
                    return outcome
        raise MemoryBusy(reason=f"the branch moved {self._bare.attempts_max} times while this commit was made")

    def _attempt(
        self, order: MemoryCommitOrder, expected_version: int | None
    ) -> Committed | VersionConflict | AlreadyApplied | None:
        """One try under the lock; None if the branch moved meanwhile."""
        with self._folder(order.agent_id) as folder:
            marker = commit_plan.marker_of(folder, order.proposal_id)
            if marker is not None:
                if marker.updates_digest != digest(order.updates):
                    raise ProposalReused(agent_id=order.agent_id, proposal_id=order.proposal_id)
                earlier = history.find_proposal(folder, order.proposal_id)
                self._bare.sync_branch()
                return AlreadyApplied(commit=CommitId(earlier.decode()), version=marker.version)
            current = commit_plan.version_of(folder)
            if expected_version is not None and current != expected_version:
                return VersionConflict(expected=expected_version, current=current)
            planned = commit_plan.plan(folder, order, self._counter)
        if not self._bare.publish(planned.objects, folder.commit, planned.commit):
            return None
        return Committed(commit=CommitId(planned.commit.decode()), version=planned.version)


def _object_id(commit: str) -> ObjectID:
    if len(commit) != 40 or not set(commit) <= set("0123456789abcdef"):
        raise OptionInvalid(option="before", value=commit, expected=history.BEFORE_EXPECTED)
    return ObjectID(commit.encode())
