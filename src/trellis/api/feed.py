"""Events of all jobs: found by job, type or correlation, or read in the order of the feed (DJ-13, RUN-5, D62).

An event tells as much as the job it belongs to, so a caller gets the events of the lifecycles that it may read.
"""

from dataclasses import dataclass
from datetime import datetime

from trellis.api.context import LIMIT_DEFAULT, ApiContext
from trellis.auth.ownership import PrincipalReach, sees_all
from trellis.engine.errors import JobNotFound
from trellis.engine.jobs import JobId
from trellis.engine.records import Event
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.inbox_entry import INBOX_ENTRY
from trellis.lifecycles.nlm_job import NLM_JOB
from trellis.lifecycles.proposal import PROPOSAL
from trellis.lifecycles.run import RUN

FOLLOW = "events.read"
RULE_OF_LIFECYCLE = {
    RUN.name: "runs.read",
    PROPOSAL.name: "proposals.read",
    INBOX_ENTRY.name: "inbox.read",
    ARTIFACT.name: "artifacts.read",
    NLM_JOB.name: "nlm.read",
}
"""The rule for reading the objects of a lifecycle; for all others it is `jobs.read`."""
LOOK_EVENTS = 1_000
"""How many events each further look at the ledger reads."""
LOOKED_AT_MAX = 20_000
"""How many events of everybody are looked at for one answer."""
LATEST = "latest"
"""The position after the last event."""


def rule_of(lifecycle: str) -> str:
    """The rule that says who may read jobs of a lifecycle."""
    return RULE_OF_LIFECYCLE.get(lifecycle, "jobs.read")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRows:
    """Events, oldest first, and the position after them in the feed; None if they were looked up."""

    items: list[Event]
    position: str | None


class LocalFeed:
    """Events on a ledger, with the calls of `client.feed`."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._reach = PrincipalReach(principal=context.reader, ledger=context.changes)

    async def find(
        self,
        *,
        job_id: str | None = None,
        type_: str | None = None,
        correlation_id: str | None = None,
        since: datetime | None = None,
        lifecycle: str | None = None,
        limit: int = LIMIT_DEFAULT,
    ) -> EventRows:
        """The events of one job, or those of a type or a correlation id. Raises JobNotFound, NotAllowed."""
        self._context.check_read(FOLLOW)
        ledger, readable = self._context.ledger, self._readable(lifecycle)
        if job_id is not None:
            await self._reach.check(FOLLOW, JobId(job_id))
            events = await ledger.events(JobId(job_id))
            if not events or events[0].lifecycle not in self._readable(None):
                raise JobNotFound(job_id=job_id)
        else:
            return EventRows(items=await self._found(type_, correlation_id, since, readable, limit), position=None)
        shown = await self._reach.events(FOLLOW, [one for one in events if one.lifecycle in readable])
        return EventRows(items=shown[:limit], position=None)

    async def _found(
        self,
        type_: str | None,
        correlation_id: str | None,
        since: datetime | None,
        readable: frozenset[str],
        limit: int,
    ) -> list[Event]:
        """The first `limit` events of a type or correlation that the caller may read, among `LOOKED_AT_MAX` of all.

        The next look begins with the time of the last event, and passes over the events of that time that it has.
        """
        shown: dict[str, Event] = {}
        looked_at: set[str] = set()
        size = limit
        while len(shown) < limit and len(looked_at) < LOOKED_AT_MAX:
            events = await self._context.changes.find_events(
                type_=type_, correlation_id=correlation_id, since=since, limit=size
            )
            new = [one for one in events if one.id not in looked_at]
            looked_at.update(one.id for one in new)
            may_read = await self._reach.events(FOLLOW, [one for one in new if one.lifecycle in readable])
            shown |= {one.id: one for one in may_read}
            if len(events) < size or not new:
                break
            since, size = events[-1].ts, LOOK_EVENTS
        return list(shown.values())[:limit]

    async def page(
        self, after: str | None = None, *, lifecycle: str | None = None, limit: int = LIMIT_DEFAULT
    ) -> EventRows:
        """The events after a position of the feed, from the first one without it. `latest` is the present end.

        There may be fewer than `limit` although more follow; go on from `position`.
        """
        self._context.check_read(FOLLOW)
        if after == LATEST:
            return EventRows(items=[], position=await self._context.changes.feed_end())
        readable = self._readable(lifecycle)
        only = None if readable == frozenset(LIFECYCLES) else readable
        page = await self._reach.page(FOLLOW, await self._context.changes.feed(after, limit=limit, lifecycle=only))
        return EventRows(items=list(page.events), position=page.position)

    def _readable(self, lifecycle: str | None) -> frozenset[str]:
        """The lifecycles, or this one, whose events the caller may read: all of them, or those of its own jobs."""
        own_only, reader = not sees_all(self._context.reader, FOLLOW), self._context.reader
        rules = {name: rule_of(name) for name in LIFECYCLES}
        readable = {
            name for name, rule in rules.items() if sees_all(reader, rule) or (own_only and rule == "jobs.read")
        }
        return frozenset(readable if lifecycle is None else readable & {lifecycle})
