"""How much of a tenant may be under way, as the configuration says it now.

The ledger keeps the limit that a tenant's first job came with. So each process of the scheduler says, once, what its configuration has for
the tenants that it names: a number that was changed there counts from the next start on, also for jobs that wait already. Tenants that
are not named keep the number that they began with, because whatever is said of a tenant stays in the ledger for good.
"""

from dataclasses import dataclass, field

from trellis.bus.topics import HELD_MAX_MAX, TENANT_KEY, Topics
from trellis.engine.errors import Refused
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.lifecycles import Role

WRITES_PER_PASS = 100
"""Tenants of which a pass says it; the others come with the next ones."""

SETTING = "held_max of this tenant in the topics file"
"""Why the limit changed, as its administrative act says it."""

_log = log_of("trellis.bus.scheduling.tenants")


@dataclass(kw_only=True)
class TenantLimits:
    """What this process has still to say."""

    ledger: Ledger
    topics: Topics
    name: str
    """Of this process."""
    _left: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._left = list(self.topics.tenants)

    async def write_limits(self) -> None:
        """Have the configured limits hold, as far as this process may. Raises LedgerError, and then the next pass goes on there."""
        for name in self._left[-WRITES_PER_PASS:][::-1]:
            limit = self.topics.tenant(name).held_max or HELD_MAX_MAX
            by = Actor(role=Role.CONTROL_PLANE, name=self.name)
            try:
                await self.ledger.limit_key(by, f"{TENANT_KEY}{name}", limit, cause=SETTING)
            except Refused as error:
                _log.warning("tenant_limit_not_set", tenant=name, held_max=limit, error=str(error))
            self._left.pop()
