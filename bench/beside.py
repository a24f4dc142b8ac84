"""Ours beside ours in another checkout, an older commit for example: `python -m bench --beside FOLDER`.

One program takes both figures: this one starts the processes, fills the stores, waits and counts, with the same sizes.
The processes that it counts run from either checkout, each with its own packages, and each checkout has a PostgreSQL
server of its own with its own schema. The two take turns figure by figure, and whoever was first is second next time.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from bench.groups import GROUPS, SMALL, Figures, Sizes
from bench.lines import SECTIONS, Line
from bench.machine import Steal, describe, load
from bench.peers import ours_alone
from bench.processes import ROOT, Checkout, ChildFailed, children_from
from bench.stores import Stores, open_stores
from bench.table import Samples, add, markdown, number, shown

UNKNOWN_THERE = frozenset({"guards", "lists", "help"})
"""Groups that look into a schema or start commands, and know those of their own checkout alone."""
SUBJECTS = Path("bench", "subjects")
WORSE_FROM = 1.05
"""From this ratio on a figure is worse; below, it is noise."""
OPTIONS = (
    "import json, dataclasses, bench.task; print(json.dumps([f.name for f in dataclasses.fields(bench.task.Task)]))"
)


def run_beside(folder: Path, groups: list[str], *, rounds: int, small: bool, json_file: Path | None) -> int:
    """Measure, print the table, and name what is worse here; 0 when it was measured."""
    checkout, sizes = open_checkout(folder), SMALL if small else Sizes()
    samples: tuple[Samples, Samples] = {}, {}
    began, steal = time.monotonic(), Steal()
    with open_stores() as here, open_stores(checkout) as there:
        about = {"beside": str(folder), "rounds": str(rounds), **describe(here.server, here.folder)}
        print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
        left = [group for group in groups if group not in UNKNOWN_THERE]
        for round_ in range(rounds):
            for group in list(left):
                try:
                    _take_turns(group, (here, there), sizes, samples, round_)
                except LeftOut as error:
                    print(f"  {group} cannot be measured in {folder}: {error}", file=sys.stderr, flush=True)
                    left.remove(group)
    about |= {"took": f"{time.monotonic() - began:.0f} s", "stolen": f"{steal.share():.1%}", "load after": load()}
    rows = compare(*samples)
    print(f"\n{render(rows)}\n\n{', '.join(f'{name}: {about[name]}' for name in ('took', 'stolen', 'load after'))}")
    if json_file:
        body = {"about": about, "here": samples[0], "there": samples[1]}
        json_file.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


class LeftOut(Exception):
    """The other checkout cannot do what a group asks of it."""


def open_checkout(folder: Path) -> Checkout:
    """The checkout in this folder, with the options that its tasks know."""
    checkout = Checkout(folder, frozenset())
    told = subprocess.run(
        [checkout.python, "-c", OPTIONS], cwd=folder, check=True, capture_output=True, text=True, timeout=60
    )
    return Checkout(folder, frozenset(json.loads(told.stdout)))


def _take_turns(
    group: str, stores: tuple[Stores, Stores], sizes: Sizes, samples: tuple[Samples, Samples], round_: int
) -> None:
    """Every figure of a group, here and there."""
    with ours_alone(_unknown_to(stores[1].checkout)), ExitStack() as closing:
        measuring = [GROUPS[group](one, sizes) for one in stores]
        for one in measuring:
            closing.callback(one.close)  # type: ignore[attr-defined]
        for turn in count(round_):
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            figures = {which: _next(measuring[which], stores[which].checkout) for which in order}
            if figures[0] is None or figures[1] is None:
                return
            for which in order:
                add(samples[which], figures[which] or {})
            name = next(iter(figures[0]))
            both = " ".join(number(each[name]) for each in (figures[1], figures[0]) if name in each)
            print(f"  round {round_ + 1}  {name} {both}", file=sys.stderr, flush=True)


def _unknown_to(checkout: Checkout | None) -> frozenset[str]:
    """Our subjects that the other checkout does not have."""
    here = {path.stem for path in (ROOT / SUBJECTS).glob("*.py")}
    there = here if checkout is None else {path.stem for path in (checkout.root / SUBJECTS).glob("*.py")}
    return frozenset(here - there)


def _next(figures: Iterator[Figures], checkout: Checkout | None) -> Figures | None:
    with children_from(checkout):
        try:
            return next(figures, None)
        except ChildFailed as error:
            if checkout is None:
                raise
            raise LeftOut(str(error)) from error


# --- the table -----------------------------------------------------------------------------------------------------

Row = tuple[str, Line, list[float], list[float]]
"""The title of its table, the line, and its figures here and there."""


def compare(here: Samples, there: Samples) -> list[Row]:
    """Every line that both have, once."""
    rows = {
        line.ours: (title, line, here[line.ours], there[line.ours])
        for title, lines in SECTIONS.items()
        for line in lines
        if line.ours in here and line.ours in there
    }
    return list(rows.values())


def ratio(row: Row) -> float:
    """The median of here / there of each pair: pairs were measured side by side. For a rate and for a cost alike."""
    _, _, here, there = row
    return statistics.median(ours / other if other else 1.0 for ours, other in zip(here, there, strict=True))


def is_worse(row: Row) -> bool:
    """Whether a cost is higher or a rate lower by more than 5 %."""
    change = ratio(row)
    return change > WORSE_FROM if row[1].less_is_better else change * WORSE_FROM < 1


def render(rows: list[Row]) -> str:
    """One table for each store, and what is worse."""
    head = ("", "unit", "there (range)", "here (range)", "here / there", "")
    tables = [
        f"### {section}\n\n" + markdown(head, [_cells(row) for row in rows if row[0] == section])
        for section in dict.fromkeys(row[0] for row in rows)
    ]
    worse = [f"- {row[0].partition(',')[0]}: {row[1].title}, {ratio(row):.2f}x" for row in rows if is_worse(row)]
    verdict = f"Worse by more than 5 %, {len(worse)} of {len(rows)}:" if worse else "Nothing is worse by more than 5 %."
    return "\n\n".join([*tables, "\n".join([verdict, *(["", *worse] if worse else [])])])


def _cells(row: Row) -> tuple[str, ...]:
    _, line, here, there = row
    return line.title, line.unit, shown(there), shown(here), f"{ratio(row):.2f}x", "worse" if is_worse(row) else ""
