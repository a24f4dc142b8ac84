"""Publishes the audit records of administrative acts: one object each, create-only, made of what the ledger recorded (OBS-1, D35)."""

from trellis.engine.admin_acts import AdminAct
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.runs import audit, ids
from trellis.runs.publishing import Publisher

_log = log_of("trellis.projector")


class ActRecorder:
    """Publishes acts of one ledger. An object of that name with other bytes stays, is named once, and stops no other act."""

    def __init__(self, ledger: Ledger, actor: Actor, publisher: Publisher) -> None:
        self._ledger = ledger
        self._actor = actor
        self._publisher = publisher
        self.differing: set[str] = set()
        """Keys where something else is than the record of the act."""

    async def publish_new(self) -> int:
        """Publish the acts that have no record yet; how many records were written. Raises StoreUnavailable."""
        waiting = await self._ledger.acts(unpublished=True)
        written = sum([await self._publish(act) for act in waiting])
        published = [act for act in waiting if _key(act) not in self.differing]
        if published:
            await self._ledger.acts_published(self._actor, published)
        return written

    async def publish_all(self) -> int:
        """Publish every act whose record the store lacks, also those that had one; how many records were written."""
        written, last = 0, 0
        while page := await self._ledger.acts(after=last):
            written += sum([await self._publish(act) for act in page])
            await self._ledger.acts_published(self._actor, [act for act in page if _key(act) not in self.differing])
            last = page[-1].no
        return written

    async def _publish(self, act: AdminAct) -> bool:
        body, key = audit.act_to_bytes(act), _key(act)
        there = await self._publisher.create(key, body)
        if there != body and key not in self.differing:
            self.differing.add(key)
            _log.error("act_differs", key=key, event_id=act.id)
        return there is body


def _key(act: AdminAct) -> str:
    return ids.audit_key(act.at, act.id)
