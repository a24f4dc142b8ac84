"""A page that documents every route of the gateway, generated from its OpenAPI description.

It is one HTML document without scripts, fonts, images or other external resources, so it can be read offline and under
the strictest content security policy. All text in it is escaped.
"""

import base64
import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from typing import Any, cast
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
code, pre { font: 14px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid #8886; border-radius: 4px; }
details { border-bottom: 1px solid #8884; padding: .35rem 0; } summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; }
.method { display: inline-block; min-width: 4.2rem; font-weight: 700; } .quiet { opacity: .75; }
"""
_STYLE_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_DIGEST}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
Schema = Mapping[str, Any]
"""A part of an OpenAPI description."""
DEPTH_MAX = 6
"""How many levels of nested schemas are followed."""
METHODS = ("get", "post", "put", "patch", "delete")
_CODE = re.compile(r"`([^`]+)`")


def install(app: FastAPI) -> None:
    """Serve the page at `/docs`, without authentication like `/openapi.json`: it reveals nothing about an instance."""
    page = cache(lambda: render(app.openapi()))

    async def docs(_: Request) -> HTMLResponse:
        return HTMLResponse(page(), headers=dict(HEADERS))

    app.add_route("/docs", docs, methods=["GET"], include_in_schema=False)


def render(described: Schema) -> str:
    """The HTML page for this OpenAPI description."""
    sections: dict[str, list[str]] = {}
    shared = _shared_answers(described)
    for path, operations in described["paths"].items():
        for method in (one for one in METHODS if one in operations):
            operation = _part(operations, method)
            heading = next(iter(_several(operation, "tags")), "other")
            sections.setdefault(heading, []).append("".join(_operation(described, path, method, operation, shared)))
    info = described["info"]
    contents = " · ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in sections)
    parts = [
        f"<h1>{escape(info['title'])} over HTTP</h1>",
        *_paragraphs(info.get("description", "")),
        _TOKENS,
        f"<pre>{escape(_ENVIRONMENT)}</pre>",
        '<p><a href="/openapi.json">/openapi.json</a> says the same for programs.</p>',
        "<p>Most routes may also give one of these answers, a problem document (<code>application/problem+json</code>):</p>",
        f"<table><tr><th>Answer<th>When{''.join(_answer(code, text) for code, text in shared)}</table>",
        f"<p>{contents}</p>",
        *(f'<h2 id="{escape(name)}">{escape(name)}</h2>{"".join(routes)}' for name, routes in sections.items()),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(info["title"])}</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(parts)}</body></html>'
    )


_TOKENS = (
    "<p>Most routes need a token: <code>trellis token issue --role owner</code> prints one; what operators and components do needs one of "
    "another role, such as <code>--role control-plane</code>, and a refusal names it. The commands below take the token "
    "and the address of the gateway from the environment:</p>"
)
_ENVIRONMENT = "export TRELLIS_GATEWAY=$(trellis wait)\nexport TRELLIS_TOKEN=$(trellis token issue --role owner)"


def _shared_answers(described: Schema) -> tuple[tuple[str, str], ...]:
    """The errors that most routes may answer with: the page lists them once."""
    operations = [one[method] for one in described["paths"].values() for method in METHODS if method in one]
    counted = Counter(answer for operation in operations for answer in _answers(operation) if answer[0] >= "400")
    return tuple(answer for answer, times in counted.items() if times > len(operations) / 2)


def _answers(operation: Schema) -> list[tuple[str, str]]:
    return [(code, str(one.get("description", ""))) for code, one in _part(operation, "responses").items()]


def _answer(code: str, text: str) -> str:
    return f"<tr><td><code>{escape(code)}</code><td>{_inline(text)}"


def _operation(
    described: Schema, path: str, method: str, operation: Schema, shared: Sequence[tuple[str, str]]
) -> Iterator[str]:
    text = str(operation.get("description") or operation.get("summary") or "")
    first, _, rest = text.partition("\n")
    yield f"<details><summary><code><span class=method>{method.upper()}</span> {escape(path)}</code> "
    yield f"<span class=quiet>{_inline(first)}</span></summary>"
    yield from _paragraphs(rest)
    fields = [_row(described, one["name"], one["in"], one) for one in _parameters(operation)]
    fields += _body_rows(described, _body(operation))
    if fields:
        yield f"<table><tr><th>Field<th>In<th>Type<th>About{''.join(fields)}</table>"
    yield f"<pre>{escape(curl(described, path, method, operation))}</pre>"
    answers = "".join(_answer(code, text) for code, text in _answers(operation) if (code, text) not in shared)
    yield f"<table><tr><th>Answer<th>When{answers}</table>"
    yield from _answer_fields(described, operation)
    yield "</details>"


def _answer_fields(described: Schema, operation: Schema) -> Iterator[str]:
    """The fields of a successful answer; of a listing, the fields of its items too."""
    for code, one in _part(operation, "responses").items():
        schema = _part(_part(_part(one, "content"), "application/json"), "schema")
        rows = dict.fromkeys(_field_rows(described, schema)) if code < "300" else {}
        if rows:
            yield f"<table><tr><th>Field of the {escape(code)} answer<th>Type<th>About{''.join(rows)}</table>"


def _field_rows(described: Schema, schema: Schema, under: str = "") -> Iterator[str]:
    for one in _choices(described, schema):
        for name, field in _part(one, "properties").items():
            about, kind = _inline(str(field.get("description") or "")), escape(_type(described, field))
            yield f"<tr><td><code>{escape(under + name)}</code><td>{kind}<td>{about}"
            if not under and name == "items" and field.get("type") == "array":
                yield from _field_rows(described, _part(field, "items"), "items[].")


def curl(described: Schema, path: str, method: str, operation: Schema) -> str:
    """A curl command for this operation, for a shell that has the address and a token in variables."""
    words = ["curl", "-sS"] + ([] if method == "get" else ["-X", method.upper()])
    words.append('-H "Authorization: Bearer $TRELLIS_TOKEN"')
    body = _body(operation)
    if body:
        example = json.dumps(_example(described, body), ensure_ascii=False)
        words += ["-H 'Content-Type: application/json'", f"-d {shlex.quote(example)}"]
    return " ".join([*words, f'"$TRELLIS_GATEWAY{_filled(described, path, operation)}"'])


def _filled(described: Schema, path: str, operation: Schema) -> str:
    """The path and required query, filled with example values, or with parameter names in capitals."""
    query: list[str] = []
    for one in _parameters(operation):
        name, examples = str(one["name"]), _several(_part(one, "schema"), "examples")
        value = str(examples[0]) if examples else name.upper()
        path = path.replace(f"{{{name}}}", value)
        if one["in"] == "query" and one.get("required"):
            words = examples or _several(_resolved(described, _part(one, "schema")), "enum")
            query.append(f"{name}={quote(str(words[0]) if words else value, safe='')}")
    return f"{path}?{'&'.join(query)}" if query else path


def _body(operation: Schema) -> Schema:
    """The schema of the operation's JSON body; empty if it has none."""
    content = _part(_part(operation, "requestBody"), "content")
    return _part(_part(content, "application/json"), "schema")


def _body_rows(described: Schema, schema: Schema) -> Iterator[str]:
    for one in _choices(described, schema):
        required = _several(one, "required")
        for name, field in _part(one, "properties").items():
            yield _row(described, name, "body", {"schema": field, "required": name in required})


def _row(described: Schema, name: str, place: str, field: Schema) -> str:
    schema = _part(field, "schema")
    needed = "" if field.get("required") else " <span class=quiet>optional</span>"
    about = str(field.get("description") or schema.get("description") or "")
    kind = escape(_type(described, schema))
    return f"<tr><td><code>{escape(name)}</code>{needed}<td>{escape(place)}<td>{kind}<td>{_inline(about)}"


def _choices(described: Schema, schema: Schema, depth: int = 0) -> list[Schema]:
    """The object schemas that a body may have, without null."""
    schema = _resolved(described, schema)
    options = _options(schema)
    if not options or depth >= DEPTH_MAX:
        return [schema]
    return [one for option in options if option.get("type") != "null" for one in _choices(described, option, depth + 1)]


def _type(described: Schema, schema: Schema, depth: int = 0) -> str:
    schema = _resolved(described, schema)
    if depth >= DEPTH_MAX:
        return "any"
    if options := _options(schema):
        return " or ".join(dict.fromkeys(_type(described, option, depth + 1) for option in options))
    if "enum" in schema:
        return f"one of {', '.join(str(value) for value in schema['enum'])}"
    if schema.get("type") == "array":
        return f"array of {_type(described, _part(schema, 'items'), depth + 1)}"
    return str(schema.get("const") or schema.get("type", "any"))


def _example(described: Schema, schema: Schema) -> Any:
    """The first example of the schema or of its alternatives; an empty object if there is none."""
    for one in (_resolved(described, schema), *_choices(described, schema)):
        if examples := _several(one, "examples"):
            return examples[0]
    return {}


def _resolved(described: Schema, schema: Schema) -> Schema:
    """The schema itself, or the one it refers to; empty if the description does not have it."""
    for _ in range(DEPTH_MAX):
        if "$ref" not in schema:
            break
        resolved = described
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            resolved = _part(resolved, part)
        schema = resolved
    return schema


def _parameters(operation: Schema) -> Sequence[Schema]:
    return _several(operation, "parameters")


def _options(schema: Schema) -> Sequence[Schema]:
    return _several(schema, "anyOf") or _several(schema, "oneOf")


def _part(of: Schema, name: str) -> Schema:
    return cast("Schema", of.get(name) or {})


def _several(of: Schema, name: str) -> Sequence[Any]:
    return cast("Sequence[Any]", of.get(name) or ())


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        if paragraph.strip():
            yield f"<p>{_inline(paragraph)}</p>"


def _inline(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))
