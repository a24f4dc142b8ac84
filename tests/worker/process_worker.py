"""A worker with handlers that run in processes of their own, as a program of its own: a test kills it."""

import asyncio

from tests.worker.process_jobs import app
from trellis import WorkerOptions
from trellis.ledgers import open_ledger
from trellis.testing import run_until_idle


def serve(url: str) -> None:
    """Runs a worker of this application until it is killed."""

    async def run() -> None:
        await run_until_idle(app, await open_ledger(url), options=WorkerOptions(name="short-lived"))

    asyncio.run(run())
