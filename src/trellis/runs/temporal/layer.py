"""The orchestration layer of runs that a Temporal server drives, as gateways and commands use it.

Needs no package of the extra `temporal`, except to ask the server whether it answers: the ledger is where runs are
requested, cancelled and scheduled.
"""

from dataclasses import dataclass

from trellis.documents.errors import TemporalAway
from trellis.engine.extras import Extra, extra_needed
from trellis.runs.orchestration import BuiltinLayer, LayerHealth
from trellis.runs.temporal.options import FEATURE, TemporalOptions

VENDOR = "temporal"


@dataclass(frozen=True, kw_only=True)
class TemporalLayer(BuiltinLayer):
    """The layer whose runs are driven by workflows of a Temporal server.

    Triggers, cancels and schedules are written to the ledger as with the built-in layer, so they are accepted while the
    server is away. The runs then wait in the ledger until it is back.
    """

    temporal: TemporalOptions

    async def health(self) -> LayerHealth:
        """Healthy if the ledger and the Temporal server answer. Raises SettingsInvalid, also for a missing extra."""
        await self.ledger.now()
        try:
            await check_server(self.temporal)
        except TemporalAway:
            return LayerHealth(healthy=False, vendor=VENDOR)
        return LayerHealth(healthy=True, vendor=VENDOR)


async def check_server(options: TemporalOptions) -> None:
    """Connect to the server once. Raises TemporalAway, SettingsInvalid and, without the extra, ExtraMissing."""
    with extra_needed(Extra.TEMPORAL, FEATURE):
        from trellis.runs.temporal.connection import connect
    await connect(options)
