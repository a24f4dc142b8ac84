"""Plans the commit of a proposal: every file it writes, and the commit message."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import TypeVar

from dulwich.objects import Commit, ObjectID, ShaFile
from pydantic import BaseModel, ValidationError

from trellis.engine.errors import OptionInvalid
from trellis.storage.memory import markdown
from trellis.storage.memory.errors import MemoryDamaged, UpdatesRefused
from trellis.storage.memory.layout import (
    AGENT_ID,
    APPLIED,
    FACTS,
    FOLDER_FILES_MAX,
    LAYER_1,
    META,
    NAME,
    OPEN_LOOPS,
    ROOT,
    RUNS,
    SNAPSHOT,
    TIMELINE,
    TIMELINE_TOKENS_MAX,
    AgentId,
    AppliedMarker,
    MemoryMeta,
    TokenCounter,
    tokens_max,
)
from trellis.storage.memory.trees import AgentFolder, load, with_changes
from trellis.storage.memory.updates import AppliedUpdates, RejectedUpdates, Update, apply_updates, digest

# The commit message of an applied proposal, written and parsed.
#
# Only the subject and the last paragraph are parsed, and no free text can reach them: ids have a fixed alphabet, and
# the reason has a separate paragraph with every further line indented.

SUBJECT = re.compile(
    rf"memory-update: (?P<agent>{AGENT_ID.pattern}) / (?P<run>{NAME.pattern}) / (?P<proposal>{NAME.pattern})"
)
TRAILER = re.compile(r"(?P<key>[A-Z][A-Za-z-]+): (?P<value>.+)")
REASON = "Reason: "


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitMessage:
    """The message of a commit by the apply engine."""

    agent_id: str
    run_id: str
    proposal_id: str
    version: int
    auto_approved: bool
    reason: str
    files: Sequence[str] = ()
    evicted: Sequence[str] = ()

    def to_bytes(self) -> bytes:
        body = [f"Files: {', '.join(self.files)}"]
        if self.evicted:
            body.append(f"Evicted: {', '.join(self.evicted)}")
        lines = [line.strip() for line in self.reason.split("\n") if line.strip()]
        body.append(REASON + "\n  ".join(lines))
        trailers = [
            f"Proposal-Id: {self.proposal_id}",
            f"Run-Id: {self.run_id}",
            f"Auto-approved: {'true' if self.auto_approved else 'false'}",
            f"Memory-Version: {self.version}",
        ]
        subject = f"memory-update: {self.agent_id} / {self.run_id} / {self.proposal_id}"
        return "\n\n".join([subject, "\n".join(body), "\n".join(trailers)]).encode() + b"\n"


def parse(raw: bytes) -> CommitMessage | None:
    """Parse the message of a commit by the apply engine; None for any other commit."""
    paragraphs = raw.decode("utf-8", "replace").rstrip("\n").split("\n\n")
    subject = SUBJECT.fullmatch(paragraphs[0])
    if subject is None or len(paragraphs) < 3:
        return None
    trailer_matches = [TRAILER.fullmatch(line) for line in paragraphs[-1].split("\n")]
    trailers = {match["key"]: match["value"] for match in trailer_matches if match}
    version = trailers.get("Memory-Version", "")
    if trailers.get("Proposal-Id") != subject["proposal"] or not re.fullmatch(r"[1-9][0-9]{0,15}", version):
        return None
    return CommitMessage(
        agent_id=subject["agent"],
        run_id=subject["run"],
        proposal_id=subject["proposal"],
        version=int(version),
        auto_approved=trailers.get("Auto-approved") == "true",
        reason=_reason("\n\n".join(paragraphs[1:-1])),
    )


def _reason(body: str) -> str:
    _, separator, rest = f"\n{body}".partition(f"\n{REASON}")
    return "\n".join(line.strip() for line in rest.split("\n")) if separator else ""


# Planning a commit. Nothing here writes.
#
# One applied proposal is one commit, which includes meta.json, the day's timeline and the proposal's marker. The same
# memory, proposal, author and time give the same bytes.

_Model = TypeVar("_Model", bound=BaseModel)

COMMITTER = b"apply-engine <>"
AUTHOR_CHARS_MAX = 100
REASON_CHARS_MAX = 2_000
TIMELINE_REASON_CHARS = 160
TIMELINE_PARTS_MAX = 999


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCommitOrder:
    """A validated, approved proposal to commit."""

    agent_id: AgentId
    updates: tuple[Update, ...]
    run_id: str
    proposal_id: str
    reason: str
    auto_approved: bool
    author: str
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitPlan:
    """What to write: first the objects, then the branch."""

    objects: tuple[ShaFile, ...]
    commit: ObjectID
    version: int


def meta_of(folder: AgentFolder) -> MemoryMeta | None:
    """The content of meta.json; None before the first proposal."""
    return _parsed(folder, META, MemoryMeta)


def version_of(folder: AgentFolder) -> int:
    """The number of proposals applied to this memory."""
    meta = meta_of(folder)
    return 0 if meta is None else meta.version


def marker_of(folder: AgentFolder, proposal_id: str) -> AppliedMarker | None:
    """The marker of an applied proposal; None if it was not applied."""
    return _parsed(folder, _marker_file(proposal_id), AppliedMarker)


def preview(folder: AgentFolder, updates: Sequence[Update], run_id: str, at: datetime, counter: TokenCounter) -> str:
    """What the updates would change, as a unified diff. Raises UpdatesRefused with every problem."""
    before = {name: folder.text(name) for name in {*LAYER_1, *_touched(updates)}}
    outcome = apply_updates(before, updates, at, run_id=run_id, counter=counter)
    if isinstance(outcome, RejectedUpdates):
        raise _refused(folder.agent_id, "this proposal", outcome)
    changed = ((name, before[name], outcome.files[name]) for name in outcome.changed)
    return "".join(markdown.unified_diff(old, new, name if old else None, name) for name, old, new in changed)


def _refused(agent_id: AgentId, proposal_id: str, outcome: RejectedUpdates) -> UpdatesRefused:
    detail = "; ".join(str(problem) for problem in outcome.problems)
    return UpdatesRefused(agent_id=agent_id, proposal_id=proposal_id, detail=detail, problems=outcome.problems)


def plan(folder: AgentFolder, order: MemoryCommitOrder, counter: TokenCounter) -> CommitPlan:
    """The next commit of this memory. Raises UpdatesRefused with every problem."""
    before = {name: folder.text(name) for name in {*LAYER_1, *_touched(order.updates)}}
    outcome = apply_updates(before, order.updates, order.at, run_id=order.run_id, counter=counter)
    if isinstance(outcome, RejectedUpdates):
        raise _refused(order.agent_id, order.proposal_id, outcome)
    version = version_of(folder) + 1
    changes, evicted = _changes(folder, order, outcome, version, counter)
    message = CommitMessage(
        agent_id=order.agent_id,
        run_id=order.run_id,
        proposal_id=order.proposal_id,
        version=version,
        auto_approved=order.auto_approved,
        reason=order.reason,
        files=outcome.changed,
        evicted=evicted,
    )
    root = None if folder.commit is None else load(folder.objects, folder.commit, Commit).tree
    tree, new_objects = with_changes(folder.objects, root, changes)
    commit = _commit(tree, folder.commit, order, message)
    return CommitPlan(objects=(*new_objects, commit), commit=commit.id, version=version)


def _changes(
    folder: AgentFolder, order: MemoryCommitOrder, outcome: AppliedUpdates, version: int, counter: TokenCounter
) -> tuple[dict[str, bytes | None], tuple[str, ...]]:
    """Every file that the commit changes, by its path from the root, and the names of what it evicts."""
    files = outcome.files
    meta = MemoryMeta(
        agent_id=order.agent_id,
        version=version,
        last_update=order.at,
        last_run_id=order.run_id,
        snapshot_token_count=counter(files[SNAPSHOT]),
        open_loops_token_count=counter(files[OPEN_LOOPS]),
        facts_token_count=counter(files[FACTS]),
        open_loops_count=sum(not loop.closed for loop in markdown.loops(files[OPEN_LOOPS])),
    )
    changes: dict[str, bytes | None] = {name: files[name].encode() for name in outcome.changed}
    changes[META] = meta.to_bytes()
    changes[_marker_file(order.proposal_id)] = AppliedMarker(
        version=version, updates_digest=digest(order.updates)
    ).to_bytes()
    day, text = _timeline(folder, order, version, counter)
    changes[day] = text.encode()
    gone = [file for part in (RUNS, TIMELINE) for file in _overflow(folder, part, changes)]
    changes.update(dict.fromkeys(gone))
    evicted = (*outcome.evicted, *gone)
    return {f"{ROOT}/{order.agent_id}/{file}": content for file, content in changes.items()}, evicted


def _timeline(folder: AgentFolder, order: MemoryCommitOrder, version: int, counter: TokenCounter) -> tuple[str, str]:
    """The day's timeline file with one more line. When a file is full, another part is started."""
    day = order.at.date().isoformat()
    steps = ", ".join(f"{update.file} {update.operation}" for update in order.updates[:5])
    more = f" and {len(order.updates) - 5} more" if len(order.updates) > 5 else ""
    approval = "auto-approved" if order.auto_approved else f"approved by {order.author}"
    reason = " ".join(order.reason.split())
    if len(reason) > TIMELINE_REASON_CHARS:
        reason = reason[: TIMELINE_REASON_CHARS - 1] + "…"
    line = (
        f"- {order.at:%H:%M:%S}Z v{version} {order.run_id} / {order.proposal_id}, {approval}: {steps}{more} — {reason}"
    )
    parts = [name for name in folder.names(TIMELINE) if name.startswith(day)]
    if (
        parts
        and counter(longer := markdown.append(folder.text(f"{TIMELINE}/{parts[-1]}"), line)) <= TIMELINE_TOKENS_MAX
    ):
        return f"{TIMELINE}/{parts[-1]}", longer
    number = next(n for n in count(1) if _part_name(day, n) not in parts)
    if number > TIMELINE_PARTS_MAX:
        detail = f"the timeline of {day} is full; go on tomorrow"
        raise UpdatesRefused(agent_id=order.agent_id, proposal_id=order.proposal_id, detail=detail, problems=())
    return f"{TIMELINE}/{_part_name(day, number)}", f"# {day}\n\n{line}\n"


def _part_name(day: str, number: int) -> str:
    """`2026-11-15.md`, then `2026-11-15.p002.md`: sorting by name gives the order of time."""
    return f"{day}.md" if number == 1 else f"{day}.p{number:03}.md"


def _overflow(folder: AgentFolder, part: str, changes: dict[str, bytes | None]) -> list[str]:
    """The oldest files to remove from a folder that would have too many. Files written by this commit stay."""
    written = {file for file in changes if file.startswith(f"{part}/")}
    kept = [f"{part}/{name}" for name in folder.names(part)]
    surplus = len({*kept, *written}) - FOLDER_FILES_MAX[part]
    return [file for file in kept if file not in written][: max(surplus, 0)]


def _commit(tree: ObjectID, parent: ObjectID | None, order: MemoryCommitOrder, message: CommitMessage) -> Commit:
    commit = Commit()
    commit.tree = tree
    commit.parents = [] if parent is None else [parent]
    commit.author = f"{order.author} <>".encode()
    commit.committer = COMMITTER
    commit.author_time = commit.commit_time = int(order.at.timestamp())
    commit.author_timezone = commit.commit_timezone = 0
    commit.encoding = b"UTF-8"
    commit.message = message.to_bytes()
    return commit


def _touched(updates: Sequence[Update]) -> list[str]:
    """The files to read: only names that can be files of a memory."""
    return [update.file for update in updates if tokens_max(update.file) is not None]


def _marker_file(proposal_id: str) -> str:
    """The marker's path. It is spread over 256 folders, so that a commit rewrites only small trees."""
    return f"{APPLIED}/{hashlib.sha256(proposal_id.encode()).hexdigest()[:2]}/{proposal_id}.json"


def _parsed(folder: AgentFolder, file: str, model: type[_Model]) -> _Model | None:
    content = folder.read(file)
    if content is None:
        return None
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        where = f"{ROOT}/{folder.agent_id}/{file}"
        raise MemoryDamaged(where=where, reason=f"it does not fit ({error.error_count()} errors)") from error


def checked_text(text: str, option: str, most: int, forbidden: str = "") -> str:
    """The stripped text, if it may appear in a commit and in the timeline; raises OptionInvalid."""
    text = text.replace("\r\n", "\n").strip()
    if not 1 <= len(text) <= most:
        raise OptionInvalid(option=option, value=text[:100], expected=f"give 1 to {most} characters")
    if problem := markdown.problem_in(text):
        raise OptionInvalid(option=option, value=text[:100], expected=f"this text cannot be kept, because {problem}")
    if any(character in forbidden for character in text):
        raise OptionInvalid(option=option, value=text[:100], expected="use one line without < and >")
    return text
