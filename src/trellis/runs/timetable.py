"""The registered schedules, each an object `schedules/{slug}.json`.

It holds the cron expression, the time of registration and the result of the last instant.

Invariants:
- A schedule is written by compare-and-set on the version that was read, so of two concurrent writers one succeeds.
- An instant is due once: it is after the registration and after the last handled instant. Of several missed instants
  only the latest is due.
- A removed schedule stays as a version without an expression. It is never due.
- An object that is not a valid schedule (unreadable, an invalid expression, another agent's) is ignored and does not
  stop the others.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, PlainSerializer, ValidationError

from trellis.agents.definition import checked_slug
from trellis.agents.errors import SlugInvalid
from trellis.documents.errors import ScheduleContended
from trellis.engine.cron import cron_problem, latest_instant, next_instant
from trellis.engine.logs import log_of
from trellis.storage.objects.canonical_json import encode, timestamp
from trellis.storage.objects.store import CREATE, ObjectStore, PutStored, if_match, listed_pages

FOLDER = "schedules/"
SCHEDULES_MAX = 10_000
WRITE_TRIES_MAX = 5

_log = log_of("trellis.schedules")


Moment = Annotated[AwareDatetime, PlainSerializer(timestamp)]
"""A time, written in the form of documents."""


class HandledInstant(BaseModel):
    """The result of an instant: a run, or the reason why it was skipped."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instant: Moment
    run_id: str | None = None
    skipped: str | None = None


class Schedule(BaseModel):
    """The cron schedule of an agent. `cron` is None once it was removed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent_slug: str
    cron: str | None
    registered_at: Moment
    last: HandledInstant | None = None
    version: int = 1

    def due(self, now: datetime) -> datetime | None:
        """The latest instant that has not been handled; None if there is none."""
        if self.cron is None:
            return None
        instant = latest_instant(self.cron, now)
        after = self.registered_at if self.last is None else max(self.registered_at, self.last.instant)
        return instant if instant > after else None

    def next(self, now: datetime) -> datetime | None:
        return None if self.cron is None else next_instant(self.cron, now)

    def registered(self, cron: str | None, at: datetime) -> Self:
        """A copy with another expression, or none, valid from `at`."""
        return self.model_copy(update={"cron": cron, "registered_at": at, "version": self.version + 1})

    def handled(self, last: HandledInstant) -> Self:
        """A copy with this result of the last instant."""
        return self.model_copy(update={"last": last, "version": self.version + 1})

    def to_bytes(self) -> bytes:
        return encode(self.model_dump())


@dataclass(frozen=True, slots=True)
class RegisteredSchedule:
    """A schedule, and the etag of the object it was read from."""

    schedule: Schedule
    etag: str


@dataclass(kw_only=True)
class Timetable:
    """The schedules of one object store. Caches what it read, so listing unchanged schedules costs one list request."""

    objects: ObjectStore
    _seen: dict[str, RegisteredSchedule] = field(default_factory=dict[str, RegisteredSchedule])
    _unreadable: dict[str, str] = field(default_factory=dict[str, str])
    """Etags of objects that are not schedules. Each version is read and logged once."""

    async def all(self) -> list[RegisteredSchedule]:
        """Every schedule with an expression, by slug."""
        seen: dict[str, RegisteredSchedule] = {}
        unreadable: dict[str, str] = {}
        async for page in listed_pages(self.objects, FOLDER):
            for info in page.items:
                known = self._seen.get(info.key)
                if self._unreadable.get(info.key) == info.etag:
                    unreadable[info.key] = info.etag
                    continue
                stored = known if known is not None and known.etag == info.etag else await self._read(info.key)
                if stored is not None:
                    seen[info.key] = stored
                else:
                    unreadable[info.key] = info.etag
            if len(seen) >= SCHEDULES_MAX:
                break
        self._seen, self._unreadable = seen, unreadable
        return [stored for stored in seen.values() if stored.schedule.cron is not None]

    async def register(self, slug: str, cron: str | None, *, at: datetime) -> bool:
        """Set the agent's expression from now on; None removes it.

        Returns whether it changed. Raises SlugInvalid, ScheduleContended.
        """
        key = schedule_key(slug)
        for _ in range(WRITE_TRIES_MAX):
            there = await self.objects.get(key)
            known = None if there is None else _read(key, there.body)
            if (None if known is None else known.cron) == cron:
                return False
            schedule = known.registered(cron, at) if known else Schedule(agent_slug=slug, cron=cron, registered_at=at)
            when = CREATE if there is None else if_match(there.etag)
            if isinstance(await self.objects.put(key, schedule.to_bytes(), when=when), PutStored):
                return True
        raise ScheduleContended(slug=slug, tries=WRITE_TRIES_MAX)

    async def handled(self, registered: RegisteredSchedule, last: HandledInstant) -> bool:
        """Store the result of an instant, unless the schedule has changed since. Returns whether it was stored."""
        schedule = registered.schedule.handled(last)
        key = schedule_key(schedule.agent_slug)
        return isinstance(await self.objects.put(key, schedule.to_bytes(), when=if_match(registered.etag)), PutStored)

    async def _read(self, key: str) -> RegisteredSchedule | None:
        there = await self.objects.get(key)
        schedule = None if there is None else _read(key, there.body)
        return None if there is None or schedule is None else RegisteredSchedule(schedule, there.etag)


def schedule_key(slug: str) -> str:
    """The object key of an agent's schedule; raises SlugInvalid."""
    return f"{FOLDER}{checked_slug(slug)}.json"


def _read(key: str, body: bytes) -> Schedule | None:
    """The schedule; None for invalid bytes. The declared schedule is then registered again."""
    try:
        schedule = Schedule.model_validate_json(body)
        problem = _problem(key, schedule)
    except ValidationError as error:
        schedule, problem = None, str(error.errors(include_url=False)[0]["msg"])
    except SlugInvalid as error:
        schedule, problem = None, str(error)
    if problem is not None:
        _log.warning("schedule_unreadable", key=key, error=problem)
        return None
    return schedule


def _problem(key: str, schedule: Schedule) -> str | None:
    """Why this schedule cannot belong to this key; None if it can. Raises SlugInvalid."""
    if schedule_key(schedule.agent_slug) != key:
        return f"it is the schedule of {schedule.agent_slug}"
    return None if schedule.cron is None else cron_problem(schedule.cron)
