"""Agent memory in one bare git repository: read by anyone who may, changed by applied proposals only.

Reads take no lock: they look at one commit, and the same commit always gives the same answer. A commit holds the
writer's lock, moves the branch by compare-and-set, and returns when everything is on the disk. Applying a proposal a
second time finds the first commit. Calls block for milliseconds; from an event loop, use a thread.
"""

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from dulwich.objects import ObjectID

from trellis.engine.errors import OptionInvalid
from trellis.storage.memory import applying, history, reading, verifying
from trellis.storage.memory.applying import MemoryCommitOrder
from trellis.storage.memory.bare import BareRepository, check_repository, make_repository
from trellis.storage.memory.errors import MemoryBusy, ProposalReused
from trellis.storage.memory.layout import (
    DEEP_TOKENS_MAX,
    READ_LIMITS,
    CommitId,
    DeepPart,
    ReadMode,
    TokenCounter,
    checked_agent_id,
    checked_count,
    count_tokens,
)
from trellis.storage.memory.records import (
    AlreadyApplied,
    Committed,
    DeepView,
    HistoryPage,
    MemoryVerifyReport,
    MemoryView,
    VersionConflict,
)
from trellis.storage.memory.trees import AgentFolder
from trellis.storage.memory.updates import Update, digest

MOVE_ATTEMPTS_MAX = 8
"""How often a commit is built again because a git beside us moved the branch meanwhile."""
HISTORY_LIMIT_MAX = 200
DEEP_LIMIT_MAX = 100
VERIFY_COMMITS_MAX = 1_000_000


def open_memory(
    path: Path | str,
    *,
    create: bool = True,
    counter: TokenCounter = count_tokens,
    pause: Callable[[float], None] = time.sleep,
) -> "MemoryRepository":
    """The memory repository at a path; an absent or empty folder becomes one unless `create` is False."""
    place = Path(path).absolute()
    if create:
        make_repository(place)
    check_repository(place)
    return MemoryRepository(BareRepository(place, pause), counter)


class MemoryRepository:
    """The memories of all agents; made by `open_memory`, safe to use from any number of threads and processes."""

    def __init__(self, bare: BareRepository, counter: TokenCounter) -> None:
        self.path = bare.path
        self._bare = bare
        self._counter = counter

    def read(self, agent_id: str, mode: ReadMode = ReadMode.BASIC) -> MemoryView:
        """Layer 1 as it is now; MemoryOverLimit if it is larger than the mode allows."""
        agent, head = checked_agent_id(agent_id), self._bare.branch()
        with self._bare.objects() as objects:
            folder = AgentFolder(objects, head, agent)
            return reading.view(folder, ReadMode(mode), self._counter, READ_LIMITS[mode].tokens_max)

    def read_deep(
        self,
        agent_id: str,
        part: DeepPart,
        *,
        before: str | None = None,
        limit: int = 5,
        tokens_max: int = DEEP_TOKENS_MAX,
    ) -> DeepView:
        """Layer 2, newest first. For an explicit request only; nothing in this package calls it (AUTH-4, PIPE-5)."""
        agent, head = checked_agent_id(agent_id), self._bare.branch()
        limit = checked_count(limit, "limit", DEEP_LIMIT_MAX)
        tokens_max = checked_count(tokens_max, "tokens_max", DEEP_TOKENS_MAX)
        with self._bare.objects() as objects:
            folder = AgentFolder(objects, head, agent)
            return reading.deep_view(
                folder, DeepPart(part), self._counter, before=before, limit=limit, tokens_max=tokens_max
            )

    def show(self, agent_id: str, version: int) -> MemoryView:
        """All of Layer 1 as one version left it, for a person to look at; no limit refuses it."""
        agent, head = checked_agent_id(agent_id), self._bare.branch()
        with self._bare.objects() as objects:
            newest = applying.version_of(AgentFolder(objects, head, agent))
            commit = history.find_version(objects, head, agent, version, newest)
            return reading.view(AgentFolder(objects, commit, agent), ReadMode.WIDE, self._counter, None)

    def history(self, agent_id: str, *, limit: int = 50, before: CommitId | None = None) -> HistoryPage:
        """The commits that changed a memory, newest first; `before` is the `more` of the page before."""
        agent = checked_agent_id(agent_id)
        limit = checked_count(limit, "limit", HISTORY_LIMIT_MAX)
        with self._bare.objects() as objects:
            start = self._bare.branch()
            if before is not None:
                start = history.parent(objects, _object_id(before))
            return history.page(objects, start, agent, limit)

    def diff(self, agent_id: str, from_version: int, to_version: int, *, deep: bool = False) -> str:
        """Unified text between two versions of Layer 1; with `deep`, of Layer 2 too."""
        agent, head = checked_agent_id(agent_id), self._bare.branch()
        with self._bare.objects() as objects:
            newest = applying.version_of(AgentFolder(objects, head, agent))
            before, after = (
                AgentFolder(objects, history.find_version(objects, head, agent, version, newest), agent)
                for version in (from_version, to_version)
            )
            return history.unified_diff(before, after, (f"v{from_version}", f"v{to_version}"), deep=deep)

    def preview(self, agent_id: str, updates: Sequence[Update], *, run_id: str, at: datetime) -> str:
        """What these updates would change in the memory as it is now, as unified text; raises UpdatesRefused."""
        agent, head = checked_agent_id(agent_id), self._bare.branch()
        with self._bare.objects() as objects:
            return applying.preview(AgentFolder(objects, head, agent), updates, run_id, at, self._counter)

    def verify(self, commits_max: int = VERIFY_COMMITS_MAX) -> MemoryVerifyReport:
        """Check every object and every commit; what is found is listed, not repaired."""
        with self._bare.objects() as objects:
            return verifying.verify(
                objects, self._bare.branch(), checked_count(commits_max, "commits_max", VERIFY_COMMITS_MAX)
            )

    def commit(
        self,
        agent_id: str,
        updates: Sequence[Update],
        *,
        expected_version: int,
        run_id: str,
        proposal_id: str,
        reason: str,
        auto_approved: bool,
        author: str,
        at: datetime,
    ) -> Committed | VersionConflict | AlreadyApplied:
        """Apply an approved proposal as exactly one commit. The apply engine alone calls this (AUTH-6).

        Raises UpdatesRefused when the updates do not fit the memory, ProposalReused when the proposal was applied
        with other updates. After MemoryUnavailable or a lost process, ask again: it is never applied twice.
        """
        order = applying.checked_order(
            agent_id,
            updates,
            run_id=run_id,
            proposal_id=proposal_id,
            reason=reason,
            auto_approved=auto_approved,
            author=author,
            at=at,
        )
        with self._bare.locked():
            for _ in range(MOVE_ATTEMPTS_MAX):
                outcome = self._attempt(order, expected_version)
                if outcome is not None:
                    return outcome
        raise MemoryBusy(reason=f"the branch moved {MOVE_ATTEMPTS_MAX} times while this commit was made")

    def _attempt(
        self, order: MemoryCommitOrder, expected_version: int
    ) -> Committed | VersionConflict | AlreadyApplied | None:
        """One try under the lock; None when the branch moved meanwhile."""
        head = self._bare.branch()
        with self._bare.objects() as objects:
            folder = AgentFolder(objects, head, order.agent_id)
            marker = applying.marker_of(folder, order.proposal_id)
            if marker is not None:
                if marker.updates_digest != digest(order.updates):
                    raise ProposalReused(agent_id=order.agent_id, proposal_id=order.proposal_id)
                found = history.find_proposal(objects, head, order.agent_id, order.proposal_id)
                self._bare.sync_branch()
                return AlreadyApplied(commit=CommitId(found.decode()), version=marker.version)
            current = applying.version_of(folder)
            if current != expected_version:
                return VersionConflict(expected=expected_version, current=current)
            planned = applying.plan(objects, folder, order, self._counter)
        self._bare.write(planned.objects)
        if not self._bare.move_branch(head, planned.commit):
            return None
        return Committed(commit=CommitId(planned.commit.decode()), version=planned.version)


def _object_id(commit: str) -> ObjectID:
    if len(commit) != 40 or not set(commit) <= set("0123456789abcdef"):
        raise OptionInvalid(option="before", value=commit, expected=history.BEFORE_EXPECTED)
    return ObjectID(commit.encode())
