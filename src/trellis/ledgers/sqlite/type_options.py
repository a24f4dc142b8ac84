"""What applications declare about their job types: written by workers, read by every submit."""

from collections.abc import Sequence
from typing import Any, LiteralString

from trellis.engine.admin_acts import TYPE_OPTIONS, NewAct
from trellis.engine.jobs import Actor, NewJob, Priority
from trellis.engine.type_options import DECLARED, DECLARED_MAX, TypeOptions, options_text
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite import acts
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import lifecycle_code
from trellis.lifecycles import BY_CODE, LIFECYCLES


class _TypeOptionQueries(NamedQueries, file="trellis.ledgers.sqlite:queries/type_options.sql"):
    declared: LiteralString
    every_declared: LiteralString
    declare: LiteralString


def declare(tx: Transaction, actor: Actor, types: Sequence[TypeOptions], *, only_new: bool) -> None:
    """Keep the options of types; each change is one administrative act. What is declared already is not written again."""
    by = tx.names.actor_id(actor.name)
    for one in types:
        row = _row(one)
        found = tx.db.execute(_TypeOptionQueries.declared, (row[1], one.type)).fetchall()
        if not found or (not only_new and found[0] != row):
            tx.db.execute(_TypeOptionQueries.declare, (*row, by, tx.now))
            before = options_text(_options(found[0])) if found else None
            act = NewAct(event=TYPE_OPTIONS, subject=one.type, source=before, target=options_text(one), cause=DECLARED)
            acts.record(tx, actor, act)


def declared(tx: Transaction, lifecycle: int, type_: str) -> TypeOptions | None:
    rows = tx.db.execute(_TypeOptionQueries.declared, (lifecycle, type_)).fetchall()
    return _options(rows[0]) if rows else None


def every_declared(tx: Transaction, type_: str | None) -> list[TypeOptions]:
    rows = tx.db.execute(_TypeOptionQueries.every_declared, {"type": type_, "limit": DECLARED_MAX}).fetchall()
    return [_options(row) for row in rows]


class DeclaredOptions:
    """The declared options of the jobs of one submit: each type is looked up once."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._known: dict[tuple[str, str], TypeOptions | None] = {}

    def of(self, job: NewJob) -> TypeOptions | None:
        """What the job's type declares."""
        name = (job.lifecycle, job.type)
        if name not in self._known:
            self._known[name] = declared(self._tx, LIFECYCLES[job.lifecycle].code, job.type)
        return self._known[name]


def _row(options: TypeOptions) -> tuple[str | int | float | None, ...]:
    """The options in the order of the queries."""
    return (
        options.type,
        lifecycle_code(options.lifecycle),
        int(options.priority),
        options.max_attempts,
        options.max_deaths,
        options.deadline_s,
        options.concurrency_limit,
        int(options.keyed),
        options.compensation,
    )


def _options(row: Sequence[Any]) -> TypeOptions:
    type_, lifecycle, prio, max_attempts, max_deaths, deadline_s, limit, keyed, compensation = row
    return TypeOptions(
        type=type_,
        lifecycle=BY_CODE[lifecycle].name,
        priority=Priority(prio),
        max_attempts=max_attempts,
        max_deaths=max_deaths,
        deadline_s=deadline_s,
        concurrency_limit=limit,
        keyed=bool(keyed),
        compensation=compensation,
    )
