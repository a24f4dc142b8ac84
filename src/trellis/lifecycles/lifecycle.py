"""What a lifecycle is: states with a phase and a rank, transitions with trigger, actors and event.

A lifecycle is a value. The engine asks it (`next_state`, `Lifecycle.between`), the databases are loaded with it
(`contract`), the diagrams are drawn from it. Nothing here reads a clock, a file or a database.

Codes are part of the stored format: a state's code is its place in `Lifecycle.states` counted from 1 (0 means "does not
exist yet"), so states, roles and event types may be appended and never reordered.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property

STATES_MAX = 15
"""States of one lifecycle; with "does not exist yet" they fill four bits of the contract."""


class Phase(StrEnum):
    """Where a job in a state rests: nobody's, one lease holder's, or nowhere any more."""

    WAITING = "waiting"
    HELD = "held"
    ENDED = "ended"


class Role(StrEnum):
    """Who may cause a transition. The order is the stored code."""

    OWNER = "owner"
    FRONTEND = "frontend"
    GATEWAY = "gateway"
    ORCHESTRATOR = "orchestrator"
    NLM_BACKEND = "nlm-backend"
    AGENT_RUNTIME = "agent-runtime"
    CONTROL_PLANE = "control-plane"
    MEMORY = "memory"
    APPLY_ENGINE = "apply-engine"
    WORKER = "worker"
    SUBMITTER = "submitter"
    SCHEDULER = "scheduler"
    SAFETY_KERNEL = "safety-kernel"
    RECONCILER = "reconciler"
    PROJECTOR = "projector"
    SWEEPER = "sweeper"

    @property
    def code(self) -> int:
        """The stored number of this role."""
        return ROLES.index(self)


ROLES: tuple[Role, ...] = tuple(Role)


class Progress(IntEnum):
    """What a transition does to progress (generation, attempt, rank): stay in the attempt, open the next, start anew."""

    SAME = 0
    ATTEMPT = 1
    GENERATION = 2


class LeaseLoss(StrEnum):
    """What a lost lease means in a held state."""

    EXPIRE = "expire"
    """The `expire` transition (or `exhaust`, when no attempt is left) is taken."""
    STAY = "stay"
    """The job keeps its state and may be claimed again there; no transition, only a new epoch."""


class Trigger:
    """Triggers the engine itself pulls; every other trigger belongs to the lifecycle that names it."""

    SUBMIT = "submit"
    CLAIM = "claim"
    START = "start"
    COMPLETE = "complete"
    FAIL = "fail"
    RETRY = "retry"
    SNOOZE = "snooze"
    RELEASE = "release"
    EXPIRE = "expire"
    EXHAUST = "exhaust"
    DUE = "due"
    DEADLINE = "deadline"
    CANCEL = "cancel"
    DEAD_LETTER = "dead_letter"
    REQUEUE = "requeue"
    COMPENSATED = "compensated"
    FINALIZE = "finalize"


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One state of one lifecycle."""

    name: str
    phase: Phase
    rank: int
    claimable: bool = False
    """Waiting: a claimer may take it. Held: a claimer may take it over once its lease is lost (`LeaseLoss.STAY`)."""
    lease_loss: LeaseLoss | None = None
    on_error: str | None = None
    """Held: the trigger a retryable error pulls here."""
    runs_code: bool = False
    """Held: user code runs here, so a worker's death here counts against the payload."""
    dead_letter: bool = False
    """Ended: entering it needs a complete dead letter."""
    success: bool = False
    timer_s: float | None = None
    """Waiting: how long the sweep lets a job rest here before it pulls `due`, when nobody said otherwise."""


def waiting(name: str, rank: int, *, claimable: bool = False, timer_s: float | None = None) -> State:
    """A state in which the job is nobody's."""
    return State(name=name, phase=Phase.WAITING, rank=rank, claimable=claimable, timer_s=timer_s)


def held(
    name: str,
    rank: int,
    *,
    lease_loss: LeaseLoss = LeaseLoss.EXPIRE,
    on_error: str | None = None,
    runs_code: bool = True,
) -> State:
    """A state in which one holder has the job under a lease."""
    return State(
        name=name,
        phase=Phase.HELD,
        rank=rank,
        claimable=lease_loss is LeaseLoss.STAY,
        lease_loss=lease_loss,
        on_error=on_error,
        runs_code=runs_code,
    )


def ended(name: str, rank: int, *, dead_letter: bool = False, success: bool = False) -> State:
    """A state nothing leaves, but for a declared requeue."""
    return State(name=name, phase=Phase.ENDED, rank=rank, dead_letter=dead_letter, success=success)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """One declared arrow. `source` None means the job comes into being."""

    source: str | None
    target: str
    trigger: str
    actors: frozenset[Role]
    event: str
    opens: Progress = Progress.SAME
    fenced: bool = False
    """Only the lease holder may make it, with its epoch."""
    when: str = ""
    """The trigger in the words of the documents."""
    extension: bool = False
    """Not in the source document's own table; added by a recorded decision."""
    finalizes: bool = False
    """It names an artifact of the job, which makes its `finalize` step in the same transaction."""


def arrow(
    source: str | None,
    target: str,
    trigger: str,
    actors: Role | frozenset[Role],
    event: str,
    when: str,
    *,
    opens: Progress = Progress.SAME,
    fenced: bool = False,
    extension: bool = False,
    finalizes: bool = False,
) -> Transition:
    """A transition in the order in which the documents' tables write it."""
    return Transition(
        source=source,
        target=target,
        trigger=trigger,
        actors=frozenset({actors}) if isinstance(actors, Role) else actors,
        event=event,
        when=when,
        opens=opens,
        fenced=fenced,
        extension=extension,
        finalizes=finalizes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Illegal:
    """The answer when a lifecycle does not declare what was asked."""

    lifecycle: str
    source: str | None
    target: str | None
    trigger: str | None
    actor: Role | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Lifecycle:
    """A whole lifecycle, checked for sense when it is made."""

    name: str
    code: int
    title: str
    states: tuple[State, ...]
    transitions: tuple[Transition, ...]
    swept_by: Role
    """The role in whose name the sweep acts: the single writer of the documents, where they name one."""
    version: int = 1
    by_name: dict[str, State] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {state.name: state for state in self.states})
        problems = list(_problems(self))
        if problems:
            raise ValueError(f"lifecycle {self.name}: {'; '.join(problems)}")

    @cached_property
    def by_trigger(self) -> dict[tuple[str | None, str], Transition]:
        """The one transition a trigger pulls in a state."""
        return {(t.source, t.trigger): t for t in self.transitions}

    @cached_property
    def codes(self) -> dict[str, int]:
        """The stored number of each state: its place in the declaration, from 1."""
        return {state.name: code for code, state in enumerate(self.states, start=1)}

    @property
    def initial(self) -> State:
        """The state a submit makes."""
        return self.by_name[self.by_trigger[None, Trigger.SUBMIT].target]

    def code_of(self, state: str | None) -> int:
        """The stored number of a state; 0 for a job that does not exist yet."""
        return 0 if state is None else self.codes[state]

    def state_of(self, code: int) -> State:
        """The state behind a stored number."""
        return self.states[code - 1]

    def pull(self, source: str | None, trigger: str) -> Transition | None:
        """The transition `trigger` pulls in `source`, or None."""
        return self.by_trigger.get((source, trigger))

    def asks_to_start(self, transition: Transition) -> bool:
        """Whether this is a start by the role that claims: it asks whether user code may run, so its lease must be alive (DJ-19).

        Where another role starts, as on the bus, the start reports what runs already, and the epoch alone decides.
        """
        claimers = {role for t in self.transitions if t.trigger == Trigger.CLAIM for role in t.actors}
        return transition.trigger == Trigger.START and not claimers.isdisjoint(transition.actors)

    def is_settled(self, state: str) -> bool:
        """Whether the work is over unless a person has it done again: it has ended, or can only end otherwise than well."""
        found = self.by_name[state]
        if found.phase is Phase.ENDED:
            return True
        onward = [t.target for t in self.transitions if t.source == state and t.trigger != Trigger.REQUEUE]
        ends = [self.by_name[target] for target in onward]
        return found.phase is Phase.WAITING and all(end.phase is Phase.ENDED and not end.success for end in ends)

    def between(self, source: str | None, target: str, actor: Role) -> Transition | Illegal:
        """The first declared transition from source to target that `actor` may make."""
        declared = [t for t in self.transitions if t.source == source and t.target == target]
        for transition in declared:
            if actor in transition.actors:
                return transition
        reason = "not declared" if not declared else f"only {_names(a for t in declared for a in t.actors)} may"
        return Illegal(lifecycle=self.name, source=source, target=target, trigger=None, actor=actor, reason=reason)


def next_state(lifecycle: Lifecycle, state: str | None, trigger: str, actor: Role) -> State | Illegal:
    """The only way a state changes: the declared target, or why there is none."""
    transition = lifecycle.pull(state, trigger)
    if transition is None:
        reason = "not declared"
    elif actor not in transition.actors:
        reason = f"only {_names(transition.actors)} may"
    else:
        return lifecycle.by_name[transition.target]
    target = transition.target if transition else None
    return Illegal(lifecycle=lifecycle.name, source=state, target=target, trigger=trigger, actor=actor, reason=reason)


def progress(lifecycle: Lifecycle, generation: int, attempt: int, state: str) -> tuple[int, int, int]:
    """The tuple that never decreases in a job's life."""
    return (generation, attempt, lifecycle.by_name[state].rank)


def _names(actors: Iterable[Role]) -> str:
    return ", ".join(sorted({actor.value for actor in actors}))


def _problems(lifecycle: Lifecycle) -> Iterable[str]:
    """Everything that makes the data no lifecycle."""
    names = [state.name for state in lifecycle.states]
    if len(set(names)) != len(names):
        yield "a state is declared twice"
    if len(names) > STATES_MAX:
        yield f"more than {STATES_MAX} states"
    if len(lifecycle.by_trigger) != len(lifecycle.transitions):
        yield "a trigger pulls two transitions in one state"
    if [t.trigger for t in lifecycle.transitions if t.source is None] != [Trigger.SUBMIT]:
        yield "exactly one submit makes a job"
    for transition in lifecycle.transitions:
        yield from _transition_problems(lifecycle, transition)
    for state in lifecycle.states:
        yield from _state_problems(lifecycle, state)


def _transition_problems(lifecycle: Lifecycle, t: Transition) -> Iterable[str]:
    label = f"{t.source} → {t.target}"
    unknown = {t.source, t.target} - {None} - set(lifecycle.by_name)
    if unknown:
        yield f"{label} names the unknown state {', '.join(map(str, unknown))}"
        return
    if not t.actors:
        yield f"{label} has no actor"
    if t.source is None:
        return
    source, target = lifecycle.by_name[t.source], lifecycle.by_name[t.target]
    if t.opens is Progress.SAME and target.rank < source.rank:
        yield f"{label} moves back inside an attempt"
    if t.finalizes and not (t.fenced and target.phase is Phase.ENDED and target.success):
        yield f"{label} finalizes an artifact and is not a holder's success"
    if t.fenced and source.phase is not Phase.HELD:
        yield f"{label} is fenced but nobody holds {source.name}"
    if source.phase is Phase.ENDED and t.trigger not in {Trigger.REQUEUE, Trigger.COMPENSATED}:
        yield f"{label} leaves an ended state"


def _state_problems(lifecycle: Lifecycle, state: State) -> Iterable[str]:
    has = {t.trigger for t in lifecycle.transitions if t.source == state.name}
    if state.claimable and state.phase is Phase.WAITING and Trigger.CLAIM not in has:
        yield f"{state.name} is claimable and no claim leaves it"
    if state.lease_loss is LeaseLoss.EXPIRE and Trigger.EXPIRE not in has:
        yield f"{state.name} can be lost and declares no expire"
    if state.on_error is not None and state.on_error not in has:
        yield f"{state.name} has no transition for its error trigger {state.on_error}"
