"""The types of a lifecycle: states with a phase and a rank, transitions with trigger, actors and event.

A lifecycle is a value. The engine queries it (`next_state`, `Lifecycle.between`), the databases are loaded with it
(`contract`), and the diagrams are drawn from it. Nothing here reads a clock, a file or a database.

Codes are part of the stored format. A state's code is its position in `Lifecycle.states`, from 1; 0 means "does not
exist yet". So states, roles and event types may be appended but never reordered.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property

STATES_MAX = 15
"""The most states of one lifecycle. With "does not exist yet" they fill four bits of the contract."""


class Phase(StrEnum):
    """Who has a job in a state: no holder yet, one lease holder, or none because it has ended."""

    WAITING = "waiting"
    HELD = "held"
    ENDED = "ended"


class Role(StrEnum):
    """The roles that may cause transitions. The position is the stored code."""

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
    """What a transition does to progress (generation, attempt, rank).

    It stays in the attempt, opens the next attempt, or starts a new generation.
    """

    SAME = 0
    ATTEMPT = 1
    GENERATION = 2


class LeaseLoss(StrEnum):
    """What happens in a held state when the lease is lost."""

    EXPIRE = "expire"
    """The `expire` transition (or `exhaust`, when no attempt is left) is taken."""
    STAY = "stay"
    """The job keeps its state and may be claimed again there; no transition, only a new epoch."""


class Trigger:
    """Triggers that the engine itself fires. Every other trigger belongs to the lifecycle that names it."""

    SUBMIT = "submit"
    CLAIM = "claim"
    START = "start"
    COMPLETE = "complete"
    FAIL = "fail"
    RETRY = "retry"
    SNOOZE = "snooze"
    SUSPEND = "suspend"
    RELEASE = "release"
    EXPIRE = "expire"
    EXHAUST = "exhaust"
    DUE = "due"
    DEADLINE = "deadline"
    CANCEL = "cancel"
    DEAD_LETTER = "dead_letter"
    REQUEUE = "requeue"
    DISCARD = "discard"
    RUN_NOW = "run_now"
    PRIORITIZE = "prioritize"
    COMPENSATED = "compensated"
    FINALIZE = "finalize"


IN_PLACE = frozenset({Trigger.RUN_NOW, Trigger.PRIORITIZE})
"""Triggers that change when a waiting job is claimed, and not its state. A move to a target state never fires them."""
OF_ENDED = frozenset({Trigger.REQUEUE, Trigger.DISCARD, Trigger.COMPENSATED})
"""The only triggers that may be declared for a final state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    name: str
    phase: Phase
    rank: int
    claimable: bool = False
    """In a waiting state: a claimer may take the job.

    In a held state: a claimer may take it over once its lease is lost (`LeaseLoss.STAY`).
    """
    lease_loss: LeaseLoss | None = None
    on_error: str | None = None
    """Held states: the trigger that a retryable error fires."""
    runs_code: bool = False
    """Held states: user code runs here, so a worker's death counts against the job."""
    dead_letter: bool = False
    """Ended states: entering requires a complete dead letter."""
    success: bool = False
    timer_s: float | None = None
    """Waiting states: how long a job waits before the sweep fires `due`, unless the step sets another delay."""


def waiting(name: str, rank: int, *, claimable: bool = False, timer_s: float | None = None) -> State:
    """A state without a holder."""
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
    """A final state. Only a declared requeue or discard leaves it."""
    return State(name=name, phase=Phase.ENDED, rank=rank, dead_letter=dead_letter, success=success)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """One declared transition. `source` None creates the job."""

    source: str | None
    target: str
    trigger: str
    actors: frozenset[Role]
    event: str
    opens: Progress = Progress.SAME
    fenced: bool = False
    """Only the lease holder may make it, under its epoch."""
    when: str = ""
    """The trigger as the source documents word it."""
    extension: bool = False
    """Not in the source document's table; added by a recorded decision."""
    finalizes: bool = False
    """The step names an artifact of the job, which makes its `finalize` step in the same transaction."""


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
    """A transition, with arguments in the order of the documents' tables."""
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
    """The answer when a lifecycle does not declare the requested step, and why."""

    lifecycle: str
    source: str | None
    target: str | None
    trigger: str | None
    actor: Role | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Lifecycle:
    """A whole lifecycle. Its consistency is checked on construction."""

    name: str
    code: int
    title: str
    states: tuple[State, ...]
    transitions: tuple[Transition, ...]
    swept_by: Role
    """The role in whose name the sweep acts: the documents' single writer, where they name one."""
    version: int = 1
    by_name: dict[str, State] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {state.name: state for state in self.states})
        problems = list(_problems(self))
        if problems:
            raise ValueError(f"lifecycle {self.name}: {'; '.join(problems)}")

    @cached_property
    def by_trigger(self) -> dict[tuple[str | None, str], Transition]:
        """The transition of each (state, trigger)."""
        return {(t.source, t.trigger): t for t in self.transitions}

    @cached_property
    def codes(self) -> dict[str, int]:
        """The stored number of each state: its position in the declaration, from 1."""
        return {state.name: code for code, state in enumerate(self.states, start=1)}

    @property
    def initial(self) -> State:
        """The state of a submitted job."""
        return self.by_name[self.by_trigger[None, Trigger.SUBMIT].target]

    def code_of(self, state: str | None) -> int:
        """The stored number of a state; 0 for a job that does not exist yet."""
        return 0 if state is None else self.codes[state]

    def state_of(self, code: int) -> State:
        """The state of a stored number."""
        return self.states[code - 1]

    def pull(self, source: str | None, trigger: str) -> Transition | None:
        """The transition that `trigger` fires in `source`, or None."""
        return self.by_trigger.get((source, trigger))

    def asks_to_start(self, transition: Transition) -> bool:
        """Whether this is a start by the claiming role.

        It asks whether user code may run, so its lease must be alive (DJ-19).

        Where another role starts jobs, as on the bus, the start reports work that already runs. Then only the epoch
        decides.
        """
        claimers = {role for t in self.transitions if t.trigger == Trigger.CLAIM for role in t.actors}
        return transition.trigger == Trigger.START and not claimers.isdisjoint(transition.actors)

    def is_settled(self, state: str) -> bool:
        """Whether the work is over unless a person repeats it: the job has ended, or can only end without success."""
        named = self.by_name[state]
        if named.phase is Phase.ENDED:
            return True
        by_person = {Trigger.REQUEUE, Trigger.DISCARD}
        onward = [t.target for t in self.transitions if t.source == state and t.trigger not in by_person]
        ends = [self.by_name[target] for target in onward]
        return named.phase is Phase.WAITING and all(end.phase is Phase.ENDED and not end.success for end in ends)

    def between(self, source: str | None, target: str, actor: Role) -> Transition | Illegal:
        """The first declared transition from source to target that `actor` may make."""
        declared = [t for t in self.transitions if t.source == source and t.target == target]
        for transition in declared:
            if actor in transition.actors:
                return transition
        reason = "not declared" if not declared else f"only {_names(a for t in declared for a in t.actors)} may"
        return Illegal(lifecycle=self.name, source=source, target=target, trigger=None, actor=actor, reason=reason)


def next_state(lifecycle: Lifecycle, state: str | None, trigger: str, actor: Role) -> State | Illegal:
    """The target state of a trigger, or why it is refused. The only way a state changes."""
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
    """The progress tuple. It never decreases in a job's life."""
    return (generation, attempt, lifecycle.by_name[state].rank)


def _names(actors: Iterable[Role]) -> str:
    return ", ".join(sorted({actor.value for actor in actors}))


def _problems(lifecycle: Lifecycle) -> Iterable[str]:
    """Every inconsistency of a lifecycle's data."""
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
    if source.phase is Phase.ENDED and t.trigger not in OF_ENDED:
        yield f"{label} leaves an ended state"
    if t.trigger in IN_PLACE and t.source != t.target:
        yield f"{label} changes the state, which {t.trigger} does not"


def _state_problems(lifecycle: Lifecycle, state: State) -> Iterable[str]:
    has = {t.trigger for t in lifecycle.transitions if t.source == state.name}
    if state.claimable and state.phase is Phase.WAITING and Trigger.CLAIM not in has:
        yield f"{state.name} is claimable and no claim leaves it"
    if state.lease_loss is LeaseLoss.EXPIRE and Trigger.EXPIRE not in has:
        yield f"{state.name} can be lost and declares no expire"
    if state.on_error is not None and state.on_error not in has:
        yield f"{state.name} has no transition for its error trigger {state.on_error}"
