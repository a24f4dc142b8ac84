"""Checks a whole memory repository: every object intact, every commit explained by a proposal, every version present."""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dulwich.object_store import BaseObjectStore
from dulwich.objects import ObjectID, ShaFile, Tree

from trellis.storage.memory import commit_plan
from trellis.storage.memory.commit_plan import CommitMessage, marker_of, version_of
from trellis.storage.memory.errors import MemoryDamaged
from trellis.storage.memory.history import walk
from trellis.storage.memory.layout import AgentId
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.trees import AgentFolder, damaged_at, load

COMMITS_MAX = 1_000_000
FINDINGS_MAX = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryVerifyReport:
    """The result of checking the whole repository. `complete` is False if it stopped at its limit."""

    commits: int
    objects: int
    damage: tuple[str, ...]
    """At most FINDINGS_MAX: the check stops there."""
    unexplained: tuple[str, ...]
    """Findings that damage nothing: commits of a person, which no proposal explains. The newest FINDINGS_MAX of them."""
    unexplained_commits: int
    """How many such commits there are, also beyond FINDINGS_MAX."""
    complete: bool

    @property
    def findings(self) -> tuple[str, ...]:
        """Damage, then commits that no proposal explains."""
        return self.damage + self.unexplained


def verify(memory: MemoryRepository, commits_max: int = COMMITS_MAX) -> MemoryVerifyReport:
    """Check every object of up to `commits_max` commits, from the newest back. Problems are reported, not repaired."""
    head = memory.head()
    with memory.objects() as objects:
        return verify_objects(objects, head, commits_max)


def verify_objects(
    objects: BaseObjectStore, head: ObjectID | None, commits_max: int = COMMITS_MAX
) -> MemoryVerifyReport:
    """Check the history of this commit, as `verify` does."""
    damage: list[str] = []
    unexplained: list[str] = []
    unexplained_commits = 0
    seen: set[ObjectID] = set()
    expected: dict[str, int] = {}
    commits = 0
    complete = True
    try:
        for name, commit in walk(objects, head):
            if commits == commits_max or len(damage) >= FINDINGS_MAX:
                complete = False
                break
            commits += 1
            _check_object(objects, name)
            parsed = commit_plan.parse(commit.message)
            if parsed is None:
                unexplained_commits += 1
                if len(unexplained) < FINDINGS_MAX:
                    unexplained.append(f"commit {name.decode()}: no proposal explains it")
            else:
                damage += _misapplied(objects, head, name, parsed, expected)
            for problem in _broken(objects, commit.tree, seen):
                damage.append(f"commit {name.decode()}: {problem}")
    except MemoryDamaged as error:
        damage.append(str(error))
        complete = False
    if complete:
        damage += [f"{agent}: version {version} has no commit" for agent, version in expected.items() if version > 0]
    return MemoryVerifyReport(
        commits=commits,
        objects=commits + len(seen),
        damage=tuple(islice(damage, FINDINGS_MAX)),
        unexplained=tuple(unexplained),
        unexplained_commits=unexplained_commits,
        complete=complete,
    )


def _misapplied(
    objects: BaseObjectStore, head: ObjectID | None, name: ObjectID, parsed: CommitMessage, expected: dict[str, int]
) -> Iterator[str]:
    """Check that the commit of a proposal has the expected version and contains the proposal's marker."""
    if parsed.agent_id not in expected:
        expected[parsed.agent_id] = version_of(AgentFolder(objects, head, AgentId(parsed.agent_id)))
    if parsed.version != expected[parsed.agent_id]:
        yield f"commit {name.decode()}: makes version {parsed.version}, {expected[parsed.agent_id]} was expected"
    expected[parsed.agent_id] = parsed.version - 1
    marker = marker_of(AgentFolder(objects, name, AgentId(parsed.agent_id)), parsed.proposal_id)
    if marker is None or marker.version != parsed.version:
        yield f"commit {name.decode()}: proposal {parsed.proposal_id} is not marked as applied in it"


def _broken(objects: BaseObjectStore, tree: ObjectID, seen: set[ObjectID]) -> Iterator[str]:
    """Objects under a tree that are missing, changed or malformed. Each is checked once."""
    waiting = [tree]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            stored = _check_object(objects, name)
        except MemoryDamaged as damage:
            yield str(damage)
            continue
        if isinstance(stored, Tree):
            for entry in stored.iteritems():
                if stat.S_ISDIR(entry.mode) or stat.S_ISREG(entry.mode):
                    waiting.append(entry.sha)
                else:
                    yield f"{entry.path!r} is no file and no folder"


def _check_object(objects: BaseObjectStore, name: ObjectID) -> ShaFile:
    """Read the object again from its bytes and check that its name is their digest."""
    stored = load(objects, name, ShaFile)
    with damaged_at(name):
        again = ShaFile.from_raw_string(stored.type_num, stored.as_raw_string())
        again.check()
        if again.id != name:
            raise MemoryDamaged(where=name.decode(), reason="its content is not what its name says")
    return stored
