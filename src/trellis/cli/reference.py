"""Generates the command line reference from its help: `python -m trellis.cli.reference > docs/reference/cli.md`."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import typer

from trellis.cli.places import PROGRAM
from trellis.cli.program import main, make_program

PREAMBLE = """# Command line

Made from the program's own help by `python -m trellis.cli.reference`; a test compares.

- **Ledger.** `--ledger URL`, else `--data DIR` (the file `trellis.db` in that folder), else the setting `ledger` (`TRELLIS_LEDGER`,
  `trellis.toml`), else `sqlite:///trellis.db` in the current folder. Only `migrate`, `up` and `demo` make a ledger that is not there.
- **Output.** Tables on a terminal fit its width; in a pipe every row is one whole line without colour. `--json` prints JSON Lines, one object
  per line, with the engine's own names, times in ISO 8601 and attempts counted from 1. Everything beside the answer (notes, how to get the
  next page, errors) goes to standard error.
- **Exit codes.** 0 done · 1 refused or failed · 2 the command was not understood and nothing was tried · 130 Ctrl-C · 141 the reader of
  the output went away. `worker` also ends with 75 (running jobs were given back) and 69 (the ledger could not be told some outcomes).
- **Durations** are seconds or `500ms`, `30s`, `10m`, `2h`, `1d`; moments are ISO 8601 with a time zone.
- **Token.** `TRELLIS_TOKEN`, or the file that `TRELLIS_TOKEN_FILE` names, limits what a command may do to the roles of the token. No option takes a token: others can
  see a command line.
- **Operator.** `requeue`, `pause` and `resume` ask on SQLite for the key file that `migrate` makes beside the ledger (readable by its owner
  only), on PostgreSQL for a database role that may.
"""
COLUMNS = "100"


def pages(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command in the order of the help, commands without subcommands first."""
    children: dict[str, Any] = getattr(command, "commands", {})
    for name, child in sorted(children.items(), key=lambda item: hasattr(item[1], "commands")):
        yield (*path, name)
        yield from pages(child, (*path, name))


def reference() -> str:
    """The whole document."""
    os.environ["COLUMNS"] = COLUMNS
    paths = pages(typer.main.get_command(make_program()))
    parts = (f"{'#' * (1 + len(path))} {PROGRAM} {' '.join(path)}\n\n{_help(path)}" for path in paths)
    return "\n".join([PREAMBLE, _help(()), *parts])


def _help(path: tuple[str, ...]) -> str:
    with redirect_stdout(io.StringIO()) as text:
        main([*path, "--help"])
    return f"```text\n{text.getvalue().rstrip()}\n```\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
