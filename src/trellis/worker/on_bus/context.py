"""The `ctx` of a job that came over the bus: the same interface as on a ledger, as far as the bus supports it.

A bus worker has no ledger. `checkpoint`, `journal` and `submit` raise `NeedsLedger`, which fails the job permanently
with a message that says where such a handler can run.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

from trellis.bus.requests import JobRequest
from trellis.engine.clock import Clock
from trellis.engine.errors import PermanentError
from trellis.engine.event_data import ArtifactPointer, add_artifact
from trellis.engine.jobs import Epoch, JobId
from trellis.worker.context import AttemptContext
from trellis.worker.held import JobLogger, LogBuffer
from trellis.worker.on_bus.attempt import OrderAttempt
from trellis.worker.payloads import state_json_bytes


class NeedsLedger(PermanentError):
    """A worker on the bus has no ledger."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"ctx.{what} needs a ledger, and a worker on the bus has none: run this handler with `trellis worker` without --bus",
            error_code="NEEDS_LEDGER",
        )


def _awaited(what: str) -> "Callable[..., Awaitable[Any]]":
    """A method of `Context` that needs a ledger."""

    async def refuse(self: "BusContext", *_: Any, **__: Any) -> NoReturn:  # noqa: ARG001 - the shape of a method
        _needs_ledger(what)

    return refuse


class BusContext(AttemptContext):
    """One attempt of one job on the bus. Handlers may annotate it as `Context`: what both have behaves the same."""

    def __init__(self, attempt: OrderAttempt, *, worker_id: str, clock: Clock, stopping: Callable[[], bool]) -> None:
        super().__init__(attempt, clock)
        self._attempt = attempt
        self._stopping = stopping
        self.worker_id = worker_id
        """The id of the worker that runs this attempt."""

    @property
    def request(self) -> JobRequest:
        """The whole request; its `job_id` is the id on the wire."""
        return self._attempt.request

    @property
    def env(self) -> Mapping[str, str]:
        return self._attempt.request.env

    @property
    def labels(self) -> Mapping[str, str]:
        return self._attempt.request.labels

    @property
    def job_id(self) -> JobId:
        """The job's id. It is the same for all attempts on an idempotent topic."""
        return self._attempt.job_id

    @property
    def type(self) -> str:
        return self._attempt.request.topic

    @property
    def attempt(self) -> int:
        return self._attempt.number

    @property
    def max_attempts(self) -> int:
        """The number of this attempt: the bus does not tell workers how many attempts are allowed."""
        return self._attempt.number

    @property
    def epoch(self) -> Epoch:
        """The fencing token: pass it to a store that can refuse a lower one. 0 if the scheduler has none."""
        return self._attempt.epoch

    @property
    def idempotency_key(self) -> str:
        """The job id, equal for all attempts of this job: pass it to the services this handler calls."""
        return self._attempt.job_id

    @property
    def correlation_id(self) -> str:
        """The trace id of the job's packet."""
        return self._attempt.trace_id

    @property
    def trace(self) -> str | None:
        return self._attempt.trace

    @property
    def parent_id(self) -> JobId | None:
        """The parent job, if this job is a step of one."""
        return JobId(self._attempt.request.parent_job_id) if self._attempt.request.parent_job_id else None

    @property
    def stopping(self) -> bool:
        return self._stopping()

    @property
    def last_checkpoint(self) -> None:
        """Always None: the bus has no checkpoints."""
        return

    @property
    def logger(self) -> JobLogger:
        """Logs to this process's log only."""
        if self._logger is None:
            self._logger = self._new_logger(LogBuffer(), job_id=self.job_id, type=self.type, attempt=self.attempt)
        return self._logger

    def progress(self, value: Any) -> None:
        """Reports the job's progress, about once a second.

        A number is a percentage. The keys of `{"percent", "step", "message"}` fill the fields of the same name.
        """
        body = state_json_bytes(value, f"the progress of {self.type}")
        self._attempt.note_progress(value, body.decode())

    def artifact(
        self, pointer: str, *, name: str | None = None, sha256: str | None = None, size: int | None = None
    ) -> None:
        """Names an artifact of this job. Only its pointer is sent: the bus has no field for the rest."""
        add_artifact(self._attempt.artifacts, ArtifactPointer(pointer=pointer, name=name, sha256=sha256, size=size))

    checkpoint, journal, submit, step = map(_awaited, ("checkpoint", "journal", "submit", "step"))
    sleep, sleep_until, gather, first = map(_awaited, ("sleep", "sleep_until", "gather", "first"))
    wait_signal, version, continue_as_new = map(_awaited, ("wait_signal", "version", "continue_as_new"))
    batch, batch_results = map(_awaited, ("batch", "batch_results"))

    def spawn(self, *_: Any, **__: Any) -> NoReturn:
        """Needs a ledger, as the calls above."""
        _needs_ledger("spawn")


def _needs_ledger(what: str) -> NoReturn:
    raise NeedsLedger(what)
