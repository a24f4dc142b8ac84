"""The protocol on standard input and output: one message in each line."""

import asyncio
import json
import selectors
import sys
from typing import Any, BinaryIO

from trellis.engine.errors import OptionInvalid
from trellis.mcp_server.protocol import INVALID_REQUEST, PARSE_ERROR, McpRefused, McpServer

LINE_BYTES_MAX = 2 * 1024 * 1024
"""The most bytes of one message: a payload of the largest size, with room for its escapes."""


async def serve_stdio(server: McpServer) -> None:
    """Answer messages of standard input, one after another, until it ends.

    Raises OptionInvalid if standard input is closed, a file, or a device that nobody can wait for, such as /dev/null.
    """
    reader, output = await _reader(), sys.stdout.buffer
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            line = error.partial  # the last line may have no end
        except asyncio.LimitOverrunError:
            # Where the next message begins is not known, so this one is the last.
            _write(output, McpRefused(INVALID_REQUEST, f"a message has at most {LINE_BYTES_MAX} bytes").document(None))
            return
        if not line:
            return
        answer = await _answer(server, line)
        if answer is not None:
            _write(output, answer)


async def _answer(server: McpServer, line: bytes) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return McpRefused(PARSE_ERROR, "a line of standard input is one JSON-RPC message").document(None)
    return await server.answer(message)


async def _reader() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] - Python sets it so if the descriptor is closed
        raise _no_pipe("closed")
    try:
        # The event loop would try this in a callback, where a failure ends nothing and the reader waits for ever.
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
        )
    except (ValueError, OSError) as error:
        raise _no_pipe("a file, or a device such as /dev/null") from error
    return reader


def _no_pipe(value: str) -> OptionInvalid:
    expected = "a pipe, as a client of the protocol opens it when it starts this command"
    return OptionInvalid(option="standard input", value=value, expected=expected)


def _write(output: BinaryIO, answer: dict[str, Any]) -> None:
    output.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
    output.flush()
