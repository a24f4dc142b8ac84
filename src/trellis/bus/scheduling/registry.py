"""Which workers are on the bus, what each can do and how busy it is, as far as this process has heard. Nothing here decides anything for good.

A worker is known by its heartbeats and its handshake, and lost after three heartbeats that did not come. A heartbeat tells how many jobs
the worker had; between two of them the jobs handed out and ended since are counted here, so that a pass of the scheduler does not give
everything to the one that was idle a moment ago. What another process hands out is known with the next heartbeat.

Subjects are kept here too: one at which nobody listened is left alone for a while, longer each time, until a worker appears. Everything
here has a bound, whatever is said on the bus.
"""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trellis.bus.messages import (
    HANDSHAKE,
    HEARTBEAT,
    RESULT,
    Handshake,
    JobResult,
    Status,
    WorkerHeartbeat,
    direct_subject,
)
from trellis.bus.port import Bus, BusSubscription, ReceivedPacket
from trellis.bus.requests import read_wire_id
from trellis.bus.topics import Topic, compile_patterns, has_wildcard
from trellis.engine.clock import Clock
from trellis.engine.errors import LedgerError
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.recent_entries import LruCache
from trellis.lifecycles import Role

INTERVAL_S_DEFAULT = 5.0
INTERVAL_S_MIN = 2.0
INTERVAL_S_MAX = 60.0
MISSED_HEARTBEATS_MAX = 3
"""A worker is lost after so many heartbeats that did not come."""
WORKERS_MAX = 10_000
ENDED_MAX = 10_000
"""Attempts of which it is remembered that they ended: a result is heard more than once."""
SUBJECTS_MAX = 10_000
SILENCE_S_FIRST = 1.0
SILENCE_S_MAX = 30.0
LASTING_AFTER_S = 600.0
"""A silence that has lasted so long lasts: it is broken more seldom still, because every try costs a job two events."""
LASTING_S_MAX = 300.0
WORKER_TEXT_CHARS_MAX = 32_000
"""Of all names, labels and topics that one worker tells; one that tells more is not taken in."""
PATTERNS_MAX = 100
"""Of its topics that have `*` or `>` in them: those are compared one by one."""
LOST_KEPT_S = 3600.0
"""How long it is remembered what a lost worker said of itself: it may come back without saying it again."""
SWEPT_EVERY_S = 60.0
"""How often it is forgotten what those said that have been lost for so long."""
LOOKED_EVERY_S = 1.0
"""How often those that are lost are looked for when there is no room for another worker."""
LOG_EVERY_S = 10.0
"""How often the log says the same about workers that are not taken in."""
LEDGER_WRITE_EVERY_S = 10.0
"""How often the ledger is told of one worker, for people who look."""
FIRST_LEDGER_WRITES_MAX = 100
"""How many workers the ledger is told of for the first time within one such interval: a name stays there for good."""
NAMES_LOGGED_MAX = 50
PROTOCOL_VERSION = 1
VERSIONS_KEPT_MAX = 10
"""How many protocol versions of one worker are kept, for people."""
WORKER_ID = re.compile(r"[A-Za-z0-9_:@-]+(\.[A-Za-z0-9_:@-]+)*")
WORKER_ID_CHARS_MAX = 200
END_STATUSES = frozenset(status for status in Status if status > Status.RUNNING)

_log = log_of("trellis.bus.workers")


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveWorker:
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
    other_versions: tuple[int, ...] = ()
    """The protocol versions of a worker that does not speak ours, lowest first; empty for every other worker."""

    @property
    def free(self) -> int:
        """How many more it can have."""
        return max(0, self.capacity - self.load)


@dataclass(slots=True)
class _WorkerEntry:
    worker_id: str
    met_at: float
    beat: WorkerHeartbeat | None = None
    beats: int = 0
    heard_at: float | None = None
    interval_s: float = INTERVAL_S_DEFAULT
    ready_topics: tuple[str, ...] = ()
    other_versions: tuple[int, ...] = ()
    """What it speaks instead of our version of the protocol; empty when it speaks ours, or did not say."""
    gone_at: float = math.inf
    """When it did not listen where it alone listens."""
    told_at: float = -math.inf
    given: dict[str, int] = field(default_factory=dict[str, int])
    """By wire id: after which heartbeat it was handed out."""
    ended: int = 0
    """Of the jobs that the last heartbeat counted."""
    seen: LiveWorker | None = None
    """As it was last looked at; None after anything has changed."""

    def load(self) -> int:
        active = self.beat.active_jobs if self.beat else 0
        since = sum(after == self.beats for after in self.given.values())
        return max(max(0, active - self.ended) + since, len(self.given))

    def lost_at(self) -> float:
        heard_at = self.met_at if self.heard_at is None else max(self.heard_at, self.met_at)
        return min(self.gone_at, heard_at + MISSED_HEARTBEATS_MAX * self.interval_s)


@dataclass(slots=True)
class _SubjectState:
    silent_since: float = math.inf
    silent_until: float = -math.inf
    silence_s: float = 0.0
    tried_at: float = -math.inf
    hoped: bool = False
    """It is tried because a worker has appeared, and not because the time was over."""
    hope_s: float = 0.0
    """How long a worker that appears changes nothing: longer each time that one did not listen there."""
    proven: bool = False
    of_topic: bool = True
    """Not one worker's own."""
    given: dict[str, float] = field(default_factory=dict[str, float])
    """By wire id: until when it counts if nothing is heard of it."""

    def fell_silent(self, now: float) -> None:
        """Nobody was there: it is left alone twice as long as before."""
        self.silent_since = min(self.silent_since, now)
        longest = LASTING_S_MAX if now - self.silent_since >= LASTING_AFTER_S else SILENCE_S_MAX
        self.silence_s = min(longest, max(SILENCE_S_FIRST, 2 * self.silence_s))
        if self.hoped:
            self.hope_s = min(LASTING_S_MAX, max(SILENCE_S_FIRST, 2 * self.hope_s))
        self.proven, self.hoped = False, False
        self.tried_at, self.silent_until = now, now + self.silence_s

    def hope(self, now: float) -> None:
        """A worker has appeared that may listen there: it is tried at once, unless that was in vain lately."""
        if now < self.silent_until:
            self.hoped = True
            self.silent_until = min(self.silent_until, self.tried_at + self.hope_s)

    def spoke(self) -> None:
        """Somebody listens there."""
        self.proven, self.hoped, self.silence_s, self.hope_s = True, False, 0.0, 0.0
        self.silent_since, self.silent_until = math.inf, -math.inf


@dataclass(kw_only=True)
class WorkerRegistry:
    """One per process; hears every heartbeat, handshake and result."""

    clock: Clock
    ledger: Ledger | None = None
    """Told of the workers now and then, when there is one."""
    appeared: Callable[[], None] | None = None
    """Called when a worker appears, or has room again."""
    _workers: dict[str, _WorkerEntry] = field(default_factory=dict[str, _WorkerEntry])
    _subjects: dict[str, _SubjectState] = field(default_factory=dict[str, _SubjectState])
    _given_to: dict[str, _WorkerEntry | _SubjectState] = field(
        default_factory=dict[str, "_WorkerEntry | _SubjectState"]
    )
    _ended: LruCache[str, str] = field(default_factory=lambda: LruCache(ENDED_MAX))
    _listening: list[BusSubscription] = field(default_factory=list[BusSubscription])
    _own_sender_id: str | None = None
    _looked_at: float = -math.inf
    _swept_at: float = -math.inf
    _first_told: deque[float] = field(default_factory=lambda: deque[float](maxlen=FIRST_LEDGER_WRITES_MAX))
    _said_at: dict[str, float] = field(default_factory=dict[str, float])

    # --- what is heard ---------------------------------------------------------------------------------------------

    def record_heartbeat(self, heartbeat: WorkerHeartbeat, at: float) -> None:
        """A worker lives; `at` is a reading of this process's clock."""
        labels = (*heartbeat.labels, *heartbeat.labels.values())
        told = (*labels, *heartbeat.capabilities, heartbeat.pool, heartbeat.region)
        known = self._known(heartbeat.worker_id, at, told)
        if known is None:
            return
        known.seen = None
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
            self._break_silence(known.ready_topics, at)
        if first or (was_full and known.load() < max(1, heartbeat.max_parallel_jobs)):
            self._call()

    def record_handshake(self, handshake: Handshake, at: float) -> None:
        """A component introduces itself; only workers are of interest here."""
        told = handshake.ready_topics
        if sum(map(has_wildcard, told)) > PATTERNS_MAX:
            self._not_taken_in("worker_tells_too_much", handshake.component_id, at)
            return
        known = self._known(handshake.component_id, at, told) if handshake.role == "worker" else None
        if known is None:
            return
        known.seen, known.met_at = None, at
        known.other_versions = _other_versions(handshake.supported_versions)
        known.ready_topics = handshake.ready_topics
        self._drop_subject(direct_subject(known.worker_id))
        self._break_silence(known.ready_topics, at)
        self._call()

    def settled(self, wire_id: str, worker_id: str = "") -> None:
        """An attempt has ended, at this worker if it is known where. Heard again it changes nothing."""
        if self._ended.get(wire_id):
            return
        self._ended[wire_id] = wire_id
        given_to = self._given_to.get(wire_id) or self._workers.get(worker_id)
        if isinstance(given_to, _WorkerEntry) and given_to.given.get(wire_id, -1) < given_to.beats:
            given_to.ended += 1
            given_to.seen = None
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
            known.given[wire_id], known.seen = known.beats, None
            self._given_to[wire_id] = known

    def sent(self, subject: str, wire_id: str, for_s: float) -> None:
        """An attempt is handed out to whoever listens there; unless it settles, it counts for so long."""
        known = self._subject(subject)
        known.given[wire_id] = self.clock.monotonic() + for_s
        self._given_to[wire_id] = known

    def mark_lost(self, worker_id: str) -> None:
        """It is not there, whatever it said; what it serves is remembered, in case it comes back."""
        known = self._workers.get(worker_id)
        if known is not None:
            known.gone_at = min(known.gone_at, math.nextafter(self.clock.monotonic(), -math.inf))
            for wire_id in list(known.given):
                self._forget_given(known, wire_id)

    # --- who is there ----------------------------------------------------------------------------------------------

    def alive(self, worker_id: str) -> LiveWorker | None:
        """A worker that is not lost; None for every other."""
        known = self._workers.get(worker_id)
        return _live_worker(known) if known and self.clock.monotonic() <= known.lost_at() else None

    def serves(self, worker_id: str, topic: str, settings: Topic) -> bool:
        """Whether it is a live worker of this topic that speaks our version of the protocol."""
        seen = self.alive(worker_id)
        return seen is not None and not seen.other_versions and serves(seen, topic, settings)

    def live(self) -> Iterator[LiveWorker]:
        """Every worker that is not lost, also one that does not speak our version of the protocol."""
        now = self.clock.monotonic()
        if now >= self._swept_at + SWEPT_EVERY_S:
            self._swept_at = now
            self._forget_lost(now - LOST_KEPT_S)
        return (_live_worker(known) for known in self._workers.values() if now <= known.lost_at())

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

    def mark_listening(self, subject: str) -> None:
        """Somebody listens there."""
        self._subject(subject).spoke()

    def mark_silent(self, subject: str, worker_id: str = "") -> None:
        """Nobody listens there: it is left alone, longer each time. The worker whose own it is, is not there either."""
        self.mark_lost(worker_id)
        known, now = self._subject(subject), self.clock.monotonic()
        if now < known.silent_until:
            return  # several were on their way when the first came back
        known.of_topic = not worker_id
        known.fell_silent(now)

    # --- the bus ---------------------------------------------------------------------------------------------------

    async def listen(self, bus: Bus) -> None:
        """Hear everything that tells of workers."""
        self._own_sender_id = bus.sender_id
        for subject in (HEARTBEAT, HANDSHAKE):
            self._listening.append(await bus.listen(subject, self._take))
        # Who writes results down alerts about those that cannot be read: one alert for one packet.
        self._listening.append(await bus.listen(RESULT, self._take, alerts=False))

    async def stop(self) -> None:
        """Hear no more."""
        while self._listening:
            await self._listening.pop().stop()

    async def _take(self, received: ReceivedPacket) -> None:
        body, now = received.packet.body, self.clock.monotonic()
        if isinstance(body, WorkerHeartbeat):
            self.record_heartbeat(body, now)
            await self._tell(body.worker_id, now)
        elif isinstance(body, Handshake):
            self.record_handshake(body, now)
        elif received.packet.sender_id == self._own_sender_id:
            return  # what the control plane tells clients is no worker's word
        elif isinstance(body, JobResult) and body.status in END_STATUSES and read_wire_id(body.job_id):
            self.settled(body.job_id, body.worker_id)
            self._call()

    async def _tell(self, worker_id: str, now: float) -> None:
        known = self._workers.get(worker_id)
        if self.ledger is None or known is None or now < known.told_at + LEDGER_WRITE_EVERY_S:
            return
        if known.told_at == -math.inf:
            if len(self._first_told) == FIRST_LEDGER_WRITES_MAX and now < self._first_told[0] + LEDGER_WRITE_EVERY_S:
                return  # with a later heartbeat
            self._first_told.append(now)
        known.told_at = now
        try:
            await self.ledger.heartbeat_worker(Actor(role=Role.WORKER, name=worker_id), _worker_info(known))
        except LedgerError as error:
            _log.info("worker_not_told", worker=worker_id, error=str(error))  # with a later heartbeat

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def _known(self, worker_id: str, at: float, told: Sequence[str]) -> _WorkerEntry | None:
        """The worker that says this; None when it cannot be taken in."""
        if sum(map(len, told)) > WORKER_TEXT_CHARS_MAX:
            return self._not_taken_in("worker_tells_too_much", worker_id, at)
        known = self._workers.get(worker_id)
        if known is not None and at <= known.lost_at():
            return known
        if len(worker_id) > WORKER_ID_CHARS_MAX or not WORKER_ID.fullmatch(worker_id):
            return self._not_taken_in("worker_id_unusable", worker_id, at)
        if known is None and len(self._workers) >= WORKERS_MAX and not self._make_room(at):
            return self._not_taken_in("too_many_workers", worker_id, at)
        self.mark_lost(worker_id)
        made = self._workers[worker_id] = _WorkerEntry(worker_id, met_at=at)
        if known is not None:  # whoever was not heard for a while says how it is, and not again what it is
            made.ready_topics, made.told_at = known.ready_topics, known.told_at
            made.other_versions = known.other_versions
        return made

    def _not_taken_in(self, why: str, worker_id: str, at: float) -> None:
        if at >= self._said_at.get(why, -math.inf) + LOG_EVERY_S:
            self._said_at[why] = at
            _log.warning(why, worker=worker_id[:WORKER_ID_CHARS_MAX], workers=len(self._workers))

    def _make_room(self, at: float) -> bool:
        """Whether there is room now that the lost are forgotten. Looking costs as much as there are workers, so it is not done always."""
        if at < self._looked_at + LOOKED_EVERY_S:
            return False
        self._looked_at = at
        self._forget_lost(at)
        return len(self._workers) < WORKERS_MAX

    def _forget_lost(self, before: float) -> None:
        for worker_id in [known.worker_id for known in self._workers.values() if known.lost_at() < before]:
            self.mark_lost(worker_id)
            del self._workers[worker_id]

    def _subject(self, name: str) -> _SubjectState:
        known = self._subjects.get(name)
        if known is None:
            if len(self._subjects) >= SUBJECTS_MAX:
                self._forget_subjects()
            known = self._subjects[name] = _SubjectState()
        return known

    def _forget_subjects(self) -> None:
        """Half of them: those at which nothing is under way, and else those known for longest."""
        now = self.clock.monotonic()
        idle = [name for name, known in self._subjects.items() if known.silent_until <= now and not known.given]
        for name in [*idle, *self._subjects][: SUBJECTS_MAX // 2]:
            self._drop_subject(name)

    def _drop_subject(self, name: str) -> None:
        known = self._subjects.pop(name, None)
        for wire_id in known.given if known else ():
            self._given_to.pop(wire_id, None)

    def _forget_given(self, known: _WorkerEntry | _SubjectState, wire_id: str) -> None:
        known.given.pop(wire_id, None)
        self._given_to.pop(wire_id, None)
        if isinstance(known, _WorkerEntry):
            known.seen = None

    def _break_silence(self, topics: tuple[str, ...], at: float) -> None:
        """Somebody is there now: the topics it named are tried, or all when it named none."""
        named = compile_patterns(topics)
        for subject, known in self._subjects.items():
            silent = at < known.silent_until and known.of_topic
            if silent and (not topics or named.fit(subject)):
                known.hope(at)

    def _call(self) -> None:
        if self.appeared is not None:
            self.appeared()


def serves(seen: LiveWorker, topic: str, settings: Topic) -> bool:
    """Whether a worker said that it serves this topic, by its name or by one of the topic's pools."""
    if settings.pools and (seen.pool not in settings.pools or not seen.ready_topics):
        return seen.pool in settings.pools
    return compile_patterns(seen.ready_topics).fit(topic)


def _live_worker(known: _WorkerEntry) -> LiveWorker:
    if known.seen is None:
        known.seen = _read_live_worker(known)
    return known.seen


def _read_live_worker(known: _WorkerEntry) -> LiveWorker:
    beat = known.beat
    return LiveWorker(
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
        other_versions=known.other_versions,
    )


def _other_versions(supported: tuple[int, ...]) -> tuple[int, ...]:
    """The versions of a component that does not speak ours. One that names none did not say: CAP has one version so far."""
    return () if PROTOCOL_VERSION in supported else tuple(sorted(set(supported)))[:VERSIONS_KEPT_MAX]


def _percent(said: float) -> float:
    return min(100.0, max(0.0, said)) if math.isfinite(said) else 0.0


def _worker_info(known: _WorkerEntry) -> bytes:
    """What people see of it."""
    beat = known.beat or WorkerHeartbeat(worker_id=known.worker_id)
    return json.dumps(
        {
            "bus": True,
            "types": list(known.ready_topics[:NAMES_LOGGED_MAX]),
            "concurrency": max(1, beat.max_parallel_jobs),
            "active_jobs": beat.active_jobs,
            "pool": beat.pool,
            "region": beat.region,
            "cpu_load": _percent(beat.cpu_load),
            "capabilities": list(beat.capabilities[:NAMES_LOGGED_MAX]),
        }
    ).encode()
