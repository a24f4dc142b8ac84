"""The jobs that a change of many jobs selects, on PostgreSQL: one page at a time."""

from collections.abc import Awaitable, Callable
from typing import LiteralString

from trellis.engine.job_changes import FEW_MAX, WALKED_MAX, JobSelection, SelectedJob, SelectedPage
from trellis.engine.jobs import JobId, Priority
from trellis.ledgers.postgres.connection import PostgresRow
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.selections import Candidates, SelectionPosition, cursor_after
from trellis.lifecycles import BY_CODE, LIFECYCLES, Phase, Role

_SELECTION_QUERIES = NamedQueries("trellis.ledgers.postgres:job_selection.sql")

Fetch = Callable[..., Awaitable[list[PostgresRow]]]


async def select_jobs(
    fetch: Fetch, where: JobSelection, type_id: int | None, limit: int, position: SelectionPosition, prefix: str
) -> SelectedPage:
    """A page of the jobs to change. `type_id` is the number of the selection's type; None for any.

    `prefix` is what the ledger adds to the names of this connection's actors.
    """
    owner = where.owned_by
    named = sorted(where.states)
    pairs = (
        [LIFECYCLES[lifecycle].code for lifecycle, _ in named],
        [LIFECYCLES[one].codes[state] for one, state in named],
    )
    candidates = await _candidates(fetch, where, type_id, pairs, position)
    page = await fetch(
        _SELECTION_QUERIES.selected,
        candidates.ids,
        where.type,
        where.correlation_id,
        where.concurrency_key,
        where.parent_id,
        where.priority,
        where.other_priority_than,
        where.submitted_before,
        where.submitted_after,
        *pairs,
        where.delayed,
        where.not_asked_to_stop,
        where.reason_code,
        limit,
        None if owner is None else prefix + owner.name,
        None if owner is None or owner.party is None else prefix + owner.party,
        Role.RECONCILER.code,
    )
    return SelectedPage(
        jobs=tuple(_selected(row) for row in page),
        cursor=cursor_after(candidates, page[-1]["id"] if len(page) == limit else None),
    )


async def _candidates(
    fetch: Fetch,
    where: JobSelection,
    type_id: int | None,
    pairs: tuple[list[int], list[int]],
    position: SelectionPosition,
) -> Candidates:
    of_link = _by_link(where)
    if of_link is not None:
        rows = await fetch(*of_link, position.after, WALKED_MAX)
    else:
        places = ["resting"] if where.delayed else sorted({one for pair in where.states for one in _places_of(*pair)})
        if not position.walks:
            few = await fetch(_SELECTION_QUERIES.in_places, type_id, *pairs, places, FEW_MAX + 1)
            if len(few) <= FEW_MAX:
                return Candidates(sorted(row["id"] for row in few if row["id"] > position.after), is_last=True)
        rows = await fetch(_SELECTION_QUERIES.next_jobs, position.after, *pairs, places, WALKED_MAX)
    ids = [row["id"] for row in rows]
    return Candidates(ids, is_last=len(ids) < WALKED_MAX, walks=of_link is None)


def _by_link(where: JobSelection) -> tuple[LiteralString, str] | None:
    if where.correlation_id is not None:
        return _SELECTION_QUERIES.of_correlation, where.correlation_id
    return None if where.parent_id is None else (_SELECTION_QUERIES.of_parent, where.parent_id)


def _places_of(lifecycle: str, name: str) -> tuple[str, ...]:
    state = LIFECYCLES[lifecycle].by_name[name]
    if state.phase is Phase.HELD:
        return ("held", "ready", "parked") if state.claimable else ("held",)
    if state.phase is Phase.ENDED:
        return ("ended",)
    return ("ready", "resting", "parked") if state.claimable else ("resting",)


def _selected(row: PostgresRow) -> SelectedJob:
    lifecycle = BY_CODE[row["lifecycle"]]
    return SelectedJob(
        job_id=JobId(row["job_id"]),
        version=row["version"],
        lifecycle=lifecycle.name,
        state=lifecycle.state_of(row["state"]).name,
        type=row["type_name"],
        priority=Priority(row["prio"]),
        created_at=row["created_at"],
    )
