"""Keeps a job in one of its held stages until the test lets it go, or makes the stage fail."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from tests.research.rig import Nlm, Rig, accept_only, finish
from trellis.research.backend_client import ExecutionRequest, ExecutionUnderWay
from trellis.storage.memory.errors import MemoryUnavailable
from trellis.storage.objects.store import StoreUnavailable

CONTEXT, CALL, WRITE = "CONTEXT_ASSEMBLY", "NOTEBOOKLM_CALL", "ARTIFACT_WRITE"
STAGES = (CONTEXT, CALL, WRITE)


class Gate:
    """Stands before one method of another object, and lets everything else through."""

    def __init__(self, behind: Any, method: str) -> None:
        self._behind, self._method = behind, method
        self.open = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._behind, name)
        if name != self._method:
            return found

        async def waits(*args: Any, **named: Any) -> Any:
            await self.open.wait()
            return await found(*args, **named)

        return waits


@asynccontextmanager
async def held_in(rig: Rig, job_id: str, stage: str) -> AsyncGenerator[Gate]:
    """The job in this stage, with its holder at work."""
    driver = rig.orchestrator.driver
    assembly, artifacts, answer = driver.assembly, driver.artifacts, rig.nlm.answer
    gate = Gate(assembly if stage == CONTEXT else artifacts, "assemble" if stage == CONTEXT else "staged_bytes")
    if stage == CONTEXT:
        driver.assembly = gate  # type: ignore[assignment]
    elif stage == CALL:
        rig.nlm.answer = accept_only
    else:
        driver.artifacts, rig.nlm.answer = gate, finish  # type: ignore[assignment]
    try:
        await rig.work(job_id, stage)
        yield gate
    finally:
        driver.assembly, driver.artifacts, rig.nlm.answer = assembly, artifacts, answer


class Unreadable:
    """An object store in which one prefix cannot be read."""

    def __init__(self, behind: Any, prefix: str) -> None:
        self._behind, self._prefix = behind, prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    async def get(self, key: str, **named: Any) -> Any:
        if key.startswith(self._prefix):
            raise StoreUnavailable(verb="get", key=key, reason="permission denied")
        return await self._behind.get(key, **named)


class NoMemory:
    """A memory backend that does not answer."""

    async def read(self, *_: Any) -> None:
        raise MemoryUnavailable(reason="timed out")


async def wrong_hash(nlm: Nlm, execution: ExecutionRequest) -> ExecutionUnderWay:
    """Stage one thing and announce another."""
    staged = await nlm.stage(execution)
    called = await nlm.complete(execution, staged, sha256="0" * 64)
    assert called.status_code == 202, called.text
    return ExecutionUnderWay(accepted=True, job_id=execution.job_id)
