"""Named subscriptions to the feed of bus jobs: one process at a time, from where the last one stopped.

After a crash between handling an event and saving the position, the event is handled again. So handling must be
idempotent.
"""

from dataclasses import dataclass, field

from trellis.engine.clock import Clock
from trellis.engine.jobs import Actor, Subscription
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import FeedPage
from trellis.lifecycles.bus_job import BUS_JOB

_log = log_of("trellis.bus.outcomes.subscription")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubscriptionOptions:
    """Options of a subscription."""

    batch: int = 500
    lease_s: float = 5.0
    poll_s: float = 0.1
    """Pause after an empty page, in seconds."""
    held_up_s: float = 0.5
    """Pause when the bus did not take everything, in seconds."""


class TakenOver(Exception):
    """Another process now holds the subscription."""


@dataclass(kw_only=True)
class FeedSubscriber:
    """One subscriber's position in the feed. Call `page`, then `keep` from time to time, then `remember`."""

    ledger: Ledger
    actor: Actor
    clock: Clock
    follows_as: str
    options: SubscriptionOptions = field(default_factory=SubscriptionOptions)
    begun: int = 0
    """How often this process took the subscription. State cached before may be outdated after each time."""
    _following: Subscription | None = None
    _read_up_to: str | None = None
    _remembered: str | None = None
    _kept_at: float = 0.0

    @property
    def follows(self) -> bool:
        """Whether this process holds the subscription, as far as it knows."""
        return self._following is not None

    async def page(self) -> FeedPage | None:
        """The events after the saved position; None while another process holds the subscription."""
        if self._following is None and not await self._begin():
            return None
        page = await self.ledger.feed(self._read_up_to, limit=self.options.batch, lifecycle=BUS_JOB.name)
        if not page.events:
            self._read_up_to = page.position  # events in between belong to other lifecycles
        return page

    async def keep(self) -> None:
        """Renew the subscription's lease when it is time; raises TakenOver."""
        if self.clock.monotonic() >= self._kept_at + self.options.lease_s / 3:
            await self._keep(None if self._read_up_to == self._remembered else self._read_up_to)

    async def remember(self, position: str) -> None:
        """Save the position up to which everything is done; raises TakenOver."""
        self._read_up_to = position
        await self._keep(position)

    async def release(self) -> None:
        """Release the subscription, so that another process can take it at once."""
        following, self._following = self._following, None
        if following is not None:
            await self.ledger.unsubscribe(following)

    async def _begin(self) -> bool:
        following = await self.ledger.subscribe(self.actor, self.follows_as, lease_s=self.options.lease_s)
        if following is None:
            return False
        self._following, self._kept_at = following, self.clock.monotonic()
        self._read_up_to = self._remembered = following.position
        self.begun += 1
        return True

    async def _keep(self, position: str | None) -> None:
        following = self._following
        if following is None or not await self.ledger.ack(following, position, lease_s=self.options.lease_s):
            self._following = None
            _log.warning("taken_over", follower=self.follows_as, process=self.actor.name)
            raise TakenOver
        self._kept_at = self.clock.monotonic()
        self._remembered = position or self._remembered
