"""Output of runs, proposals and decisions, for a ledger and for a gateway."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast

from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from trellis.agents import sources
from trellis.agents.refusals import refusal_advice, refusal_text
from trellis.cli import values
from trellis.cli.bus_jobs import print_context_hint
from trellis.cli.invocation import Cli
from trellis.cli.output import RecordColumn, age_column, escape_terminal_codes, state_text
from trellis.documents import ids
from trellis.engine.errors import OptionInvalid, Refused
from trellis.engine.text import counted, duration
from trellis.http.shapes import ProposalDiff
from trellis.lifecycles.run import RUN
from trellis.proposals.proposal import grounds_of, quotations_of

# --- runs and decisions ---


@contextmanager
def step_bar(cli: Cli) -> Generator[Callable[[Mapping[str, Any]], None]]:
    """A progress bar that follows each status.json it is given; without a terminal, a line on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, console=cli.out.errors, disable=not cli.out.errors.is_terminal) as bars:
        bar, shown = bars.add_task("queued", total=len(ids.STEPS)), [""]

        def show(status: Mapping[str, Any]) -> None:
            about = status.get("current_step") or status.get("status") or "requested"
            bars.update(bar, completed=status.get("steps_completed", 0), description=about)
            if bars.disable and about != shown[-1] and not cli.out.as_json:  # without a terminal, a line for each step
                cli.out.note(f"{about} ({status.get('steps_completed', 0)} of {len(ids.STEPS)} steps done)")
            shown.append(about)

        yield show


def print_ended(cli: Cli, status: dict[str, Any], steps: Sequence[Mapping[str, Any]]) -> int:
    """Print the final status.json, and the agent's summary and proposals from the step files; returns the exit code."""
    if cli.out.as_json:
        cli.out.record(status)
    else:
        cli.out.line(f"{status['run_id']} {status['status']}" + (f": {status['error']}" if status["error"] else ""))
        outcome = made_by(steps)
        if outcome["summary"]:
            cli.out.prose(str(outcome["summary"]))
        for proposal in status["proposals_created"]:
            cli.out.line(f"  {_proposal_text(proposal, outcome)}")
        for equal in status.get("already_proposed", ()):
            cli.out.line(f"  {_already_proposed_text(equal)}")
        if status["status"] == "completed" and not status["proposals_created"]:
            cli.out.line("  it proposes nothing" + (" new" if status.get("already_proposed") else ""))
            if outcome["sources"] == 0:
                slug = status["agent_slug"]
                cli.out.line(
                    f"  it has no sources: put texts (.md, .txt) into agents/{slug}/sources/ of its object store"
                )
        for refusal in status.get("refused", ()):
            cli.out.line(f"  refused: {_refused(refusal)}", style="yellow")
        if status.get("refused_actions") and not status.get("refused"):
            number = counted(status["refused_actions"], "action")
            shown = cli.command(f"runs show {status['run_id']}")
            cli.out.line(f"  {number} of its model refused: {shown}")
    return 0 if status["status"] == "completed" else 1


def made_by(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The agent's summary, its proposals, and the number of its sources, from the step files of a run."""
    results = {step["name"]: step["result"] for step in steps}
    sources = results.get("load-context", {}).get("sources")
    return {
        "summary": results.get("execute-agent", {}).get("summary"),
        "proposals": results.get("persist-results", {}).get("proposals") or [],
        "sources": None if sources is None else len(sources),
    }


PROPOSAL_WORDS = {"auto_applied": "applied"}
"""Words for people where the record of a run names a status that the proposal itself does not have."""


def _proposal_text(proposal: str, outcome: Mapping[str, Any]) -> str:
    """A proposal's id, and what it would do."""
    record = next((one for one in outcome["proposals"] if one["id"] == proposal), None)
    if record is None:
        return proposal
    status = f" ({PROPOSAL_WORDS.get(record['status'], record['status'])})" if "status" in record else ""
    return f"{proposal}  {record['action']} {record['target']}{status}"


def _already_proposed_text(equal: Mapping[str, Any]) -> str:
    """The text for an agent that proposed nothing new, with the equal proposal that exists."""
    why = {"rejected": ", and its sources are as they were", "applied": ": it is there already"}
    status = f"{equal['status']}{why.get(equal['status'], '')}"
    return f"{equal['id'] or 'done'} ({status}): {equal['action']} {equal['target']} was not proposed again"


def _refused(refusal: Mapping[str, Any]) -> str:
    """The text for a tool call that was refused to the model: which, why, and what to change."""
    advice = refusal_advice(refusal)
    return refusal_text(refusal) + (f" → {advice}" if advice else "")


def refusals(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tool calls that were refused to the agent's model, from the step files of a run.

    A repeated annotation is left out: it is listed with what was proposed already.
    """
    refused = [refusal for step in steps for refusal in step["result"].get("refused") or ()]
    return [one for one in refused if not one.get("approved_before")]


def show_runs(cli: Cli, runs: Sequence[Mapping[str, Any]], now: datetime) -> None:
    """Print runs as a listing. Zero counts are left empty."""
    columns = [
        RecordColumn(title="RUN", cell=lambda run: run["run_id"]),
        RecordColumn(title="AGENT", cell=lambda run: run["agent_slug"]),
        RecordColumn(title="STATUS", cell=lambda run: state_text(RUN.name, run["status"])),
        age_column(now),
        RecordColumn(title="PROPOSALS", cell=lambda run: _number(run["proposals"]), right=True),
        RecordColumn(title="REPEATED", cell=lambda run: _number(run["already_proposed"]), right=True),
        RecordColumn(title="REFUSED", cell=lambda run: _number(run["refused_actions"]), right=True),
    ]
    cli.out.listing(runs, columns, empty="No runs.")


def _number(count: int) -> str:
    return str(count) if count else ""


def wait_s(wait: str | None, *, watch: bool) -> float | None:
    """The duration of --wait in seconds; raises OptionInvalid together with --watch."""
    if wait is not None and watch:
        raise OptionInvalid(option="--wait", value=wait, expected="give it or --watch, not both")
    return values.seconds("--wait", wait)


def still_at_work(run_id: str, patience_s: float) -> Refused:
    """The error for a run that has not ended in time."""
    return Refused(
        detail=f"Run {run_id} has not ended in {duration(patience_s)}; it goes on. `trellis runs show {run_id}` tells"
        " its status; if it is queued, start `trellis up`."
    )


def run_facts(record: dict[str, Any]) -> list[tuple[str, str | Text]]:
    """The facts of `runs show`; unknown ones are left out."""
    stopping = ", asked to stop" if record.get("cancel_requested") else ""
    facts: list[tuple[str, str | Text]] = [
        ("run", record["run_id"]),
        ("agent", record["agent_slug"]),
        ("status", Text.assemble(state_text(RUN.name, record["status"]), stopping)),
        ("steps", f"{record['steps_completed']} of {record['steps_total']}"),
        ("trigger", record["trigger"]),
        ("requested", record["started_at"]),
    ]
    if record.get("params"):
        facts.append(("params", json.dumps(record["params"], ensure_ascii=False)))
    if record.get("position") is not None:
        before = record["position"]
        facts.append(("waits for", f"{before} runs of this agent before it" if before else "a free slot: it is next"))
    if record["status"] == "running":
        facts.append(("now at", record["current_step"]))
    if record.get("waits"):
        facts.append(("waits since", f"{record['waits']['since']}: {record['waits']['reason']}"))
    if record["finished_at"]:
        facts.append(("ended", record["finished_at"]))
    if record["error"]:
        facts.append(("error", Text(record["error"], "red")))
    if record.get("summary"):
        facts.append(("summary", record["summary"]))
    outcome = {"proposals": record.get("proposals", ())}
    facts += [("proposal", _proposal_text(proposal, outcome)) for proposal in record["proposals_created"]]
    facts += [("already proposed", _already_proposed_text(equal)) for equal in record.get("already_proposed", ())]
    facts += [("refused", Text(_refused(refusal), "yellow")) for refusal in record["refused"]]
    return [*facts, ("folder", record["folder"])] if record.get("folder") else facts


def took(step: Mapping[str, Any]) -> str:
    """How long a step took."""
    began, ended = (datetime.fromisoformat(step[name]) for name in ("started_at", "finished_at"))
    return f"{(ended - began).total_seconds():.1f}s"


def calls_text(step: Mapping[str, Any]) -> str:
    """How many calls of each kind a step made, and how long they took together."""
    kinds: dict[str, list[int]] = {}
    for call in step.get("calls") or ():
        kinds.setdefault(call["kind"], []).append(call["duration_ms"])
    return ", ".join(f"{len(times)} {kind} {sum(times) / 1000:.1f}s" for kind, times in kinds.items())


def print_decision(cli: Cli, proposal: str, state: str) -> int:
    """Print the state of a proposal after a decision.

    Returns the exit code. An approved change that could not be applied is a failure.
    """
    failed = state == "failed"
    if cli.out.as_json:
        cli.out.record({"job_id": proposal, "id": proposal, "proposal": proposal, "status": state, "decided": True})
    elif failed:
        why = cli.command(f"proposals show {proposal}")
        cli.out.line(f"{proposal} is {state}: it was approved and could not be applied; why: {why}")
    else:
        cli.out.line(f"{proposal} is {state}")
    return 1 if failed else 0


# How a proposal is shown to the person who decides about it.
# Nothing is cut, because the decision is about all of it. Characters that are invisible or reorder the text are escaped
# as `\u202e`, and a line says that there are some.

GROUNDS = frozenset({"reasoning", "citations", "flags", "not_found", "not_read"})
"""Fields of the content that give a proposal's reasons."""
QUOTATIONS = (
    ("citations", "Sources", "|"),
    ("not_found", "Not found in what the agent read", "?"),
    ("not_read", "In a source that the agent did not read in this run: compare the words there yourself", "?"),
)
"""The lists of quotations in a proposal's reasons: the field, its title on the page, and the mark of each line."""
SHOWN = GROUNDS | {"summary", "change", "updates", "grounds", "expected_version"}
"""Fields of the content that have their own place on the page; the others are listed by name."""


def record_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """A proposal as JSON: `id` as in the gateway's API, `job_id` as in every other listing."""
    return {"job_id": document["id"], **document}


def what(document: Mapping[str, Any]) -> str:
    """One line: the agent, the action and the reason."""
    return f"{document['agent_slug']}: {document['action']} {document['target']}: {document['content'].get('summary')}"


def show_proposals(cli: Cli, documents: Sequence[Mapping[str, Any]], now: datetime) -> None:
    """Print proposals as a listing."""
    columns = [
        RecordColumn(title="PROPOSAL", cell=lambda one: one["id"]),
        RecordColumn(title="STATUS", cell=lambda one: one["status"]),
        age_column(now),
        RecordColumn(title="FLAGS", cell=_flags),
        RecordColumn(title="WHAT", cell=what, gives_way=True),
    ]
    cli.out.listing([record_of(document) for document in documents], columns, empty="No proposals.")


def _flags(document: Mapping[str, Any]) -> Text:
    """`conflict` if it can no longer be applied, then the kinds of its flags; `proposals show` prints them in full."""
    kinds = dict.fromkeys(str(flag).partition(":")[0] for flag in flags_of(document["content"]))
    return Text(" ".join((["conflict"] if document.get("conflict") else []) + list(kinds)), "yellow")


def flags_of(content: Mapping[str, Any]) -> list[Any]:
    """The anomalies that were found when a proposal was made."""
    return [flag for ground in grounds_of(content) for flag in _listed(ground, "flags")]


def _listed(ground: Mapping[str, Any], field: str) -> list[Any]:
    """A list in a proposal's reasons; empty if it is none."""
    listed: Any = ground.get(field)
    return cast("list[Any]", listed) if isinstance(listed, list) else []


def show_proposal_page(cli: Cli, document: Mapping[str, Any], preview: ProposalDiff | None) -> None:
    """Print a proposal as a page: what it is, what it would change now, its quoted sources, how to decide.

    `preview` is None if it could not be read.
    """
    diff, conflict = (None, None) if preview is None else (preview.diff, preview.conflict)
    if cli.out.as_json:
        related = {
            "rules_out": [] if preview is None else preview.rules_out,
            "ruled_out_by": [] if preview is None else preview.ruled_out_by,
            "source_warnings": [] if preview is None else preview.source_warnings,
        }
        cli.out.record({**record_of(document), "diff": diff, "conflict": conflict, **related})
        return
    content: dict[str, Any] = document["content"]
    cli.out.facts(_facts(document))
    cli.out.line()
    if diff is not None:
        cli.out.line("What it would change now", style="bold")
        cli.out.diff(diff)
    else:
        _show_change(cli, content)
    for ground in grounds_of(content):
        _show_sources(cli, ground)
    hidden = _unseen([document, diff])
    if hidden:
        cli.out.line()
        cli.out.line(f"warning: it has characters that cannot be seen, written out here: {', '.join(hidden)}", "yellow")
    for warning in [] if preview is None else preview.source_warnings:
        cli.out.line()
        cli.out.line(f"warning: {warning}", "yellow")
    if conflict is not None:
        cli.out.line()
        cli.out.line(f"warning: {conflict}", "yellow")
    elif preview is not None:
        _show_exclusions(cli, preview)
    print_context_hint(cli, content)
    if document["status"] == "pending":
        cli.out.line()
        if conflict is None:
            cli.out.line(cli.command(f"proposals approve {document['id']}"))
        cli.out.line(cli.command(f'proposals reject {document["id"]} --note "why it is wrong"'))


def _show_exclusions(cli: Cli, preview: ProposalDiff) -> None:
    """Say which other pending proposals can no longer be applied after this one, and after which this one cannot."""
    both = [one for one in preview.rules_out if one in preview.ruled_out_by]
    texts = (
        ("only one of these and this proposal can be applied, because they change the same version", both),
        ("once this one is applied, these can no longer be applied", [x for x in preview.rules_out if x not in both]),
        (
            "approve this one first: it can no longer be applied after",
            [x for x in preview.ruled_out_by if x not in both],
        ),
    )
    for text, ids_ in texts:
        if ids_:
            cli.out.line()
            cli.out.line(f"note: {text}: {', '.join(ids_)}", "yellow")


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    content, source = document["content"], document["source"]
    pending = document["status"] == "pending"
    yield "proposal", document["id"]
    yield "status", f"{document['status']}, until {document['expires_at']}" if pending else document["status"]
    yield "agent", document["agent_slug"]
    yield "made by", f"{source['identity']} in {source['run_id']}" if source.get("run_id") else source["identity"]
    beside = document["action"] in sources.ANNOTATION_KINDS
    yield "action", document["action"] + (": stored beside the text, which stays as it is" if beside else "")
    yield "target", document["target"]
    yield "summary", str(content.get("summary") or "")
    for ground in grounds_of(content):
        if ground.get("reasoning"):
            yield "reasoning", str(ground["reasoning"])
        if _listed(ground, "flags"):
            yield "flags", ", ".join(map(str, _listed(ground, "flags")))
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
    """Print the proposed content, if there is no diff against the present target."""
    change = content.get("change")
    if change is not None:
        cli.out.line(f"What it proposed ({change['type']})", style="bold")
        cli.out.line(change["text"].rstrip("\n"))
    for update in content.get("updates") or ():
        cli.out.line(f"What it proposed ({update['operation']} {update['file']})", style="bold")
        cli.out.line((update.get("content") or update.get("resolution") or "").rstrip("\n"))


def _show_sources(cli: Cli, ground: Mapping[str, Any]) -> None:
    """Print each source with the words quoted from it, then the quotations that are no evidence, and why."""
    for name, title, mark in QUOTATIONS:
        quotations = quotations_of(ground, name)
        if quotations:
            cli.out.line()
            cli.out.line(title, style="bold" if name == "citations" else "bold yellow")
        for quotation in quotations:
            cli.out.line(quotation["ref"], style="cyan")
            for line in quotation["excerpt"].split("\n"):
                cli.out.line(f"  {mark} {line}")


def _unseen(value: Any) -> list[str]:
    """The invisible characters of a document in escaped form, each once and in order."""
    characters = (character for text in _texts(value) for character in text.replace("\r\n", "\n"))
    return list(dict.fromkeys(shown for one in characters if (shown := escape_terminal_codes(one)) != one))


def _texts(value: Any) -> Iterator[str]:
    """Every string inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in cast("Mapping[str, Any]", value).values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in cast("Sequence[Any]", value):
            yield from _texts(one)
