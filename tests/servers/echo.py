"""An HTTP server in a thread that refuses everything and repeats the credentials it was sent, as careless servers do."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Repeats(BaseHTTPRequestHandler):
    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        sent = self.headers.get("Authorization", "")
        body = json.dumps({"error": {"message": f"NLM refuses: incorrect API key provided: {sent}"}}).encode()
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _refuse  # noqa: N815 - the library's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


@contextmanager
def repeating_server() -> Iterator[str]:
    """Its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Repeats)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
