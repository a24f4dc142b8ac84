"""Lets the driver ask a server about the server's own types once in a test process, instead of once on every connection.

Most tests of a PostgreSQL ledger are shorter than these questions, and the answers never differ: types below `FIRST_OWN_OID` come with the
server, the same in every database of a version. What a database has of its own is asked for each time.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import asyncpg

FIRST_OWN_OID = 16_384
"""The server gives its own objects smaller numbers (FirstNormalObjectId)."""

Introspect: TypeAlias = Callable[[Any, Iterable[int], float | None], Awaitable[tuple[Any, Any]]]

ASKED: Introspect = asyncpg.Connection._introspect_types  # type: ignore[attr-defined]
"""The driver's own way."""


@dataclass(frozen=True)
class Known:
    """Stands for the statement that was not needed: it has replaced none."""

    name: str = "known"


_known: dict[tuple[int, frozenset[int]], Any] = {}


async def remembered(connection: Any, typeoids: Iterable[int], timeout_s: float | None) -> tuple[Any, Any]:
    wanted = frozenset(typeoids)
    key = connection.get_server_version().major, wanted
    if key in _known:
        return _known[key], Known()
    answer = await ASKED(connection, wanted, timeout_s)
    if max(wanted) < FIRST_OWN_OID:
        _known[key] = answer[0]
    return answer


def remember_types() -> None:
    """From now on, in this process."""
    asyncpg.Connection._introspect_types = remembered  # type: ignore[attr-defined, method-assign]
