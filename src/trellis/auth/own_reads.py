"""The ledger reads available to a token limited to its own jobs. Other jobs are refused as over HTTP (D62).

Entrances that read a ledger directly pass this to commands in place of the ledger. A read that is not defined here
would reach all jobs and is refused. A new read stays unavailable until it is added here.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NoReturn

from trellis.auth.ownership import PrincipalReach, not_allowed_within
from trellis.auth.principals import Principal
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import DeadLetter, Event, FeedPage, Job, JobFilter, JobPage, Signal

READ, FOLLOW = "jobs.read", "events.read"
LETTERS_PAGE = 100
"""How many dead letters of all owners one read of the ledger takes, when it looks for those of the principal."""
LETTERS_PAGES_MAX = 100
"""How many such reads one call makes. Own letters behind 10,000 letters of other owners are not listed."""


@dataclass(kw_only=True)
class OwnReads:
    """A ledger limited to what this principal may read."""

    ledger: Ledger
    principal: Principal
    reach: PrincipalReach = field(init=False)

    def __post_init__(self) -> None:
        self.reach = PrincipalReach(principal=self.principal, ledger=self.ledger)
        self.url, self.name_prefix = self.ledger.url, self.ledger.name_prefix

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse reads that are not defined here."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_allowed_within(
            self.principal, READ, "for its own jobs only, and this command reads those of everybody"
        )

    async def now(self) -> datetime:
        """The ledger's time."""
        return await self.ledger.now()

    async def job(self, job_id: JobId) -> Job:
        """One job. Raises NotAllowed for another owner's job, and for one that does not exist."""
        job = await self.ledger.job(job_id)
        await self.reach.check(READ, job_id, job)
        assert job is not None  # a principal limited to its own jobs is refused a missing one above
        return job

    async def jobs(self, where: JobFilter, **how: Any) -> JobPage:
        """The jobs of a page that belong to the principal. A page may be short or empty and still have a next page."""
        page = await self.ledger.jobs(where, **how)
        own = await self._own([job.job_id for job in page.jobs])
        return replace(page, jobs=tuple(job for job in page.jobs if job.job_id in own))

    async def events(self, job_id: JobId) -> list[Event]:
        """The events of one of its jobs."""
        await self.reach.check(READ, job_id)
        return await self.ledger.events(job_id)

    async def events_of(self, job_ids: Sequence[JobId], *, last: int | None = None) -> dict[JobId, list[Event]]:
        """The events of those of these jobs that are its own. Other owners' jobs are left out, as unknown ones are."""
        own = await self._own(job_ids)
        return await self.ledger.events_of([job_id for job_id in job_ids if job_id in own], last=last)

    async def payloads(self, job_ids: Sequence[JobId]) -> dict[JobId, bytes]:
        """The payloads of those of these jobs that are its own. Other owners' jobs are left out, as unknown ones are."""
        own = await self._own(job_ids)
        return await self.ledger.payloads([job_id for job_id in job_ids if job_id in own])

    async def contents_of(self, job_ids: Sequence[JobId]) -> dict[JobId, tuple[bytes, list[Event]]]:
        """The payloads and events of those of these jobs that are its own. Other owners' jobs are left out."""
        own = await self._own(job_ids)
        return await self.ledger.contents_of([job_id for job_id in job_ids if job_id in own])

    async def signals(self, job_id: JobId, *, limit: int) -> list[Signal]:
        """Progress and log lines of one of its jobs."""
        await self.reach.check(READ, job_id)
        return await self.ledger.signals(job_id, limit=limit)

    async def result(self, job_id: JobId) -> bytes | None:
        """The result of one of its jobs."""
        await self.reach.check(READ, job_id)
        return await self.ledger.result(job_id)

    async def dead_letters(self, where: JobFilter, *, limit: int, cursor: str | None = None) -> list[DeadLetter]:
        """The next dead letters of its jobs. Fewer than `limit` are the last ones, up to LETTERS_PAGES_MAX."""
        own_letters: list[DeadLetter] = []
        for _ in range(LETTERS_PAGES_MAX):
            letters = await self.ledger.dead_letters(where, limit=LETTERS_PAGE, cursor=cursor)
            for letter in letters:
                if len(own_letters) < limit and await self._own([letter.job_id]):
                    own_letters.append(letter)
            if not letters or len(own_letters) >= limit:
                break
            cursor = letters[-1].job_id
        return own_letters

    async def dead_letter(self, job_id: JobId) -> DeadLetter | None:
        """The dead letter of one of its jobs."""
        await self.reach.check(READ, job_id)
        return await self.ledger.dead_letter(job_id)

    async def find_events(self, **what: Any) -> list[Event]:
        """The matching events that belong to its jobs."""
        return await self.reach.events(FOLLOW, await self.ledger.find_events(**what))

    async def feed(self, position: str | None, **how: Any) -> FeedPage:
        """A page of the feed with the events of its jobs only."""
        return await self.reach.page(FOLLOW, await self.ledger.feed(position, **how))

    async def _own(self, job_ids: Sequence[JobId]) -> set[JobId]:
        own: set[JobId] = set()
        for job_id in job_ids:
            with suppress(NotAllowed):
                await self.reach.check(READ, job_id)
                own.add(job_id)
        return own
