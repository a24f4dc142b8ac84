"""The author of a ledger migration, and the administrative act that both ledgers record for it (OBS-1)."""

import getpass
import os
import time
from dataclasses import dataclass, field

from trellis.engine.admin_acts import LEDGER_SUBJECT, MIGRATED, NewAct, this_node
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role

OPENED = "an older ledger was opened by a newer program"
"""The cause of a migration that happened on opening, without a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MigratedBy:
    """Who migrates, from which machine, why and when. PostgreSQL uses its own clock for the time."""

    name: str
    node: str = field(default_factory=this_node)
    cause: str | None = None
    at: float = field(default_factory=time.time)

    @property
    def actor(self) -> Actor:
        """The author as an actor: whoever may change the schema administers the ledger."""
        return Actor(role=Role.CONTROL_PLANE, name=self.name)


def migrated_by(name: str | None = None, *, cause: str | None = None) -> MigratedBy:
    """The author of a migration; by default this process, named by user, machine and process number."""
    return MigratedBy(name=name or f"{_user()}@{this_node()}:{os.getpid()}", cause=cause)


def migration_act(by: MigratedBy, before: int, version: int) -> NewAct:
    """The administrative act of a migration, from one schema version to another."""
    source = f"version {before}" if before else None
    return NewAct(event=MIGRATED, subject=LEDGER_SUBJECT, source=source, target=f"version {version}", cause=by.cause)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "migrate"
