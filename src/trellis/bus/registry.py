"""Which workers are on the bus, what each can do and how busy it is, as far as this process has heard. Nothing here decides anything for good.

A worker is known by its heartbeats and its handshake, and lost after three heartbeats that did not come. A heartbeat tells how many jobs
the worker had; between two of them the jobs handed out and ended since are counted here, so that a pass of the scheduler does not give
everything to the one that was idle a moment ago. What another process hands out is known with the next heartbeat.

Subjects are kept here too: one at which nobody listened is left alone for a while, longer each time, until a worker appears.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trellis.bus.messages import (
    HANDSHAKE,
    HEARTBEAT,
    RESULT,
    Handshake,
    Heartbeat,
    JobResult,
    Status,
    direct_subject,
    read_wire_id,
)
from trellis.bus.port import Bus, Listening, Received
from trellis.bus.recent import Recent
from trellis.bus.topics import fits
from trellis.engine.clock import Clock
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.lifecycles import Role

INTERVAL_S_DEFAULT = 5.0
INTERVAL_S_MIN = 2.0
INTERVAL_S_MAX = 60.0
MISSED_MAX = 3
"""A worker is lost after so many heartbeats that did not come."""
WORKERS_MAX = 10_000
ENDED_MAX = 10_000
"""Attempts of which it is remembered that they ended: a result is heard more than once."""
SUBJECTS_MAX = 10_000
SILENCE_S_FIRST = 1.0
SILENCE_S_MAX = 30.0
TOLD_EVERY_S = 10.0
"""How often the ledger is told of one worker, for people who look."""
NAMES_TOLD_MAX = 50
PROTOCOL_VERSION = 1
WORKER_ID = re.compile(r"[A-Za-z0-9_:@-]+(\.[A-Za-z0-9_:@-]+)*")
WORKER_ID_CHARS_MAX = 200
ENDS = frozenset(status for status in Status if status > Status.RUNNING)

_log = log_of("trellis.bus.workers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A live worker, as of now."""

    worker_id: str
    heard_at: float | None
    """This process's clock when its last heartbeat came; None while it has only introduced itself."""
    interval_s: float
    active_jobs: int
    """As its last heartbeat said."""
    load: int
    """With what was handed out and has ended since."""
    capacity: int
    cpu: float
    pool: str
    capabilities: frozenset[str]
    labels: dict[str, str]
    ready_topics: tuple[str, ...]
    """Empty when it did not say."""

    @property
    def free(self) -> int:
        """How many more it can have."""
        return max(0, self.capacity - self.load)


@dataclass(slots=True)
class _Worker:
    worker_id: str
    beat: Heartbeat | None = None
    beats: int = 0
    heard_at: float | None = None
    met_at: float | None = None
    interval_s: float = INTERVAL_S_DEFAULT
    ready_topics: tuple[str, ...] = ()
    speaks: bool = True
    told_at: float = -math.inf
    given: dict[str, int] = field(default_factory=dict[str, int])
    """By wire id: after which heartbeat it was handed out."""
    ended: int = 0
    """Of the jobs that the last heartbeat counted."""

    def load(self) -> int:
        active = self.beat.active_jobs if self.beat else 0
        since = sum(after == self.beats for after in self.given.values())
        return max(max(0, active - self.ended) + since, len(self.given))

    def lost_at(self) -> float:
        last = max(at for at in (self.heard_at, self.met_at, -math.inf) if at is not None)
        return last + MISSED_MAX * self.interval_s


@dataclass(slots=True)
class _Subject:
    silent_until: float = -math.inf
    silence_s: float = 0.0
    proven: bool = False
    of_topic: bool = True
    """Not one worker's own."""
    given: dict[str, float] = field(default_factory=dict[str, float])
    """By wire id: until when it counts if nothing is heard of it."""


@dataclass(kw_only=True)
class Workers:
    """One per process; hears every heartbeat, handshake and result."""

    clock: Clock
    ledger: Ledger | None = None
    """Told of the workers now and then, when there is one."""
    appeared: Callable[[], None] | None = None
    """Called when a worker appears, or has room again."""
    _workers: dict[str, _Worker] = field(default_factory=dict[str, _Worker])
    _subjects: dict[str, _Subject] = field(default_factory=dict[str, _Subject])
    _given_to: dict[str, _Worker | _Subject] = field(default_factory=dict[str, "_Worker | _Subject"])
    _ended: Recent[str, str] = field(default_factory=lambda: Recent(ENDED_MAX))
    _listening: list[Listening] = field(default_factory=list[Listening])

    # --- what is heard ---------------------------------------------------------------------------------------------

    def heard(self, heartbeat: Heartbeat, at: float) -> None:
        """A worker lives; `at` is a reading of this process's clock."""
        known = self._known(heartbeat.worker_id, at)
        if known is None:
            return
        if known.heard_at is not None:
            gap_s = (known.interval_s + at - known.heard_at) / 2
            known.interval_s = min(INTERVAL_S_MAX, max(INTERVAL_S_MIN, gap_s))
        was_full = known.beat is None or known.load() >= max(1, known.beat.max_parallel_jobs)
        first, known.beat, known.heard_at = known.beat is None, heartbeat, at
        # What was handed out before the heartbeat before this one is in the worker's own count by now, or has ended.
        for wire_id in [wire_id for wire_id, after in known.given.items() if after < known.beats]:
            self._forget_given(known, wire_id)
        known.beats += 1
        known.ended = 0
        if first:
            self._break_silence(known.ready_topics)
        if was_full:
            self._call()

    def met(self, handshake: Handshake, at: float) -> None:
        """A component introduces itself; only workers are of interest here."""
        known = self._known(handshake.component_id, at) if handshake.role == "worker" else None
        if known is None:
            return
        known.met_at = at
        known.speaks = PROTOCOL_VERSION in handshake.supported_versions
        known.ready_topics = handshake.ready_topics
        self._subjects.pop(direct_subject(known.worker_id), None)
        self._break_silence(known.ready_topics)
        self._call()

    def settled(self, wire_id: str, worker_id: str = "") -> None:
        """An attempt has ended, at this worker if it is known where. Heard again it changes nothing."""
        if self._ended.get(wire_id):
            return
        self._ended.put(wire_id, wire_id)
        given_to = self._given_to.get(wire_id) or self._workers.get(worker_id)
        if isinstance(given_to, _Worker) and given_to.given.get(wire_id, -1) < given_to.beats:
            given_to.ended += 1
        self.released(wire_id)

    def released(self, wire_id: str) -> None:
        """An attempt was not handed out after all."""
        given_to = self._given_to.get(wire_id)
        if given_to is not None:
            self._forget_given(given_to, wire_id)

    def assigned(self, worker_id: str, wire_id: str) -> None:
        """An attempt is handed out to a worker."""
        known = self._workers.get(worker_id)
        if known is not None:
            known.given[wire_id] = known.beats
            self._given_to[wire_id] = known

    def sent(self, subject: str, wire_id: str, for_s: float) -> None:
        """An attempt is handed out to whoever listens there; unless it settles, it counts for so long."""
        known = self._subjects.setdefault(subject, _Subject())
        known.given[wire_id] = self.clock.monotonic() + for_s
        self._given_to[wire_id] = known

    def forget(self, worker_id: str) -> None:
        """It is not there, whatever it said."""
        known = self._workers.pop(worker_id, None)
        for wire_id in list(known.given) if known else ():
            self._given_to.pop(wire_id, None)

    # --- who is there ----------------------------------------------------------------------------------------------

    def alive(self, worker_id: str) -> Seen | None:
        """A worker that is not lost; None for every other."""
        known = self._workers.get(worker_id)
        return _seen(known) if known and self.clock.monotonic() <= known.lost_at() else None

    def live(self) -> Iterator[Seen]:
        """Every worker that is not lost and speaks our version."""
        now = self.clock.monotonic()
        return (_seen(known) for known in self._workers.values() if known.speaks and now <= known.lost_at())

    def outstanding(self, subject: str) -> int:
        """How many attempts that went to this subject may still be under way."""
        known = self._subjects.get(subject)
        if known is None:
            return 0
        now = self.clock.monotonic()
        for wire_id in [wire_id for wire_id, until in known.given.items() if until <= now]:
            self._forget_given(known, wire_id)
        return len(known.given)

    # --- subjects --------------------------------------------------------------------------------------------------

    def silent(self, subject: str) -> bool:
        """Whether nobody listened there lately."""
        known = self._subjects.get(subject)
        return known is not None and self.clock.monotonic() < known.silent_until

    def proven(self, subject: str) -> bool:
        """Whether somebody listened there when it was last used."""
        known = self._subjects.get(subject)
        return known is not None and known.proven

    def answered(self, subject: str) -> None:
        """Somebody listens there."""
        known = self._subjects.setdefault(subject, _Subject())
        known.proven, known.silence_s = True, 0.0

    def unanswered(self, subject: str, worker_id: str = "") -> None:
        """Nobody listens there: it is left alone, longer each time. The worker whose own it is, is not there either."""
        self.forget(worker_id)
        if len(self._subjects) >= SUBJECTS_MAX:
            self._prune_subjects()
        known = self._subjects.setdefault(subject, _Subject())
        now = self.clock.monotonic()
        if now < known.silent_until:
            return  # several were on their way when the first came back
        known.proven, known.of_topic = False, not worker_id
        known.silence_s = min(SILENCE_S_MAX, max(SILENCE_S_FIRST, 2 * known.silence_s))
        known.silent_until = now + known.silence_s

    # --- the bus ---------------------------------------------------------------------------------------------------

    async def listen(self, bus: Bus) -> None:
        """Hear everything that tells of workers."""
        for subject in (HEARTBEAT, HANDSHAKE, RESULT):
            self._listening.append(await bus.listen(subject, self._take))

    async def stop(self) -> None:
        """Hear no more."""
        while self._listening:
            await self._listening.pop().stop()

    async def _take(self, received: Received) -> None:
        body, now = received.packet.body, self.clock.monotonic()
        if isinstance(body, Heartbeat):
            self.heard(body, now)
            await self._tell(body.worker_id, now)
        elif isinstance(body, Handshake):
            self.met(body, now)
        elif isinstance(body, JobResult) and body.status in ENDS and read_wire_id(body.job_id):
            self.settled(body.job_id, body.worker_id)
            self._call()

    async def _tell(self, worker_id: str, now: float) -> None:
        known = self._workers.get(worker_id)
        if self.ledger is None or known is None or now < known.told_at + TOLD_EVERY_S:
            return
        known.told_at = now
        try:
            await self.ledger.beat(Actor(role=Role.WORKER, name=worker_id), _told(known))
        except LedgerError as error:
            _log.info("worker_not_told", worker=worker_id, error=str(error))  # with a later heartbeat

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def _known(self, worker_id: str, at: float) -> _Worker | None:
        known = self._workers.get(worker_id)
        if known is not None and at <= known.lost_at():
            return known
        if len(worker_id) > WORKER_ID_CHARS_MAX or not WORKER_ID.fullmatch(worker_id):
            _log.warning("worker_id_unusable", worker=worker_id[:WORKER_ID_CHARS_MAX])
            return None
        if known is not None:
            self.forget(worker_id)
        elif len(self._workers) >= WORKERS_MAX:
            self._prune(at)
            if len(self._workers) >= WORKERS_MAX:
                _log.warning("too_many_workers", worker=worker_id, limit=WORKERS_MAX)
                return None
        made = self._workers[worker_id] = _Worker(worker_id)
        made.met_at = at
        return made

    def _prune(self, at: float) -> None:
        for worker_id in [known.worker_id for known in self._workers.values() if known.lost_at() < at]:
            self.forget(worker_id)

    def _prune_subjects(self) -> None:
        now = self.clock.monotonic()
        idle = [name for name, known in self._subjects.items() if known.silent_until <= now and not known.given]
        for name in idle or list(self._subjects)[: SUBJECTS_MAX // 2]:
            del self._subjects[name]

    def _forget_given(self, known: _Worker | _Subject, wire_id: str) -> None:
        known.given.pop(wire_id, None)
        self._given_to.pop(wire_id, None)

    def _break_silence(self, topics: tuple[str, ...]) -> None:
        """Somebody is there now: the topics it named are tried at once, or all when it named none."""
        for subject, known in self._subjects.items():
            if known.of_topic and (not topics or any(fits(topic, subject) for topic in topics)):
                known.silent_until = -math.inf

    def _call(self) -> None:
        if self.appeared is not None:
            self.appeared()


def _seen(known: _Worker) -> Seen:
    beat = known.beat
    return Seen(
        worker_id=known.worker_id,
        heard_at=known.heard_at,
        interval_s=known.interval_s,
        active_jobs=beat.active_jobs if beat else 0,
        load=known.load(),
        capacity=max(1, beat.max_parallel_jobs) if beat else 1,
        cpu=_percent(beat.cpu_load) if beat else 0.0,
        pool=beat.pool if beat else "",
        capabilities=frozenset(name.lower() for name in beat.capabilities) if beat else frozenset(),
        labels=dict(beat.labels) if beat else {},
        ready_topics=known.ready_topics,
    )


def _percent(said: float) -> float:
    return min(100.0, max(0.0, said)) if math.isfinite(said) else 0.0


def _told(known: _Worker) -> bytes:
    """What people see of it."""
    beat = known.beat or Heartbeat(worker_id=known.worker_id)
    return json.dumps(
        {
            "bus": True,
            "types": list(known.ready_topics[:NAMES_TOLD_MAX]),
            "concurrency": max(1, beat.max_parallel_jobs),
            "active_jobs": beat.active_jobs,
            "pool": beat.pool,
            "region": beat.region,
            "cpu_load": _percent(beat.cpu_load),
            "capabilities": list(beat.capabilities[:NAMES_TOLD_MAX]),
        }
    ).encode()
