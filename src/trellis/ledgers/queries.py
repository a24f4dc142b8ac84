"""Named SQL queries: a `.sql` file beside the ledger holds them, each after a line `-- name: the_name`.

A file begins with a header comment. `tests/ledgers/sqlite/test_queries.py` compares the names that the code uses with
those of the files, in both directions.
"""

import re
from importlib import resources
from typing import LiteralString

_NAME = re.compile(r"^-- name: ([a-z0-9_]+)[ \t]*$", re.MULTILINE)


class QueryFileError(ImportError):
    """A `.sql` file has two queries of one name."""


class NamedQueries:
    """The queries of one file, `package:path.sql`, as attributes."""

    def __init__(self, file: str) -> None:
        package, _, path = file.partition(":")
        self._file = file
        self.__dict__.update(parse(resources.files(package).joinpath(path).read_text(encoding="utf-8"), file))

    def __getattr__(self, name: str) -> LiteralString:
        """Called for a query that the file does not have."""
        raise AttributeError(f"{self._file} has no query {name}")


def parse(text: str, file: str) -> dict[str, str]:
    """The queries of one file by name, without the comment lines between them."""
    parts = _NAME.split(text)
    names, bodies = parts[1::2], parts[2::2]
    if len(set(names)) != len(names):
        raise QueryFileError(f"{file}: a name is used twice")
    return {name: _statement(body) for name, body in zip(names, bodies, strict=True)}


def _statement(body: str) -> str:
    kept = (line for line in body.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(kept).strip().removesuffix(";")
