"""Ledger implementations of the engine's port, one package each, opened by URL."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from trellis.engine.errors import LedgerUrlInvalid
from trellis.engine.extras import Extra, extra_needed
from trellis.engine.ledger import Ledger
from trellis.ledgers.migration import migrated_by

_POSTGRES = ("postgresql://", "postgres://")


async def open_ledger(
    url: str,
    *,
    clock: Callable[[], float] = time.time,
    part: str | None = None,
    node: str | None = None,
    **options: Any,
) -> Ledger:
    """Open the ledger at `url`. `clock` is an SQLite ledger's time; PostgreSQL has its own and takes `options`.

    `part` names the component of Trellis: PostgreSQL lists its connections as `trellis-<part>`. `node` is the machine
    named in audit records; this machine by default.
    """
    if url.startswith("sqlite:") or url == ":memory:":
        from trellis.ledgers.sqlite.ledger import SqliteLedger

        return await SqliteLedger.open(url, clock=clock, node=node)
    if url.startswith(_POSTGRES):
        with extra_needed(Extra.POSTGRES, "A ledger on PostgreSQL"):
            from trellis.ledgers.postgres.lanes import LaneOptions
            from trellis.ledgers.postgres.ledger import PostgresLedger

        if node is not None:
            options["options"] = replace(options.get("options") or LaneOptions(), node=node)
        return await PostgresLedger.open(url, part=part, **options)
    raise LedgerUrlInvalid(url=url, reason="its scheme is not known")


async def migrate(url: str, *, by: str | None = None, reason: str | None = None, **options: Any) -> None:
    """Create or upgrade the schema of the ledger at `url`. An SQLite file is also migrated whenever it is opened.

    A change is recorded as an administrative act of `by`, by default this process, with the reason.
    """
    author = migrated_by(by, cause=reason)
    if url.startswith("sqlite:"):
        from trellis.ledgers.sqlite.connection import parse_url
        from trellis.ledgers.sqlite.schema import migrate as migrate_sqlite

        await asyncio.get_running_loop().run_in_executor(None, partial(migrate_sqlite, parse_url(url), by=author))
    elif url.startswith(_POSTGRES):
        with extra_needed(Extra.POSTGRES, "A ledger on PostgreSQL"):
            from trellis.ledgers.postgres.migrate import migrate as migrate_postgres

        await migrate_postgres(url, by=author, **options)
    else:
        raise LedgerUrlInvalid(url=url, reason="its scheme is not known")


__all__ = ["migrate", "open_ledger"]
