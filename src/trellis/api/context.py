"""What the parts of the application work with: a ledger as its caller may read it, who calls, and the instance."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from trellis.api.requests import IdempotentRequest, single_request
from trellis.auth.matrices import permit
from trellis.auth.principals import Principal
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger

if TYPE_CHECKING:  # loads the whole platform, so it is imported only when an instance is opened
    from trellis.app.instance import Instance
    from trellis.bus.pointers import Pointers
    from trellis.bus.topics import Topics


LIMIT_DEFAULT = 50


class ActingPrincipal(Protocol):
    """Returns the caller as a principal for a change; raises NotAllowed."""

    def __call__(self, *, operator: bool) -> Principal:
        """The caller, as an operator if asked. On a local SQLite ledger an operator can read the ledger's key."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiContext:
    """One caller on one instance."""

    ledger: Ledger
    """The ledger, restricted to what the caller may read."""
    changes: Ledger
    """The same ledger without that restriction, for changes. A rule is asked before each of them."""
    reader: Principal
    """The caller, for the checks of what it may read. On a local ledger, whoever can open the file reads it."""
    acting: ActingPrincipal
    """The caller, for rules about a single job: a submitter may cancel its own job and needs no operator's key."""
    permit: Callable[[str], Actor]
    """The caller as an actor, if the rule of this name allows it; raises NotAllowed."""
    instance: "Callable[[], Awaitable[Instance]]"
    """The whole instance, opened on the first call. Raises if a store is missing."""
    pointers: "Callable[[], Awaitable[Pointers]]"
    """Reads what jobs on topics point to. It needs less than an instance."""
    topics: "Callable[[], Topics]"
    """The configuration of topics, pools and tenants. Raises BusConfigInvalid."""
    bus_problem: Callable[[], Awaitable[str | None]]
    """Why the server of the bus cannot be reached now; None if it can be, or if there is none."""
    cancel_grace_s: float
    """How long a job may continue after a soft cancel, unless the call says otherwise."""
    request: IdempotentRequest | None = None
    """The request of a route that changes something."""

    def check_read(self, rule: str) -> None:
        """Raise NotAllowed unless the rule of this name lets the caller read."""
        permit(self.reader, rule)

    def request_of(self, key: str | None) -> IdempotentRequest:
        """The request of the route; of a call without one, a request under this key, or of its own."""
        return self.request or single_request(key)

    async def now(self) -> datetime:
        """The time of the ledger."""
        return await self.ledger.now()


class ApiPart:
    """One part of the application, such as its runs, for one caller."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
