"""What the parts of the application work with: a ledger as its caller may read it, who calls, and the instance."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from trellis.auth.matrices import permit
from trellis.auth.principals import Principal
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger

if TYPE_CHECKING:  # loads the whole platform, so it is imported only when an instance is opened
    from trellis.app.instance import Instance
    from trellis.bus.pointers import Pointers


LIMIT_DEFAULT = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiContext:
    """One caller on one instance."""

    ledger: Ledger
    """The ledger, restricted to what the caller may read."""
    reader: Principal
    """The caller, for the checks of what it may read. On a local ledger, whoever can open the file reads it."""
    permit: Callable[[str], Actor]
    """The caller as an actor, if the rule of this name allows it; raises NotAllowed."""
    instance: "Callable[[], Awaitable[Instance]]"
    """The whole instance, opened on the first call. Raises if a store is missing."""
    pointers: "Callable[[], Awaitable[Pointers]]"
    """Reads what jobs on topics point to. It needs less than an instance."""

    def check_read(self, rule: str) -> None:
        """Raise NotAllowed unless the rule of this name lets the caller read."""
        permit(self.reader, rule)

    async def now(self) -> datetime:
        """The time of the ledger."""
        return await self.ledger.now()
