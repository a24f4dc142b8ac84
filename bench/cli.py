"""The command: rounds of every group, progress while they run, the table at the end."""

import argparse
import json
import sys
import time
from pathlib import Path

from bench.groups import GROUPS, SMALL, Sizes
from bench.machine import Steal, describe, load
from bench.peers import PEERS, why_missing
from bench.processes import ChildFailed
from bench.stores import Stores, open_stores
from bench.table import Samples, add, number, render, verdicts

ROUNDS_DEFAULT = 3
ROUNDS_MAX = 50
BEGIN, END = "<!-- figures of make bench: begin -->", "<!-- figures of make bench: end -->"
"""The lines of a document between which `--write` puts the tables."""
READY_DEFAULT, FINISHED_DEFAULT = 1_000_000, 10_000_000


def main(arguments: list[str]) -> int:
    """Run what was asked for; 0 when it was measured, whether targets are met or not."""
    options = _parser().parse_args(arguments)
    try:
        return _chosen(options)
    except ChildFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _chosen(options: argparse.Namespace) -> int:
    if options.large:
        from bench.large import run_large

        return run_large(ready=options.ready, finished=options.finished, json_file=options.json)
    if options.day:
        from bench.day import run_days

        return run_days(options.day)
    if options.beside:
        from bench.beside import run_beside

        return run_beside(
            options.beside, options.only, rounds=options.rounds, small=options.small, json_file=options.json
        )
    if options.cost:
        from bench.cost import run_cost

        return run_cost(small=options.small, json_file=options.json)
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Ours beside the floor and the peers.")
    parser.add_argument("--rounds", type=_rounds, default=ROUNDS_DEFAULT, help="interleaved rounds (default 3)")
    parser.add_argument("--only", type=_groups, default=list(GROUPS), help=f"some of {', '.join(GROUPS)}")
    parser.add_argument(
        "--beside", type=_checkout, metavar="FOLDER", help="ours alone, beside ours in another checkout of this project"
    )
    parser.add_argument("--write", type=_document, help="also put the tables into this document, where it says so")
    parser.add_argument("--json", type=Path, help="also write every sample and verdict to this file")
    parser.add_argument(
        "--small", action="store_true", help="a few jobs each: proves that the program runs, measures nothing"
    )
    parser.add_argument("--large", action="store_true", help="pages per claim on big tables, with a snapshot held open")
    parser.add_argument("--cost", action="store_true", help="what one job costs over its whole life, on PostgreSQL")
    parser.add_argument("--day", type=int, nargs="+", metavar="JOBS", help="simulate days with so many jobs")
    parser.add_argument("--ready", type=int, default=READY_DEFAULT, help="--large: jobs that wait (default 1,000,000)")
    parser.add_argument(
        "--finished", type=int, default=FINISHED_DEFAULT, help="--large: jobs that ended (default 10,000,000)"
    )
    return parser


def _rounds(text: str) -> int:
    rounds = int(text)
    if not 1 <= rounds <= ROUNDS_MAX:
        raise argparse.ArgumentTypeError(f"from 1 to {ROUNDS_MAX}")
    return rounds


def _groups(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(GROUPS)}")
    return names


def _checkout(text: str) -> Path:
    """A checkout whose benchmark can be asked: `tools/bootstrap.py bench` makes its environment."""
    folder = Path(text).resolve()
    if not (folder / "bench" / "child.py").is_file() or not (folder / ".venv" / "bin" / "python").exists():
        raise argparse.ArgumentTypeError(
            f"{text} is no checkout with an environment: run `python3 tools/bootstrap.py bench` in it"
        )
    return folder


def _document(text: str) -> Path:
    """Looked at before the run, which takes long."""
    try:
        body = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error}") from error
    if END not in body.partition(BEGIN)[2]:
        raise argparse.ArgumentTypeError(f"{text} has no line {BEGIN} with a line {END} after it: write both into it")
    return Path(text)


def write_figures(document: Path, figures: str) -> None:
    """Put the figures of a run between the two lines of the document that are for them."""
    before, _, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    document.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", encoding="utf-8")


def _run(options: argparse.Namespace) -> int:
    samples: Samples = {}
    missing = [reason for peer in PEERS if (reason := why_missing(peer)) is not None]
    about = {"command": _command(options), "rounds": str(options.rounds)}
    try:
        _measure(options, samples, about, missing)
    except BaseException:
        about["complete"] = "no, it was ended before"
        _report(options, samples, about, missing)
        raise
    tables = _report(options, samples, about, missing)
    if options.write:
        facts = "\n".join(f"- {line}" for line in (*(f"{name}: {value}" for name, value in about.items()), *missing))
        write_figures(options.write, f"{facts}\n\n{tables}")
    return 0


def _measure(options: argparse.Namespace, samples: Samples, about: dict[str, str], missing: list[str]) -> None:
    """All rounds. What there is when one is ended early stays in `samples`."""
    began, steal = time.monotonic(), Steal()
    with open_stores() as stores:
        about |= describe(stores.server, stores.folder)
        print("\n".join([*(f"{name}: {value}" for name, value in about.items()), *missing]), flush=True)
        sizes = SMALL if options.small else Sizes()
        for round_ in range(1, options.rounds + 1):
            _round(stores, options.only, sizes, samples, f"round {round_}/{options.rounds}")
    about |= {
        "took": f"{time.monotonic() - began:.0f} s",
        "stolen": f"{steal.share():.1%} of busy time",
        "load after": load(),
    }


def _report(options: argparse.Namespace, samples: Samples, about: dict[str, str], missing: list[str]) -> str:
    """Prints the tables and returns them; writes every sample where that was asked for."""
    tables = render(samples)
    facts = [
        f"{name}: {about[name]}" for name in ("rounds", "took", "stolen", "load after", "complete") if name in about
    ]
    print(f"\n{tables}\n\n{', '.join(facts)}")
    if options.json:
        body = {"about": about, "left out": missing, "lines": verdicts(samples), "samples": samples}
        options.json.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return tables


def _command(options: argparse.Namespace) -> str:
    """What to type for such a run."""
    small = " --small" if options.small else ""
    only = "" if options.only == list(GROUPS) else f" --only {','.join(options.only)}"
    return f"`make bench ARGS='--rounds {options.rounds}{small}{only}'`"


def _round(stores: Stores, groups: list[str], sizes: Sizes, samples: Samples, title: str) -> None:
    for group in groups:
        for figures in GROUPS[group](stores, sizes):
            add(samples, figures)
            name, value = next(iter(figures.items()))
            print(f"  {title}  {name} {number(value)}", file=sys.stderr, flush=True)
