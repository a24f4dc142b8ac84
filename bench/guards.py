"""What each guard costs: the same drain on throwaway databases from which one guard was taken away by a superuser.

Every change is made in the database itself, from the text of the functions that are there, and refused when it finds
nothing to change: a figure for a guard that is still in force would be a lie.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from bench.stores import Database

SCHEMA = "trellis"


@dataclass(frozen=True, slots=True)
class Guard:
    """One thing that can be taken away."""

    name: str
    title: str
    remove: Callable[[Database], None]


class GuardNotFound(Exception):
    """The schema has changed, and this part of the benchmark does not know it any more."""


def no_change(database: Database) -> None:
    """Everything in force."""


def drop_chain_trigger(database: Database) -> None:
    """Events are no longer checked against the lifecycle and their predecessor."""
    database.run(f"drop trigger check_events on {SCHEMA}.event", "select 1")


def drop_definer(database: Database) -> None:
    """The application's role writes the tables itself, and no row security asks whose rows they are."""
    tables = database.run(
        f"""select string_agg(format('alter table %s disable row level security', c.oid::regclass), ';')
              from pg_class c where c.relnamespace = '{SCHEMA}'::regnamespace and c.relrowsecurity"""
    )
    functions = database.run(
        f"""select string_agg(format('alter function %s security invoker', p.oid::regprocedure), ';')
              from pg_proc p where p.pronamespace = '{SCHEMA}'::regnamespace and p.prosecdef"""
    )
    if not functions or not tables:
        raise GuardNotFound("no SECURITY DEFINER function, or no row security")
    database.run(
        tables,
        functions,
        f"grant all on all tables in schema {SCHEMA} to public",
        f"grant all on all sequences in schema {SCHEMA} to public",
        f"grant execute on all functions in schema {SCHEMA} to public",
        "select 1",
    )


def drop_batch_row(database: Database) -> None:
    """Transactions leave no row by which the feed orders them."""
    _replace(database, "_open_batch", r"insert into batch.*?returning no", "select 1::bigint")


def drop_ended_row(database: Database) -> None:
    """A settled job leaves only its events."""
    _replace(database, "turn", r"n as \(\s*insert into ended.*?from x\s*\),", "")


def drop_ended_index(database: Database) -> None:
    """Ended jobs cannot be listed by state."""
    database.run(f"drop index {SCHEMA}.ended_type", "select 1")


def drop_ready_id(database: Database) -> None:
    """A waiting job cannot be found by its id: no cancel, and nothing refuses a second row."""
    database.run(f"drop index {SCHEMA}.ready_id", "select 1")


def drop_claim_row(database: Database) -> None:
    """A claim whose answer was lost cannot be asked for again."""
    _replace(
        database,
        "_claim",
        r"insert into claim \(claim_id, at\).*?returning no into claim_no",
        "claim_no := nextval('claim_no_seq')",
    )


def drop_brin(database: Database) -> None:
    """The feed and look-ups by time scan the whole history."""
    names = database.run(
        f"select string_agg(format('drop index {SCHEMA}.%I', indexname), ';') from pg_indexes"
        f" where schemaname = '{SCHEMA}' and tablename like 'event\\_%' and indexdef like '%USING brin%'"
    )
    if not names:
        raise GuardNotFound("no BRIN index on events")
    database.run(names, "select 1")


def drop_everything(database: Database) -> None:
    """The bare split layout: rows that move, events that stay."""
    for guard in GUARDS[1:-1]:
        guard.remove(database)


GUARDS = (
    Guard("all", "every guard in force", no_change),
    Guard("chain", "no chain trigger on events", drop_chain_trigger),
    Guard("definer", "no SECURITY DEFINER, tables open", drop_definer),
    Guard("batch", "no batch row for the feed", drop_batch_row),
    Guard("ended", "no ended row", drop_ended_row),
    Guard("ended_index", "no (state, id) index on ended", drop_ended_index),
    Guard("ready_id", "no unique index on ready(id)", drop_ready_id),
    Guard("claim", "no claim row for repeated claims", drop_claim_row),
    Guard("brin", "no BRIN indexes on events", drop_brin),
    Guard("none", "none of these", drop_everything),
)


def _replace(database: Database, function: str, pattern: str, replacement: str) -> None:
    """Write a function anew with a part of its text changed."""
    source: str = database.run(  # older programs have functions of the same name with fewer arguments
        f"""select pg_get_functiondef(p.oid) from pg_proc p
             where p.pronamespace = '{SCHEMA}'::regnamespace and p.proname = '{function}' order by p.pronargs desc limit 1"""
    )
    changed, count = re.subn(pattern, replacement, source, count=1, flags=re.DOTALL)
    if not count:
        raise GuardNotFound(f"{function}: {pattern}")
    database.run(f"set search_path = {SCHEMA}", changed, "select 1")
