"""A real ledger whose caller dies right after one of its transactions: committed, and never answered."""

from typing import Any, cast

from trellis.engine.ledger import Ledger


class Died(Exception):
    """The process that called the ledger is gone."""


class DiesAfter:
    """Passes everything on to a ledger. After the given call of one method, the caller dies."""

    def __init__(self, inner: Ledger, method: str, call: int = 1) -> None:
        self._inner, self._method, self._left = inner, method, call

    @property
    def ledger(self) -> Ledger:
        return cast("Ledger", self)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._dying(found) if name == self._method else found

    def _dying(self, method: Any) -> Any:
        async def call(*arguments: Any, **options: Any) -> Any:
            answer = await method(*arguments, **options)
            self._left -= 1
            if self._left == 0:
                raise Died
            return answer

        return call
