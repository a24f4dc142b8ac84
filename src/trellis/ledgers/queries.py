"""Named SQL queries: a `.sql` file beside the ledger holds them, each after a line `-- name: the_name`.

A part that several queries of a file have stands once, after a line `-- part: the_name`; `{the_name}` in a query stands
for it. A file begins with a header comment. `tests/ledgers/sqlite/test_queries.py` compares the names that the code uses with
those of the files, in both directions.
"""

import re
from importlib import resources
from typing import LiteralString

_NAME = re.compile(r"^-- (name|part): ([a-z0-9_]+)[ \t]*$", re.MULTILINE)
_PART = re.compile(r"\{([a-z0-9_]+)\}")


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
    """The queries of one file by name, with their parts, without the comment lines between them."""
    kinds, names, bodies = (_NAME.split(text)[first::3] for first in (1, 2, 3))
    if len(set(names)) != len(names):
        raise QueryFileError(f"{file}: a name is used twice")
    statements = {name: _statement(body) for name, body in zip(names, bodies, strict=True)}

    def whole(statement: str) -> str:
        return _PART.sub(lambda part: whole(statements[part[1]]) if part[1] in statements else part[0], statement)

    return {name: whole(statements[name]) for kind, name in zip(kinds, names, strict=True) if kind == "name"}


def _statement(body: str) -> str:
    kept = (line for line in body.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(kept).strip().removesuffix(";")
