"""The registered schedules, each an object `schedules/{slug}.json`: since when an agent runs by which expression, and what became of the last instant.

What holds:
- a schedule is changed only over exactly the version that was read, so of two processes one changes it;
- an instant is due once: it comes after the registration and after the last instant that was taken care of, and of several missed ones
  only the latest counts;
- a schedule that was taken back stays as a version without an expression. It is never due;
- what is no schedule that could be fired (unreadable, an expression that means nothing, another agent's) counts as none, and stops no other.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from trellis.agents.cron import cron_problem, latest_instant, next_instant
from trellis.agents.definition import checked_slug
from trellis.agents.errors import SlugInvalid
from trellis.documents.errors import ScheduleContended
from trellis.documents.run_documents import encode, timestamp
from trellis.engine.logs import log_of
from trellis.storage.objects.store import CREATE, ObjectStore, PutStored, if_match

FOLDER = "schedules/"
SCHEDULES_MAX = 10_000
WRITE_TRIES_MAX = 5

_log = log_of("trellis.schedules")


class HandledInstant(BaseModel):
    """What became of an instant: a run, or the reason why there is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instant: AwareDatetime
    run_id: str | None = None
    skipped: str | None = None


class Schedule(BaseModel):
    """When an agent runs by itself. `cron` None: not any more."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent_slug: str
    cron: str | None
    registered_at: AwareDatetime
    last: HandledInstant | None = None
    version: int = 1

    def due(self, now: datetime) -> datetime | None:
        """The latest instant that nobody has taken care of."""
        if self.cron is None:
            return None
        instant = latest_instant(self.cron, now)
        after = self.registered_at if self.last is None else max(self.registered_at, self.last.instant)
        return instant if instant > after else None

    def next(self, now: datetime) -> datetime | None:
        """The first instant after this moment."""
        return None if self.cron is None else next_instant(self.cron, now)

    def registered(self, cron: str | None, at: datetime) -> Self:
        """By another expression from now on, or by none."""
        return self.model_copy(update={"cron": cron, "registered_at": at, "version": self.version + 1})

    def handled(self, last: HandledInstant) -> Self:
        """The instant is taken care of."""
        return self.model_copy(update={"last": last, "version": self.version + 1})

    def to_bytes(self) -> bytes:
        """The object's bytes."""
        last = None
        if self.last is not None:
            last = {
                "instant": timestamp(self.last.instant),
                "run_id": self.last.run_id,
                "skipped": self.last.skipped,
            }
        return encode(
            {
                "agent_slug": self.agent_slug,
                "cron": self.cron,
                "registered_at": timestamp(self.registered_at),
                "last": last,
                "version": self.version,
            }
        )


@dataclass(frozen=True, slots=True)
class RegisteredSchedule:
    """A schedule, and the version of the object it was read from."""

    schedule: Schedule
    etag: str


@dataclass(kw_only=True)
class Timetable:
    """The schedules of one object store. Remembers what it read, so that a look at all costs one listing while nothing changes."""

    objects: ObjectStore
    _seen: dict[str, RegisteredSchedule] = field(default_factory=dict[str, RegisteredSchedule])
    _unreadable: dict[str, str] = field(default_factory=dict[str, str])
    """The versions that are no schedule: each is read, and said to be none, once."""

    async def all(self) -> list[RegisteredSchedule]:
        """Every schedule that is in force, by slug."""
        seen: dict[str, RegisteredSchedule] = {}
        unreadable: dict[str, str] = {}
        after: str | None = None
        while len(seen) < SCHEDULES_MAX:
            page = await self.objects.list(FOLDER, after=after)
            for info in page.items:
                known = self._seen.get(info.key)
                if self._unreadable.get(info.key) == info.etag:
                    unreadable[info.key] = info.etag
                    continue
                found = known if known is not None and known.etag == info.etag else await self._read(info.key)
                if found is not None:
                    seen[info.key] = found
                else:
                    unreadable[info.key] = info.etag
            if not page.more:
                break
            after = page.items[-1].key
        self._seen, self._unreadable = seen, unreadable
        return [found for found in seen.values() if found.schedule.cron is not None]

    async def register(self, slug: str, cron: str | None, *, at: datetime) -> bool:
        """Run by this expression from now on, None by none; whether that is a change. Raises SlugInvalid, ScheduleContended."""
        key = schedule_key(slug)
        for _ in range(WRITE_TRIES_MAX):
            there = await self.objects.get(key)
            known = None if there is None else _read(key, there.body)
            if (None if known is None else known.cron) == cron:
                return False
            made = known.registered(cron, at) if known else Schedule(agent_slug=slug, cron=cron, registered_at=at)
            when = CREATE if there is None else if_match(there.etag)
            if isinstance(await self.objects.put(key, made.to_bytes(), when=when), PutStored):
                return True
        raise ScheduleContended(slug=slug, tries=WRITE_TRIES_MAX)

    async def handled(self, found: RegisteredSchedule, last: HandledInstant) -> bool:
        """Keep what became of an instant, unless the schedule has changed meanwhile."""
        schedule = found.schedule.handled(last)
        key = schedule_key(schedule.agent_slug)
        return isinstance(await self.objects.put(key, schedule.to_bytes(), when=if_match(found.etag)), PutStored)

    async def _read(self, key: str) -> RegisteredSchedule | None:
        there = await self.objects.get(key)
        schedule = None if there is None else _read(key, there.body)
        return None if there is None or schedule is None else RegisteredSchedule(schedule, there.etag)


def schedule_key(slug: str) -> str:
    """Where the schedule of an agent is; raises SlugInvalid."""
    return f"{FOLDER}{checked_slug(slug)}.json"


def instant_text(instant: datetime) -> str:
    """An instant as keys and parameters name it: a cron expression knows no fraction of a second."""
    return f"{instant.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _read(key: str, body: bytes) -> Schedule | None:
    """The schedule, or None for bytes that are none: what is declared is then registered anew."""
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
    """Why this schedule cannot be the one under this key; raises SlugInvalid."""
    if schedule_key(schedule.agent_slug) != key:
        return f"it is the schedule of {schedule.agent_slug}"
    return None if schedule.cron is None else cron_problem(schedule.cron)
