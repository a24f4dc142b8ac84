"""An SQLite ledger that was lost, while the local folder of objects still has the audit records of it."""

from pathlib import Path

from trellis.cli.invocation import Cli, sqlite_path
from trellis.engine.errors import Refused


async def refuse_lost_ledger(cli: Cli) -> None:
    """Raise Refused if the SQLite ledger is missing or empty and there are audit records of one.

    A new ledger beside them would hide that the old one is lost, and no rebuild fills a ledger that has a job of its
    own. A ledger is older than its records: one that appears while they are looked for was just made by another process.
    """
    folder = await records_of_lost_ledger(cli)
    ledger = sqlite_path(cli.url)
    if folder is None or ledger is None or _has_content(ledger):
        return
    problem = "is empty" if ledger.exists() else "does not exist"
    raise Refused(
        detail=f"The ledger {ledger} {problem}, and {folder} has audit records: the ledger was lost, or is"
        " elsewhere. Bring it back, or make it again from the records with `trellis rebuild --from objects`; to begin"
        f" with an empty ledger, move {folder} away."
    )


async def records_of_lost_ledger(cli: Cli) -> Path | None:
    """The local folder of objects with audit records, if the SQLite ledger is missing or empty; else None."""
    ledger = sqlite_path(cli.url)
    return None if ledger is None or _has_content(ledger) else await _folder_with_records(cli)


def _has_content(file: Path) -> bool:
    """Whether there is a ledger in this file. If that cannot be known, it is to be opened, which says why not."""
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:
        return False
    except OSError:
        return True


async def _folder_with_records(cli: Cli) -> Path | None:
    """The local folder of the instance's objects if it has audit records; None in a bucket, which is not asked."""
    from trellis.app.fleet import storage_locations
    from trellis.documents import ids
    from trellis.storage.objects.address import read_address
    from trellis.storage.objects.open import open_objects

    place = storage_locations(cli.settings, cli.url).objects
    folder = read_address(place)
    if not isinstance(folder, Path) or not folder.is_dir():
        return None
    objects = await open_objects(place)
    try:
        records = await objects.list(f"{ids.AUDIT_FOLDER}/", limit=1)
    finally:
        await objects.close()
    return folder if records.items else None
