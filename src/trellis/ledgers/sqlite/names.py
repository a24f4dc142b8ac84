"""Numbers for names: types, actors and concurrency keys are stored once and referred to by number.

Types and actors are never removed, so their committed numbers are cached and stay valid in every process. Keys are
looked up each time, because an unused key is removed and gets another number later. Numbers from a transaction that was
rolled back are invalid: `forget` clears the cache.
"""

from typing import Any

from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.connection import Database

CACHED_MAX = 10_000
PLANS_MAX = 64


_NAME_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/names.sql")


class NameNumbers:
    """The name tables of one connection, in a process on `node`."""

    def __init__(self, connection: Database, node: str) -> None:
        self._db = connection
        self._node = node
        self._types: dict[tuple[int, str], int] = {}
        self._actors: dict[tuple[str, str], int] = {}

        self.plans: dict[tuple[int, int], Any] = {}
        """What submits worked out from these numbers, by the identity of the request and the actor, which each plan holds."""

    def forget(self) -> None:
        self._types.clear()
        self._actors.clear()
        self.plans.clear()

    def keep_plan(self, of: tuple[int, int], plan: Any) -> None:
        if len(self.plans) >= PLANS_MAX:
            self.plans.clear()
        self.plans[of] = plan

    def type_id(self, lifecycle: int, name: str) -> int:
        """The number of a type; created if new."""
        known = self._types.get((lifecycle, name))
        return known or self._learn_type(lifecycle, name)

    def known_type(self, lifecycle: int, name: str) -> int | None:
        """The number of a type that was submitted before, or None."""
        known = self._types.get((lifecycle, name))
        if known is None and (rows := self._db.execute(_NAME_QUERIES.find_type, (lifecycle, name)).fetchall()):
            known = self._types[lifecycle, name] = rows[0][0]
        return known

    def actor_id(self, name: str, node: str | None = None) -> int:
        """The number of an actor that writes from this node, or from the node given."""
        named = (name, self._node if node is None else node)
        known = self._actors.get(named)
        return known or self._learn_actor(named)

    def key_id(self, name: str, limit: int) -> int:
        """The number of a concurrency key. A new key gets `limit`; a known key keeps its own."""
        rows = self._db.execute(_NAME_QUERIES.find_key, (name,)).fetchall()
        return rows[0][0] if rows else self._db.execute(_NAME_QUERIES.add_key, (name, limit)).fetchall()[0][0]

    def key_limit(self, name: str) -> int | None:
        """How many jobs of a concurrency key may be held; None for an unknown key."""
        rows = self._db.execute(_NAME_QUERIES.key_limit, (name,)).fetchall()
        return rows[0][0] if rows else None

    def set_key_limit(self, name: str, limit: int, actor: str) -> int:
        values = {"name": name, "limit": limit, "actor": self.actor_id(actor)}
        return self._db.execute(_NAME_QUERIES.set_key_limit, values).fetchall()[0][0]

    def _learn_type(self, lifecycle: int, name: str) -> int:
        self._bound(self._types)
        rows = self._db.execute(_NAME_QUERIES.find_type, (lifecycle, name)).fetchall()
        number = rows[0][0] if rows else self._db.execute(_NAME_QUERIES.add_type, (lifecycle, name)).fetchall()[0][0]
        self._types[lifecycle, name] = number
        return number

    def _learn_actor(self, named: tuple[str, str]) -> int:
        self._bound(self._actors)
        rows = self._db.execute(_NAME_QUERIES.find_actor, named).fetchall()
        number = rows[0][0] if rows else self._db.execute(_NAME_QUERIES.add_actor, named).fetchall()[0][0]
        self._actors[named] = number
        return number

    @staticmethod
    def _bound(cache: dict[tuple[str, str], int] | dict[tuple[int, str], int]) -> None:
        if len(cache) >= CACHED_MAX:
            cache.clear()
