"""The process that runs handlers with `runner="process"`, and the frames between it and its worker.

A frame is a pickled tuple after its length in four bytes. The worker sends `ProcessOrder` and the number of an order that
should stop; the process answers with progress and, once for each order, a `ProcessReply`. Payload and result travel as the
JSON that the ledger stores. When the worker is gone, the process ends, whatever its handler does.
"""

import importlib
import os
import pickle
import queue
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from trellis.engine.jobs import PAYLOAD_BYTES_MAX, RESULT_BYTES_MAX, JobId
from trellis.engine.retry_policy import error_text
from trellis.worker.payloads import Codec, Serializer, UnreadablePayload, codec_for, state_json_bytes

TEXT_CHARS_MAX = 64 * 1024
"""How much of a traceback goes to the worker: more than it stores. An error may say anything, such as a whole document."""
FRAME_BYTES_MAX = max(PAYLOAD_BYTES_MAX, RESULT_BYTES_MAX) + 1024 * 1024
LENGTH = struct.Struct(">I")
TRACEBACK_FRAMES_MAX = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOrder:
    """One handler call, for a process that has nothing of its worker's memory."""

    number: int
    module: str
    function: str
    """The qualified name of the handler in its module."""
    main: Mapping[str, Any] | None
    """How to import the worker's `__main__`, if the handler is defined there."""
    type: str
    payload_name: str | None
    payload: bytes
    serializer: Serializer | None
    about: Mapping[str, Any]
    """The values of the context's properties."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessReply:
    """How a handler call ended: with a result as JSON, or with an error."""

    result: bytes | None = None
    error: bytes | None = None
    """The pickled exception; None if it cannot be pickled."""
    text: str = ""
    """The exception's class and message; empty if there is none."""
    traceback: str = ""
    heard: bool = False
    """Whether the handler saw the cancel request."""


class ProcessContext:
    """The `ctx` of a handler with `runner="process"`: who the job is, `progress` and `cancelled`.

    It has no ledger: `checkpoint`, `journal`, `submit`, `artifact` and `logger` are for handlers in the worker itself.
    """

    def __init__(self, order: ProcessOrder, report: Callable[[tuple[Any, ...]], None]) -> None:
        self._report = report
        self._number = order.number
        self.job_id: JobId = order.about["job_id"]
        self.type: str = order.about["type"]
        self.attempt: int = order.about["attempt"]
        """The number of this attempt, from 1."""
        self.max_attempts: int = order.about["max_attempts"]
        self.epoch: int = order.about["epoch"]
        """The fencing token: pass it to a store that can refuse a lower one."""
        self.idempotency_key: str = order.about["job_id"]
        self.correlation_id: str = order.about["correlation_id"]
        self.stop_requested = threading.Event()
        self.heard = False

    @property
    def cancelled(self) -> bool:
        """Whether the job was asked to stop. The process is ended a short while after that."""
        self.heard = self.heard or self.stop_requested.is_set()
        return self.heard

    def progress(self, value: Any) -> None:
        """Report the job's progress: anything with a JSON form."""
        self._report(("progress", self._number, state_json_bytes(value, f"the progress of {self.type}")))


class ProcessLine:
    """The child's end of the line to its worker."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._sending = threading.Lock()
        self._orders: queue.SimpleQueue[ProcessOrder] = queue.SimpleQueue()
        self._current: ProcessContext | None = None
        self._stopped = 0
        self._codecs: dict[tuple[str, str, str], tuple[Callable[..., Any], Codec]] = {}
        self._process = os.getpid()

    def serve(self) -> None:
        """Runs orders until the worker is gone."""
        threading.Thread(target=self._listen, name="trellis-orders", daemon=True).start()
        while True:
            self._run(self._orders.get())

    def _listen(self) -> None:
        while True:
            frame = self._receive()
            if isinstance(frame, ProcessOrder):
                self._orders.put(frame)
            else:
                self._stopped = frame
                if self._current is not None:
                    self._current.stop_requested.set()

    def _receive(self) -> Any:
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return pickle.loads(self._exactly(size))  # noqa: S301 - the worker that started this process sent it

    def _exactly(self, size: int) -> bytes:
        body = bytearray()
        while len(body) < size:
            try:
                part = self._line.recv(size - len(body))
            except OSError:
                part = b""
            if not part:
                os._exit(0)  # the worker is gone: end also a handler that never returns
            body += part
        return bytes(body)

    def _send(self, frame: tuple[Any, ...]) -> None:
        body = pickle.dumps(frame)
        with self._sending:
            self._line.sendall(LENGTH.pack(len(body)) + body)

    def _run(self, order: ProcessOrder) -> None:
        context = self._current = ProcessContext(order, self._send)
        if self._stopped == order.number:
            context.stop_requested.set()
        try:
            handler, codec = self._handler(order)
            reply = ProcessReply(result=self._result(order, handler, codec, context), heard=context.heard)
        except BaseException as error:  # noqa: BLE001 - whatever the handler raises is the outcome of its job
            reply = _failed(error, context)
        if os.getpid() != self._process:
            os._exit(0)  # a process that the handler forked has come out of the handler: the handler itself answers
        self._current = None
        self._send(("reply", order.number, reply))

    @staticmethod
    def _result(
        order: ProcessOrder, handler: Callable[..., Any], codec: Codec, context: ProcessContext
    ) -> bytes | None:
        arguments: dict[str, Any] = {}
        if order.payload_name is not None:
            payload = codec.read_payload(order.payload)
            if isinstance(payload, UnreadablePayload):
                raise ValueError(payload.detail)
            arguments[order.payload_name] = payload
        value = handler(context, **arguments)
        return None if value is None else codec.result_bytes(value)

    def _handler(self, order: ProcessOrder) -> tuple[Callable[..., Any], Codec]:
        key = (order.type, order.module, order.function)
        if key not in self._codecs:
            if order.main is not None:
                from multiprocessing import spawn  # only a handler of `__main__` needs it

                spawn.prepare(dict(order.main))
            handler: Any = reduce(getattr, order.function.split("."), importlib.import_module(order.module))
            codec = codec_for(
                order.type, handler, batch=False, payload_name=order.payload_name, serializer=order.serializer
            )
            self._codecs[key] = (handler, codec)
        return self._codecs[key]


def _failed(error: BaseException, context: ProcessContext) -> ProcessReply:
    text = "".join(traceback.format_exception(error, limit=-TRACEBACK_FRAMES_MAX))[-TEXT_CHARS_MAX:]
    return ProcessReply(error=_pickled(error), text=error_text(error), traceback=text, heard=context.heard)


def _pickled(error: BaseException) -> bytes | None:
    """The exception for the worker; None for one that cannot be sent, or that means something to the event loop."""
    if not isinstance(error, Exception):
        return None
    try:
        body = pickle.dumps(error)
        pickle.loads(body)  # noqa: S301 - bytes of the line above
    except Exception:  # noqa: BLE001 - an exception's own code may raise anything
        return None
    return body if len(body) <= RESULT_BYTES_MAX else None


def main(number: int) -> None:
    """Serves the worker at the other end of this file descriptor."""
    sys.argv[:] = ["trellis-handler"]
    ProcessLine(socket.socket(fileno=number)).serve()
