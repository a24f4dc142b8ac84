"""What one principal reaches of one ledger: jobs and events, for entrances that work on a ledger directly."""

from contextlib import suppress
from dataclasses import dataclass, field, replace

from trellis.engine.authority import Principal
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.matrices import permit
from trellis.engine.ownership import permit_on_job, sees_all
from trellis.engine.recent import LruCache
from trellis.engine.records import Event, FeedPage, Job

REMEMBERED_MAX = 10_000


@dataclass(kw_only=True)
class PrincipalReach:
    """Asks whose a job is, once: that never changes."""

    principal: Principal
    ledger: Ledger
    _known: LruCache[tuple[str, JobId], None] = field(
        default_factory=lambda: LruCache[tuple[str, JobId], None](REMEMBERED_MAX)
    )

    async def check(self, rule: str, job_id: JobId, job: Job | None = None) -> None:
        """Raise NotAllowed when the rule does not give the principal this job; `job` where it was read already."""
        permit(self.principal, rule)
        if sees_all(self.principal, rule) or (rule, job_id) in self._known:
            return
        await permit_on_job(self.principal, rule, self.ledger, job or await self.ledger.job(job_id))
        self._known[rule, job_id] = None

    async def events(self, rule: str, events: list[Event]) -> list[Event]:
        """Those of these events that the rule gives the principal."""
        permit(self.principal, rule)
        if sees_all(self.principal, rule):
            return events
        shown: list[Event] = []
        for event in events:
            with suppress(NotAllowed):
                await self.check(rule, event.job_id)
                shown.append(event)
        return shown

    async def page(self, rule: str, page: FeedPage) -> FeedPage:
        """What the rule gives the principal of a page of the feed; raises NotAllowed when that is nothing of any page."""
        permit(self.principal, rule)
        if sees_all(self.principal, rule):
            return page
        shown = {event.id for event in await self.events(rule, list(page.events))}
        kept = [one for one in zip(page.events, page.positions, strict=True) if one[0].id in shown]
        return replace(page, events=tuple(event for event, _ in kept), positions=tuple(place for _, place in kept))
