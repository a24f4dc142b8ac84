"""A lifecycle for people: as two tables of text, and as Mermaid text."""

from collections import defaultdict
from dataclasses import dataclass

from trellis.lifecycles.lifecycle import LeaseLoss, Lifecycle, Phase, Progress, State, Transition

OPENS_WORDS = {Progress.SAME: "same attempt", Progress.ATTEMPT: "next attempt", Progress.GENERATION: "new generation"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLine:
    """One state as text."""

    state: str
    phase: Phase
    rank: str
    notes: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionLine:
    """One transition as text."""

    source: str
    target: str
    trigger: str
    who: str
    event: str
    progress: str
    notes: str
    when: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A whole lifecycle as text."""

    name: str
    title: str
    version: int
    swept_by: str
    states: tuple[StateLine, ...]
    transitions: tuple[TransitionLine, ...]


def describe(lifecycle: Lifecycle) -> Description:
    return Description(
        name=lifecycle.name,
        title=lifecycle.title,
        version=lifecycle.version,
        swept_by=lifecycle.swept_by.value,
        states=tuple(_state_line(lifecycle, state) for state in lifecycle.states),
        transitions=tuple(_transition_line(t) for t in lifecycle.transitions),
    )


def _state_line(lifecycle: Lifecycle, state: State) -> StateLine:
    notes_if = (
        (state is lifecycle.initial, "first"),
        (state.claimable and state.phase is Phase.WAITING, "claimable"),
        (state.timer_s is not None, f"due after {(state.timer_s or 0) / 3600:g} h"),
        (state.lease_loss is LeaseLoss.STAY, "a lost lease leaves it here, to be claimed again"),
        (state.lease_loss is LeaseLoss.EXPIRE, "a lost lease pulls expire"),
        (state.on_error is not None, f"an error pulls {state.on_error}"),
        (state.phase is Phase.HELD and not state.runs_code, "no user code runs"),
        (state.success, "success"),
        (state.dead_letter, "needs a dead letter"),
    )
    notes = "; ".join(words for holds, words in notes_if if holds)
    return StateLine(state=state.name, phase=state.phase, rank=str(state.rank), notes=notes)


def _transition_line(t: Transition) -> TransitionLine:
    notes = (
        (t.fenced, "fenced by epoch"),
        (t.finalizes, "finalizes the artifact it names"),
        (t.extension, "extension"),
    )
    return TransitionLine(
        source=t.source or "[new]",
        target=t.target,
        trigger=t.trigger,
        who=", ".join(sorted(t.actors)),
        event=t.event,
        progress=OPENS_WORDS[t.opens],
        notes=", ".join(words for holds, words in notes if holds),
        when=t.when,
    )


# A lifecycle as Mermaid text, for tools that render it.

COLOURS = {
    Phase.WAITING: "fill:#fef3c7,stroke:#d97706,color:#1f2937",
    Phase.HELD: "fill:#dbeafe,stroke:#2563eb,color:#1f2937",
    Phase.ENDED: "fill:#eef0f4,stroke:#7c8798,color:#1f2937",
}


def mermaid(lifecycle: Lifecycle) -> str:
    """A `stateDiagram-v2`: one arrow per pair of states, with one label line per transition.

    A dagger marks a transition that is not in the source document and was added by a recorded decision.
    """
    arrows: dict[tuple[str, str], list[Transition]] = defaultdict(list)
    for t in lifecycle.transitions:
        arrows[t.source or "[*]", t.target].append(t)
    lines = [
        "stateDiagram-v2",
        f"    %% {lifecycle.name}: {lifecycle.title}",
        "    %% † added by a recorded decision",
        *(
            f"    {source} --> {target} : {'<br/>'.join(map(_label, transitions))}"
            for (source, target), transitions in arrows.items()
        ),
        *(f"    {state.name} --> [*]" for state in lifecycle.states if state.phase is Phase.ENDED),
    ]
    for phase, colours in COLOURS.items():
        names = ",".join(state.name for state in lifecycle.states if state.phase is phase)
        lines += [] if not names else [f"    classDef {phase} {colours}", f"    class {names} {phase}"]
    return "\n".join(lines) + "\n"


def _label(t: Transition) -> str:
    return f"{t.trigger}{'†' if t.extension else ''} ({', '.join(sorted(t.actors))})"
