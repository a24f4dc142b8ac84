"""What is written from the lifecycle tables. `python -m tests.lifecycles.generated` writes it again."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.lifecycles.projection import WIRE_NUMBERS, WORDS, Position
from trellis.lifecycles import LIFECYCLES, Lifecycle
from trellis.lifecycles.describe import describe, mermaid

ROOT = Path(__file__).parents[2]
VOCABULARIES = ("bus-job", "leased-job", "queue-job", "run")
INTRODUCTION = """# Lifecycles

Written from the tables in `src/trellis/lifecycles/` by `python -m tests.lifecycles.generated`; the suite compares. A
state's phase says who has the job (nobody, one lease holder, or nobody any more), its rank how far it is: progress is
the tuple (generation, attempt, rank) and never falls. A *fenced* transition is made by the lease holder only, with its
epoch. An *extension* is not in the source document and was added by a [recorded decision](decisions.md). The words are
defined in the [glossary](../glossary.md).
"""

STATE_COLUMNS = ("state", "phase", "rank", "notes")
TRANSITION_COLUMNS = ("from", "to", "trigger", "who", "event", "progress", "notes", "when")


def documents() -> dict[Path, str]:
    """Every generated file and what it must hold."""
    files = {ROOT / "docs/reference/lifecycles.md": reference()}
    for name, lifecycle in LIFECYCLES.items():
        files[ROOT / f"docs/lifecycles/{name}.mmd"] = mermaid(lifecycle)
    return files


def reference() -> str:
    """The reference page of all lifecycles."""
    parts = [INTRODUCTION, *(_chapter(lifecycle) for lifecycle in LIFECYCLES.values()), _projection()]
    return "\n".join(parts)


def _chapter(lifecycle: Lifecycle) -> str:
    told = describe(lifecycle)
    states = [(f"`{line.state}`", line.phase.value, line.rank, line.notes) for line in told.states]
    transitions = [
        (f"`{t.source}`", f"`{t.target}`", f"`{t.trigger}`", t.who, f"`{t.event}`", t.progress, t.notes, t.when)
        for t in told.transitions
    ]
    return "\n".join(
        (
            f"## {told.name}",
            "",
            f"{told.title}. Version {told.version}; the sweep acts as {told.swept_by}.",
            "",
            *("```mermaid", mermaid(lifecycle).rstrip("\n"), "```"),
            "",
            *_table(STATE_COLUMNS, states),
            "",
            *_table(TRANSITION_COLUMNS, transitions),
            "",
        )
    )


def _projection() -> str:
    rows = [
        (
            position.value,
            *(_cell(name, WORDS[name][position].state, WORDS[name][position].note) for name in VOCABULARIES),
        )
        for position in Position
    ]
    return "\n".join(
        (
            "## Projection",
            "",
            "How one job reads in another lifecycle's words. The number is the JobStatus of CAP v1 on the bus.",
            "",
            *_table(("position", *VOCABULARIES), rows),
            "",
            "All of an nlm-job happens inside NOTEBOOKLM_CALL; a proposal is a decision and has no word for work.",
            "",
        )
    )


def _cell(vocabulary: str, state: str | None, note: str) -> str:
    if state is None:
        return note
    number = f" {WIRE_NUMBERS[state]}" if vocabulary == "bus-job" else ""
    return f"`{state}`{number}{f' ({note})' if note else ''}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    for path, text in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
