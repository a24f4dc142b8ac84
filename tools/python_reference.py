"""Writes the reference of the Python API from its docstrings: `python -m tools.python_reference` (in the checkout).

It reads the source, so that what stands there is what is shown: signatures, the docstrings of classes and functions, and the
text under each field. The suite compares docs/reference/python.md with what this makes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum, StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import trellis
from tools.markdown_lines import wrapped
from trellis.engine import errors

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "python.md"
INTRODUCTION = """# Python

Written from the docstrings by `python -m tools.python_reference`; the suite compares. Everything is imported from `trellis`, but for what
stands under [Tests](#tests), which is in `trellis.testing`, under [Callers over HTTP](#callers-over-http), whose objects `connect(gateway=…)` makes, under
[Callers in their own transaction](#callers-in-their-own-transaction), which is in `trellis.integrations.sql`, under
[Agents of pydantic-ai](#agents-of-pydantic-ai), which is in `trellis.integrations.pydantic_ai`, and the less
common [errors](#errors). The words are defined in the
[glossary](../glossary.md); the [tutorial](../tutorial.md) shows them at work.
"""
OPTION, FIELD, DEFAULT, MEANING = "Option", "Field", "Default", "Meaning"

OVER_HTTP = ("runs", "agents", "proposals", "artifacts", "jobs", "dead_letters", "memory", "logic", "inbox")

# Chapter -> what is in it: module:name. `fields` lists the fields of a class, whose own methods are of no concern to users;
# `record` lists its properties too.
CHAPTERS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Applications": (
        ("class", "trellis.worker.app", "App"),
        ("fields", "trellis.worker.options", "JobOptions"),
        ("fields", "trellis.worker.options", "HandlerRunner"),
        ("class", "trellis.worker.middleware", "CallNext"),
        ("class", "trellis.worker.payloads", "Serializer"),
        ("fields", "trellis.engine.retry_policy", "RetryPolicy"),
    ),
    "Inside a handler": (
        ("class", "trellis.worker.context", "Context"),
        ("class", "trellis.worker.context", "SyncContext"),
        ("class", "trellis.worker.process_child", "ProcessContext"),
        ("class", "trellis.worker.context", "Item"),
        ("class", "trellis.worker.durable", "ChildHandle"),
        ("class", "trellis.worker.durable", "FirstChild"),
        ("class", "trellis.worker.durable", "ChildFailed"),
        ("class", "trellis.worker.batches", "BatchOutcome"),
        ("class", "trellis.worker.batches", "MemberOutcome"),
        ("class", "trellis.worker.durable", "MemberFailed"),
        ("class", "trellis.worker.durable", "DurableStepFailed"),
        ("class", "trellis.worker.durable", "SignalTimeout"),
        ("class", "trellis.worker.durable", "ReplayMismatch"),
        ("fields", "trellis.worker.payloads", "Undo"),
        ("class", "trellis.worker.outcomes", "Snooze"),
    ),
    "Callers": (
        ("function", "trellis.app.wiring", "connect"),
        ("class", "trellis.client", "Trellis"),
        ("fields", "trellis.worker.requests", "SubmitSettings"),
        ("fields", "trellis.bus.requests", "TopicSubmitOptions"),
        ("class", "trellis.client", "JobHandle"),
        ("class", "trellis.client", "BatchHandle"),
        ("class", "trellis.worker.requests", "BatchJob"),
        ("fields", "trellis.engine.jobs", "Priority"),
    ),
    "Callers in their own transaction": (
        ("function", "trellis.integrations.sql", "submit_on"),
        ("function", "trellis.integrations.sql", "submit_on_async"),
    ),
    "Records": (
        ("record", "trellis.engine.records", "Job"),
        ("record", "trellis.engine.records", "Event"),
        ("record", "trellis.engine.records", "FeedPage"),
        ("record", "trellis.engine.records", "Signal"),
        ("record", "trellis.engine.records", "DeadLetter"),
        ("record", "trellis.engine.records", "JobFilter"),
        ("record", "trellis.operations.job_changes", "ChangeFilter"),
        ("record", "trellis.operations.job_changes", "ChangeTotals"),
        ("fields", "trellis.engine.jobs", "ReasonCode"),
        ("fields", "trellis.engine.jobs", "CancelMode"),
        ("record", "trellis.engine.jobs", "Moved"),
        ("record", "trellis.engine.jobs", "NotMoved"),
    ),
    "Callers over HTTP": (
        ("function", "trellis.app.wiring", "connect_sync"),
        ("class", "trellis.http.client", "GatewayClient"),
        *(
            (
                "class",
                "trellis.http.jobs" if name == "jobs" else "trellis.http.resources",
                "".join(map(str.title, name.split("_"))),
            )
            for name in OVER_HTTP
        ),
        ("fields", "trellis.http.jobs", "JobSubmitOptions"),
        ("fields", "trellis.http.resources", "Backing"),
        ("fields", "trellis.http.calls", "CallOptions"),
    ),
    "Workers": (
        ("function", "trellis.app.wiring", "run_worker"),
        ("fields", "trellis.worker.options", "WorkerOptions"),
    ),
    "Agents of pydantic-ai": (("function", "trellis.integrations.pydantic_ai", "run_agent"),),
    "Tests": (
        ("function", "trellis.testing", "sandbox"),
        ("class", "trellis.testing", "Sandbox"),
        ("class", "trellis.testing", "FakeClock"),
        ("function", "trellis.testing", "run_until_idle"),
    ),
}
TITLES = {
    "JobOptions": "Options of `@app.job`",
    "SubmitSettings": "Settings of a submit",
    "JobSubmitOptions": "Settings of a submit over HTTP",
}


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for chapter, entries in CHAPTERS.items():
        parts.append(f"## {chapter}\n")
        parts += ["\n".join(_entry(kind, importlib.import_module(module), name)) for kind, module, name in entries]
    return wrapped("\n".join([*parts, _errors()]))


def _entry(kind: str, module: ModuleType, name: str) -> Iterator[str]:
    node = _nodes(module)[name]
    yield f"### {TITLES.get(name, name)}\n"
    if kind == "function":
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield f"```python\n{_signature(node, module, managed=_managed(node))}\n```\n"
        yield f"{_doc(node)}\n"
        return
    assert isinstance(node, ast.ClassDef)
    yield f"{_doc(node)}\n"
    if kind in {"fields", "record"}:
        yield from _table(node, getattr(module, name), OPTION if kind == "fields" else FIELD)
    if kind == "fields":
        return
    bases = [_nodes(module)[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in _nodes(module)]
    written = [_taken(one, module) for owner in (node, *bases) if isinstance(owner, ast.ClassDef) for one in owner.body]
    members = [one for one in written if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    for made in (one for one in members if one.name == "__init__" and name not in WITHOUT_CONSTRUCTOR):
        yield f"```python\n{_signature(made, module, called=name)}\n```\n"
    for member in (one for one in members if not one.name.startswith("_")):
        yield from _member(member, module)
    yield ""


def _taken(statement: ast.stmt, module: ModuleType) -> ast.stmt:
    """The method that a class takes from another one, without its `await`, as `sleep = _blocking(Context.sleep)`."""
    match statement:
        case ast.Assign(value=ast.Call(args=[ast.Attribute(value=ast.Name(id=owner), attr=name)])):
            members = class_of(module, owner).body
            method = next(one for one in members if isinstance(one, ast.AsyncFunctionDef) and one.name == name)
            return ast.FunctionDef(**{field: getattr(method, field) for field in method._fields})
        case _:
            return statement


WITHOUT_CONSTRUCTOR = {
    "Context",
    "SyncContext",
    "Item",
    "Trellis",
    "JobHandle",
    "BatchHandle",
    "Sandbox",
    "GatewayClient",
} | {"".join(map(str.title, name.split("_"))) for name in OVER_HTTP}
"""Users are handed these; they do not make them."""


def _member(node: ast.FunctionDef | ast.AsyncFunctionDef, module: ModuleType) -> Iterator[str]:
    if any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
        kind = f": {ast.unparse(node.returns)}" if node.returns else ""
        yield f"- **`{node.name}`**`{kind}` — {inline(_doc(node), escape=False)}"
    else:
        yield f"- **`{_signature(node, module)}`** — {inline(_doc(node), escape=False)}"


def _table(node: ast.ClassDef, owner: type[Any], title: str) -> Iterator[str]:
    """The fields of a class with the text that stands under each."""
    said = field_docs(node)
    defaults = {one.name: one for one in fields(owner)} if hasattr(owner, "__dataclass_fields__") else {}
    if node.name == "JobOptions":
        settings = field_docs(class_of(importlib.import_module("trellis.worker.app"), "JobSettings"))
        for option in ("concurrency_key", "serializer"):
            said = {**said, option: settings[option]}
            defaults = {**defaults, option: defaults["compensation"]}
    if not any(doc for _, doc in said.values()) and not defaults:
        yield ", ".join(f"`{name}`" for name in said) + "\n"
        return
    yield f"| {title} | {DEFAULT} | {MEANING} |\n|---|---|---|"
    plain = {name: kind for name, (kind, doc) in said.items() if title == FIELD and not doc}
    for name, (annotation, doc) in said.items():
        if name in plain:
            continue
        yield f"| `{name}: {inline(annotation)}` | {_default(defaults.get(name))} | {inline(doc)} |"
    yield ""
    if plain:
        yield "Besides: " + ", ".join(f"`{name}: {kind}`" for name, kind in plain.items()) + ".\n"


def _default(field: Any) -> str:
    if field is None or field.default is MISSING:
        return ""
    return f"`{_shown(field.default)}`"


def _shown(value: Any) -> str:
    match value:
        case StrEnum():
            return value.value
        case Enum():
            return value.name.lower()
        case _:
            return repr(value)


def _errors() -> str:
    """The tree as drawn at the top of its file, then every message."""
    tree = (errors.__doc__ or "").partition("\n\n")[2].strip()
    rows = [
        f"| `{name}` | {'`trellis`' if name in trellis.__all__ else ''} | {kind.code} | {(kind.__doc__ or '').strip()} |"
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.TrellisError)
    ]
    head = (
        "## Errors\n\nAll are in `trellis.engine.errors`; those that handlers raise and callers meet are in `trellis` too,"
        " as the table says. The message is the docstring; what stands in braces is also in `error.data`.\n"
    )
    return "\n".join(
        [head, f"```text\n{tree}\n```\n", "| Error | Also in | Code | Message |\n|---|---|---|---|", *rows, ""]
    )


# --- reading the source ----------------------------------------------------------------------------------------------


def class_of(module: ModuleType, name: str) -> ast.ClassDef:
    """The source of a class."""
    node = _nodes(module)[name]
    assert isinstance(node, ast.ClassDef)
    return node


def _nodes(module: ModuleType) -> dict[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(inspect.getsource(module))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def _doc(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    doc = ast.get_docstring(node)
    assert doc, f"{node.name} is public and says nothing"
    return doc


def inline(doc: str, *, escape: bool = True) -> str:
    """On one line; in a table a bar would end the cell."""
    line = " ".join(doc.split())
    return line.replace("|", "\\|") if escape else line


def field_docs(node: ast.ClassDef) -> dict[str, tuple[str, str]]:
    """Name -> annotation and the string that follows the field."""
    found: dict[str, tuple[str, str]] = {}
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        doc = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            doc = str(after.value.value)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            if not one.target.id.startswith("_"):
                found[one.target.id] = (ast.unparse(one.annotation), doc)
        elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            found[one.targets[0].id] = (ast.unparse(one.value), doc)
    return found


def _managed(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """How a call is entered, for one that opens something."""
    returns = "" if node.returns is None else ast.unparse(node.returns)
    if "AsyncContextManager" in returns or any(
        "asynccontextmanager" in ast.unparse(one) for one in node.decorator_list
    ):
        return "async with "
    return "with " if "ContextManager" in returns else ""


def _signature(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    module: ModuleType,
    *,
    called: str | None = None,
    managed: str = "",
) -> str:
    """The call as people write it: without `self`, with named defaults as values."""
    arguments = ast.parse(ast.unparse(node.args).join(("def _(", "): ..."))).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    arguments.args.args = [one for one in arguments.args.args if one.arg != "self"]
    told = ast.unparse(_Defaults(module).visit(arguments.args))
    told = re.sub(r"Unpack\[(\w+)\]", r"\1", re.sub(r": '([^']+)'", r": \1", told))
    told = re.sub(r"(: (?:[^=,\[]|\[[^\]]*\])+)=", r"\1 = ", told)
    word = managed or ("await " if isinstance(node, ast.AsyncFunctionDef) else "")
    if not managed and node.returns is not None and ast.unparse(node.returns).startswith("Async"):
        word = "async for page in " if "Page" in ast.unparse(node.returns) else "async for one in "
    returns = "" if called or managed or node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{word}{called or node.name}({told}){returns}"


class _Defaults(ast.NodeTransformer):
    """A constant's name says nothing to whoever calls: put its value there."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = getattr(self.module, node.id, None)
        return ast.Constant(value) if node.id.isupper() and isinstance(value, int | float | str) else node


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    sys.stderr.write(f"{PAGE.relative_to(ROOT)}\n")
