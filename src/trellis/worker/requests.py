"""Builds a checked, encoded and fingerprinted `NewJob` from a caller's arguments. Writes nothing."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TypedDict, Unpack, cast

from trellis.auth.principals import Principal, party_of
from trellis.engine import tracing
from trellis.engine.errors import OptionInvalid, UnknownLifecycle
from trellis.engine.jobs import (
    ATTEMPTS_DEFAULT,
    ATTEMPTS_MAX,
    DEADLINE_S_MIN,
    DEATHS_DEFAULT,
    DELAY_S_MAX,
    JOB_ID_PATTERN,
    AlikeJobs,
    ChosenOptions,
    JobId,
    NewJob,
    Priority,
)
from trellis.engine.option_values import SECONDS, check_listed, check_text, check_whole, check_within
from trellis.engine.schedules import RESERVED_SCOPE_PREFIX
from trellis.engine.text import is_storable
from trellis.engine.uniqueness import OnConflict, UniqueRule, WhileHeld, checked_rule, merged
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.worker.app import App, JobSpec, checked_type, priority_of, refuse_unknown
from trellis.worker.options import KEY_LIMIT_MAX
from trellis.worker.payloads import all_json_bytes

KEY_CHARS_MAX = 200
TRACE_CHARS_MAX = 1_000
TYPES_CACHED_MAX = 1_000
"""Job types whose jobs without settings are built from a stored copy."""
SHOWN_CHARS_MAX = 40
"""How much of a refused text an error message repeats."""
RUN_AT_MAX = datetime(3000, 1, 1, tzinfo=UTC)
"""Upper bound of `run_at`. It is far from the largest date, so that adding a duration cannot overflow."""
KEY_NAMESPACE = "user:"
"""Prefix of callers' concurrency keys, which keeps them apart from `run:` and `queue-job:` keys."""


class SubmitSettings(TypedDict, total=False):
    """The keyword arguments of a submit."""

    job_id: str | None
    """The job id. Submitting the same id and request again returns the existing job."""
    idempotency_key: str | None
    """The same key with the same request returns the same job. With another request it is refused."""
    idempotency_scope: str
    """The scope of the idempotency key. The same key in another scope is a different key."""
    priority: Priority | str
    """`critical`, `interactive` or `batch`."""
    delay_s: float
    """Do not start before this many seconds from now."""
    run_at: datetime | None
    """Do not start before this time, which must have a time zone."""
    deadline_s: float | None
    """Seconds from now to the latest end. After that, no attempt starts."""
    max_attempts: int
    """Maximum number of executions."""
    concurrency_key: str | None
    """Limits how many jobs with the same key run at once.

    Keys of a limited database login are separate from the application's.
    """
    concurrency_limit: int
    """How many jobs of the concurrency key may be held at once."""
    correlation_id: str | None
    """The job's correlation id. Default: its own id."""
    trace: str | None
    """The caller's trace context (a W3C `traceparent`), which the handler continues. Default: the current one."""
    parent_id: str | None
    """The job that caused this one."""
    unique: str | None
    """The unique key: `args` for the payload, or a key. One job of a type and key may wait, or be unfinished."""
    while_: WhileHeld | str | None
    """How long the job holds its unique key: while it is `waiting`, or `unfinished`."""
    window_s: float | None
    """The job holds its unique key at least so long after its submit, also when it has ended."""
    on_conflict: OnConflict | str | None
    """What happens when the unique key is taken: `return` that job, `replace` the waiting one, or `raise`."""
    debounce_s: float | None
    """Replace the waiting job with the same unique key, and start this long after the last submit."""
    debounce_max_s: float | None
    """Start at most this long after the first submit. Default: 10 times `debounce_s`."""
    compensates: str | None
    """The succeeded job that this one undoes. `Trellis.compensate` sets it."""
    lifecycle: str
    """The job's lifecycle. Default: leased-job."""


class BatchJob:
    """A job to submit with others (`submit_batch`): its type, its payload and the settings of a submit."""

    __slots__ = ("payload", "settings", "type")

    def __init__(self, type_: str, payload: Any = None, **settings: Unpack[SubmitSettings]) -> None:
        self.type, self.payload, self.settings = type_, payload, settings


def check_batch_jobs(jobs: Any, on_complete: Any) -> None:
    """Check that a batch is given as a list of BatchJob and one BatchJob. Raises OptionInvalid."""
    expected = 'it must be a BatchJob, such as BatchJob("row.import", 1)'
    check_listed("jobs", jobs, 'it must be a list of jobs, such as [BatchJob("row.import", 1)]')
    for option, job in (("on_complete", on_complete), *((f"jobs[{number}]", job) for number, job in enumerate(jobs))):
        if not isinstance(job, BatchJob):
            raise OptionInvalid(option=option, value=job, expected=expected)


SETTINGS = frozenset(SubmitSettings.__annotations__)
UNIQUE_SETTINGS = frozenset({"unique", "while_", "window_s", "on_conflict", "debounce_s", "debounce_max_s"})
"""The settings that are about uniqueness."""
CHOSEN_BY = {
    "priority": ChosenOptions.PRIORITY,
    "max_attempts": ChosenOptions.MAX_ATTEMPTS,
    "concurrency_key": ChosenOptions.CONCURRENCY_KEY,
    "concurrency_limit": ChosenOptions.CONCURRENCY_LIMIT,
}
"""Settings that a job type can declare too, with their bits."""


def new_job(
    type_: str, payload: Any, settings: SubmitSettings, *, app: App | None, new_id: Callable[[], str]
) -> NewJob:
    """Builds the job to submit. Raises an InputError that says what is wrong."""
    (job,) = new_jobs(type_, [payload], settings, app=app, new_id=new_id)
    return job


def new_jobs(
    type_: str, payloads: Collection[Any], settings: SubmitSettings, *, app: App | None, new_id: Callable[[], str]
) -> Sequence[NewJob]:
    """Builds a job for each payload. The settings, which are the same for all, are checked once. Raises as `new_job`."""
    trace = tracing.here()
    if app is None and not settings and trace is None:
        check_text("job type", type_)
        common = _common_request_by_default(type_)
        bodies = all_json_bytes(payloads, type_)
        new_ids: list[Any] = [new_id() for _ in bodies]
        return AlikeJobs(common, new_ids, bodies)
    checked_type(type_)
    spec = app.spec(type_) if app is not None else None
    common = _common_request(type_, spec, settings, trace)
    accepted = None if spec is None else [spec.codec.accept(payload) for payload in payloads]
    bodies = all_json_bytes(payloads, type_) if accepted is None else [body for _, body in accepted]
    given = common.id_is_given
    ids = [common.job_id] * len(bodies) if given else cast("list[JobId]", [new_id() for _ in bodies])
    jobs: Sequence[NewJob] = AlikeJobs(common, ids, bodies)
    if spec is not None and accepted is not None and (spec.concurrency_key is not None or spec.unique_rule is not None):
        jobs = [_keyed(job, spec, value, settings) for job, (value, _) in zip(jobs, accepted, strict=True)]
    if given or common.idempotency_key is not None:
        return [replace(job, fingerprint=fingerprint(job)) for job in jobs]
    return jobs


@lru_cache(maxsize=TYPES_CACHED_MAX)
def _common_request_by_default(type_: str) -> NewJob:
    return _common_request(checked_type(type_), None, {}, None)


def _common_request(type_: str, spec: JobSpec | None, settings: SubmitSettings, trace: str | None) -> NewJob:
    """Builds what the jobs of one submit have in common. The id is empty unless the caller chose it."""
    if not settings.keys() <= SETTINGS:
        refuse_unknown(settings, tuple(SubmitSettings.__annotations__))
    given = settings.get("job_id")
    limit = settings.get("concurrency_limit", spec.options.concurrency_limit if spec else 1)
    check_whole("concurrency_limit", limit, 1, KEY_LIMIT_MAX)
    by_payload = spec is not None and spec.unique_rule is not None
    return NewJob(
        job_id=JobId(_matching("job_id", given) if given is not None else ""),
        type=type_,
        lifecycle=_lifecycle(settings.get("lifecycle", "leased-job")),
        priority=priority_of(settings.get("priority", spec.options.priority if spec else Priority.BATCH)),
        delay_s=_duration("delay_s", settings.get("delay_s", 0.0)),
        run_at=_aware(settings.get("run_at")),
        deadline_s=_deadline(settings.get("deadline_s", spec.options.deadline_s if spec else None)),
        max_attempts=_attempts(settings.get("max_attempts", spec.options.max_attempts if spec else ATTEMPTS_DEFAULT)),
        max_deaths=spec.options.max_deaths if spec else DEATHS_DEFAULT,
        concurrency_key=_concurrency_key(settings.get("concurrency_key")),
        concurrency_limit=limit,
        idempotency_key=_checked_text("idempotency_key", settings.get("idempotency_key")),
        idempotency_scope=_scope(settings.get("idempotency_scope", "")),
        id_is_given=given is not None,
        correlation_id=_checked_text("correlation_id", settings.get("correlation_id")),
        trace=_trace(settings.get("trace", trace)),
        parent_id=_job_id("parent_id", settings.get("parent_id")),
        compensates=_job_id("compensates", settings.get("compensates")),
        chosen=_chosen_options(spec, settings),
        unique=None if by_payload or UNIQUE_SETTINGS.isdisjoint(settings) else _unique_rule(None, None, settings),
    )


def _keyed(job: NewJob, spec: JobSpec, payload: Any, settings: SubmitSettings) -> NewJob:
    """Adds the keys that the job's type computes from the payload."""
    if spec.concurrency_key is not None and settings.get("concurrency_key") is None:
        job = replace(job, concurrency_key=_concurrency_key(spec.key_of(payload)))
    return job if spec.unique_rule is None else replace(job, unique=_unique_rule(spec, payload, settings))


def _unique_rule(spec: JobSpec | None, payload: Any, settings: SubmitSettings) -> UniqueRule | None:
    """Returns what this submit and its application say about uniqueness. Raises OptionInvalid."""
    given = {name: settings.get(name) for name in UNIQUE_SETTINGS}
    if given["unique"] is None and spec is not None:
        given["unique"] = spec.unique_key_of(payload)
    rule = merged(checked_rule(**cast("dict[str, Any]", given)), spec.unique_rule if spec is not None else None)
    if rule is None:
        return None
    if settings.get("lifecycle", LEASED_JOB.name) != LEASED_JOB.name:
        expected = f"only jobs of the lifecycle {LEASED_JOB.name} can be unique"
        raise OptionInvalid(option="unique", value=rule.key, expected=expected)
    delays = [name for name in ("delay_s", "run_at") if settings.get(name)]
    if rule.debounce_s is not None and delays:
        expected = "leave it out: debounce_s says when the job starts"
        raise OptionInvalid(option=delays[0], value=settings.get(delays[0]), expected=expected)
    return replace(rule, computed=False)


def _chosen_options(spec: JobSpec | None, settings: SubmitSettings) -> int:
    """Returns the options that this submit sets. A concurrency key computed by the application counts as set."""
    chosen = 0
    if settings:
        chosen = sum(bit for name, bit in CHOSEN_BY.items() if settings.get(name) is not None)
        chosen |= ChosenOptions.DEADLINE if "deadline_s" in settings else 0
    return chosen | (ChosenOptions.CONCURRENCY_KEY if spec is not None and spec.concurrency_key is not None else 0)


def fingerprint(job: NewJob) -> bytes:
    """Hashes the request to detect reuse of an idempotency key: type, payload and the options that change what happens.

    Who submits and when are no part of it. Neither are options declared by the type, so a caller without the
    application produces the same fingerprint, nor what is said about uniqueness, which the type may declare too.
    """
    chosen = job.chosen
    request = {
        "type": job.type,
        "payload": json.loads(job.payload),
        "lifecycle": job.lifecycle,
        "priority": int(job.priority if chosen & ChosenOptions.PRIORITY else Priority.BATCH),
        "delay_s": job.delay_s,
        "run_at": job.run_at.isoformat() if job.run_at else None,
        "deadline_s": job.deadline_s if chosen & ChosenOptions.DEADLINE else None,
        "concurrency_key": job.concurrency_key,
    }
    canonical = json.dumps(request, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).digest()


def _concurrency_key(key: str | None) -> str | None:
    checked = _checked_text("concurrency_key", key)
    return None if checked is None else KEY_NAMESPACE + checked


def _lifecycle(name: str) -> str:
    check_text("lifecycle", name)
    if name not in LIFECYCLES:
        raise UnknownLifecycle(name=name, known=", ".join(LIFECYCLES))
    if name == BUS_JOB.name:
        expected = "a job on a topic is a request that is checked and says who asks; use submit_topic"
        raise OptionInvalid(option="lifecycle", value=name, expected=expected)
    return name


def _duration(option: str, value: float) -> float:
    check_within(option, value, 0, DELAY_S_MAX, of=SECONDS)
    return float(value)


def _deadline(value: float | None) -> float | None:
    if value is None:
        return None
    check_within("deadline_s", value, DEADLINE_S_MIN, DELAY_S_MAX, of=SECONDS)
    return float(value)


def _attempts(value: int) -> int:
    check_whole("max_attempts", value, 1, ATTEMPTS_MAX)
    return value


def check_moment(option: str, value: Any) -> None:
    """Check that a value is a datetime with a time zone. Raises OptionInvalid."""
    if not isinstance(value, datetime):
        expected = "it must be a datetime with a time zone, such as datetime(2026, 12, 1, tzinfo=UTC)"
        raise OptionInvalid(option=option, value=value, expected=expected)
    if value.tzinfo is None:
        raise OptionInvalid(option=option, value=value, expected="it must have a time zone")


def _aware(run_at: datetime | None) -> datetime | None:
    """Returns the same time in UTC. Raises OptionInvalid."""
    if run_at is None:
        return None
    check_moment("run_at", run_at)
    try:
        moment = run_at.astimezone(UTC)
    except OverflowError:  # in UTC the year would be 0 or 10,000
        moment = datetime.max.replace(tzinfo=UTC)
    if moment >= RUN_AT_MAX:
        expected = f"it must be a moment of the years 1 to {RUN_AT_MAX.year - 1}, in UTC"
        raise OptionInvalid(option="run_at", value=run_at, expected=expected)
    return moment


def _checked_text(option: str, value: str | None) -> str | None:
    return None if value is None else _checked(option, value, range(1, KEY_CHARS_MAX + 1))


def _scope(value: str) -> str:
    check_text("idempotency_scope", value)
    if value.startswith(RESERVED_SCOPE_PREFIX):
        expected = f"scopes that begin with {RESERVED_SCOPE_PREFIX} are Trellis' own; choose another"
        raise OptionInvalid(option="idempotency_scope", value=value[:SHOWN_CHARS_MAX], expected=expected)
    return _checked("idempotency_scope", value, range(KEY_CHARS_MAX + 1))


def _trace(value: str | None) -> str | None:
    return None if value is None else _checked("trace", value, range(TRACE_CHARS_MAX + 1))


def _checked(option: str, value: str, lengths: range) -> str:
    """Returns the text unchanged. Raises OptionInvalid if its length is out of bounds or a ledger cannot store it."""
    check_text(option, value)
    if len(value) not in lengths:
        expected = f"it must have {lengths[0]} to {lengths[-1]} characters"
        raise OptionInvalid(option=option, value=value[:SHOWN_CHARS_MAX], expected=expected)
    if not is_storable(value):
        expected = "it must be text without NUL characters and halves of surrogate pairs"
        raise OptionInvalid(option=option, value=value[:SHOWN_CHARS_MAX], expected=expected)
    return value


def _job_id(option: str, value: str | None) -> JobId | None:
    return None if value is None else JobId(_matching(option, value))


def _matching(option: str, value: str) -> str:
    check_text(option, value)
    if not re.fullmatch(JOB_ID_PATTERN, value):
        raise OptionInvalid(option=option, value=value[:SHOWN_CHARS_MAX], expected=f"it must match {JOB_ID_PATTERN}")
    return value


def stored_concurrency_key(principal: Principal, key: str | None) -> str | None:
    """A caller's concurrency key as the ledger stores it, for a filter; see `admitted_submission`."""
    if key is None:
        return None
    is_stored = key.startswith((KEY_NAMESPACE, f"{QUEUE_JOB.name}:"))
    named = key if is_stored else f"{KEY_NAMESPACE}{key}"
    return named if principal.tenant is None else f"{party_of(principal.name)}{named}"
