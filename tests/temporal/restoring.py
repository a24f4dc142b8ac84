"""A ledger that is restored from a backup while the workflows of its runs go on."""

import asyncio
import shutil
from contextlib import closing
from pathlib import Path

import apsw

from tests.layers.temporal import TemporalRig

BUSY_MS = 5_000
LEDGER, OBJECTS = "ledger.db", "objects"


async def copy(source: Path, target: Path) -> None:
    """Copy a ledger's file, also onto a ledger that is open, and the objects beside it."""

    def copied() -> None:
        databases = [closing(apsw.Connection(str(folder / LEDGER))) for folder in (source, target)]
        with databases[0] as read, databases[1] as written:
            written.set_busy_timeout(BUSY_MS)
            with written.backup("main", read, "main") as copying:
                copying.step()
        for file in (target / OBJECTS).rglob("*"):  # the store keeps its folders open
            if file.is_file():
                file.unlink()
        shutil.copytree(source / OBJECTS, target / OBJECTS, dirs_exist_ok=True)

    await asyncio.to_thread(copied)


async def take_over(rig: TemporalRig) -> None:
    """The process dies, its lease ends, and another process claims the run."""
    await rig.kill()
    await rig.pass_time(40.0)
    await rig.start()
