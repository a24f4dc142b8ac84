"""The runbooks: a page for each alert and alerting rule, with the commands that help.

Their source is docs/runbooks. A wheel holds a copy in `runbook_pages` beside this module (pyproject.toml); a checkout
has none there and reads the source.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from trellis.engine.errors import Refused
from trellis.engine.text import nearest

SUFFIX = ".md"
ROUTE = "runbooks"
_SHIPPED = Path(__file__).parent / "runbook_pages"
_CHECKOUT = Path(__file__).parents[3] / "docs" / "runbooks"


class RunbookUnknown(Refused):
    """There is no runbook {name!r}; {hint}"""

    code = "NOT_FOUND"


@cache
def _pages() -> Mapping[str, Path]:
    folder = _SHIPPED if _SHIPPED.is_dir() else _CHECKOUT
    return MappingProxyType({path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))})


def runbook_names() -> list[str]:
    """The names of all runbooks, such as `jobs-wait`."""
    return list(_pages())


def runbook(name: str, *, also: Iterable[str] = ()) -> str:
    """The page of this name, as Markdown; `jobs-wait.md` means `jobs-wait`. Raises RunbookUnknown.

    The error suggests the nearest name, among the pages and the names in `also`.
    """
    path = _pages().get(name.removesuffix(SUFFIX))
    if path is None:
        near = nearest(name, (*_pages(), *also))
        raise RunbookUnknown(
            name=name, hint=f"did you mean {near}?" if near else f"choose one of {', '.join(_pages())}."
        )
    return path.read_text(encoding="utf-8")


def runbook_title(name: str) -> str:
    """The heading of a runbook. Raises RunbookUnknown."""
    return runbook(name).partition("\n")[0].removeprefix("# ")


def runbook_command(name: str) -> str:
    """The command that prints a runbook."""
    return f"trellis alerts runbook {name}"


def runbook_address(name: str, gateway: str | None) -> str:
    """Where a runbook can be read: its address at the gateway of this URL, else the command that prints it."""
    return runbook_command(name) if gateway is None else f"{gateway.rstrip('/')}/{ROUTE}/{name}"
