"""A small leased-job engine whose every possible course is tried, over the same table the real one uses.

Two jobs and a few workers. Anything may happen at any moment: a worker claims, starts, completes, gives back, crashes,
stalls for as long as it likes, or does not hear an answer and asks again; the sweep takes any lease away (that covers
expiry, orphaning and a partition at once, because time only decides whether, never who); somebody cancels.

A world is a plain tuple and remembers of the past only what a later answer can depend on: the events of epochs that a
worker still believes in. That keeps the number of worlds small enough to see them all.

`Rules` are the promises of the engine. A test breaks one and expects the search to find a course that shows it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from trellis.lifecycles import LIFECYCLES, Phase, Progress, Role, Transition, progress

LEASED = LIFECYCLES["leased-job"]
SWEEPER, OPERATOR = -1, -2
ROLES = {SWEEPER: Role.SWEEPER, OPERATOR: Role.CONTROL_PLANE}
HELD = frozenset(state.name for state in LEASED.states if state.phase is Phase.HELD)
ENDED = frozenset(state.name for state in LEASED.states if state.phase is Phase.ENDED)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the engine promises; each can be broken."""

    fenced: bool = True
    """A write is refused unless it carries the job's epoch."""
    revoking_raises_epoch: bool = True
    event_in_transaction: bool = True
    repeat_is_recognised: bool = True
    """A call made again finds what the first one did, and says so."""
    repeat_is_harmless: bool = True
    """A call made again on a job that moved on changes nothing."""
    key_checked_in_transaction: bool = True
    attempt_opened: bool = True


class Entry(NamedTuple):
    """One event, as far as it matters later."""

    epoch: int
    actor: int
    target: str


class Job(NamedTuple):
    state: str
    attempt: int
    epoch: int
    lost: int
    """Transitions without an event."""
    log: tuple[Entry, ...]


GONE = Job("succeeded", 0, 0, 0, ())
"""An ended job that no worker remembers."""


class Mind(NamedTuple):
    """What a worker believes: the job it has, and the call whose answer it did not hear."""

    job: int
    epoch: int
    attempt: int
    state: str
    unheard: str | None = None


class World(NamedTuple):
    jobs: tuple[Job, ...]
    workers: tuple[Mind | None, ...]


class Answer(NamedTuple):
    """What the ledger says to a worker: whether its step is in the ledger."""

    applied: bool


class Step(NamedTuple):
    """One thing that happened."""

    what: str
    world: World
    problem: str | None = None


class Bounds(NamedTuple):
    """How big the world is."""

    jobs: int = 2
    workers: int = 2
    attempts: int = 2
    key_limit: int = 1


class Searched(NamedTuple):
    """What a search saw: how many worlds, which steps, and the first course that breaks a promise."""

    worlds: int
    seen: frozenset[str]
    problem: str | None
    course: tuple[str, ...]


def search(rules: Rules, bounds: Bounds) -> Searched:
    """Breadth first through every world that can be reached, until one breaks a promise."""
    first = _first_world(bounds)
    came: dict[World, tuple[World, str] | None] = {first: None}
    queue, seen = deque([first]), set[str]()
    while queue:
        world = queue.popleft()
        for step in _steps(world, rules, bounds):
            seen.add(step.what.split()[0])
            problem = _problem(world, step.world, bounds) or step.problem
            if problem:
                return Searched(len(came), frozenset(seen), problem, (*_course(came, world), step.what))
            after = _forget(step.world)
            if after not in came:
                came[after] = (world, step.what)
                queue.append(after)
    return Searched(len(came), frozenset(seen), None, ())


def _course(came: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    steps: list[str] = []
    while (before := came[world]) is not None:
        world, what = before
        steps.append(what)
    return tuple(reversed(steps))


def _first_world(bounds: Bounds) -> World:
    born = Job(LEASED.initial.name, 0, 0, 0, ())
    return World((born,) * bounds.jobs, (None,) * bounds.workers)


# -- what must hold ----------------------------------------------------------------------------------------------


def _problem(before: World, after: World, bounds: Bounds) -> str | None:
    held = 0
    for old, new in zip(before.jobs, after.jobs, strict=True):
        held += new.state in HELD
        if old == new:
            continue
        problem = _change_problem(old, new)
        if problem:
            return problem
    return "more jobs are held than the key allows" if held > bounds.key_limit else None


def _change_problem(old: Job, new: Job) -> str | None:
    if old.state in ENDED:
        return "an ended job changed"
    if progress(LEASED, 0, new.attempt, new.state) < progress(LEASED, 0, old.attempt, old.state):
        return "progress fell"
    if new.lost:
        return "events are not transitions"
    writers = {(entry.epoch, entry.actor) for entry in new.log}
    if len({epoch for epoch, _ in writers}) != len(writers):
        return "two holders wrote in one epoch"
    return "the epoch fell" if new.epoch < old.epoch else None


def _forget(world: World) -> World:
    """The same world without what no later step can depend on.

    Events of epochs that nobody believes in; how an ended job ended; the size of epochs, of which only the order counts.
    """
    jobs: list[Job] = []
    minds = list(world.workers)
    for j, job in enumerate(world.jobs):
        believed = sorted({mind.epoch for mind in minds if mind is not None and mind.job == j})
        if job.state in ENDED and not believed:
            jobs.append(GONE)
            continue
        small = {epoch: place for place, epoch in enumerate(believed)}
        now = small.get(job.epoch, len(small))
        log = tuple(Entry(small[e.epoch], e.actor, e.target) for e in job.log if e.epoch in small)
        ended = job.state in ENDED
        jobs.append(Job(GONE.state if ended else job.state, 0 if ended else job.attempt, now, job.lost, log))
        for w, mind in enumerate(world.workers):
            if mind is not None and mind.job == j:
                minds[w] = mind._replace(epoch=small[mind.epoch])
    return World(tuple(jobs), tuple(minds))


# -- what may happen ---------------------------------------------------------------------------------------------


def _steps(world: World, rules: Rules, bounds: Bounds) -> Iterator[Step]:
    for j, job in enumerate(world.jobs):
        if job.state in HELD:
            yield from _reap(world, j, rules, bounds)
        if job.state not in ENDED:
            for new in _taken(job, "cancel", OPERATOR, rules, revokes=True):
                yield Step(f"cancel {j}", _with_job(world, j, new))
    for w, mind in enumerate(world.workers):
        if mind is None:
            yield from _claims(world, w, rules, bounds)
            continue
        yield Step(f"crash {w}", _with_mind(world, w, None))
        if mind.unheard == "look":
            yield from _claim_after_look(world, w, mind, rules)
        elif mind.unheard == "claim":
            yield from _claim_again(world, w, mind)
        else:
            for trigger in (mind.unheard,) if mind.unheard else _work(mind, bounds):
                yield from _send(world, w, mind, trigger, rules)


def _work(mind: Mind, bounds: Bounds) -> tuple[str, ...]:
    """What a holder may do next; a failure is worth a retry while attempts are left."""
    if mind.state == "assigned":
        return ("start",)
    return ("complete", "retry" if mind.attempt + 1 < bounds.attempts else "reject")


def _reap(world: World, j: int, rules: Rules, bounds: Bounds) -> Iterator[Step]:
    """The sweep takes the lease away: back to queued, or to the dead letters when the attempts are spent."""
    job = world.jobs[j]
    trigger = "expire" if job.attempt + 1 < bounds.attempts else "exhaust"
    for new in _taken(job, trigger, SWEEPER, rules, revokes=True):
        yield Step(f"{trigger} {j}", _with_job(world, j, new))


def _claims(world: World, w: int, rules: Rules, bounds: Bounds) -> Iterator[Step]:
    if sum(job.state in HELD for job in world.jobs) >= bounds.key_limit:
        return
    for j, job in enumerate(world.jobs):
        if job.state != "queued":
            continue
        if rules.key_checked_in_transaction:
            yield from _claim(world, w, j, rules)
        else:
            yield Step(f"look {w} {j}", _with_mind(world, w, Mind(j, job.epoch, job.attempt, "queued", "look")))


def _claim(world: World, w: int, j: int, rules: Rules) -> Iterator[Step]:
    job = world.jobs[j]
    for new in _taken(job, "claim", w, rules, revokes=False):
        claimed = _with_job(world, j, new)
        yield Step(f"claim {w} {j}", _with_mind(claimed, w, Mind(j, new.epoch, new.attempt, "assigned")))
        yield Step(f"claim-unheard {w} {j}", _with_mind(claimed, w, Mind(j, new.epoch, new.attempt, "queued", "claim")))


def _claim_after_look(world: World, w: int, mind: Mind, rules: Rules) -> Iterator[Step]:
    if world.jobs[mind.job].state == "queued":
        yield from _claim(world, w, mind.job, rules)


def _claim_again(world: World, w: int, mind: Mind) -> Iterator[Step]:
    """The same claim id returns the lease while it lives, and nothing when it is gone."""
    job = world.jobs[mind.job]
    lives = job.state in HELD and job.epoch == mind.epoch
    again = mind._replace(state="assigned", unheard=None) if lives else None
    yield Step(f"claim-again {w}", _with_mind(world, w, again))


def _send(world: World, w: int, mind: Mind, trigger: str, rules: Rules) -> Iterator[Step]:
    """A holder's step reaches the ledger; its answer reaches the holder, or does not."""
    what = f"{trigger}{'-again' if mind.unheard else ''} {w} {mind.job}"
    target = _arrow(mind.state, trigger).target
    for job, answer in _advance(world.jobs[mind.job], w, mind, trigger, rules):
        made = any(e.epoch == mind.epoch and e.actor == w and e.target == target for e in job.log)
        problem = None if answer.applied == made else f"the answer {answer} is not what happened"
        moved = _with_job(world, mind.job, job)
        goes_on = answer.applied and target in HELD
        heard = mind._replace(state=target, unheard=None) if goes_on else None
        yield Step(what, _with_mind(moved, w, heard), problem)
        yield Step(f"{what} unheard", _with_mind(moved, w, mind._replace(unheard=trigger)), problem)


def _advance(job: Job, w: int, mind: Mind, trigger: str, rules: Rules) -> Iterator[tuple[Job, Answer]]:
    """Compare epoch and state, and write; else look whether an earlier call had written it."""
    mine = job.epoch == mind.epoch or not rules.fenced
    if mine and job.state == mind.state:
        yield from ((new, Answer(applied=True)) for new in _taken(job, trigger, w, rules, revokes=False))
        return
    of_epoch = [entry for entry in job.log if entry.epoch == mind.epoch]
    repeated = bool(of_epoch) and of_epoch[-1].target == _arrow(mind.state, trigger).target
    if repeated and not rules.repeat_is_harmless:
        yield job._replace(log=(*job.log, of_epoch[-1])), Answer(applied=True)
    else:
        yield job, Answer(applied=repeated and rules.repeat_is_recognised)


def _taken(job: Job, trigger: str, actor: int, rules: Rules, *, revokes: bool) -> Iterator[Job]:
    """One transition of the table, with what it does to epoch, attempt and log."""
    t = _arrow(job.state, trigger)
    assert ROLES.get(actor, Role.WORKER) in t.actors
    raises = trigger == "claim" or (revokes and rules.revoking_raises_epoch)
    epoch = job.epoch + raises
    attempt = job.attempt + (t.opens is Progress.ATTEMPT and rules.attempt_opened)
    moved = Job(t.target, attempt, epoch, job.lost, (*job.log, Entry(epoch, actor, t.target)))
    yield moved
    if not rules.event_in_transaction:
        yield moved._replace(lost=job.lost + 1, log=job.log)


@cache
def _arrow(state: str, trigger: str) -> Transition:
    found = LEASED.pull(state, trigger)
    assert found is not None, (state, trigger)
    return found


def _with_job(world: World, j: int, job: Job) -> World:
    return World((*world.jobs[:j], job, *world.jobs[j + 1 :]), world.workers)


def _with_mind(world: World, w: int, mind: Mind | None) -> World:
    return World(world.jobs, (*world.workers[:w], mind, *world.workers[w + 1 :]))
