"""The table: medians with ranges, the best that ours is measured beside, ratios, and whether targets are met."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from bench.groups import Figures
from bench.guards import GUARDS
from bench.lines import NAMES, SECTIONS, Line
from bench.peers import PEERS

Samples = dict[str, list[float]]
HEAD = ("", "unit", "ours (range)", "best beside", "theirs (range)", "ratio", "target", "")
TARGET_ITSELF = "the target"
NOBODY = "nobody here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One line with its figures."""

    line: Line
    ours: list[float]
    others: dict[str, list[float]]
    """What was measured beside ours, by the names of the figures."""
    best: str | None
    """The name of the best of these."""

    @property
    def their_values(self) -> list[float]:
        """What is best beside ours. A limit, if the line has one and nothing was measured beside it."""
        if self.best is not None:
            return self.others[self.best]
        return [] if self.line.limit is None else [self.line.limit]

    @property
    def theirs(self) -> float | None:
        """The median of these."""
        return statistics.median(self.their_values) if self.their_values else None

    @property
    def ratio(self) -> float | None:
        """Ours / theirs; None only for a line whose peers are not here. Nothing beside nothing is 1."""
        ours, theirs = statistics.median(self.ours), self.theirs
        if theirs is None:
            return None
        if theirs == 0:
            return inf if ours else 1.0
        return ours / theirs

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target, or without a peer that it refers to."""
        return self.line.met(statistics.median(self.ours), self.theirs)

    @property
    def beside(self) -> str:
        """The name of the best beside ours."""
        if self.best is not None:
            return NAMES[_subject(self.best)]
        return NOBODY if self.line.limit is None else TARGET_ITSELF


def compare(line: Line, samples: Samples) -> Compared | None:
    """A line with its figures; None if ours was not measured, or nothing beside it. The summary shows even that."""
    others = {name: samples[name] for name in line.beside if name in samples}
    if line.ours not in samples or not (others or line.limit is not None or line.in_summary):
        return None
    choose = min if line.less_is_better else max
    best = choose(others, key=lambda name: statistics.median(others[name])) if others else None
    return Compared(line=line, ours=samples[line.ours], others=others, best=best)


def compared(samples: Samples) -> list[tuple[str, Compared]]:
    """Every line that was measured, with the title of its table."""
    every = ((title, compare(line, samples)) for title, lines in SECTIONS.items() for line in lines)
    return [(title, one) for title, one in every if one is not None]


def render(samples: Samples) -> str:
    """Everything that was measured, as Markdown; the summary comes last."""
    every = compared(samples)
    parts = [_section(title, [one for at, one in every if at == title]) for title in SECTIONS]
    return "\n\n".join(
        part for part in (*parts, _peer_section(every), _guard_section(samples), _summary(every)) if part
    )


def verdicts(samples: Samples) -> list[dict[str, Any]]:
    """The same lines for a program: titles, medians, ratio, target, verdict."""
    return [
        {
            "section": title,
            "title": one.line.title,
            "unit": one.line.unit,
            "ours": statistics.median(one.ours),
            "beside": one.best,
            "name": one.beside,
            "other": one.theirs,
            "others": {name: statistics.median(values) for name, values in one.others.items()},
            "ratio": one.ratio if one.ratio != inf else None,
            "target": one.line.target,
            "met": one.met,
            "in_summary": one.line.in_summary,
        }
        for title, one in compared(samples)
    ]


def _subject(figure: str) -> str:
    return figure.rpartition(".")[2]


def _section(title: str, lines: Sequence[Compared]) -> str:
    return f"### {title}\n\n{markdown(HEAD, [_row(one.line.title, one, shown) for one in lines])}" if lines else ""


def _row(title: str, one: Compared, show: Callable[[Sequence[float]], str]) -> tuple[str, ...]:
    theirs = show(one.their_values) if one.their_values else ""
    return (
        title,
        one.line.unit,
        show(one.ours),
        one.beside,
        theirs,
        _ratio(one.ratio),
        one.line.target,
        _verdict(one),
    )


def _full_title(section: str, one: Compared) -> str:
    return f"{section.partition(',')[0]}: {one.line.title}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _verdict(one: Compared) -> str:
    if one.met is None:
        return "no peer here" if one.line.target else ""
    return "met" if one.met else "MISSED"


def _peer_section(every: Sequence[tuple[str, Compared]]) -> str:
    """Every peer of the lines in the summary, with how many times its figure ours is."""
    lines = [(title, one) for title, one in every if one.line.in_summary and _peers(one)]
    names = sorted({name for _, one in lines for name in _peers(one)})
    if not names:
        return ""
    rows = [
        (
            _full_title(title, one),
            one.line.unit,
            median(one.ours),
            *(_peers(one).get(name, "") for name in names),
        )
        for title, one in lines
    ]
    return f"### Every peer (ours / theirs)\n\n{markdown(('', 'unit', 'ours', *names), rows)}"


def _peers(one: Compared) -> dict[str, str]:
    ours = statistics.median(one.ours)
    medians = {_subject(name): statistics.median(values) for name, values in one.others.items()}
    return {
        NAMES[subject]: f"{number(theirs)} ({ours / theirs:.2f}x)" if theirs else number(theirs)
        for subject, theirs in medians.items()
        if subject.rstrip("0123456789") in PEERS
    }


def _summary(every: Sequence[tuple[str, Compared]]) -> str:
    lines = [(title, one) for title, one in every if one.line.in_summary]
    if not lines:
        return ""
    rows = [_row(_full_title(title, one), one, median) for title, one in lines]
    head = ("", "unit", "ours", "best beside", "theirs", "ratio", "target", "")
    judged = [one.met for _, one in lines if one.met is not None]
    left = len(lines) - len(judged)
    count = f"{sum(judged)} of {len(judged)} targets met{f', {left} without a peer here' if left else ''}."
    return f"### Summary\n\n{markdown(head, rows)}\n\n{count}"


def _guard_section(samples: Samples) -> str:
    if "guard.pg.all" not in samples:
        return ""
    whole, rate = statistics.median(samples["guard_cpu.pg.all"]), statistics.median(samples["guard.pg.all"])
    rows = [
        (
            guard.title,
            shown(samples[f"guard.pg.{guard.name}"]),
            _ratio(statistics.median(samples[f"guard.pg.{guard.name}"]) / rate),
            shown(samples[f"guard_cpu.pg.{guard.name}"]),
            f"{statistics.median(samples[f'guard_cpu.pg.{guard.name}']) - whole:+.1f}",
            shown(samples[f"guard_wal.pg.{guard.name}"]),
        )
        for guard in GUARDS
        if f"guard.pg.{guard.name}" in samples
    ]
    head = ("without", "jobs/s (range)", "ratio", "server CPU µs/job (range)", "difference", "WAL bytes/job (range)")
    return f"### What each guard costs (PostgreSQL, ledger alone, 1 connection)\n\n{markdown(head, rows)}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose source is as easy to read as its rendering."""
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    rule = "-|-".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))


def shown(values: Sequence[float]) -> str:
    """Median and range."""
    middle = median(values)
    return middle if len(values) == 1 else f"{middle} ({number(min(values))}-{number(max(values))})"


def median(values: Sequence[float]) -> str:
    """The median alone."""
    return number(statistics.median(values))


def number(value: float) -> str:
    """Enough digits to compare, not more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.2f}"


def add(samples: Samples, figures: Figures) -> None:
    """Take in one measurement's figures."""
    for name, value in figures.items():
        samples.setdefault(name, []).append(value)
