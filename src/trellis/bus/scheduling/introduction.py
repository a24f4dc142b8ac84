"""The scheduler's own handshake: CAP wants every component to say on `sys.handshake` who it is and what it speaks."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from trellis.bus.errors import BusError
from trellis.bus.messages import HANDSHAKE, Handshake
from trellis.bus.port import Bus
from trellis.engine.logs import log_of

HANDSHAKE_INTERVAL_S = 30.0
"""How often it is said again, for those that began later; and how soon after an outage of the bus."""
CAPABILITIES = ("cancel", "compensation", "error_codes", "progress", "workflows")
"""CAP's names for what this control plane does."""
DISTRIBUTION = "trellis-engine"

_log = log_of("trellis.bus.scheduling")


@dataclass(kw_only=True)
class SchedulerHandshake:
    """The service: one handshake in a pass."""

    bus: Bus
    new_id: Callable[[], str]
    name: str = "bus-introduction"

    async def run_once(self) -> bool:
        """Say it; False while the bus does not take it."""
        try:
            await self.bus.publish(HANDSHAKE, self.handshake(), trace_id=self.new_id())
        except BusError as error:
            _log.debug("handshake_not_sent", error=str(error))
            return False
        return True

    def pause_s(self, report: bool) -> float:  # noqa: FBT001 - the shape of every service: what a pass said
        """Until the next time."""
        return HANDSHAKE_INTERVAL_S if report else HANDSHAKE_INTERVAL_S / 10

    def handshake(self) -> Handshake:
        """Who we are."""
        return Handshake(
            component_id=self.bus.sender_id,
            role="scheduler",
            capabilities=dict.fromkeys(CAPABILITIES, True),
            sdk_version=f"trellis {_version()}",
        )


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unpacked"
