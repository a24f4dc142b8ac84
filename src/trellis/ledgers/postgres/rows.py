"""Converts database rows into the engine's values, and values into the arguments of functions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from trellis.engine.admin_acts import AdminAct, NewAct, facts_text, node_of, read_facts
from trellis.engine.event_data import cancel_request_in, with_cancel_request_of
from trellis.engine.jobs import Epoch, HeldLease, JobId, JobKey, Lease, Priority, ReasonCode, Stage, TypeOptions
from trellis.engine.key_rates import key_rate
from trellis.engine.records import (
    AuditHead,
    DeadLetter,
    DeadLetterCount,
    Event,
    Job,
    JobPlace,
    LedgerFigures,
    QueueDepth,
    RetentionOptions,
    SampledEvent,
    Signal,
    SweepOptions,
    event_id,
)
from trellis.engine.schedules import ScheduleRecord, ScheduleSpec
from trellis.engine.uniqueness import rule_from_text
from trellis.ledgers.postgres.connection import PostgresRow
from trellis.ledgers.refusals import lifecycle_named
from trellis.ledgers.retention_plan import stored_ages
from trellis.lifecycles import BY_CODE, SIGNAL_TYPES, Lifecycle, event_name
from trellis.lifecycles.lifecycle import ROLES

STORED_PLACES: Mapping[JobPlace | None, str | None] = {
    None: None,
    JobPlace.READY: "ready",
    JobPlace.SCHEDULED: "resting",
    JobPlace.BLOCKED: "parked",
    JobPlace.LEASED: "held",
    JobPlace.ENDED: "ended",
}
"""The words that the tables and views have for places."""
PLACES = {word: place for place, word in STORED_PLACES.items() if place is not None}


def job(row: PostgresRow) -> Job:
    """A row of `job_status`, joined with its names."""
    lifecycle = BY_CODE[row["lifecycle"]]
    read_job = Job(
        job_id=JobId(row["job_id"]),
        lifecycle=lifecycle.name,
        type=row["type_name"],
        state=lifecycle.state_of(row["state"]).name,
        place=PLACES[row["place"]],
        priority=Priority(row["prio"]),
        generation=row["generation"],
        attempt=row["attempt"],
        max_attempts=row["max_attempts"],
        spared=row["max_attempts"] - row.get("asked_attempts", row["max_attempts"]),
        version=row["version"],
        epoch=Epoch(row["epoch"]),
        deaths=row["deaths"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        due_at=row["due_at"],
        deadline_at=row["deadline_at"],
        owner=row["owner_name"] if row["place"] == STORED_PLACES[JobPlace.LEASED] else None,
        lease_expires_at=row["until"],
        cancel_requested=row["cancel_at"] is not None,
        cancel_due_at=row["cancel_at"],
        cancel_asked_by=row.get("asked_by"),
        cancel_asked_at=row.get("asked_at"),
        cancel_cause=row.get("asked_why"),
        concurrency_key=row["key_name"],
        correlation_id=row["correlation_id"] or row["job_id"],
        trace=row["trace"],
        parent_id=row["parent_id"],
        compensates=row["compensates_id"],
        payload=row.get("payload"),
        progress=row.get("progress"),
    )
    return with_cancel_request_of(read_job, cancel_request_in(row.get("end_data")))


def type_options(row: PostgresRow) -> TypeOptions:
    """A row of `type_options`, joined with its names."""
    return TypeOptions(
        type=row["name"],
        lifecycle=BY_CODE[row["lifecycle"]].name,
        priority=Priority(row["prio"]),
        max_attempts=row["max_attempts"],
        max_deaths=row["max_deaths"],
        deadline_s=row["deadline_s"],
        concurrency_limit=row["concurrency_limit"],
        keyed=row["keyed"],
        compensation=row["compensation"],
        unique=rule_from_text(row["unique_rule"]),
        key_rate=key_rate(row["rate_per_key"], row["burst_per_key"]),
    )


def schedule(row: PostgresRow) -> ScheduleRecord:
    return ScheduleRecord(
        spec=ScheduleSpec.from_json(row["name"], row["spec"]),
        owner=row["owner"],
        version=row["version"],
        paused=row["paused"],
        since=row["since"],
        next_at=row["next_at"],
        firing=row["firing"],
        last_at=row["last_at"],
        last_job=row["last_job"],
        skipped=row["skipped"],
    )


def hold(row: PostgresRow) -> HeldLease:
    """A row of `lease`, joined with its names."""
    lifecycle = BY_CODE[row["lifecycle"]]
    return HeldLease(
        lease=Lease(JobKey(row["id"]), Epoch(row["epoch"]), JobId(row["job_id"]), lifecycle.name),
        type=row["type_name"],
        state=lifecycle.state_of(row["state"]).name,
        attempt=row["attempt"],
        max_attempts=row["max_attempts"],
        version=row["version"],
        owner=row["owner_name"],
        left_s=row["left_s"],
        cancel=row["cancel"],
        correlation_id=row["correlation_id"],
    )


def event(row: PostgresRow) -> Event:
    """A row of `event`, joined with its names."""
    lifecycle = BY_CODE[row["lifecycle"]]
    source = row["from_state"]
    return Event(
        id=event_id(row["job_id"], row["version"]),
        job_id=JobId(row["job_id"]),
        lifecycle=lifecycle.name,
        type=event_name(row["type"]),
        ts=row["at"],
        role=ROLES[int(row["role"])],
        actor=row["actor_name"],
        correlation_id=row["correlation_id"],
        cause=row["cause"],
        source=lifecycle.state_of(source).name if source else None,
        target=lifecycle.state_of(row["to_state"]).name,
        generation=row["generation"],
        attempt=row["attempt"],
        epoch=Epoch(row["epoch"]),
        version=row["version"],
        data=row["data"],
        node=node_of(row["actor_name"], row["actor_node"]),
    )


def sampled_event(row: PostgresRow, lifecycle: Lifecycle) -> SampledEvent:
    source = row["from_state"]
    return SampledEvent(
        type=event_name(row["type"]),
        ts=row["at"],
        submitted_at=row["created_at"],
        role=ROLES[int(row["role"])],
        source=lifecycle.state_of(source).name if source else None,
        cause=row["cause"],
        data=row["data"],
    )


def dead_letter(row: PostgresRow, state: str | None = None) -> DeadLetter:
    """A row of `dead_letter`, joined with its names."""
    lifecycle = BY_CODE[row["lifecycle"]]
    return DeadLetter(
        job_id=JobId(row["job_id"]),
        type=row["type_name"],
        lifecycle=lifecycle.name,
        state=state or lifecycle.state_of(row["state"]).name,
        reason_code=ReasonCode(row["reason_code"]),
        stage=Stage(row["stage"]),
        last_error=row["last_error"],
        attempts=row["attempts"],
        last_owner=row["owner_name"],
        last_lease_expires_at=row["last_lease_expires_at"],
        correlation_id=row["correlation_id"],
        at=row["at"],
        version=row["version"],
    )


def queue_depth(row: PostgresRow) -> QueueDepth:
    """The number of jobs of one type in each place."""
    return QueueDepth(
        type=row["name"],
        lifecycle=BY_CODE[row["lifecycle"]].name if row["lifecycle"] is not None else "leased-job",
        ready=row["ready"] or 0,
        scheduled=row["resting"] or 0,
        blocked=row["parked"] or 0,
        held=row["held"] or 0,
        paused=row["paused"],
        oldest_ready_s=row["oldest_s"],
        rate_limit=row["rate_per_s"],
        rate_per_key=row["rate_per_key"],
    )


def figures(stored: Sequence[PostgresRow]) -> LedgerFigures:
    """The rows of `figures`: one per type with dead letters, or one without a type."""
    return LedgerFigures(
        dead_letters=tuple(
            DeadLetterCount(type=row["type_name"], lifecycle=BY_CODE[row["lifecycle"]].name, count=row["many"])
            for row in stored
            if row["type_name"] is not None
        ),
        swept_at=stored[0]["tick"],
    )


def act(row: PostgresRow) -> AdminAct:
    """A row of `act`, joined with its names."""
    return AdminAct(
        no=row["no"],
        id=row["act_id"],
        at=row["at"],
        role=ROLES[int(row["role"])],
        actor=row["actor_name"],
        node=node_of(row["actor_name"], row["actor_node"]),
        event=row["event"],
        subject=row["subject"],
        source=row["source"],
        target=row["target"],
        cause=row["cause"],
        correlation_id=row["correlation_id"],
        job_id=row["act_job"],
        facts=read_facts(row["facts"]),
    )


def act_arguments(actor: int, act: NewAct) -> tuple[object, ...]:
    """An act's values in the argument order of `record_act`."""
    about = (act.event, act.subject, act.source, act.target, act.cause, act.correlation_id, act.job_id)
    return (actor, *about, facts_text(act.facts), act.id)


def head_arguments(head: AuditHead | None) -> tuple[object, ...]:
    """A block of the audit chain in the argument order of `extend_audit_chain`."""
    return (None,) * 4 if head is None else (head.number, head.sha256, head.position, head.feed)


def acts_json(acts: Sequence[AdminAct]) -> str:
    """Acts in the JSON form that `restore_acts` takes."""
    return json.dumps(
        [
            {
                **{name: value for name, value in asdict(act).items() if name not in {"no", "id"}},
                "act_id": act.id,
                "facts": facts_text(act.facts),
                "at": act.at.isoformat(),
                "role": act.role.code,
                "node": act.node or "",
            }
            for act in acts
        ]
    )


def ages_json(options: RetentionOptions) -> str:
    """How long jobs are kept, in the form of `retain`: the states that are not kept for ever."""
    ages = stored_ages(options).items()
    return json.dumps(
        [{"code": code, "keep_s": age.keep_s, "is_set": age.is_set} for code, age in ages if age.keep_s is not None]
    )


def stored_windows(options: SweepOptions) -> str | None:
    """The configured windows by lifecycle and state number; None where the lifecycles' own timers apply."""
    named = ((lifecycle_named(name), state, window_s) for (name, state), window_s in options.windows_s.items())
    windows = {lc.code * 16 + lc.code_of(state): window_s for lc, state, window_s in named}
    return json.dumps(windows) if windows else None


def signal(row: PostgresRow) -> Signal:
    return Signal(job_id=JobId(row["job_id"]), type=SIGNAL_TYPES[int(row["type"]) - 1], ts=row["at"], data=row["data"])
