"""Checks a whole memory repository: every object intact, every commit explained by a proposal, every version present."""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dulwich.object_store import BaseObjectStore
from dulwich.objects import ObjectID, ShaFile, Tree

from trellis.storage.memory import commit_plan
from trellis.storage.memory.commit_plan import marker_of, version_of
from trellis.storage.memory.errors import MemoryDamaged
from trellis.storage.memory.history import walk
from trellis.storage.memory.layout import AgentId
from trellis.storage.memory.repository import MemoryRepository
from trellis.storage.memory.trees import AgentFolder, damaged_at, load

COMMITS_MAX = 1_000_000
FINDINGS_MAX = 100
UNEXPLAINED = ": no proposal explains it"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryVerifyReport:
    """The result of checking the whole repository. `complete` is False if it stopped at its limit."""

    commits: int
    objects: int
    findings: tuple[str, ...]
    unexplained: tuple[str, ...]
    """Those findings that damage nothing: commits of a person, which no proposal explains."""
    complete: bool

    @property
    def damage(self) -> tuple[str, ...]:
        """The findings without commits that no proposal explains."""
        return tuple(finding for finding in self.findings if finding not in self.unexplained)


def verify(memory: MemoryRepository, commits_max: int = COMMITS_MAX) -> MemoryVerifyReport:
    """Check every object of up to `commits_max` commits, from the newest back. Problems are reported, not repaired."""
    head = memory.head()
    with memory.objects() as objects:
        return verify_objects(objects, head, commits_max)


def verify_objects(
    objects: BaseObjectStore, head: ObjectID | None, commits_max: int = COMMITS_MAX
) -> MemoryVerifyReport:
    """Check the history of this commit, as `verify` does."""
    findings: list[str] = []
    seen: set[ObjectID] = set()
    expected: dict[str, int] = {}
    commits = 0
    complete = True
    try:
        for name, commit in walk(objects, head):
            if commits == commits_max or len(findings) >= FINDINGS_MAX:
                complete = False
                break
            commits += 1
            _check_object(objects, name)
            findings += _explained(objects, head, name, commit.message, expected)
            for problem in _broken(objects, commit.tree, seen):
                findings.append(f"commit {name.decode()}: {problem}")
    except MemoryDamaged as damage:
        findings.append(str(damage))
        complete = False
    if complete:
        findings += [f"{agent}: version {version} has no commit" for agent, version in expected.items() if version > 0]
    return MemoryVerifyReport(
        commits=commits,
        objects=commits + len(seen),
        findings=tuple(islice(findings, FINDINGS_MAX)),
        unexplained=tuple(finding for finding in findings if finding.endswith(UNEXPLAINED)),
        complete=complete,
    )


def _explained(
    objects: BaseObjectStore, head: ObjectID | None, name: ObjectID, message: bytes, expected: dict[str, int]
) -> Iterator[str]:
    """Check that a commit names its proposal, has the expected version, and contains the proposal's marker."""
    parsed = commit_plan.parse(message)
    if parsed is None:
        yield f"commit {name.decode()}{UNEXPLAINED}"
        return
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
