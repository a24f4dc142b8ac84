"""A lifecycle as Mermaid text, for tools that render it."""

from collections import defaultdict

from trellis.lifecycles.lifecycle import Lifecycle, Phase, Transition

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
