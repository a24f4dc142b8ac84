"""The command: rounds of every group, progress while they run, the table at the end."""

import argparse
import json
import sys
import time
from pathlib import Path

from bench.groups import GROUPS, SMALL, Sizes
from bench.machine import Steal, describe, load
from bench.processes import ChildFailed
from bench.stores import Stores, open_stores
from bench.table import Samples, add, number, render, verdicts

ROUNDS_DEFAULT = 3
ROUNDS_MAX = 50
READY_DEFAULT, FINISHED_DEFAULT = 1_000_000, 10_000_000


def main(arguments: list[str]) -> int:
    """Run what was asked for; 0 when it was measured, whether targets are met or not."""
    options = _parser().parse_args(arguments)
    try:
        if options.large:
            from bench.large import run_large

            return run_large(ready=options.ready, finished=options.finished, json_file=options.json)
        if options.day:
            from bench.day import run_days

            return run_days(options.day)
        if options.cost:
            from bench.cost import run_cost

            return run_cost(small=options.small, json_file=options.json)
        return _run(options)
    except ChildFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Ours beside the floor and the peers.")
    parser.add_argument("--rounds", type=_rounds, default=ROUNDS_DEFAULT, help="interleaved rounds (default 3)")
    parser.add_argument("--only", type=_groups, default=list(GROUPS), help=f"some of {', '.join(GROUPS)}")
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


def _run(options: argparse.Namespace) -> int:
    samples: Samples = {}
    began, steal = time.monotonic(), Steal()
    with open_stores() as stores:
        about = describe(stores.server, stores.folder)
        for name, value in about.items():
            print(f"{name}: {value}", flush=True)
        for number_ in range(1, options.rounds + 1):
            _round(
                stores, options.only, SMALL if options.small else Sizes(), samples, f"round {number_}/{options.rounds}"
            )
    about["rounds"] = str(options.rounds)
    about["took"] = f"{time.monotonic() - began:.0f} s"
    about["stolen"] = f"{steal.share():.1%} of busy time"
    about["load after"] = load()
    print(
        f"\n{render(samples)}\n\nrounds: {about['rounds']}, took: {about['took']}, stolen: {about['stolen']}, load after: {about['load after']}"
    )
    if options.json:
        body = {"about": about, "lines": verdicts(samples), "samples": samples}
        options.json.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _round(stores: Stores, groups: list[str], sizes: Sizes, samples: Samples, title: str) -> None:
    for group in groups:
        for figures in GROUPS[group](stores, sizes):
            add(samples, figures)
            name, value = next(iter(figures.items()))
            print(f"  {title}  {name} {number(value)}", file=sys.stderr, flush=True)
