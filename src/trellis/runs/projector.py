"""Publishes what the ledger decided: follows the feed and puts documents and audit records into the object store (D14, D35, OBS-1).

One projector at a time follows; the ledger keeps its place, so the next one goes on where it stopped. An event may be published
twice, after a crash between publishing and remembering: the second time nothing is written, because documents are functions of
the ledger and are only ever created or raised.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from trellis.engine.clock import Clock
from trellis.engine.jobs import Actor, Following, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Event
from trellis.lifecycles.proposal import PROPOSAL
from trellis.lifecycles.run import RUN
from trellis.runs import documents, ids, proposals
from trellis.runs.documents import Facts, Publication, Request
from trellis.runs.publishing import Publisher

FOLLOWS_AS = "projector"
AUDITED = frozenset({RUN.name, PROPOSAL.name})
"""Lifecycles whose every event has an audit record of its own."""
PAYLOADS_MAX = 1_000

_log = log_of("trellis.projector")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorOptions:
    """How it follows."""

    batch: int = 200
    lease_s: float = 5.0
    poll_s: float = 0.05
    """How soon it looks again when there was nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projected:
    """What one pass did. `following` false: another projector does the work."""

    following: bool = False
    events: int = 0
    written: int = 0


@dataclass(kw_only=True)
class Projector:
    """The service. A pass reads a page of the feed, publishes it, and remembers how far it came."""

    ledger: Ledger
    actor: Actor
    publisher: Publisher
    clock: Clock
    options: ProjectorOptions = field(default_factory=ProjectorOptions)
    name: str = "projector"
    _following: Following | None = None
    _payloads: "OrderedDict[JobId, bytes]" = field(default_factory=OrderedDict[JobId, bytes])

    async def run_once(self) -> Projected:
        """One page. What the store does not take now is tried again from the same place."""
        following = self._following or await self.ledger.follow(self.actor, FOLLOWS_AS, lease_s=self.options.lease_s)
        if following is None:
            return Projected()
        page = await self.ledger.feed(following.position, limit=self.options.batch)
        written, renewed_at = 0, self.clock.monotonic()
        for event in page.events:
            written += await self._publish(event)
            if self.clock.monotonic() > renewed_at + self.options.lease_s / 3:
                renewed_at = self.clock.monotonic()
                if not await self.ledger.followed(following, None, lease_s=self.options.lease_s):
                    break
        self._following = None
        position = page.position if page.events else None
        if not await self.ledger.followed(following, position, lease_s=self.options.lease_s):
            _log.warning("taken_over", projector=self.actor.name)
            return Projected(events=len(page.events), written=written)
        self._following = Following(name=following.name, epoch=following.epoch, position=position or following.position)
        return Projected(following=True, events=len(page.events), written=written)

    def pause_s(self, report: Projected) -> float:
        """At once while there is more."""
        if not report.following:
            return self.options.lease_s / 5
        return 0.0 if report.events else self.options.poll_s

    async def let_go(self) -> None:
        """Let another projector go on at once."""
        following, self._following = self._following, None
        if following is not None:
            await self.ledger.unfollow(following)

    async def _publish(self, event: Event) -> int:
        if event.lifecycle not in AUDITED:
            return 0
        return await self.publisher.publish(
            await publications_of(self.ledger, event, await self._payload(event.job_id))
        )

    async def _payload(self, job_id: JobId) -> bytes:
        found = self._payloads.get(job_id)
        if found is None:
            job = await self.ledger.job(job_id)
            found = b"" if job is None or job.payload is None else job.payload
            self._payloads[job_id] = found
            if len(self._payloads) > PAYLOADS_MAX:
                self._payloads.popitem(last=False)
        return found


async def publications_of(ledger: Ledger, event: Event, payload: bytes) -> list[Publication]:
    """Everything one event publishes, in order: its documents, then its audit record."""
    events = [past for past in await ledger.events(event.job_id) if past.version <= event.version]
    if event.lifecycle == PROPOSAL.name:
        puts = [proposals.publication(payload, events)]
    else:
        puts = await _of_run(ledger, event, events, payload)
    return [*puts, Publication(ids.audit_key(event.ts, event.id), documents.audit(event))]


async def _of_run(ledger: Ledger, event: Event, events: Sequence[Event], payload: bytes) -> list[Publication]:
    facts = Facts(event.job_id, Request.read(payload), tuple(events))
    journal = await ledger.read_journal(event.job_id) if event.type == documents.STEP_DONE else {}
    return documents.publications(facts, journal)
