"""What clients were told, and whether the ledger agrees.

Every answer a client gets is noted here. `problems` compares the notes with every history in the ledger. It needs no
search: the epoch orders the owners of a job, so each rule is a look at one job.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from trellis.engine.jobs import Claimed, JobId, Lease, LeaseLost, Mismatch, StepApplied, Submitted, Turn, TurnResult
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobHistory
from trellis.lifecycles import LIFECYCLES, Phase, Trigger


@dataclass
class Told:
    """The answers that clients got. What they were never told, they may not count on."""

    submitted: set[JobId] = field(default_factory=set)
    claims: dict[tuple[JobId, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """(job, epoch) -> the claim ids it was handed out to."""
    completed: set[tuple[JobId, int]] = field(default_factory=set)
    refused: set[tuple[JobId, int]] = field(default_factory=set)
    """Completions that were answered with LeaseLost."""

    def note_submit(self, answers: Iterable[Submitted | Mismatch]) -> None:
        self.submitted |= {answer.job_id for answer in answers if isinstance(answer, Submitted)}

    def note_claim(self, claim_id: str, claimed: Iterable[Claimed]) -> None:
        for job in claimed:
            self.claims[job.lease.job_id, job.lease.epoch].add(claim_id)

    def note_completion(self, lease: Lease, outcome: StepApplied | LeaseLost) -> None:
        kind = self.refused if isinstance(outcome, LeaseLost) else self.completed
        kind.add((lease.job_id, lease.epoch))

    def note_turn(self, turn: Turn, result: TurnResult) -> None:
        if turn.claim is not None:
            self.note_claim(turn.claim.claim_id, result.claimed)
        for advance, outcome in zip(turn.advances, result.outcomes, strict=True):
            if advance.trigger == Trigger.COMPLETE:
                self.note_completion(advance.lease, outcome)


async def problems(told: Told, ledger: Ledger) -> list[str]:
    """Everything in which the ledger and what clients were told disagree."""
    found = []
    histories = {history.job.job_id: history async for history in ledger.histories()}
    found += [
        f"{job_id}: its submit was acknowledged and it is not there" for job_id in told.submitted - set(histories)
    ]
    found += [
        f"{job_id}: epoch {epoch} was handed out to {len(claims)} claims"
        for (job_id, epoch), claims in told.claims.items()
        if len(claims) > 1
    ]
    for history in histories.values():
        found += _chain(history)
        found += _completions(history, told)
    found += [
        f"{job_id}: its claim at epoch {epoch} was acknowledged and no event of that epoch is there"
        for job_id, epoch in told.claims
        if job_id in histories and epoch not in {event.epoch for event in histories[job_id].events}
    ]
    return found


def _chain(history: JobHistory) -> list[str]:
    """Versions 1, 2, 3 …, each event beginning where the last one ended."""
    found, state = [], None
    for number, event in enumerate(history.events, 1):
        if event.version != number:
            found.append(f"{event.job_id}: event {number} has version {event.version}")
        if event.source != state:
            found.append(f"{event.job_id}: event {number} leaves {event.source} and the job was in {state}")
        state = event.target
    if history.job.version != len(history.events):
        found.append(f"{history.job.job_id}: version {history.job.version} with {len(history.events)} events")
    return found


def _completions(history: JobHistory, told: Told) -> list[str]:
    job_id, lifecycle = history.job.job_id, LIFECYCLES[history.job.lifecycle]
    done = {state.name for state in lifecycle.states if state.phase is Phase.ENDED and state.success}
    recorded = Counter(event.epoch for event in history.events if event.target in done and event.source != event.target)
    acknowledged = {epoch for job, epoch in told.completed if job == job_id}
    refused = {epoch for job, epoch in told.refused if job == job_id}
    found = []
    if sum(recorded.values()) > 1:
        found.append(f"{job_id}: completed {sum(recorded.values())} times, at epochs {sorted(recorded)}")
    if len(acknowledged) > 1:
        found.append(f"{job_id}: completions at epochs {sorted(acknowledged)} were all acknowledged")
    found += [
        f"{job_id}: completion at epoch {epoch} was acknowledged, not recorded"
        for epoch in acknowledged - set(recorded)
    ]
    found += [f"{job_id}: completion at epoch {epoch} was refused and recorded" for epoch in refused & set(recorded)]
    owners = {epoch for job, epoch in told.claims if job == job_id}
    stale = {epoch for epoch in recorded if owners and epoch < max(owners)}
    found += [f"{job_id}: completed by epoch {epoch}, which had been taken over" for epoch in stale]
    return found
