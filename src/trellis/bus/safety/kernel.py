"""Safety kernels in this process: with a fixed policy, or with a policy file that is read again when it changes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from trellis.bus.errors import KernelUnavailable
from trellis.bus.requests import JobRequest
from trellis.bus.safety import evaluation
from trellis.bus.safety.decisions import DecisionKernel, PolicyInvalid, SafetyDecision
from trellis.bus.safety.evaluation import DecisionExplanation
from trellis.bus.safety.policy import ALLOW_ALL_POLICY, SafetyPolicy, cannot_read, read_bounded, read_policy_bytes

FILE_CHECK_S = 1.0
"""Minimum interval between checks of the file, in seconds."""


class SafetyKernel(DecisionKernel, Protocol):
    """A kernel with the calls for people, in addition to the scheduler's."""

    async def explain(self, request: JobRequest) -> DecisionExplanation:
        """The decision, and how it was made; raises KernelUnavailable."""
        ...

    async def snapshot(self) -> str:
        """The hash of the policy in force; raises KernelUnavailable."""
        ...

    async def close(self) -> None:
        """Release its resources."""
        ...


class PolicyKernel:
    """Decides by one fixed policy."""

    def __init__(self, policy: SafetyPolicy = ALLOW_ALL_POLICY) -> None:
        self.policy = policy

    async def check(self, request: JobRequest) -> SafetyDecision:
        """The policy's decision."""
        return evaluation.decide(self.policy, request)

    async def explain(self, request: JobRequest) -> DecisionExplanation:
        """The policy's decision, and why."""
        return evaluation.explain(self.policy, request)

    async def snapshot(self) -> str:
        """The policy's hash."""
        return self.policy.hash

    async def close(self) -> None:
        """Does nothing: there are no resources."""


class FileKernel:
    """Decides by the policy in a file.

    While the file is unreadable or invalid, no job is dispatched, not even by its last valid version.

    A changed file takes effect when the next check finds it unchanged: a half-written policy may be valid too, and
    allow more.
    """

    def __init__(self, file: Path, *, monotonic: Callable[[], float]) -> None:
        self.file = file
        self._monotonic = monotonic
        self._looked_at: float | None = None
        self._body: bytes | None = None
        self._found: SafetyPolicy | PolicyInvalid | None = None
        self._settled = True
        """Whether two checks in a row found the same content, or there was only one."""
        self._looking: asyncio.Future[None] | None = None
        """The running check of the file, or the last one.

        Only one runs at a time, however slow the disk is: each holds a thread.
        """

    async def policy(self) -> SafetyPolicy:
        """The policy in force; raises KernelUnavailable, which says what is wrong with the file."""
        if self._looking is None or (self._looking.done() and self._is_due()):
            self._looking = asyncio.ensure_future(self._look_beside())
        await asyncio.shield(self._looking)
        if isinstance(self._found, SafetyPolicy) and self._settled:
            return self._found
        changed = f"{self.file} has changed just now; it counts when it stays the same for {FILE_CHECK_S:g} s"
        raise KernelUnavailable(detail=changed if isinstance(self._found, SafetyPolicy) else str(self._found))

    def _is_due(self) -> bool:
        return self._looked_at is None or self._monotonic() - self._looked_at >= FILE_CHECK_S

    async def _look_beside(self) -> None:
        now = self._monotonic()
        await asyncio.to_thread(self._look)
        self._looked_at = now

    def _look(self) -> None:
        try:
            body = read_bounded(self.file)
        except OSError as error:
            self._body, self._found = None, cannot_read(self.file, error)
            return
        self._settled = body == self._body or self._looked_at is None
        if body == self._body:
            return
        self._body, self._found = None, None  # if parsing raises, the previous policy no longer applies
        try:
            self._found = read_policy_bytes(body, source=str(self.file))
        except PolicyInvalid as error:
            self._found = error
        self._body = body

    async def check(self, request: JobRequest) -> SafetyDecision:
        """The decision of the policy in force."""
        return evaluation.decide(await self.policy(), request)

    async def explain(self, request: JobRequest) -> DecisionExplanation:
        """The decision of the policy in force, and why."""
        return evaluation.explain(await self.policy(), request)

    async def snapshot(self) -> str:
        """The hash of the policy in force."""
        return (await self.policy()).hash

    async def close(self) -> None:
        """Does nothing: there are no resources."""
