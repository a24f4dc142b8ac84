"""The registry of workers on the bus: their capabilities and load, as far as this process has received it.

The registry is a cache of what workers announce; it makes no final decision. A worker is known by its heartbeats and
its handshake, and lost after three missed heartbeats. A heartbeat says how many jobs the worker had. Between two
heartbeats the registry counts jobs dispatched and ended since, so that a scheduler pass does not give everything to one
idle worker. Dispatches of other processes are known with the next heartbeat.

The registry also tracks subjects. A subject without a subscriber is not used for a while, longer each time, until a
worker appears. All memory is bounded, whatever arrives on the bus.
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
"""A worker is lost after this many missed heartbeats."""
WORKERS_MAX = 10_000
ENDED_MAX = 10_000
"""Number of ended attempts remembered, because a result can arrive more than once."""
SUBJECTS_MAX = 10_000
SILENCE_S_FIRST = 1.0
SILENCE_S_MAX = 30.0
LASTING_AFTER_S = 600.0
"""After this many seconds without a subscriber, a subject is tried even less often: each try costs a job two events."""
LASTING_S_MAX = 300.0
WORKER_TEXT_CHARS_MAX = 32_000
"""Maximum total length of the names, labels and topics of one worker. A worker that sends more is not registered."""
PATTERNS_MAX = 100
"""Maximum number of a worker's topics with wildcards, because those are compared one by one."""
HALF_OPEN_S = 600.0
"""How long after its last heartbeat a silent worker may still seem to listen, in seconds.

The connection of a host that was cut off stays half open. A NATS server with its defaults closes it within six minutes.
"""
LOST_KEPT_S = 3600.0
"""How long the handshake of a lost worker is remembered, in seconds: it may come back without repeating it."""
SWEPT_EVERY_S = 60.0
"""Interval for removing workers that have been lost for `LOST_KEPT_S`, in seconds."""
LOOKED_EVERY_S = 1.0
"""Minimum interval between searches for lost workers when the registry is full, in seconds."""
LOG_EVERY_S = 10.0
"""Minimum interval between identical log messages about workers that are not registered, in seconds."""
LEDGER_WRITE_EVERY_S = 10.0
"""Minimum interval between ledger writes about one worker, in seconds. They are for display only."""
FIRST_LEDGER_WRITES_MAX = 100
"""Maximum number of new workers written to the ledger per such interval, because a name stays there for good."""
NAMES_LOGGED_MAX = 50
PROTOCOL_VERSION = 1
VERSIONS_KEPT_MAX = 10
"""Number of protocol versions kept per worker, for display."""
WORKER_ID = re.compile(r"[A-Za-z0-9_:@-]+(\.[A-Za-z0-9_:@-]+)*")
WORKER_ID_CHARS_MAX = 200
END_STATUSES = frozenset(status for status in Status if status > Status.RUNNING)

_log = log_of("trellis.bus.workers")


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveWorker:
    """A snapshot of a live worker."""

    worker_id: str
    heard_at: float | None
    """This process's clock at its last heartbeat; None while only its handshake has arrived."""
    interval_s: float
    active_jobs: int
    """The number of jobs in its last heartbeat."""
    load: int
    """`active_jobs`, adjusted by jobs dispatched and ended since."""
    capacity: int
    cpu: float
    pool: str
    capabilities: frozenset[str]
    labels: dict[str, str]
    ready_topics: tuple[str, ...]
    """Topics from its handshake; empty when it listed none."""
    other_versions: tuple[int, ...] = ()
    """The protocol versions of a worker that does not speak ours, lowest first; empty for every other worker."""

    @property
    def free(self) -> int:
        """How many more jobs it can take."""
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
    """The protocol versions it speaks instead of ours; empty when it speaks ours or listed none."""
    gone_at: float = math.inf
    """When its own subject was found to have no subscriber."""
    written_at: float = -math.inf
    given: dict[str, int] = field(default_factory=dict[str, int])
    """By wire id of a dispatched job: the number of heartbeats received before."""
    ended: int = 0
    """How many of the jobs in the last heartbeat have ended since."""
    seen: LiveWorker | None = None
    """Cached snapshot; None after a change."""

    def load(self) -> int:
        active = self.beat.active_jobs if self.beat else 0
        since = sum(after == self.beats for after in self.given.values())
        return max(max(0, active - self.ended) + since, len(self.given))

    def snapshot(self) -> LiveWorker:
        """The worker as it is now; the same object until something changes."""
        if self.seen is None:
            beat = self.beat or WorkerHeartbeat(worker_id=self.worker_id)
            self.seen = LiveWorker(
                worker_id=self.worker_id,
                heard_at=self.heard_at,
                interval_s=self.interval_s,
                active_jobs=beat.active_jobs,
                load=self.load(),
                capacity=max(1, beat.max_parallel_jobs),
                cpu=_percent(beat.cpu_load),
                pool=beat.pool,
                capabilities=frozenset(name.lower() for name in beat.capabilities),
                labels=dict(beat.labels),
                ready_topics=self.ready_topics,
                other_versions=self.other_versions,
            )
        return self.seen

    def names(self, topic: str) -> bool:
        """Whether it listed this topic, or has it as its pool and listed none."""
        if not self.ready_topics:
            return self.beat is not None and self.beat.pool == topic
        return compile_patterns(self.ready_topics).fit(topic)

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
    """The next try is due to a new worker, not because the silence ran out."""
    hope_s: float = 0.0
    """How long a new worker triggers no try, in seconds; longer after each failed try."""
    proven: bool = False
    of_topic: bool = True
    """Whether it is the subject of a topic, not of one worker."""
    answered_by: str = ""
    """The worker that last reported a job that was sent here before the worker had announced itself."""
    given: dict[str, float] = field(default_factory=dict[str, float])
    """By wire id of a dispatched job: until when it counts without a result."""

    def fell_silent(self, now: float) -> None:
        """Record that there was no subscriber. The subject is not used for twice as long as before."""
        self.silent_since = min(self.silent_since, now)
        longest = LASTING_S_MAX if now - self.silent_since >= LASTING_AFTER_S else SILENCE_S_MAX
        self.silence_s = min(longest, max(SILENCE_S_FIRST, 2 * self.silence_s))
        if self.hoped:
            self.hope_s = min(LASTING_S_MAX, max(SILENCE_S_FIRST, 2 * self.hope_s))
        self.proven, self.hoped = False, False
        self.tried_at, self.silent_until = now, now + self.silence_s

    def hope(self, now: float) -> None:
        """Record that a worker appeared that may subscribe here.

        The subject is tried at once, unless that failed recently.
        """
        if now < self.silent_until:
            self.hoped = True
            self.silent_until = min(self.silent_until, self.tried_at + self.hope_s)

    def spoke(self) -> None:
        self.proven, self.hoped, self.silence_s, self.hope_s = True, False, 0.0, 0.0
        self.silent_since, self.silent_until = math.inf, -math.inf


@dataclass(kw_only=True)
class WorkerRegistry:
    """The registry of one process. Receives every heartbeat, handshake and result."""

    clock: Clock
    ledger: Ledger | None = None
    """Optional; workers are written to it from time to time."""
    appeared: Callable[[], None] | None = None
    """Called when a worker appears or has free capacity again."""
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
    _first_written: deque[float] = field(default_factory=lambda: deque[float](maxlen=FIRST_LEDGER_WRITES_MAX))
    _logged_at: dict[str, float] = field(default_factory=dict[str, float])

    # --- received messages ----------------------------------------------------------------------------------------

    def record_heartbeat(self, heartbeat: WorkerHeartbeat, at: float) -> None:
        """Record a heartbeat; `at` is a reading of this process's clock."""
        labels = (*heartbeat.labels, *heartbeat.labels.values())
        texts = (*labels, *heartbeat.capabilities, heartbeat.pool, heartbeat.region)
        known = self._known(heartbeat.worker_id, at, texts)
        if known is None:
            return
        known.seen = None
        if known.heard_at is not None:
            gap_s = (known.interval_s + at - known.heard_at) / 2
            known.interval_s = min(INTERVAL_S_MAX, max(INTERVAL_S_MIN, gap_s))
        was_full = known.beat is None or known.load() >= max(1, known.beat.max_parallel_jobs)
        first, known.beat, known.heard_at = known.beat is None, heartbeat, at
        # Jobs dispatched before the previous heartbeat are in the worker's own count by now, or have ended.
        for wire_id in [wire_id for wire_id, after in known.given.items() if after < known.beats]:
            self._forget_given(known, wire_id)
        known.beats += 1
        known.ended = 0
        if first:
            self._break_silence(known.ready_topics, at)
        if first or (was_full and known.load() < max(1, heartbeat.max_parallel_jobs)):
            self._call()

    def record_handshake(self, handshake: Handshake, at: float) -> None:
        """Record a handshake. Only handshakes of workers matter here."""
        topics = handshake.ready_topics
        if sum(map(has_wildcard, topics)) > PATTERNS_MAX:
            self._not_taken_in("worker_tells_too_much", handshake.component_id, at)
            return
        known = self._known(handshake.component_id, at, topics) if handshake.role == "worker" else None
        if known is None:
            return
        known.seen, known.met_at = None, at
        known.other_versions = _other_versions(handshake.supported_versions)
        known.ready_topics = handshake.ready_topics
        self._drop_subject(direct_subject(known.worker_id))
        self._break_silence(known.ready_topics, at)
        self._call()

    def settled(self, wire_id: str, worker_id: str = "") -> None:
        """Record the end of an attempt, at this worker if known. Repeating it changes nothing."""
        if self._ended.get(wire_id):
            return
        self._ended[wire_id] = wire_id
        given_to = self._given_to.get(wire_id) or self._workers.get(worker_id)
        if isinstance(given_to, _SubjectState) and worker_id not in self._workers:
            given_to.answered_by = worker_id
        if isinstance(given_to, _WorkerEntry) and given_to.given.get(wire_id, -1) < given_to.beats:
            given_to.ended += 1
            given_to.seen = None
        self.released(wire_id)

    def released(self, wire_id: str) -> None:
        """Undo the record of a dispatch that did not happen."""
        given_to = self._given_to.get(wire_id)
        if given_to is not None:
            self._forget_given(given_to, wire_id)

    def assigned(self, worker_id: str, wire_id: str) -> None:
        known = self._workers.get(worker_id)
        if known is not None:
            known.given[wire_id], known.seen = known.beats, None
            self._given_to[wire_id] = known

    def sent(self, subject: str, wire_id: str, for_s: float) -> None:
        """Record a dispatch to the subscribers of a subject. It counts for `for_s` seconds unless it ends earlier."""
        known = self._subject(subject)
        known.given[wire_id] = self.clock.monotonic() + for_s
        self._given_to[wire_id] = known

    def mark_lost(self, worker_id: str) -> None:
        """Mark a worker as lost. Its handshake is remembered in case it comes back."""
        known = self._workers.get(worker_id)
        if known is not None:
            known.gone_at = min(known.gone_at, math.nextafter(self.clock.monotonic(), -math.inf))
            for wire_id in list(known.given):
                self._forget_given(known, wire_id)

    # --- live workers ---------------------------------------------------------------------------------------------

    def alive(self, worker_id: str) -> LiveWorker | None:
        """A snapshot of the worker; None if it is lost or unknown."""
        known = self._workers.get(worker_id)
        return known.snapshot() if known and self.clock.monotonic() <= known.lost_at() else None

    def serves(self, worker_id: str, topic: str, settings: Topic) -> bool:
        """Whether it is a live worker of this topic that speaks our protocol version."""
        seen = self.alive(worker_id)
        return seen is not None and not seen.other_versions and serves(seen, topic, settings)

    def live(self) -> Iterator[LiveWorker]:
        """All live workers, including those that do not speak our protocol version."""
        now = self.clock.monotonic()
        if now >= self._swept_at + SWEPT_EVERY_S:
            self._swept_at = now
            self._forget_lost(now - LOST_KEPT_S)
        return (known.snapshot() for known in self._workers.values() if now <= known.lost_at())

    def outstanding(self, subject: str) -> int:
        """How many attempts sent to this subject may still be running."""
        known = self._subjects.get(subject)
        if known is None:
            return 0
        now = self.clock.monotonic()
        for wire_id in [wire_id for wire_id, until in known.given.items() if until <= now]:
            self._forget_given(known, wire_id)
        return len(known.given)

    # --- subjects -------------------------------------------------------------------------------------------------

    def silent(self, subject: str) -> bool:
        """Whether the subject recently had no subscriber and is not to be used yet."""
        known = self._subjects.get(subject)
        return known is not None and self.clock.monotonic() < known.silent_until

    def proven(self, subject: str) -> bool:
        """Whether the subject had a subscriber when it was last used."""
        known = self._subjects.get(subject)
        return known is not None and known.proven

    def deserted(self, topic: str) -> bool:
        """Whether the workers that announced themselves for a topic have all fallen silent, so that nobody may hear.

        Their subscriptions may outlive them: what is sent there would be lost until its lease is over. It is not so if
        a worker that does not announce itself has answered there, or if their connections are known to be closed.
        """
        now, state = self.clock.monotonic(), self._subjects.get(topic)
        if state is not None and state.answered_by and state.answered_by not in self._workers:
            return False
        named = [known for known in self._workers.values() if known.names(topic)]
        if any(now <= known.lost_at() for known in named):
            return False
        return any(known.gone_at == math.inf and now <= known.lost_at() + HALF_OPEN_S for known in named)

    def mark_listening(self, subject: str) -> None:
        self._subject(subject).spoke()

    def mark_silent(self, subject: str, worker_id: str = "") -> None:
        """Record that the subject has no subscriber; it is not used for a while.

        If it is a worker's own subject, the worker is lost.
        """
        self.mark_lost(worker_id)
        known, now = self._subject(subject), self.clock.monotonic()
        if now < known.silent_until:
            return  # several packets were in flight when the first failed
        known.of_topic = not worker_id
        known.fell_silent(now)

    # --- the bus --------------------------------------------------------------------------------------------------

    async def listen(self, bus: Bus) -> None:
        self._own_sender_id = bus.sender_id
        for subject in (HEARTBEAT, HANDSHAKE):
            self._listening.append(await bus.listen(subject, self._take))
        # The result listener alerts about unreadable results, so that there is one alert per packet.
        self._listening.append(await bus.listen(RESULT, self._take, alerts=False, echoes=False))

    async def stop(self) -> None:
        while self._listening:
            await self._listening.pop().stop()

    async def _take(self, received: ReceivedPacket) -> None:
        body, now = received.packet.body, self.clock.monotonic()
        if isinstance(body, WorkerHeartbeat):
            self.record_heartbeat(body, now)
            await self._write_worker(body.worker_id, now)
        elif isinstance(body, Handshake):
            self.record_handshake(body, now)
        elif received.packet.sender_id == self._own_sender_id:
            return  # published by the control plane for clients, not by a worker
        elif isinstance(body, JobResult) and body.status in END_STATUSES and read_wire_id(body.job_id):
            self.settled(body.job_id, body.worker_id)
            self._call()

    async def _write_worker(self, worker_id: str, now: float) -> None:
        known = self._workers.get(worker_id)
        if self.ledger is None or known is None or now < known.written_at + LEDGER_WRITE_EVERY_S:
            return
        if known.written_at == -math.inf:
            if (
                len(self._first_written) == FIRST_LEDGER_WRITES_MAX
                and now < self._first_written[0] + LEDGER_WRITE_EVERY_S
            ):
                return  # written with a later heartbeat
            self._first_written.append(now)
        known.written_at = now
        try:
            await self.ledger.heartbeat_worker(Actor(role=Role.WORKER, name=worker_id), _worker_info(known))
        except LedgerError as error:
            _log.info("worker_not_told", worker=worker_id, error=str(error))  # written with a later heartbeat

    # --- bookkeeping ----------------------------------------------------------------------------------------------

    def _known(self, worker_id: str, at: float, texts: Sequence[str]) -> _WorkerEntry | None:
        """The entry of the worker that sent this; None when it cannot be registered."""
        if sum(map(len, texts)) > WORKER_TEXT_CHARS_MAX:
            return self._not_taken_in("worker_tells_too_much", worker_id, at)
        known = self._workers.get(worker_id)
        if known is not None and at <= known.lost_at():
            return known
        if len(worker_id) > WORKER_ID_CHARS_MAX or not WORKER_ID.fullmatch(worker_id):
            return self._not_taken_in("worker_id_unusable", worker_id, at)
        if known is None and len(self._workers) >= WORKERS_MAX and not self._make_room(at):
            return self._not_taken_in("too_many_workers", worker_id, at)
        self.mark_lost(worker_id)
        entry = self._workers[worker_id] = _WorkerEntry(worker_id, met_at=at)
        if known is not None:  # a worker that returns after a silence sends heartbeats, but not its handshake again
            entry.ready_topics, entry.written_at = known.ready_topics, known.written_at
            entry.other_versions = known.other_versions
        return entry

    def _not_taken_in(self, why: str, worker_id: str, at: float) -> None:
        if at >= self._logged_at.get(why, -math.inf) + LOG_EVERY_S:
            self._logged_at[why] = at
            _log.warning(why, worker=worker_id[:WORKER_ID_CHARS_MAX], workers=len(self._workers))

    def _make_room(self, at: float) -> bool:
        """Whether there is room after removing lost workers.

        The search visits every worker, so it does not run every time.
        """
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
        """Drop half of the subjects: idle ones first, then the oldest."""
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
        """A worker appeared: try the silent subjects of its topics, or all when it lists none."""
        named = compile_patterns(topics)
        for subject, known in self._subjects.items():
            silent = at < known.silent_until and known.of_topic
            if silent and (not topics or named.fit(subject)):
                known.hope(at)

    def _call(self) -> None:
        if self.appeared is not None:
            self.appeared()


def serves(seen: LiveWorker, topic: str, settings: Topic) -> bool:
    """Whether a worker serves this topic, by its listed topics or by one of the topic's pools."""
    if settings.pools and (seen.pool not in settings.pools or not seen.ready_topics):
        return seen.pool in settings.pools
    return compile_patterns(seen.ready_topics).fit(topic)


def _other_versions(supported: tuple[int, ...]) -> tuple[int, ...]:
    """The versions of a component that does not speak ours.

    A component that lists none is assumed to: CAP has one version so far.
    """
    return () if PROTOCOL_VERSION in supported else tuple(sorted(set(supported)))[:VERSIONS_KEPT_MAX]


def _percent(value: float) -> float:
    return min(100.0, max(0.0, value)) if math.isfinite(value) else 0.0


def _worker_info(known: _WorkerEntry) -> bytes:
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
