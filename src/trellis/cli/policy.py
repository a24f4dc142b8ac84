"""`trellis policy`: check a safety policy, explain its decision about a job, and simulate another policy."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from trellis.app.fleet import kernel_of
from trellis.app.system import elapsed_s
from trellis.bus.approvals import get_bus_job
from trellis.bus.requests import JobRequest
from trellis.bus.safety import evaluation
from trellis.bus.safety.evaluation import JOBS_MAX
from trellis.bus.safety.policy import PolicyRule, read_bounded, read_policy_file
from trellis.cli.commands import command, group
from trellis.cli.invocation import Cli
from trellis.cli.output import ListingColumn, RecordColumn
from trellis.cli.values import pairs
from trellis.engine.closing import closing
from trellis.engine.errors import JobNotFound, OptionInvalid
from trellis.engine.jobs import JobId
from trellis.http.shapes import BusJob, JobWhole

LAST_DEFAULT = 100

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A policy (TOML).")]
FileOption = Annotated[
    Path | None, typer.Option("--policy", metavar="FILE", help="Use this policy, not the one in force.")
]


def add_to(program: typer.Typer) -> None:
    policy = group(program, "policy", section="Jobs", help_="The safety policy: check, explain, simulate.")
    command(policy, "check")(check)
    command(policy, "explain", gateway=True)(explain)
    command(policy, "simulate", gateway=True)(simulate)


def check(cli: Cli, file: FileArgument) -> None:
    """Validate a policy file and list its rules in the order of evaluation."""
    policy = read_policy_file(file)
    if cli.out.as_json:
        cli.out.record({"policy_hash": policy.hash, "rules": [rule.to_dict() for rule in policy.rules]})
        return
    columns = [
        ListingColumn[PolicyRule](title="RULE", cell=lambda rule: rule.id),
        ListingColumn[PolicyRule](title="DECISION", cell=lambda rule: rule.decision.value),
        ListingColumn[PolicyRule](title="MATCH", cell=_conditions, gives_way=True),
    ]
    cli.out.listing(policy.rules, columns, empty="")
    cli.out.note(f"{file} is valid: policy {policy.hash}; a job that matches no rule is denied")


def _conditions(rule: PolicyRule) -> str:
    match = rule.match
    lists = {name: getattr(match, name) for name in sorted(match.model_fields_set - {"labels"})}
    conditions = [f"{name} {', '.join(patterns)}" for name, patterns in lists.items()]
    return "; ".join([*conditions, *(f"label {name}={pattern}" for name, pattern in (match.labels or {}).items())])


async def explain(
    cli: Cli,
    topic: Annotated[str | None, typer.Option("--topic", help="The topic of the job.")] = None,
    *,
    job: Annotated[str | None, typer.Option("--job", metavar="ID", help="An existing job, instead of --topic.")] = None,
    tenant: Annotated[str, typer.Option("--tenant", help="The job's tenant.")] = "",
    principal: Annotated[str, typer.Option("--principal", help="The principal that submits the job.")] = "",
    actor_type: Annotated[str, typer.Option("--actor-type", help="human or service.")] = "",
    capability: Annotated[str, typer.Option("--capability", help="The capability that the job uses.")] = "",
    risk_tag: Annotated[list[str] | None, typer.Option("--risk-tag", help="A risk tag; may be repeated.")] = None,
    requires: Annotated[
        list[str] | None, typer.Option("--requires", help="What the job requires of a worker; may be repeated.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="A label; may be repeated.")] = None,
    priority: Annotated[str | None, typer.Option("--priority", help="critical, interactive or batch.")] = None,
    adapter: Annotated[str, typer.Option("--adapter", help="The job's adapter.")] = "",
    pack: Annotated[str, typer.Option("--pack", help="The job's pack.")] = "",
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
    fields: dict[str, Any] = {
        "tenant_id": tenant,
        "principal_id": principal,
        "labels": pairs("--label", label or []),
        "priority": priority,
        "adapter_id": adapter,
        "meta": meta,
    }
    _show(cli, await _explained(cli, await _request(cli, topic, job, fields), policy))


async def _request(cli: Cli, topic: str | None, job: str | None, fields: dict[str, Any]) -> JobRequest:
    if (topic is None) == (job is None):
        raise OptionInvalid(option="--topic", value=topic, expected="give a --topic, or a --job that is there")
    if job is None:
        return JobRequest.checked({"job_id": "asked", "topic": topic, **fields})
    if cli.gateway_url is not None:
        async with cli.client() as client:
            return _stored(await client.jobs.get(job))
    async with cli.open() as ledger:
        return JobRequest.read((await get_bus_job(ledger, JobId(job))).payload or b"")


def _stored(job: JobWhole) -> JobRequest:
    """The request of a job on a topic, from a gateway's document; raises JobNotFound for any other job."""
    if not isinstance(job, BusJob):
        raise JobNotFound(job_id=job.job_id)
    body = job.model_dump(mode="json", include=set(JobRequest.model_fields))
    request = JobRequest.read(json.dumps(body).encode())
    unsaid = request.model_copy(update={"priority": None})  # a job has a priority even if its request has none
    return unsaid if unsaid.hash == (job.decision or {}).get("job_hash") else request


async def _explained(cli: Cli, request: JobRequest, policy: Path | None) -> dict[str, Any]:
    """The explanation by the given policy, the gateway's, or the one in the settings."""
    if policy is not None:
        return evaluation.explain(read_policy_file(policy), request).to_dict()
    if cli.gateway_url is not None:
        async with cli.client() as client:
            explanation = await client.safety.explain(request.model_dump(mode="json", exclude_defaults=True))
        return explanation.model_dump(mode="json", exclude_none=True)
    async with closing(kernel_of(cli.settings, cli.url, monotonic=elapsed_s)) as kernel:
        return (await kernel.explain(request)).to_dict()


def _show(cli: Cli, explanation: dict[str, Any]) -> None:
    if cli.out.as_json:
        cli.out.record(explanation)
        return
    cli.out.line(f"{explanation['decision']} by {explanation['rule']}: {explanation['reason']}", style="bold")
    for one in explanation["looked"]:
        cli.out.line(f"  {'fits' if one['fits'] else 'no'}  {one['rule']} ({one['decision']}): {one['why']}")
    if explanation["not_looked"]:
        cli.out.line(f"  not looked at: {', '.join(explanation['not_looked'])}", style="dim")
    if explanation.get("constraints"):
        cli.out.line("  " + ", ".join(f"{name} = {value}" for name, value in explanation["constraints"].items()))
    cli.out.note(f"policy {explanation['policy_hash']}")


async def simulate(
    cli: Cli,
    file: FileArgument,
    last: Annotated[int, typer.Option("--last", metavar="N", help="How many of the last jobs to use.")] = LAST_DEFAULT,
) -> None:
    """Say what a policy would have decided about the last jobs on the bus, beside what was decided."""
    if not 1 <= last <= JOBS_MAX:
        raise OptionInvalid(option="--last", value=last, expected=f"it must be from 1 to {JOBS_MAX}")
    read_policy_file(file)  # names the file in its errors
    async with cli.api() as api:
        decisions = (await api.safety.simulate(read_bounded(file).decode(), last=last)).items
    records = [one.model_dump() for one in decisions]
    columns = [
        RecordColumn(title="JOB", cell=lambda one: one["job_id"]),
        RecordColumn(title="TOPIC", cell=lambda one: one["topic"], gives_way=True),
        RecordColumn(title="BEFORE", cell=lambda one: one["before"] or "not decided"),
        RecordColumn(title="AFTER", cell=lambda one: one["after"]),
        RecordColumn(title="BY", cell=lambda one: one["after_rule"]),
        RecordColumn(title="CHANGES", cell=lambda one: "yes" if one["changes"] else "no"),
    ]
    cli.out.listing(records, columns, empty="No jobs on the bus.")
    if not cli.out.as_json:
        cli.out.note(f"{sum(one['changes'] for one in records)} of {len(records)} would be decided otherwise")
