"""Runs of agents: begin, look, wait, watch, cancel."""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from trellis.http.calls import GatewayCalls, GatewayRequest, path_of, read_shape
from trellis.http.errors import NotFound
from trellis.http.listing import LIMIT_DEFAULT, listed
from trellis.http.shapes import Begun, Page, RunListed, RunManifest, RunStatus, StepFile, Stopped
from trellis.http.streams import follow
from trellis.http.watching import changes, wait_for_last

ENDED = frozenset({"completed", "failed"})
NOT_MODIFIED = 304
CHANGES = ("run.status.changed", "run.step.completed")
"""Events after which status.json is another."""


class Runs:
    """Runs of agents: `client.runs`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls

    async def start(
        self,
        agent: str,
        params: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
        correlation_id: str | None = None,
    ) -> Begun:
        """Begin a run of an agent. The same key and request again is the same run.

        `correlation_id` is your own name for what the run belongs to; its events, proposals and audit records carry it.
        """
        body = {"agent_slug": agent, "params": dict(params or {})}
        body |= {} if correlation_id is None else {"correlation_id": correlation_id}
        return await self._calls.post(Begun, "/agents/run", body, key=idempotency_key)

    async def get(self, run_id: str) -> RunStatus:
        """One run, as its status.json says."""
        return await self._calls.get(RunStatus, path_of("runs", run_id))

    async def status(self, run_id: str, *, unless: RunStatus | None = None) -> RunStatus | None:
        """The same; None when it is still as `unless` says."""
        headers = {} if unless is None else {"If-None-Match": f'"{unless.version}"'}
        path = path_of("runs", run_id, "status")
        ask = GatewayRequest(method="GET", path=path, headers=headers, takes=frozenset({NOT_MODIFIED}))
        answer = await self._calls.ask(ask)
        return None if answer.status == NOT_MODIFIED else read_shape(RunStatus, answer, ask)

    async def list(
        self,
        *,
        agent: str | None = None,
        status: str | None = None,
        archived: bool = False,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> Page[RunListed]:
        """Runs, newest first; with `archived` only those that have ended."""
        only = "true" if archived else None
        return await listed(self._calls, RunListed, "/runs", limit, cursor, agent=agent, status=status, archived=only)

    async def steps(self, run_id: str) -> Sequence[StepFile]:
        """The files of the steps that are done, in order."""
        return (await self._calls.get(Page[StepFile], path_of("runs", run_id, "steps"))).items

    async def manifest(self, run_id: str) -> RunManifest:
        """What a run that ended left; raises NotFound before."""
        return await self._calls.get(RunManifest, path_of("runs", run_id, "manifest"))

    async def wait(self, run_id: str, timeout_s: float | None = None) -> RunStatus:
        """The run once it has completed or failed; raises TimeoutError."""
        return await wait_for_last(self.watch(run_id), self._calls.clock, timeout_s, f"run {run_id}")

    async def watch(self, run_id: str) -> AsyncGenerator[RunStatus]:
        """How the run stands, each time it has changed, until it has ended; never an older state after a newer one."""
        hints = follow(self._calls, {"run": run_id, "type": list(CHANGES)}, None)
        async with contextlib.aclosing(
            changes(lambda last: self._look(run_id, last), hints, ended=has_ended, clock=self._calls.clock)
        ) as states:
            async for state in states:
                yield state

    async def cancel(
        self, run_id: str, *, mode: str = "soft", reason: str | None = None, idempotency_key: str | None = None
    ) -> Stopped:
        """End a run: soft asks it to stop, hard ends it now. Raises WrongState once it has ended."""
        body = {"mode": mode, "reason": reason}
        return await self._calls.post(Stopped, path_of("runs", run_id, "cancel"), body, key=idempotency_key)

    async def _look(self, run_id: str, last: RunStatus | None) -> RunStatus | None:
        try:
            return await self.status(run_id, unless=last)
        except NotFound as error:
            if error.retry_after_s is None:
                raise
            return None  # written down, and not published yet


def has_ended(run: RunStatus) -> bool:
    """Whether nothing more happens to it."""
    return run.status in ENDED
