"""The commit message of an applied proposal, written and read back.

Only the subject and the last paragraph are believed, and no free text reaches either: ids have a fixed alphabet, and
a reason is kept in a paragraph of its own with every further line indented.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trellis.storage.memory.layout import AGENT_ID, NAME

SUBJECT = re.compile(
    rf"memory-update: (?P<agent>{AGENT_ID.pattern}) / (?P<run>{NAME.pattern}) / (?P<proposal>{NAME.pattern})"
)
TRAILER = re.compile(r"(?P<key>[A-Z][A-Za-z-]+): (?P<value>.+)")
REASON = "Reason: "


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitMessage:
    """What a commit of the apply engine says about itself."""

    agent_id: str
    run_id: str
    proposal_id: str
    version: int
    auto_approved: bool
    reason: str
    files: Sequence[str] = ()
    evicted: Sequence[str] = ()

    def to_bytes(self) -> bytes:
        """The commit message."""
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
    """The message of a commit of the apply engine; None for any other commit."""
    paragraphs = raw.decode("utf-8", "replace").rstrip("\n").split("\n\n")
    subject = SUBJECT.fullmatch(paragraphs[0])
    if subject is None or len(paragraphs) < 3:
        return None
    found = [TRAILER.fullmatch(line) for line in paragraphs[-1].split("\n")]
    trailers = {match["key"]: match["value"] for match in found if match}
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
    _, found, rest = f"\n{body}".partition(f"\n{REASON}")
    return "\n".join(line.strip() for line in rest.split("\n")) if found else ""
