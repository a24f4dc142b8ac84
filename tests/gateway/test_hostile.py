"""Hostile input: names that want out of their folder, and bodies that nobody should have to read."""

import asyncio
import json
import posixpath
import random
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from tests.gateway.description import description
from tests.gateway.door import KEY, Door, opened, token
from tests.gateway.serving import serving
from trellis.agents.catalog import agent_key
from trellis.app.settings import Settings
from trellis.documents import ids
from trellis.engine.errors import TrellisError
from trellis.http_server.bodies import StrictRoute
from trellis.runs.timetable import schedule_key
from trellis.storage.objects.keys import checked_key, file_path, is_key, object_key

NAMES = 20_000
SAMPLED = 150
PATIENCE_S = 60.0
RUN = "run_2026-02-14_080000_abc123"
AT = datetime(2026, 2, 14, tzinfo=UTC)

_PIECES = (
    *("..", ".", "/", "//", "\\", "..\\", "../", "/..", "%2e%2e", "%2f", "%252e", "..%00", "\0", "\n", "\r\n", " ", ""),
    *(
        "agents",
        "archivist-violin",
        "a",
        "A",
        "0",
        "-",
        "_",
        "~",
        "$HOME",
        "`id`",
        "*",
        "?",
        "[a]",
        ":",
        "@",
        "|",
        "con",
    ),
    *("․․", "‥", "…", "．．", "／", "∕", "﹨", "\u202e", "\u200b", "\ufeff", "é", "e\u0301", "ß", "İ", "\ud800"),  # noqa: RUF001
    *("etc/passwd", ".git", ".git/config", ".trellis", "%file", "%dir", "%more", "status.json", "runs", RUN, "run_"),
    *("x" * 63, "x" * 255, "x" * 1_100, "-" * 70, "file:///", "s3://", "http://a", "'; --", '"', "<a>", "{slug}"),
)


@cache
def names(seed: int) -> list[str]:
    """Pieces that are dangerous in some system, put together at random; each name once."""
    rng = random.Random(seed)
    made: dict[str, None] = dict.fromkeys(_PIECES)
    while len(made) < NAMES:
        made["".join(rng.choices(_PIECES, k=rng.randint(1, 6)))] = None
    return list(made)


BUILDERS: dict[str, tuple[Callable[[str], str], str]] = {
    "agent": (agent_key, "agents/{}/_agent.md"),
    "schedule": (schedule_key, "schedules/{}.json"),
    "status of a slug": (lambda name: ids.status_key(name, RUN), "agents/{}/runs/" + RUN + "/status.json"),
    "status of a run": (lambda name: ids.status_key("a", name), "agents/a/runs/{}/status.json"),
    "manifest": (lambda name: ids.manifest_key("a", name), "agents/a/runs/{}/manifest.json"),
    "output": (lambda name: ids.output_key("a", name), "agents/a/runs/{}/output/proposal.json"),
    "step": (lambda name: ids.step_key("a", name, 1), "agents/a/runs/{}/steps/01-load-context.json"),
    "proposal": (lambda name: checked_key(ids.proposal_key("a", name)), "agents/a/proposals/{}.json"),
    "proposal of a slug": (lambda name: ids.proposal_key(name, "prop_1"), "agents/{}/proposals/prop_1.json"),
    "audit": (lambda name: checked_key(ids.audit_key(AT, name)), "audit/20260214/{}.json"),
    "one part": (lambda name: object_key("callbacks", name, "x.json"), "callbacks/{}/x.json"),
    "a whole key": (checked_key, "{}"),
}


@pytest.mark.parametrize("builder", BUILDERS)
def test_no_dangerous_name_leaves_its_folder_or_bucket(builder: str):
    """A name is refused, or becomes part of exactly the key that was meant, in a folder and in a bucket alike."""
    build, form = BUILDERS[builder]
    taken = 0
    for name in names(seed=4):
        try:
            key = build(name)
        except TrellisError:
            continue
        taken += 1
        assert key == form.format(name), name
        assert is_key(key), name
        assert posixpath.normpath("bucket/prefix/" + key) == "bucket/prefix/" + key, name
        path = file_path(key)
        assert all(part not in {b"", b".", b".."} and b"/" not in part and b"\0" not in part for part in path), name
        assert not any(part.startswith(b".") for part in path), name  # the store's own names begin with a dot
        assert all(len(part) <= 255 for part in path), name
    assert taken or builder in {"status of a run", "manifest", "output", "step"}


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside.json").write_text('"planted outside"')
    async with opened(tmp_path / "inside") as made:
        await made.instance.plant()
        yield made


def _files(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith("inside/")}


async def test_no_name_in_an_address_reaches_anything_outside(door: Door, tmp_path: Path):
    before, owner = _files(tmp_path), token()
    routes = [
        (method.upper(), path)
        for path, operations in description()["paths"].items()
        for method in operations
        if "{" in path
    ]
    assert len(routes) >= 10
    rng = random.Random(5)
    for name in rng.sample(names(seed=4), SAMPLED):
        method, path = rng.choice(routes)
        written = quote(name.encode("utf-8", "surrogatepass"), safe="")
        url = path[: path.index("{")] + written + path[path.index("}") + 1 :].replace("{version}", "1")
        content = None if method == "GET" else b"{}"
        answer = await door(method, url, owner, content=content, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500 or name == "archivist-violin", (method, url, answer.text)
        assert b"planted outside" not in answer.content
    assert _files(tmp_path) == before


async def test_no_name_in_a_body_reaches_anything_outside(door: Door, tmp_path: Path):
    before, owner = _files(tmp_path), token()
    for name in islice(names(seed=4), SAMPLED):
        body = json.dumps({"agent_slug": name}).encode()
        answer = await door("POST", "/agents/run", owner, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in {409, 422} or name == "archivist-violin", (name, answer.text)
    assert _files(tmp_path) == before


@pytest.mark.parametrize("cursor", ["a" * 40, "0" * 40, "HEAD", "--all", "../x"])
async def test_a_page_of_a_history_that_nobody_gave_is_refused(door: Door, cursor: str):
    answer = await door("GET", f"/memory/archivist-violin/history?cursor={cursor}", token())
    assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_FAILED"), answer.text


# --- bodies ----------------------------------------------------------------------------------------------------------

JSON = {"content-type": "application/json"}
START = b'{"agent_slug": "archivist-violin", "params": '
BODIES: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "oversized": (START + b'"' + b"x" * 1_100_000 + b'"}', JSON, 413, "1048576 bytes"),
    "deep": (START + b'{"a":' * 100 + b"1" + b"}" * 101, JSON, 422, "32 levels"),
    "very deep": (START + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON, 422, "32 levels"),
    "never closed": (START + b"[" * 100_000, JSON, 422, "32 levels"),
    "not UTF-8": (START + b'{"a": "\xff\xfe"}}', JSON, 422, "UTF-8"),
    "UTF-16": ('{"agent_slug": "a"}'.encode("utf-16"), JSON, 422, "UTF-8"),
    "NaN": (START + b'{"a": NaN}}', JSON, 422, "NaN"),
    "infinite": (START + b'{"a": -Infinity}}', JSON, 422, "Infinity"),
    "twice": (b'{"agent_slug": "a", "agent_slug": "b"}', JSON, 422, "twice"),
    "twice inside": (START + b'{"a": {"b": 1, "b": 2}}}', JSON, 422, "twice"),
    "a number of 5,000 digits": (START + b'{"a": ' + b"9" * 5_000 + b"}}", JSON, 422, "digits"),
    "a number beyond all": (START + b'{"a": 1e999}}', JSON, 422, "1e999"),
    "half a character": (START + b'{"a": "\\ud800"}}', JSON, 422, "character"),
    "a zero character": (START + b'{"a": "\\u0000"}}', JSON, 422, "character"),
    "half an object": (START, JSON, 422, "no JSON"),
    "nothing": (b"", JSON, 422, "body"),
    "a list": (b"[]", JSON, 422, "body"),
    "text": (b'{"agent_slug": "a"}', {"content-type": "text/plain"}, 415, "application/json"),
    "a form": (b"agent_slug=a", {"content-type": "application/x-www-form-urlencoded"}, 415, "application/json"),
    "parts": (b"--x\r\n\r\n--x--", {"content-type": "multipart/form-data; boundary=x"}, 415, "application/json"),
    "no content type": (b'{"agent_slug": "a"}', {}, 415, "application/json"),
    "a name nobody knows": (b'{"agent_slug": "a", "admin": true}', JSON, 422, "admin"),
    "compressed": (b"\x1f\x8b\x08\x00", {**JSON, "content-encoding": "gzip"}, 422, "UTF-8"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_bad_body_is_refused_with_what_to_change(door: Door, name: str):
    body, headers, status, says = BODIES[name]
    answer = await door("POST", "/agents/run", token(), content=body, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    problem = answer.json()
    assert says in problem["detail"], problem
    assert len(answer.content) < 3_000
    listed = await door("GET", "/runs", token())
    assert listed.json()["items"] == []


# --- the same over a real connection -----------------------------------------------------------------------------------


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(StrictRoute, "body_s", 0.2)
    with serving(f"sqlite:///{tmp_path}/t.db", [KEY], settings=Settings.model_validate({})) as served:
        yield served.port


def _head(*lines: str) -> bytes:
    common = (
        "POST /agents/run HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {token()}",
        "Content-Type: application/json",
    )
    return "\r\n".join([*common, *lines, "", ""]).encode()


async def _exchange(port: int, *pieces: bytes) -> tuple[int, dict[str, Any]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(PATIENCE_S):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        body = await reader.readexactly(length)
    writer.close()
    return int(head.split(b" ", 2)[1]), json.loads(body)


async def test_over_a_connection_what_is_too_much_or_too_slow_is_answered_before_it_has_come(port: int):
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    told = [
        # Announced and never sent.
        await _exchange(port, _head("Content-Length: 99999999999")),
        # Without a length and without an end.
        await _exchange(port, _head("Transfer-Encoding: chunked"), *[chunk] * 17),
        # Begun and never finished.
        await _exchange(port, _head("Content-Length: 100"), b'{"agent_slug": '),
        await _exchange(port, _head("Transfer-Encoding: chunked"), b"5\r\n{"),
    ]
    assert [(status, problem["code"]) for status, problem in told] == [
        (413, "PAYLOAD_TOO_LARGE"),
        (413, "PAYLOAD_TOO_LARGE"),
        (408, "REQUEST_TIMEOUT"),
        (408, "REQUEST_TIMEOUT"),
    ]
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        assert (await client.get("/system/health")).status_code == 200


async def test_a_chunked_body_is_accepted_like_any_other(port: int):
    body = b'{"agent_slug": "nobody"}'
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (body[:9], body[9:])) + b"0\r\n\r\n"
    status, problem = await _exchange(port, _head("Transfer-Encoding: chunked"), pieces)
    assert (status, problem["code"]) == (409, "CONFLICT")
