"""Who migrates a ledger, and the administrative act that both ledgers record of it (OBS-1)."""

import getpass
import os
import time
from dataclasses import dataclass, field

from trellis.engine.admin_acts import LEDGER_SUBJECT, MIGRATED, NewAct, this_node
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role

OPENED = "an older ledger was opened by a newer program"
"""Why a ledger was migrated that nobody asked to migrate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MigratedBy:
    """Who migrates, from which machine, why and when; PostgreSQL takes the moment from its own clock."""

    name: str
    node: str = field(default_factory=this_node)
    cause: str | None = None
    at: float = field(default_factory=time.time)

    @property
    def actor(self) -> Actor:
        """Whoever may change the schema administers the ledger."""
        return Actor(role=Role.CONTROL_PLANE, name=self.name)


def migrated_by(name: str | None = None, *, cause: str | None = None) -> MigratedBy:
    """The one who migrates; by default this process, named like every process: user, machine and number."""
    return MigratedBy(name=name or f"{_user()}@{this_node()}:{os.getpid()}", cause=cause)


def migration_act(by: MigratedBy, before: int, version: int) -> NewAct:
    """The act: from which schema version to which."""
    source = f"version {before}" if before else None
    return NewAct(event=MIGRATED, subject=LEDGER_SUBJECT, source=source, target=f"version {version}", cause=by.cause)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "migrate"
