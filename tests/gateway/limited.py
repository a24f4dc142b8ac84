"""A server in a process of its own that may have few files open: `python -m tests.gateway.limited LIMIT`.

It prints its port and answers until its standard input ends; then it prints the errors that the event loop was told of.
"""

import asyncio
import logging
import resource
import sys

from tests.gateway.test_server import LOOPBACK, hello
from trellis.http_server.server import listen, serve_gateway


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def serve() -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["message"])))
    place, stop = listen(LOOPBACK, key_configured=False), asyncio.Event()
    serving = asyncio.create_task(
        serve_gateway(hello, place, LOOPBACK, stop, ready=lambda: say(place.url.rpartition(":")[2]))
    )
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    await serving
    say(str(told))


if __name__ == "__main__":
    limit = int(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    asyncio.run(serve())
