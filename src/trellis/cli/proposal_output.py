r"""How a proposal is shown to whoever decides about it; the same from the ledger and over HTTP.

Nothing is cut: a person decides about all of it. Characters that cannot be seen, or that change the order of writing, are written
out as `\u202e`, and a line says that there are some.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from rich.text import Text

from trellis.agents import annotations
from trellis.cli.bus_jobs import print_context_hint
from trellis.cli.invocation import Cli, program_name
from trellis.cli.output import ListingColumn, age_column, escape_terminal_codes

GROUNDS = frozenset({"reasoning", "citations", "flags"})
"""What a proposal gives as its reasons, of its content."""
SHOWN = GROUNDS | {"summary", "change", "updates", "grounds", "expected_version"}
"""What of a content has a place of its own on the page; the rest is listed by name."""


def record_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """A proposal for programs: `id` as the gateway calls it, `job_id` as every other listing does."""
    return {"job_id": document["id"], **document}


def what(document: Mapping[str, Any]) -> str:
    """One line: whose it is, what it would do and why."""
    return f"{document['agent_slug']}: {document['action']} {document['target']}: {document['content'].get('summary')}"


def show_proposals(cli: Cli, documents: Sequence[Mapping[str, Any]], now: datetime | None) -> None:
    """Proposals as a listing, from the ledger or, without its time, over HTTP. What must be known before deciding has a column."""
    columns = [
        ListingColumn[Mapping[str, Any]](title="PROPOSAL", cell=lambda one: one["id"]),
        ListingColumn[Mapping[str, Any]](title="STATUS", cell=lambda one: one["status"]),
        age_column("CREATED", now),
        ListingColumn[Mapping[str, Any]](title="FLAGS", cell=_flags),
        ListingColumn[Mapping[str, Any]](title="WHAT", cell=what, gives_way=True),
    ]
    cli.out.listing([record_of(document) for document in documents], columns, empty="No proposals.")


def _flags(document: Mapping[str, Any]) -> Text:
    """`conflict` where it can no longer be applied, then the kinds of its flags; `proposals show` has them in full."""
    kinds = dict.fromkeys(str(flag).partition(":")[0] for flag in flags_of(document["content"]))
    return Text(" ".join((["conflict"] if document.get("conflict") else []) + list(kinds)), "yellow")


def flags_of(content: Mapping[str, Any]) -> list[Any]:
    """What was found odd about a proposal when it was made."""
    return [flag for ground in content.get("grounds") or [content] for flag in ground.get("flags") or ()]


def show_proposal_page(cli: Cli, document: Mapping[str, Any], diff: str | None, conflict: str | None) -> None:
    """The proposal as a page: what it is, what it would change now, its sources with their words, how to decide."""
    if cli.out.as_json:
        cli.out.record({**record_of(document), "diff": diff, "conflict": conflict})
        return
    content: dict[str, Any] = document["content"]
    cli.out.facts(_facts(document))
    cli.out.line()
    if diff is not None:
        cli.out.line("What it would change now", style="bold")
        cli.out.diff(diff)
    else:
        _show_change(cli, content)
    for ground in content.get("grounds") or [content]:
        _show_sources(cli, ground)
    hidden = _unseen([document, diff])
    if hidden:
        cli.out.line()
        cli.out.line(f"warning: it has characters that cannot be seen, written out here: {', '.join(hidden)}", "yellow")
    if conflict is not None:
        cli.out.line()
        cli.out.line(f"warning: {conflict}", "yellow")
    print_context_hint(cli, content)
    if document["status"] == "pending":
        cli.out.line()
        if conflict is None:
            cli.out.line(f"{program_name()} proposals approve {document['id']}")
        cli.out.line(f'{program_name()} proposals reject {document["id"]} --note "why it is wrong"')


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    content, source = document["content"], document["source"]
    pending = document["status"] == "pending"
    yield "proposal", document["id"]
    yield "status", f"{document['status']}, until {document['expires_at']}" if pending else document["status"]
    yield "agent", document["agent_slug"]
    yield "made by", f"{source['identity']} in {source['run_id']}" if source.get("run_id") else source["identity"]
    beside = document["action"] in annotations.KINDS
    yield "action", document["action"] + (": stored beside the text, which stays as it is" if beside else "")
    yield "target", document["target"]
    yield "summary", str(content.get("summary") or "")
    for ground in content.get("grounds") or [content]:
        if ground.get("reasoning"):
            yield "reasoning", ground["reasoning"]
        if ground.get("flags"):
            yield "flags", ", ".join(map(str, ground["flags"]))
    for name, value in content.items():
        if name not in SHOWN and value not in ("", None, [], {}):
            yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    yield from _outcome(document)


def _outcome(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    approval: dict[str, Any] | None = document.get("approval")
    applied: dict[str, Any] | None = document.get("apply_result")
    if approval:
        note = f": {approval['decision_note']}" if approval.get("decision_note") else ""
        yield "decided", f"by {approval['decided_by']} at {approval['decided_at']}{note}"
    for name, value in (applied or {}).items():
        if value:
            yield name.replace("_", " "), str(value)


def _show_change(cli: Cli, content: Mapping[str, Any]) -> None:
    """What was proposed, where it is not compared with what is there now."""
    change = content.get("change")
    if change is not None:
        cli.out.line(f"What it proposed ({change['type']})", style="bold")
        cli.out.line(change["text"].rstrip("\n"))
    for update in content.get("updates") or ():
        cli.out.line(f"What it proposed ({update['operation']} {update['file']})", style="bold")
        cli.out.line((update.get("content") or update.get("resolution") or "").rstrip("\n"))


def _show_sources(cli: Cli, ground: Mapping[str, Any]) -> None:
    """Each source with the words that are quoted from it."""
    if ground.get("citations"):
        cli.out.line()
        cli.out.line("Sources", style="bold")
    for citation in ground.get("citations") or ():
        cli.out.line(f"{citation['ref']}", style="cyan")
        for line in citation["excerpt"].split("\n"):
            cli.out.line(f"  | {line}")


def _unseen(value: Any) -> list[str]:
    """The characters of a document that cannot be seen, as they are written out, each once and in order."""
    characters = (character for text in _texts(value) for character in text.replace("\r\n", "\n"))
    return list(dict.fromkeys(shown for one in characters if (shown := escape_terminal_codes(one)) != one))


def _texts(value: Any) -> Iterator[str]:
    """Every text inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in cast("Mapping[str, Any]", value).values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in cast("Sequence[Any]", value):
            yield from _texts(one)
