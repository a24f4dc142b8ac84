"""Serves the console: the page that a browser opens at `/`, and the files that the page loads.

Invariants:
- Screens have addresses under `/console/`, a prefix that no route of the API has. Each is answered with the same page,
  which shows the screen. So an address means one thing whoever asks for it, and a wrong address of the API stays a 404.
- The page runs only scripts and styles that this gateway serves; nothing inline, nothing from elsewhere.
- File names under `/assets/` contain a digest of the file and are cached for good. The page itself is asked for again.
- The files are read into memory once, and a request can name only one of those.
- If the console was not built, the instance runs all the same, and `/` says what is missing.
"""

import gzip
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

FILES = Path(__file__).with_name("console_files")
"""Where `tools/console.py` puts the built console. Not in the repository; part of the wheel."""
PAGE = "index.html"
MISSING = "missing.txt"
"""Written by the build instead of the page: why the console could not be built."""
FILES_MAX = 500
GZIP_BYTES_MIN = 1_000

PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
ASSET_HEADERS: Mapping[str, str] = {"Cache-Control": "public, max-age=31536000, immutable"}


@dataclass(frozen=True)
class ConsoleFile:
    """One file of the console."""

    body: bytes
    media_type: str

    @cached_property
    def compressed(self) -> bytes | None:
        """The body for browsers that take gzip; None if it would not be smaller."""
        body = gzip.compress(self.body, mtime=0) if len(self.body) >= GZIP_BYTES_MIN else self.body
        return body if len(body) < len(self.body) else None

    def response(self, request: Request, headers: Mapping[str, str]) -> Response:
        """The file as a response to this request."""
        accepted = {one.partition(";")[0].strip() for one in request.headers.get("accept-encoding", "").split(",")}
        sent = {**headers, "Vary": "Accept-Encoding"}
        if "gzip" in accepted and self.compressed is not None:
            return Response(self.compressed, media_type=self.media_type, headers={**sent, "Content-Encoding": "gzip"})
        return Response(self.body, media_type=self.media_type, headers=sent)


def read_files(folder: Path) -> dict[str, ConsoleFile]:
    """The files of the built console by their path in the folder; without `index.html` if it was not built."""
    paths = sorted(one for one in folder.rglob("*") if one.is_file())[:FILES_MAX] if folder.is_dir() else []
    return {
        one.relative_to(folder).as_posix(): ConsoleFile(
            one.read_bytes(), mimetypes.guess_type(one.name)[0] or "application/octet-stream"
        )
        for one in paths
    }


def is_built(folder: Path = FILES) -> bool:
    """Whether there is a console to serve."""
    return (folder / PAGE).is_file()


def install(app: FastAPI, folder: Path = FILES) -> None:
    """Serve the console at `/`. Its files need no token: they are the same for everybody and reveal nothing."""
    files = read_files(folder)

    async def page(request: Request) -> Response:
        if PAGE not in files:
            return _not_built(files.get(MISSING))
        return files[PAGE].response(request, PAGE_HEADERS)

    async def asset(request: Request) -> Response:
        file = files.get(f"assets/{request.path_params['name']}")
        if file is None:
            raise HTTPException(404)
        return file.response(request, ASSET_HEADERS)

    app.add_route("/", page, methods=["GET"], include_in_schema=False)
    app.add_route("/console/{screen:path}", page, methods=["GET"], include_in_schema=False)
    app.add_route("/assets/{name}", asset, methods=["GET"], include_in_schema=False)


def _not_built(why: ConsoleFile | None) -> Response:
    reason = "It was never built." if why is None else why.body.decode(errors="replace")
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Trellis</title></head><body>'
        f"<h1>The console is not built</h1><p>{escape(reason)}</p><p>The instance runs: <code>make console</code> in a "
        "checkout builds the console, the command line and the HTTP API work without it. "
        '<a href="/docs">/docs</a> describes the API.</p></body></html>'
    )
    return Response(html, 503, media_type="text/html", headers={"Cache-Control": "no-cache"})
