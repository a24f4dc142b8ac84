"""An SQLite ledger that was lost, while the objects of the instance still have the audit records of it."""

import os
from pathlib import Path

from trellis.cli.invocation import Cli, sqlite_path
from trellis.engine.closing import closing
from trellis.engine.errors import Refused


async def refuse_lost_ledger(cli: Cli) -> None:
    """Raise Refused if the SQLite ledger is missing or empty and there are audit records of one.

    A new ledger beside them would hide that the old one is lost, and no rebuild fills a ledger that has a job of its
    own. A ledger is older than its records: one that appears while they are looked for was just made by another process.
    """
    place = await records_of_lost_ledger(cli)
    ledger = sqlite_path(cli.url)
    if place is None or ledger is None or _has_content(ledger):
        return
    problem = "is empty" if ledger.exists() else "does not exist"
    raise Refused(
        detail=f"The ledger {ledger} {problem}, and {place} has audit records: the ledger was lost, or is"
        " elsewhere. Bring it back, or make it again from the records with `trellis rebuild --from objects`; to begin"
        f" with an empty ledger, {beginning_anew(place)}."
    )


async def records_of_lost_ledger(cli: Cli) -> str | None:
    """Where the objects with audit records are, if the SQLite ledger is missing or empty; else None.

    Raises StoreError if a bucket is needed to know it and does not answer.
    """
    ledger = sqlite_path(cli.url)
    return None if ledger is None or _has_content(ledger) else await _place_with_records(cli)


def beginning_anew(place: str) -> str:
    """What leaves the records alone when somebody wants an empty ledger; a bucket is not moved."""
    return "set TRELLIS_OBJECTS to another bucket or prefix" if place.startswith("s3:") else f"move {place} away"


def _has_content(file: Path) -> bool:
    """Whether there is a ledger in this file. If that cannot be known, it is to be opened, which says why not."""
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:
        return False
    except OSError:
        return True


async def _place_with_records(cli: Cli) -> str | None:
    """The folder or the bucket of the instance's objects if it has audit records."""
    from trellis.app.fleet import storage_locations
    from trellis.documents import ids
    from trellis.storage.objects.address import read_address, s3_credentials
    from trellis.storage.objects.open import open_objects

    url = storage_locations(cli.settings, cli.url).objects
    place = read_address(url)
    if isinstance(place, Path) and not place.is_dir():
        return None
    async with closing(await open_objects(url, credentials=s3_credentials(os.environ))) as objects:
        records = await objects.list(f"{ids.AUDIT_FOLDER}/", limit=1)
    if not records.items:
        return None
    return str(place) if isinstance(place, Path) else f"s3://{place.bucket}/{place.prefix}"
