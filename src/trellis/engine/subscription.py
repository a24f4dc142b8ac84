"""A service that follows the ledger's feed under a name: one process at a time, from where the last one stopped.

A subscriber is elected by the ledger, reads bounded pages, and saves the position up to which it has handled
everything. After a crash between handling an event and saving the position, the event is handled again. So handling
must be idempotent.
"""

import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trellis.engine.clock import Clock
from trellis.engine.jobs import Actor, Subscription
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Event, FeedPage

PROJECTOR = "projector"
"""The name under which a projector follows the feed. What it publishes is sealed in the audit chain, so retention waits
for the chain in a ledger that this name follows."""

_log = log_of("trellis.subscription")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubscriptionOptions:
    """Page size, lease and pauses of a subscriber."""

    batch: int = 500
    """Most events in a page."""
    lease_s: float = 5.0
    """How long after the last sign of life another process may take over. Renewed after a third of it."""
    poll_s: float = 0.1
    """Pause after an empty page, in seconds."""
    held_up_s: float = 0.5
    """Pause after a page that could not be handled to its end, in seconds."""
    gather_s: float = 0.0
    """Pause after a page that was not full, in seconds. What happens meanwhile is read in one page."""
    rest_s: float = 0.0
    """Pause after a page that was not full and needed no action, in seconds, if it is longer than `gather_s`."""
    save_every_s: float = 0.0
    """Shortest time between two saves of the position, in seconds; 0 saves it after every page.

    After a crash, what was handled since the last save is handled again.
    """
    standby_tries: int = 5
    """How often per lease a process on standby tries to take over."""


OptionsT = TypeVar("OptionsT", bound=SubscriptionOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedReport:
    """The result of one pass of a subscriber."""

    following: bool = False
    """False while another process does the work."""
    events: int = 0
    """Number of events that were read."""
    held_up: bool = False
    """Whether events are left that could not be handled now."""
    needed_nothing: bool = False
    """Whether there was nothing to do for the events that were read."""


class TakenOver(Exception):
    """Another process now holds the subscription."""


@dataclass(kw_only=True)
class FeedSubscriber(Generic[OptionsT]):
    """The base of services that follow the feed.

    A subclass defines `run_once`. It calls `take`; or `page`, `keep` from time to time, and `remember`.
    """

    ledger: Ledger
    actor: Actor
    clock: Clock
    options: OptionsT
    name: str
    follows_as: str
    """The name under which the ledger elects one process and stores its position."""
    lifecycle: str | frozenset[str] | None = None
    """The lifecycles whose events it reads; None for all."""
    types: frozenset[str] | None = None
    """The event types that it reads; None for all."""
    waits_for_events = True
    begun: int = 0
    """How often this process took the subscription. State cached before may be outdated after each time."""
    saved: str | None = None
    """The position that was saved last; None at the start of the feed."""
    _following: Subscription | None = None
    _read_up_to: str | None = None
    _kept_in: int = 0
    _save_at: float = -math.inf
    """When a position may be saved next, by this process's clock."""
    _is_unsaved: bool = False

    @property
    def follows(self) -> bool:
        """Whether this process holds the subscription, as far as it knows."""
        return self._following is not None

    async def begin(self, first: str | None = None) -> bool:
        """Take the subscription, with the position that was saved last. False while another process holds it.

        If none was saved yet, `first` is saved with the subscription; without it the feed is read from its start.
        """
        lease_s = self.options.lease_s
        following = await self.ledger.subscribe(self.actor, self.follows_as, lease_s=lease_s, first=first)
        if following is None:
            return False
        self._following, self._kept_in = following, self._renewal_period()
        self._read_up_to = self.saved = following.position
        self._is_unsaved = False
        self.begun += 1
        return True

    async def page(self) -> FeedPage | None:
        """The events after the saved position; None while another process holds the subscription."""
        if self._following is None and not await self.begin():
            return None
        page = await self.ledger.feed(
            self._read_up_to, limit=self.options.batch, lifecycle=self.lifecycle, types=self.types
        )
        if not page.events:
            self._read_up_to = page.position  # events in between belong to other lifecycles, or have other types
        return page

    async def take(self, handle: Callable[[Sequence[Event]], Awaitable[None]]) -> FeedReport:
        """Read a page, have it handled, and save the position. After an error the next pass reads the same page."""
        page = await self.page()
        if page is None:
            return FeedReport()
        try:
            if page.events:
                await handle(page.events)
                await self.remember(page.position)
            else:
                await self.keep()
        except TakenOver:
            return FeedReport(events=len(page.events))
        return FeedReport(following=True, events=len(page.events))

    async def keep(self) -> None:
        """Renew the subscription's lease, or save its position, when it is time.

        Raises TakenOver, in every task once it is lost.
        """
        if self._following is None:
            raise TakenOver
        is_save_due = self._is_unsaved and self.clock.monotonic() >= self._save_at
        if is_save_due or self._renewal_period() > self._kept_in:
            await self._ack(None if self._read_up_to == self.saved else self._read_up_to)

    async def remember(self, position: str) -> None:
        """Note the position up to which everything is done, and save it when it is time; raises TakenOver."""
        self._read_up_to, self._is_unsaved = position, True
        await self.keep()

    async def release(self) -> None:
        """Save the position and release the subscription, so that another process can take it at once."""
        try:
            if self._following is not None and self._is_unsaved:
                with contextlib.suppress(TakenOver):
                    await self._ack(self._read_up_to)
        finally:
            following, self._following = self._following, None
            if following is not None:
                await self.ledger.unsubscribe(following)

    def pause_s(self, report: FeedReport) -> float:
        """No pause while there are more events that can be handled."""
        if not report.following:
            return self.options.lease_s / self.options.standby_tries
        if report.held_up:
            return self.options.held_up_s
        if not report.events:
            return self.options.poll_s
        if report.events >= self.options.batch:
            return 0.0
        return max(self.options.gather_s, self.options.rest_s if report.needed_nothing else 0.0)

    def _renewal_period(self) -> int:
        """The number of the current third of a lease, counted by the clock alone.

        All subscribers of a process with the same lease renew at the same time, and share one transaction.
        """
        return int(self.clock.monotonic() / (self.options.lease_s / 3))

    async def _ack(self, position: str | None) -> None:
        following, self._kept_in = self._following, self._renewal_period()
        self._save_at = self.clock.monotonic() + self.options.save_every_s
        if following is None or not await self.ledger.ack(following, position, lease_s=self.options.lease_s):
            self._following = None
            _log.warning("taken_over", follower=self.follows_as, process=self.actor.name)
            raise TakenOver
        self.saved = position or self.saved
        self._is_unsaved = self._is_unsaved and self._read_up_to != self.saved
