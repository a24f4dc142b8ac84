"""`trellis policy`: whether a safety policy fits, what it says about a job and why, and what it would change."""

from pathlib import Path
from typing import Annotated, Any

import typer

from trellis.bus.approvals import found
from trellis.bus.requests import JobRequest
from trellis.bus.safety import simulating
from trellis.bus.safety.judging import Explanation
from trellis.bus.safety.kernel import PolicyKernel, SafetyKernel
from trellis.bus.safety.policy import Rule, read_policy_file
from trellis.bus.safety.simulating import JOBS_MAX, Simulated
from trellis.cli.commands import command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import Column
from trellis.cli.values import pairs
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import JobId
from trellis.fleet import kernel_of
from trellis.wiring import elapsed_s

LAST_DEFAULT = 100

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A policy (TOML).")]
FileOption = Annotated[
    Path | None, typer.Option("--policy", metavar="FILE", help="Ask this policy and not the one in force.")
]


def add_to(program: typer.Typer) -> None:
    """Put these commands into the program."""
    made = group(program, "policy", section="Jobs", help_="What the safety policy lets go; check, explain, simulate.")
    command(made, "check")(check)
    command(made, "explain")(explain)
    command(made, "simulate")(simulate)


def check(cli: Cli, file: FileArgument) -> None:
    """Say whether a policy fits, and show its rules in the order in which they are looked at."""
    policy = read_policy_file(file)
    if cli.out.as_json:
        cli.out.record({"policy_hash": policy.hash, "rules": [rule.to_dict() for rule in policy.rules]})
        return
    columns = [
        Column[Rule](title="RULE", cell=lambda rule: rule.id),
        Column[Rule](title="DECISION", cell=lambda rule: rule.decision.value),
        Column[Rule](title="MATCH", cell=_conditions, gives_way=True),
    ]
    cli.out.listing(policy.rules, columns, empty="")
    cli.out.note(f"{file} fits: policy {policy.hash}; what no rule fits is denied")


def _conditions(rule: Rule) -> str:
    match = rule.match
    lists = {name: getattr(match, name) for name in sorted(match.model_fields_set - {"labels"})}
    told = [f"{name} {', '.join(patterns)}" for name, patterns in lists.items()]
    return "; ".join([*told, *(f"label {name}={pattern}" for name, pattern in (match.labels or {}).items())])


async def explain(
    cli: Cli,
    topic: Annotated[str | None, typer.Option("--topic", help="The topic of the job that is meant.")] = None,
    *,
    job: Annotated[str | None, typer.Option("--job", metavar="ID", help="Or a job that is there.")] = None,
    tenant: Annotated[str, typer.Option("--tenant", help="Whose job it is.")] = "",
    principal: Annotated[str, typer.Option("--principal", help="Who asks for it.")] = "",
    actor_type: Annotated[str, typer.Option("--actor-type", help="human or service.")] = "",
    capability: Annotated[str, typer.Option("--capability", help="What it uses.")] = "",
    risk_tag: Annotated[list[str] | None, typer.Option("--risk-tag", help="A risk; may be repeated.")] = None,
    requires: Annotated[list[str] | None, typer.Option("--requires", help="What its worker needs; repeated.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="A label; repeated.")] = None,
    priority: Annotated[str | None, typer.Option("--priority", help="critical, interactive or batch.")] = None,
    adapter: Annotated[str, typer.Option("--adapter", help="Its adapter.")] = "",
    pack: Annotated[str, typer.Option("--pack", help="Its pack.")] = "",
    policy: FileOption = None,
) -> None:
    """Say what the policy decides about a job: which rules were looked at, why each did not fit, which decided."""
    meta = {
        "actor_type": actor_type,
        "capability": capability,
        "risk_tags": risk_tag or [],
        "requires": requires or [],
        "pack_id": pack,
    }
    said: dict[str, Any] = {
        "tenant_id": tenant,
        "principal_id": principal,
        "labels": pairs("--label", label or []),
        "priority": priority,
        "adapter_id": adapter,
        "meta": meta,
    }
    request = await _request(cli, topic, job, said)
    kernel = _kernel(cli, policy)
    try:
        told = await kernel.explain(request)
    finally:
        await kernel.close()
    _show(cli, told)


async def _request(cli: Cli, topic: str | None, job: str | None, said: dict[str, Any]) -> JobRequest:
    if (topic is None) == (job is None):
        raise OptionInvalid(option="--topic", value=topic, expected="give a --topic, or a --job that is there")
    if job is None:
        return JobRequest.checked({"job_id": "asked", "topic": topic, **said})
    async with cli.open() as ledger:
        return JobRequest.read((await found(ledger, JobId(job))).payload or b"")


def _kernel(cli: Cli, policy: Path | None) -> SafetyKernel:
    return (
        kernel_of(cli.settings, cli.url, monotonic=elapsed_s)
        if policy is None
        else PolicyKernel(read_policy_file(policy))
    )


def _show(cli: Cli, told: Explanation) -> None:
    if cli.out.as_json:
        cli.out.record(told.to_dict())
        return
    decision = told.decision
    cli.out.line(f"{decision.kind.value} by {decision.rule}: {decision.reason}", style="bold")
    for one in told.looked:
        cli.out.line(f"  {'fits' if one.fits else 'no'}  {one.rule} ({one.decision.value}): {one.why}")
    if told.not_looked:
        cli.out.line(f"  not looked at: {', '.join(told.not_looked)}", style="dim")
    if decision.constraints:
        cli.out.line("  " + ", ".join(f"{name} = {value}" for name, value in decision.constraints.items()))
    cli.out.note(f"policy {decision.policy_hash}")


async def simulate(
    cli: Cli,
    file: FileArgument,
    last: Annotated[int, typer.Option("--last", metavar="N", help="Over so many of the last jobs.")] = LAST_DEFAULT,
) -> None:
    """Say what a policy would have decided about the last jobs on the bus, beside what was decided."""
    if not 1 <= last <= JOBS_MAX:
        raise OptionInvalid(option="--last", value=last, expected=f"it must be from 1 to {JOBS_MAX}")
    policy = read_policy_file(file)
    async with cli.open() as ledger:
        made = await simulating.over_jobs(policy, ledger, last=last)
    if cli.out.as_json:
        for one in made:
            cli.out.record(one.to_dict())
        return
    columns = [
        Column[Simulated](title="JOB", cell=lambda one: one.job_id),
        Column[Simulated](title="TOPIC", cell=lambda one: one.topic, gives_way=True),
        Column[Simulated](title="BEFORE", cell=lambda one: one.before or "not decided"),
        Column[Simulated](title="AFTER", cell=lambda one: one.after.kind.value),
        Column[Simulated](title="BY", cell=lambda one: one.after.rule),
        Column[Simulated](title="", cell=lambda one: "changes" if one.changes else ""),
    ]
    cli.out.listing(made, columns, empty="No jobs on the bus.")
    cli.out.note(f"{sum(one.changes for one in made)} of {len(made)} would be decided otherwise")
