"""Named SQL queries: a class declares the queries it needs, a `.sql` file beside the ledger holds them.

A file is a header comment followed by queries, each after a line `-- name: the_name`. Importing fails unless file and
class have the same query names, so that a misspelling is found before any ledger is opened.
"""

import re
from importlib import resources

_NAME = re.compile(r"^-- name: ([a-z0-9_]+)[ \t]*$", re.MULTILINE)


class QueryFileError(ImportError):
    """The queries of a `.sql` file differ from those its class declares."""


class NamedQueries:
    """Subclass with `file="package:path.sql"` and one annotation `name: LiteralString` for each query."""

    def __init_subclass__(cls, *, file: str) -> None:
        super().__init_subclass__()
        package, _, path = file.partition(":")
        found = parse(resources.files(package).joinpath(path).read_text(encoding="utf-8"), file)
        wanted = set(cls.__annotations__)
        if wanted != set(found):
            missing, unused = sorted(wanted - set(found)), sorted(set(found) - wanted)
            raise QueryFileError(f"{file}: missing {missing}, not asked for {unused}")
        for name, sql in found.items():
            setattr(cls, name, sql)


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
