"""Audit records of acts that are no event of a job: a request that was refused, a rebuild (OBS-1, PIPE-8).

A record is an object of its own beside those of events, with the same fields first. It is made once, under an id of its own, and says
nothing that a rebuild would need: `audit.is_of_event` tells the two apart.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from trellis.engine.errors import TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.runs import ids
from trellis.runs.audit import ORCHESTRATOR_NAME
from trellis.storage.documents import encode, timestamp
from trellis.storage.objects import CREATE, ObjectStore, Stored, StoreError

KEYS_MAX = 1_000
"""Objects that the record of one act names; beyond it they are counted only."""
ERROR_CHARS_MAX = 500
NUMBERS_MAX = 10
"""Rebuilds that may end in the same microsecond of the ledger: a clock can be put back."""

_log = log_of("trellis.audit")


def document(event: str, event_id: str, at: datetime, roles: str, name: str, facts: Mapping[str, Any]) -> bytes:
    """The record of one act: the fields of document 000, who did it by name, and what is known of it."""
    told = {
        "ts": timestamp(at),
        "event": event,
        "actor": ORCHESTRATOR_NAME if roles == "orchestrator" else roles,
        "job_id": None,
        "from": None,
        "to": None,
        "node": name.partition("@")[2] or None,
        "event_id": event_id,
        "actor_name": name,
    }
    return encode(told | dict(facts))


@dataclass(kw_only=True)
class Rebuild:
    """What a rebuild did, while it is under way."""

    written: list[str] = field(default_factory=list[str])
    """The objects that it made, by key, at most KEYS_MAX."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def wrote(self, key: str) -> None:
        """An object was made."""
        if len(self.written) < KEYS_MAX:
            self.written.append(key)


@asynccontextmanager
async def recorded_rebuild(ledger: Ledger, objects: ObjectStore, actor: Actor, event: str) -> AsyncGenerator[Rebuild]:
    """Record who rebuilt what, when it is over; one that fails is recorded with its error."""
    act = Rebuild()
    try:
        yield act
    except TrellisError as error:
        try:
            await _record(
                ledger, objects, actor, event, act, error=f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]
            )
        except StoreError as away:
            _log.error("rebuild_not_recorded", actor=actor.name, act=event, error=str(away))
        raise
    await _record(ledger, objects, actor, event, act, error=None)


async def _record(
    ledger: Ledger, objects: ObjectStore, actor: Actor, event: str, act: Rebuild, *, error: str | None
) -> None:
    at = await ledger.now()
    facts = {"objects_written": act.written, **act.facts, "error": error}
    for number in range(1, NUMBERS_MAX + 1):
        event_id = f"{event.replace('.', '-')}-{at:%H%M%S%f}-{number}"
        body = document(event, event_id, at, actor.role.value, actor.name, facts)
        if isinstance(await objects.put(ids.audit_key(at, event_id), body, when=CREATE), Stored):
            return
    _log.error("rebuild_not_recorded", actor=actor.name, act=event, error="its name is taken")
