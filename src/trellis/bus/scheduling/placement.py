"""Placement: chooses a worker of the topic's pools, the topic's own subject, or neither yet (BUS-3, D53).

Pure: works on the registry's snapshot of workers and subjects. Jobs of a topic with pools go to workers of those pools
only. Jobs of a topic without pools go to a worker that listed the topic, else to the topic's own subject, where workers
that never announce themselves subscribe.

A job's label `worker.<name>` must equal the worker's label `<name>`. `preferred_worker` and `preferred_pool` are
preferences. All other labels are the submitter's own. Everything a job requires must be among the capabilities of the
pool or of the worker.

A worker that does not speak our version of CAP gets no jobs. Subscribers of a topic's own subject cannot be told apart.
So that subject is not used while such a worker lists the topic or has it as its pool: the job waits, with
VERSION_MISMATCH as the reason. A worker that lists neither, or only a pattern, may subscribe anywhere. It holds jobs
back only where no worker of our version is known, and each job for at most DOUBT_S_MAX, so that one such handshake
never stops a topic for good. An alert is sent in either case.

A topic's own subject is not used while all workers that announced themselves for it are silent: a host that was cut off
still seems to listen, and each job sent there would lose an attempt. The jobs wait, as jobs of a ledger do.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, TypeAlias

from trellis.bus.messages import ErrorCode, direct_subject
from trellis.bus.requests import JobRequest
from trellis.bus.scheduling.registry import LiveWorker, serves
from trellis.bus.topics import Topics

OVERLOADED_CPU = 95.0
DOUBT_S_MAX = 30.0
"""How long a worker of another version that lists no topic holds back a job of a topic not served yet, in seconds.

Then the job goes to the topic's own subject. Workers that never announce themselves may subscribe there, and only a
dispatched job can show it.
"""
WORKER_LABEL = "worker."
PREFERRED_WORKER = "preferred_worker"
PREFERRED_POOL = "preferred_pool"
NOBODY_LISTENS = "the workers that may have it do not listen at their own subjects, and others listen on its topic"


class SubjectStates(Protocol):
    """What placement needs to know about subjects; implemented by the registry."""

    def silent(self, subject: str, /) -> bool:
        """Whether the subject recently had no subscriber."""
        ...

    def proven(self, subject: str, /) -> bool:
        """Whether the subject had a subscriber when it was last used."""
        ...

    def outstanding(self, subject: str, /) -> int:
        """How many attempts sent there may still be running."""
        ...

    def deserted(self, topic: str, /) -> bool:
        """Whether the workers that announced themselves for the topic have all fallen silent."""
        ...


class WaitReason(StrEnum):
    """Why a job stays ready."""

    FULL = "full"
    NOBODY = "nobody"
    """No live worker serves the topic."""
    SILENT = "silent"
    """The topic's subject recently had no subscriber."""
    DESERTED = "deserted"
    """The workers that announced themselves for the topic have fallen silent."""


_REASONS = {
    WaitReason.FULL: "the workers that may have it are busy",
    WaitReason.NOBODY: "no worker that serves its topic is there",
    WaitReason.SILENT: "nobody listens on its topic",
    WaitReason.DESERTED: "no heartbeat comes from the workers of its topic any more",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedJob:
    """Where the job goes; `worker_id` is empty for the topic's own subject.

    With a `doubt`, an alert is sent about a worker of another version that may also subscribe there.
    """

    subject: str
    worker_id: str = ""
    doubt: "NoFittingWorker | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StaysReady:
    """The job stays ready. `all_do` means that the same holds for every other job of the topic."""

    why: WaitReason
    all_do: bool

    @property
    def reason(self) -> str:
        """The reason as text, for people."""
        return _REASONS[self.why]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoFittingWorker:
    """There are workers, but none of them may get the job. With a `code`, an alert about `worker_id` is sent."""

    reason: str
    code: ErrorCode | None = None
    worker_id: str = ""


Placement: TypeAlias = PlacedJob | StaysReady | NoFittingWorker


def place_job(
    request: JobRequest,
    topics: Topics,
    workers: Iterable[LiveWorker],
    subjects: SubjectStates,
    *,
    subject_max: int,
    age_s: float = 0.0,
) -> Placement:
    """Choose where the job goes now; `age_s` is how long it has waited."""
    topic = topics.of(request.topic)
    serving: list[LiveWorker] = []
    foreign: list[LiveWorker] = []
    unsaid: list[LiveWorker] = []
    known = subjects.proven(request.topic)
    for seen in workers:
        named = request.topic in seen.ready_topics or (seen.pool == request.topic and not seen.ready_topics)
        fits = serves(seen, request.topic, topic)
        if not seen.other_versions:
            known = known or named
            if fits:
                serving.append(seen)
        elif fits if topic.pools else named:
            foreign.append(seen)
        elif fits or not (seen.ready_topics or seen.pool):
            unsaid.append(seen)
    placed = _place_among(request, topics, serving, subjects, subject_max)
    own_subject = isinstance(placed, PlacedJob) and not placed.worker_id
    nobody = isinstance(placed, StaysReady) and placed.why is not WaitReason.FULL
    if foreign and (own_subject or nobody):
        return _mismatch(request.topic, foreign)
    if not unsaid or topic.pools or not (own_subject or nobody):
        return placed
    doubt = _mismatch(request.topic, unsaid)
    if not known and not serving and age_s < DOUBT_S_MAX:
        return doubt
    return replace(placed, doubt=doubt) if isinstance(placed, PlacedJob) else placed


def _place_among(
    request: JobRequest, topics: Topics, serving: Sequence[LiveWorker], subjects: SubjectStates, subject_max: int
) -> Placement:
    """Choose where the job goes, considering only serving workers of our version."""
    if not serving:
        if topics.of(request.topic).pools:
            return StaysReady(why=WaitReason.NOBODY, all_do=True)
        problem = _why_unfit_for_unknown(request)
        return NoFittingWorker(reason=problem) if problem else _own_subject(request.topic, subjects, subject_max)
    fitting = (
        [seen for seen in serving if _why_unfit(request, topics, seen) is None]
        if _has_requirements(request)
        else serving
    )
    if not fitting:
        return NoFittingWorker(
            reason=f"{_why_unfit(request, topics, serving[0])} ({len(serving)} workers serve {request.topic})"
        )
    free = [seen for seen in fitting if _free(seen)]
    if not free:
        return StaysReady(why=WaitReason.FULL, all_do=len(fitting) == len(serving) or not any(map(_free, serving)))
    chosen = _best_listening(request, free, subjects)
    if chosen is None and len(fitting) == len(serving):
        return _own_subject(request.topic, subjects, subject_max)
    return chosen or _nobody_listens(request, fitting, subjects)


def _mismatch(topic: str, foreign: Sequence[LiveWorker]) -> NoFittingWorker:
    code, first = ErrorCode.VERSION_MISMATCH, foreign[0]
    spoken = ", ".join(map(str, first.other_versions))
    others = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
    where = f"serves {topic}" if first.ready_topics or first.pool else f"names no topics and may listen on {topic}"
    reason = (
        f"{code.name}: worker {first.worker_id}{others} {where} and speaks version {spoken} of CAP, this side version 1; "
        "upgrade it, stop it, or serve the topic with workers that listen at their own subjects"
    )
    return NoFittingWorker(reason=reason, code=code, worker_id=first.worker_id)


def _nobody_listens(
    request: JobRequest, fitting: Sequence[LiveWorker], subjects: SubjectStates
) -> StaysReady | NoFittingWorker:
    """No free worker subscribes to its own subject. The job waits if a busy one does."""
    listening = _best_listening(request, fitting, subjects)
    return (
        NoFittingWorker(reason=NOBODY_LISTENS) if listening is None else StaysReady(why=WaitReason.FULL, all_do=False)
    )


def _best_listening(request: JobRequest, workers: Sequence[LiveWorker], subjects: SubjectStates) -> PlacedJob | None:
    """The best worker that subscribes to its own subject; None if none does.

    The others subscribe to the topic, if at all, where they share jobs with all workers of the topic.
    """
    hearing = [seen for seen in workers if not subjects.silent(direct_subject(seen.worker_id))]
    if not hearing:
        return None
    chosen = _best(request, hearing)
    return PlacedJob(subject=direct_subject(chosen.worker_id), worker_id=chosen.worker_id)


def _has_requirements(request: JobRequest) -> bool:
    """Whether some workers may be unfit for the job.

    Checked first, since most jobs have no requirements and there may be thousands of workers.
    """
    return bool(_required(request)) or any(label.startswith(WORKER_LABEL) for label in request.labels)


def _why_unfit(request: JobRequest, topics: Topics, seen: LiveWorker) -> str | None:
    """Why this worker may not get the job; None if it may."""
    for label, wanted in request.labels.items():
        if label.startswith(WORKER_LABEL) and seen.labels.get(label[len(WORKER_LABEL) :]) != wanted:
            return f"label {label}={wanted} asks for another worker"
    pool = topics.pools.get(seen.pool)
    there = seen.capabilities | {name.lower() for name in (pool.requires if pool else ())}
    missing = [name for name in _required(request) if name.lower() not in there]
    return f"it requires {', '.join(missing)}" if missing else None


def _why_unfit_for_unknown(request: JobRequest) -> str | None:
    """Why no unknown worker may get the job; None if one may."""
    if _required(request):
        return f"it requires {', '.join(_required(request))}, and no worker says that it can"
    labels = sorted(label for label in request.labels if label.startswith(WORKER_LABEL))
    return f"no worker says that it has the labels of {', '.join(labels)}" if labels else None


def _required(request: JobRequest) -> tuple[str, ...]:
    return request.meta.requires if request.meta else ()


def _free(seen: LiveWorker) -> bool:
    return seen.free > 0 and seen.cpu < OVERLOADED_CPU


def _best(request: JobRequest, free: Sequence[LiveWorker]) -> LiveWorker:
    """The least loaded worker.

    Ties are broken by job, so that concurrent schedulers do not all choose the same worker.
    """
    wished_pool, wished_worker = request.labels.get(PREFERRED_POOL), request.labels.get(PREFERRED_WORKER)

    def cost(seen: LiveWorker) -> tuple[bool, bool, float, bytes]:
        score = seen.load / seen.capacity + seen.cpu / 100
        spread = hashlib.blake2b(f"{request.job_id} {seen.worker_id}".encode(), digest_size=8).digest()
        return seen.worker_id != wished_worker, seen.pool != wished_pool, score, spread

    return min(free, key=cost)


def _own_subject(topic: str, subjects: SubjectStates, subject_max: int) -> Placement:
    if subjects.silent(topic):
        return StaysReady(why=WaitReason.SILENT, all_do=True)
    if subjects.outstanding(topic) >= subject_max:
        return StaysReady(why=WaitReason.FULL, all_do=True)
    if subjects.deserted(topic):
        return StaysReady(why=WaitReason.DESERTED, all_do=True)
    return PlacedJob(subject=topic)
