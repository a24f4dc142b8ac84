"""How a run and a decision about a proposal are shown; the same from the ledger and over HTTP."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from trellis.cli import values
from trellis.cli.invocation import Cli, program_name
from trellis.cli.output import ListingColumn, age_column, state_text
from trellis.engine.errors import OptionInvalid, Refused
from trellis.lifecycles.run import RUN
from trellis.operations.explain import counted, duration
from trellis.runs import ids


@contextmanager
def step_bar(cli: Cli) -> Generator[Callable[[Mapping[str, Any]], None]]:
    """A bar on the terminal that moves with each status.json it is given."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, console=cli.out.errors, disable=not cli.out.errors.is_terminal) as bars:
        bar = bars.add_task("queued", total=len(ids.STEPS))

        def show(status: Mapping[str, Any]) -> None:
            about = status.get("current_step") or status.get("status") or "requested"
            bars.update(bar, completed=status.get("steps_completed", 0), description=about)

        yield show


def print_ended(cli: Cli, status: dict[str, Any]) -> int:
    """The last status.json for people or programs; the exit code."""
    if cli.out.as_json:
        cli.out.record(status)
    else:
        cli.out.line(f"{status['run_id']} {status['status']}" + (f": {status['error']}" if status["error"] else ""))
        for proposal in status["proposals_created"]:
            cli.out.line(f"  {proposal}")
        for equal in status.get("already_proposed", ()):
            cli.out.line(f"  {_already_proposed_text(equal)}")
        if status["status"] == "completed" and not status["proposals_created"]:
            cli.out.line("  it proposes nothing" + (" new" if status.get("already_proposed") else ""))
        if status.get("refused_actions"):
            number = counted(status["refused_actions"], "action")
            cli.out.line(f"  {number} of its model refused: {program_name()} runs show {status['run_id']}")
    return 0 if status["status"] == "completed" else 1


def _already_proposed_text(equal: Mapping[str, Any]) -> str:
    """That nothing new was proposed, and what stands in its place."""
    why = {"rejected": ", and its sources are as they were", "applied": ": the file is as it would be"}
    told = f"{equal['status']}{why.get(equal['status'], '')}"
    return f"{equal['id'] or 'done'} ({told}): {equal['action']} {equal['target']} was not proposed again"


def _refused(refusal: Mapping[str, Any]) -> str:
    """What the model wanted and may not do."""
    what = " ".join(str(refusal[name]) for name in ("tool", "action", "target") if refusal.get(name))
    return f"{what}: {refusal['detail']}"


def refusals(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was refused to the agent's model, from the files of a run's steps."""
    return [refusal for step in steps for refusal in step["result"].get("refused") or ()]


def show_runs(cli: Cli, runs: Sequence[Mapping[str, Any]], now: datetime | None) -> None:
    """Runs as a listing, from the ledger or, without its time, over HTTP; what a run has none of is left empty."""
    columns = [
        ListingColumn[Mapping[str, Any]](title="RUN", cell=lambda run: run["run_id"]),
        ListingColumn[Mapping[str, Any]](title="AGENT", cell=lambda run: run["agent_slug"]),
        ListingColumn[Mapping[str, Any]](title="STATUS", cell=lambda run: state_text(RUN.name, run["status"])),
        age_column("REQUESTED", now),
        ListingColumn[Mapping[str, Any]](title="PROPOSALS", cell=lambda run: _number(run["proposals"]), right=True),
        ListingColumn[Mapping[str, Any]](
            title="REPEATED", cell=lambda run: _number(run["already_proposed"]), right=True
        ),
        ListingColumn[Mapping[str, Any]](title="REFUSED", cell=lambda run: _number(run["refused_actions"]), right=True),
    ]
    cli.out.listing(runs, columns, empty="No runs.")


def _number(count: int) -> str:
    return str(count) if count else ""


def wait_s(wait: str | None, *, watch: bool) -> float | None:
    """How long --wait waits; raises OptionInvalid beside --watch, which does not leave the run to others."""
    if wait is not None and watch:
        raise OptionInvalid(option="--wait", value=wait, expected="give it or --watch, not both")
    return values.seconds("--wait", wait)


def still_at_work(run_id: str, patience_s: float) -> Refused:
    """The refusal when a run has not ended in time."""
    return Refused(
        detail=f"Run {run_id} has not ended in {duration(patience_s)}; it goes on. `trellis runs show {run_id}` tells"
        " its status; if it is queued, start `trellis up`."
    )


def run_facts(record: dict[str, Any]) -> list[tuple[str, str | Text]]:
    """What people want to know of a run; what is not known here is left out."""
    asked = ", asked to stop" if record.get("cancel_requested") else ""
    facts: list[tuple[str, str | Text]] = [
        ("run", record["run_id"]),
        ("agent", record["agent_slug"]),
        ("status", Text.assemble(state_text(RUN.name, record["status"]), asked)),
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
    facts += [("proposal", proposal) for proposal in record["proposals_created"]]
    facts += [("already proposed", _already_proposed_text(equal)) for equal in record.get("already_proposed", ())]
    facts += [("refused", Text(_refused(refusal), "yellow")) for refusal in record["refused"]]
    return [*facts, ("folder", record["folder"])] if "folder" in record else facts


def took(step: dict[str, Any]) -> str:
    """How long a step was at work."""
    began, ended = (datetime.fromisoformat(step[name]) for name in ("started_at", "finished_at"))
    return f"{(ended - began).total_seconds():.1f}s"


def print_decision(cli: Cli, proposal: str, state: str, *, decided: bool) -> int:
    """Print how a proposal stands after a decision; the exit code. An approved change that could not be applied is a failure."""
    failed = state == "failed"
    if cli.out.as_json:
        cli.out.record({"job_id": proposal, "id": proposal, "proposal": proposal, "status": state, "decided": decided})
    elif failed:
        cli.out.line(
            f"{proposal} is {state}: it was approved and could not be applied; why: `trellis proposals show {proposal}`"
        )
    else:
        cli.out.line(f"{proposal} is {state}")
    return 0 if decided and not failed else 1
