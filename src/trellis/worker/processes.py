"""Processes for sync handlers with `runner="process"`: work that needs the CPU and must be stoppable.

Each process runs one handler call at a time and is used again. A timeout, a lost lease and a drain end the process of that
job, by its id; a soft cancel does so after a grace period. A process that dies costs its own job an attempt; the worker
and the other jobs go on. Processes are started anew (spawned), never forked, so they share nothing with the worker.
"""

import asyncio
import json
import pickle
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Any

from trellis.engine.clock import Clock
from trellis.engine.errors import JobError, OptionInvalid, PermanentError, ProcessCrashed
from trellis.worker.app import JobSpec
from trellis.worker.held import AttemptState
from trellis.worker.parameters import name_of
from trellis.worker.payloads import NULL
from trellis.worker.process_child import FRAME_BYTES_MAX, LENGTH, ProcessOrder, ProcessReply

CALLS_MAX = 1_000
"""How many calls one process runs before another takes its place, so that no leak of memory grows for ever."""
GRACE_S = 2.0
"""How long a handler may go on after a soft cancel before its process is ended."""
MAIN = "__main__"


class ProcessEnded(JobError):
    """The process of a handler was ended, because the handler did not stop after a cancel request."""


class ProcessTraceback(Exception):
    """The traceback of an error in another process, as the cause of the error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Processes:
    """At most `size` processes, started on demand. Further calls wait for one."""

    def __init__(self, size: int, clock: Clock) -> None:
        self._clock = clock
        self._free = asyncio.Semaphore(size)
        self._idle: list[_HandlerProcess] = []
        self._numbers = 0

    async def run(self, spec: JobSpec, context: Any, state: AttemptState, payload: Any) -> Any:
        """Runs the handler of a job in a process. Raises what it raised, or ProcessCrashed."""
        async with self._free:
            process = await self._take()
            try:
                self._numbers += 1
                reply = await process.call(self._order(spec, context, payload), context, state, self._clock)
            finally:
                if process.usable:
                    self._idle.append(process)
                else:
                    await process.end()
        state.heard = state.heard or reply.heard
        if reply.text:
            raise _error_of(reply)
        return None if reply.result is None else spec.codec.read_result(reply.result)

    async def close(self) -> None:
        """Ends every process that runs nothing. The others end with their calls."""
        idle, self._idle = self._idle, []
        for process in idle:
            await process.end()

    async def _take(self) -> "_HandlerProcess":
        while self._idle:
            process = self._idle.pop()
            if process.usable:
                return process
            await process.end()
        return await _HandlerProcess.start()

    def _order(self, spec: JobSpec, context: Any, payload: Any) -> ProcessOrder:
        name = spec.parameters.payload
        about = ("job_id", "type", "attempt", "max_attempts", "epoch", "correlation_id")
        return ProcessOrder(
            number=self._numbers,
            module=spec.handler.__module__,
            function=spec.handler.__qualname__,
            main=_main() if spec.handler.__module__ == MAIN else None,
            type=spec.type,
            payload_name=name,
            payload=NULL if name is None else spec.codec.payload_bytes(payload),
            serializer=spec.serializer,
            about={one: getattr(context, one) for one in about},
        )


class _HandlerProcess:
    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._calls = 0
        self._busy = False

    @classmethod
    async def start(cls) -> "_HandlerProcess":
        ours, theirs = socket.socketpair()
        with ExitStack() as failed:
            failed.callback(ours.close)
            with theirs:
                process = await _started(theirs.fileno())
            reader, writer = await asyncio.open_connection(sock=ours)
            failed.pop_all()
        return cls(process, reader, writer)

    @property
    def usable(self) -> bool:
        """Whether the process lives, runs nothing and has calls left."""
        return self._process.returncode is None and not self._busy and self._calls < CALLS_MAX

    async def call(self, order: ProcessOrder, context: Any, state: AttemptState, clock: Clock) -> ProcessReply:
        self._calls += 1
        self._busy = True
        stopping = asyncio.ensure_future(self._stop_when_asked(order.number, state, clock))
        try:
            await self._send(order)
            reply = await self._reply(order.number, context)
        except (EOFError, OSError) as error:
            raise await self._died(stopping) from error
        finally:
            stopping.cancel()
        self._busy = False
        return reply

    async def end(self) -> None:
        """Kills the process by its id and waits until it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._writer.close()
        await self._process.wait()

    async def _stop_when_asked(self, number: int, state: AttemptState, clock: Clock) -> None:
        """Passes a soft cancel on, and kills the process when the grace period is over."""
        await state.stop_event.wait()
        with suppress(OSError):
            await self._send(number)
        await clock.sleep(GRACE_S)
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _reply(self, number: int, context: Any) -> ProcessReply:
        while True:
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if size > FRAME_BYTES_MAX:
                raise PermanentError(f"the process sent {size} bytes, and the limit is {FRAME_BYTES_MAX}")
            kind, of, body = pickle.loads(await self._reader.readexactly(size))  # noqa: S301 - our own process sent it
            if of != number:
                continue
            if kind == "reply":
                return body
            context.progress(json.loads(body))

    async def _send(self, frame: ProcessOrder | int) -> None:
        body = pickle.dumps(frame)
        self._writer.write(LENGTH.pack(len(body)) + body)
        await self._writer.drain()

    async def _died(self, stopping: "asyncio.Future[None]") -> JobError:
        code = await self._process.wait()
        if stopping.done():
            return ProcessEnded(
                f"its process did not stop within {GRACE_S:g} s after the cancel request, and was killed"
            )
        return ProcessCrashed(f"the process of the handler {_how(code)}; the worker and its other jobs went on")


async def _started(number: int) -> asyncio.subprocess.Process:
    """Starts a process that serves this file descriptor.

    The import path goes along, because the application may have been found through a folder of its own. In a session of
    its own, the process does not get the terminal's signals: its worker drains first.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from trellis.worker.process_child import main; main({number})"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.DEVNULL, pass_fds=(number,), start_new_session=True
    )


def check_importable(spec: JobSpec) -> None:
    """Raises OptionInvalid unless another process can import the handler and gets all that it takes."""
    handler = spec.handler
    place: Any = sys.modules.get(handler.__module__)
    for part in handler.__qualname__.split("."):
        place = getattr(place, part, None)
    if place is not handler:
        raise _not_for_a_process(spec, "must be at the top level of a module, where another process can import it")
    if spec.parameters.resources:
        raise _not_for_a_process(spec, "gets no resources: they live in the worker; open what it needs inside of it")
    try:
        pickle.dumps(spec.serializer)
    except (pickle.PicklingError, TypeError, AttributeError):
        raise _not_for_a_process(spec, "needs a serializer that can be pickled") from None


def _not_for_a_process(spec: JobSpec, rule: str) -> OptionInvalid:
    return OptionInvalid(
        option=f"runner of {spec.type}",
        value=name_of(spec.handler),
        expected=f"a handler with runner='process' {rule}",
    )


def _error_of(reply: ProcessReply) -> BaseException:
    error: BaseException
    error = RuntimeError(reply.text) if reply.error is None else pickle.loads(reply.error)  # noqa: S301 - our own process
    error.__cause__ = ProcessTraceback(reply.traceback)
    return error


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}" + (", as it is when memory runs out" if -code == signal.SIGKILL else "")


def _main() -> dict[str, Any]:
    """How another process imports the `__main__` of this one."""
    from multiprocessing import spawn  # only a handler of `__main__` needs it

    data = spawn.get_preparation_data("trellis-handler")
    return {name: value for name, value in data.items() if name.startswith("init_main")}
