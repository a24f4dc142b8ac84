"""The page at `/docs`: every route, without anything from elsewhere, under a policy that allows nothing else."""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from httpx2 import Response

from tests.gateway.conftest import VIOLIN, Gateway
from tests.gateway.description import description
from trellis.cli import reference as cli_reference
from trellis.gateway.docs_page import curl, render

URLS = {"src", "href", "action", "srcset", "data", "poster"}


@pytest.fixture(scope="module")
def pages() -> list[Response]:
    """What `docs_page` has fetched: nothing, or one page."""
    return []


@pytest.fixture
async def docs_page(gateway: Gateway, pages: list[Response]) -> Response:
    """The page of the first gateway that was asked. It depends on no instance, and each new gateway makes it in 0.6 s."""
    if not pages:
        pages.append(await gateway.anonymous().get("/docs"))
    return pages[0]


class Tags(HTMLParser):
    """The elements of a page with their attributes, and what stands in its style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.style = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "style" and not self.style:
            self.style = data


async def test_the_page_has_every_route_with_a_command_that_a_shell_understands(docs_page: Response):
    answer = docs_page
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    commands = [unescape(found) for found in re.findall(r"<pre>(curl .*?)</pre>", answer.text, re.DOTALL)]
    asked = {(words[words.index("-X") + 1] if "-X" in words else "GET") for words in map(shlex.split, commands)}
    assert asked == {"GET", "POST", "PATCH", "DELETE"}
    described = description()["paths"]
    for path, operations in described.items():
        for method in operations:
            assert f"<span class=method>{method.upper()}</span> {path}</code>" in answer.text
    assert len(commands) == sum(len(operations) for operations in described.values())
    assert all("{" not in command.rpartition(" ")[2] for command in commands), "every path is filled"


async def test_the_page_loads_nothing_and_its_policy_lets_nothing_load(docs_page: Response):
    answer = docs_page
    tags = Tags(answer.text)
    assert not {"script", "img", "link", "iframe", "object", "form", "base"} & {tag for tag, _ in tags.elements}
    addresses = [value for _, given in tags.elements for name, value in given.items() if name in URLS]
    assert [one for one in addresses if not (one or "").startswith(("#", "/openapi.json"))] == []
    assert not any(name.startswith("on") or name == "style" for _, given in tags.elements for name in given)
    digest = base64.b64encode(hashlib.sha256(tags.style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    assert "unsafe" not in policy


async def test_no_text_for_users_cites_our_own_decisions(gateway: Gateway):
    """Whoever calls the gateway has never seen our list of requirements and decisions."""
    described = json.dumps(description()["paths"]) + json.dumps(description()["components"])
    assert re.findall(r"\b(?:D\d{1,2}|(?:DJ|JQ|RUN|PIPE|AUTH|OBS|BUS|NLM)-\d+)\b", described) == []


@pytest.mark.requirement("D38")
async def test_the_page_describes_the_fields_of_an_answer_and_says_from_where_attempts_count(docs_page: Response):
    page = unescape(docs_page.text)
    (shown,) = re.findall(
        r"<details><summary><code><span class=method>GET</span> /jobs/{job_id}</code>.*?</details>", page
    )
    assert re.search(r"<code>attempt</code><td>integer<td>How many attempts were over .* from 0", shown)
    assert "<code>max_attempts</code>" in shown
    (listed,) = re.findall(r"<details><summary><code><span class=method>GET</span> /jobs</code>.*?</details>", page)
    assert "<code>items[].attempt</code><td>integer<td>How many attempts were over" in listed
    assert page.count("<code>429</code>") == 1, "an answer that every route may give is described once"


async def test_a_command_of_the_page_has_the_query_that_its_route_needs(gateway: Gateway):
    described = description()
    path = "/memory/{agent_id}/deep"
    operation = described["paths"][path]["get"]
    assert re.search(r"/deep\?part=[a-z-]+\"$", curl(described, path, "get", operation))


async def test_the_command_that_changes_an_agents_status_leaves_the_demos_agent_as_it_is(gateway: Gateway):
    described, path = description(), "/agents/{slug}/status"
    words = shlex.split(curl(described, path, "patch", described["paths"][path]["patch"]))
    body, url = words[words.index("-d") + 1], words[-1].removeprefix("$TRELLIS_GATEWAY")
    before = await gateway.instance.catalog.load(VIOLIN)
    answer = await gateway.client("owner").patch(url, json=json.loads(body))
    assert (answer.status_code, answer.json()["status"]) == (200, "active")
    assert await gateway.instance.catalog.load(VIOLIN) == before


def test_descriptions_on_the_docs_page_are_text_and_never_markup():
    evil = "<script>alert(1)</script>"
    fields = {"properties": {evil: {"type": evil, "description": evil}}, "examples": [{evil: evil}]}
    operation = {
        "tags": [evil],
        "description": evil,
        "parameters": [{"name": evil, "in": "query", "schema": {"$ref": "#/nowhere"}}],
        "requestBody": {"content": {"application/json": {"schema": {"anyOf": [fields, {"type": "null"}]}}}},
        "responses": {evil: {"description": evil}},
    }
    page = render({"info": {"title": evil, "description": evil}, "paths": {f"/{evil}": {"post": operation}}})
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 10


INTERNAL = re.compile(
    r"§\s?\d|\bD\d{1,2}\b|\b(?:RUN|PIPE|JQ|DJ|AUTH|ART|BUS|NLM|OBS)-\d+\b|\bdocument 00\d", re.IGNORECASE
)
"""What only those who wrote the program can look up."""


def described(found: object, place: str = "") -> Iterator[tuple[str, str]]:
    """Every text of an OpenAPI document that people read, with its place."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name in {"summary", "description", "title"} and isinstance(value, str):
                yield f"{place}/{name}", value
            else:
                yield from described(value, f"{place}/{name}")
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from described(value, f"{place}/{number}")


async def test_no_text_for_callers_refers_to_what_they_cannot_look_up(docs_page: Response):
    texts = dict(described(description()))
    assert len(texts) > 500
    texts["docs"] = unescape(re.sub(r"<[^>]+>", " ", docs_page.text))
    texts["help"] = cli_reference.reference()
    texts["guide"] = (Path(__file__).parents[2] / "docs/how-to/call-the-gateway.md").read_text()
    assert {place: found[0] for place, text in texts.items() if (found := INTERNAL.search(text))} == {}
