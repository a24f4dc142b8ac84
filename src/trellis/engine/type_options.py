"""Type options: what an application declares about a job type, as the ledger keeps it for every submit (D66).

A worker declares the types of its application when it starts; a client with an application declares those that the ledger does not
know yet. Submits from anywhere (Python, command line, HTTP, SQL) get the declared values for every option that they do not choose by
name. A concurrency key that a Python function computes cannot be computed by the ledger: a submit that has neither the
application nor a key is refused, because it would pass by the limit.
"""

from dataclasses import dataclass
from typing import NamedTuple

from trellis.engine.errors import ConcurrencyKeyMissing
from trellis.engine.jobs import ATTEMPTS_DEFAULT, DEATHS_DEFAULT, ChosenOptions, NewJob, Priority

DECLARED_MAX = 1_000
"""Types that one call declares, and that one look at the declared ones gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeOptions:
    """What holds for jobs of a type unless their submit says otherwise."""

    type: str
    lifecycle: str = "leased-job"
    priority: Priority = Priority.BATCH
    max_attempts: int = ATTEMPTS_DEFAULT
    max_deaths: int = DEATHS_DEFAULT
    deadline_s: float | None = None
    concurrency_limit: int = 1
    keyed: bool = False
    """A function of the application computes the concurrency key of each job."""
    compensation: str | None = None
    """The job type that undoes a succeeded job of this one."""


DECLARED = "declared by an application"
"""Why the options of a type changed, as acts say it."""


def options_text(options: TypeOptions) -> str:
    """The options of a type as acts show them. PostgreSQL words it the same."""
    deadline = None if options.deadline_s is None else f"{float(options.deadline_s)!r}".removesuffix(".0")
    named = {
        "priority": int(options.priority),
        "max_attempts": options.max_attempts,
        "max_deaths": options.max_deaths,
        "deadline_s": deadline,
        "concurrency_limit": options.concurrency_limit,
    }
    told = [f"{name} {value}" for name, value in named.items() if value is not None]
    undone_by = [] if options.compensation is None else [f"compensation {options.compensation}"]
    return ", ".join([*told, *(["keyed"] if options.keyed else []), *undone_by])


class ResolvedOptions(NamedTuple):
    """The options that a job is stored with."""

    priority: Priority
    max_attempts: int
    max_deaths: int
    deadline_s: float | None
    concurrency_limit: int


def resolve_options(job: NewJob, declared: TypeOptions | None) -> ResolvedOptions:
    """What the job chose itself, and for the rest what its type declares; raises ConcurrencyKeyMissing."""
    chosen = job.chosen
    if declared is None or chosen == ChosenOptions.ALL:
        return ResolvedOptions(job.priority, job.max_attempts, job.max_deaths, job.deadline_s, job.concurrency_limit)
    if declared.keyed and not chosen & ChosenOptions.CONCURRENCY_KEY:
        raise ConcurrencyKeyMissing(type=job.type)
    return ResolvedOptions(
        job.priority if chosen & ChosenOptions.PRIORITY else declared.priority,
        job.max_attempts if chosen & ChosenOptions.MAX_ATTEMPTS else declared.max_attempts,
        job.max_deaths if chosen & ChosenOptions.MAX_DEATHS else declared.max_deaths,
        job.deadline_s if chosen & ChosenOptions.DEADLINE else declared.deadline_s,
        job.concurrency_limit if chosen & ChosenOptions.CONCURRENCY_LIMIT else declared.concurrency_limit,
    )
