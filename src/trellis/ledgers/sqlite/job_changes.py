"""Changes of many jobs on SQLite: a page of the jobs that a filter selects, and the change of such a page."""

import json
from collections.abc import Sequence

from trellis.engine.event_data import priority_data
from trellis.engine.job_changes import (
    FEW_MAX,
    WALKED_MAX,
    ChangeAnswer,
    ChangedJobs,
    ChangeOrder,
    JobChange,
    JobSelection,
    JobToChange,
    SelectedJob,
    SelectedPage,
    act_of,
    check_order,
)
from trellis.engine.jobs import Actor, JobId, NotMoved, Priority
from trellis.engine.request_keys import CHANGE_ANSWERS
from trellis.ledgers import refusals
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.selections import Candidates, SelectionPosition, cursor_after, position_in
from trellis.ledgers.sqlite import control, moves, request_keys, rows
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import (
    ENDED_OTHERWISE,
    HELD,
    PARKED,
    READY,
    RESTING,
    ROLE_CODES,
    STATE_CODES,
    STATE_NAMES,
    STEPS,
    JobRow,
    StoredStep,
    lifecycle_code,
    state_of,
)
from trellis.ledgers.sqlite.steps import STEP_QUERIES, job_row
from trellis.ledgers.sqlite.submit import existing
from trellis.lifecycles import BY_CODE, Phase, Role

_CHANGE_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/job_changes.sql")


# --- selection -------------------------------------------------------------------------------------------------------


def select_jobs(tx: Transaction, where: JobSelection, *, limit: int, cursor: str | None = None) -> SelectedPage:
    refusals.check_selected(limit)
    codes = [_code(lifecycle, state) for lifecycle, state in sorted(where.states)]
    values = _bindings(where, codes)
    candidates = _candidates(tx, where, codes, values, position_in(cursor))
    of_page = {"ids": json.dumps(candidates.ids), "limit": limit}
    page = tx.db.execute(_CHANGE_QUERIES.selected, values | of_page).fetchall()
    return SelectedPage(
        jobs=tuple(_selected(row) for row in page),
        cursor=cursor_after(candidates, page[-1][7] if len(page) == limit else None),
    )


def _candidates(
    tx: Transaction,
    where: JobSelection,
    codes: Sequence[int],
    values: dict[str, str | int | None],
    position: SelectionPosition,
) -> Candidates:
    ended = any(_is_ended(code) for code in codes)
    if where.correlation_id is not None:
        query, names = _CHANGE_QUERIES.of_correlation, ("correlation",)
    elif where.parent_id is not None:
        query, names = _CHANGE_QUERIES.of_parent, ("parent",)
    elif where.concurrency_key is not None and not ended:
        query, names = _CHANGE_QUERIES.of_key, ("key",)
    else:
        few = None if position.walks else _few_candidates(tx, where, codes, values)
        if few is not None:
            return Candidates([id_ for id_ in few if id_ > position.after], is_last=True)
        query, names = _CHANGE_QUERIES.next_jobs, ()
    bound = {name: values[name] for name in names} | {"after": position.after, "most": WALKED_MAX}
    ids = [id_ for (id_,) in tx.db.execute(query, bound)]
    return Candidates(ids, is_last=len(ids) < WALKED_MAX, walks=not names)


def _few_candidates(
    tx: Transaction, where: JobSelection, codes: Sequence[int], values: dict[str, str | int | None]
) -> list[int] | None:
    """The ids of all jobs in the places of these states, oldest first; None if they are too many."""
    named = {"type": where.type, "states": values["states"]}
    types = [id_ for (id_,) in tx.db.execute(_CHANGE_QUERIES.types, named)]
    places = {RESTING} if where.delayed else {place for code in codes for place in _places_of(code)}
    bound = {
        "types": json.dumps(types),
        "states": values["states"],
        "places": sum(1 << place for place in places),
        "most": FEW_MAX + 1,
    }
    ids: list[int] = [id_ for (id_,) in tx.db.execute(_CHANGE_QUERIES.in_places, bound)]
    return None if len(ids) > FEW_MAX else sorted(ids)


def _places_of(code: int) -> tuple[int, ...]:
    state = state_of(code // 16, code % 16)
    if state.phase is Phase.HELD:
        return (HELD, READY, PARKED) if state.claimable else (HELD,)
    if state.phase is Phase.ENDED:
        return (ENDED_OTHERWISE,)
    return (READY, RESTING, PARKED) if state.claimable else (RESTING,)


def _is_ended(code: int) -> bool:
    return state_of(code // 16, code % 16).phase is Phase.ENDED


def _code(lifecycle: str, state: str) -> int:
    return (lifecycle_code(lifecycle) or 0) * 16 + STATE_CODES[lifecycle, state]


def _bindings(where: JobSelection, codes: Sequence[int]) -> dict[str, str | int | None]:
    before, after = where.submitted_before, where.submitted_after
    return {
        "states": json.dumps(codes),
        "type": where.type,
        "correlation": where.correlation_id,
        "key": where.concurrency_key,
        "parent": where.parent_id,
        "reason": None if where.reason_code is None else where.reason_code.value,
        "priority": where.priority,
        "other_priority": where.other_priority_than,
        "submitted_before": None if before is None else rows.microseconds(before),
        "submitted_after": None if after is None else rows.microseconds(after),
        "delayed": int(where.delayed),
        "not_asked": int(where.not_asked_to_stop),
        "owner": None if where.owned_by is None else where.owned_by.name,
        "party": None if where.owned_by is None else where.owned_by.party,
        "reconciler": ROLE_CODES[Role.RECONCILER],
    }


def _selected(row: rows.SqliteRow) -> SelectedJob:
    job_id, version, lifecycle, state, type_, prio, created_at, _ = row
    return SelectedJob(
        job_id=job_id,
        version=version,
        lifecycle=BY_CODE[lifecycle].name,
        state=STATE_NAMES[lifecycle, state],
        type=type_,
        priority=Priority(prio),
        created_at=rows.moment(created_at),
    )


# --- change ----------------------------------------------------------------------------------------------------------


def change_jobs(tx: Transaction, actor: Actor, order: ChangeOrder, jobs: Sequence[JobToChange]) -> ChangedJobs:
    check_order(order, jobs)
    return request_keys.answer_once(tx, order.key, CHANGE_ANSWERS, lambda: _change(tx, actor, order, jobs))


def _change(tx: Transaction, actor: Actor, order: ChangeOrder, jobs: Sequence[JobToChange]) -> ChangedJobs:
    # Oldest first, as on PostgreSQL: jobs that keep waiting get their new places in this order.
    known = existing(tx, [job.job_id for job in jobs])
    oldest_first = sorted(jobs, key=lambda job: known.get(job.job_id, 0))
    changed = {job.job_id: _change_one(tx, actor, order, job) for job in oldest_first}
    answers = tuple(changed[job.job_id] for job in jobs)
    if order.selected_by is not None and not all(isinstance(answer, NotMoved) for answer in answers):
        control.record(tx, actor, act_of(actor, order, jobs, answers))
    return ChangedJobs(answers=answers, next_cursor=order.next_cursor)


def _change_one(tx: Transaction, actor: Actor, order: ChangeOrder, job: JobToChange) -> ChangeAnswer:
    keys = tx.db.execute(STEP_QUERIES.find_key_of_job, (job.job_id,)).fetchall()
    if not keys:
        return refusals.no_such_job(job.job_id, order.change)
    row = job_row(tx, keys[0][0])
    before = moves.made_before(tx, row, job.job_id, order.request_id)
    if before is not None:
        return before
    if job.version is not None and job.version != row.version:
        return _skipped(row, job.job_id, order, refusals.version_refusal(row.version, job.version))
    if order.change is JobChange.CANCEL:
        return moves.cancel(
            tx, actor, job.job_id, order.mode, order.request_id, grace_s=order.grace_s, cause=order.cause
        )
    step = STEPS.get((row.lifecycle, row.state, order.change.value))
    if step is None or not step.allows(ROLE_CODES[actor.role]):
        return moves.not_pulled(row, job.job_id, order.change.value, actor)
    return _make_step(tx, actor, order, row, step, job.job_id)


def _make_step(
    tx: Transaction, actor: Actor, order: ChangeOrder, row: JobRow, step: StoredStep, job_id: JobId
) -> ChangeAnswer:
    delay, data = None, None
    if order.change is JobChange.RUN_NOW and row.place != RESTING:
        return _skipped(row, job_id, order, refusals.NOT_DELAYED)
    if order.priority is not None:
        if row.prio == order.priority:
            return _skipped(row, job_id, order, refusals.HAS_THIS_PRIORITY)
        data = priority_data(Priority(row.prio), order.priority)
        delay = None if row.place != RESTING or row.due_at is None else row.due_at - tx.now
        tx.db.execute(_CHANGE_QUERIES.set_priority, (int(order.priority), row.id))
    return moves.make_step(
        tx, actor, row, step, job_id, delay_us=delay, cause=order.cause, data=data, request_id=order.request_id
    )


def _skipped(row: JobRow, job_id: JobId, order: ChangeOrder, reason: str) -> NotMoved:
    lifecycle, state = BY_CODE[row.lifecycle], STATE_NAMES[row.lifecycle, row.state]
    target = refusals.trigger_target(lifecycle, state, order.change.value)
    return NotMoved(job_id=job_id, state=state, target=target, reason=reason)
