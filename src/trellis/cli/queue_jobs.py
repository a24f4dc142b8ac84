"""Jobs of the job queue in `trellis submit`: RESEARCH, BRIEF and PROPOSAL_PREPROCESS.

They belong to an agent, and their result is an artifact.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any

import typer

from trellis.artifacts.content import JobType
from trellis.auth.ownership import owner_scope, scoped_key
from trellis.cli import values
from trellis.cli.invocation import Cli
from trellis.engine.errors import IdempotencyMismatch, InputError, OptionInvalid
from trellis.engine.jobs import Actor, Mismatch, Submitted
from trellis.lifecycles import Role
from trellis.lifecycles.queue_job import QUEUE_JOB

KEY_SCOPE = "trellis submit"


@dataclass(frozen=True, kw_only=True)
class QueueJobOptions:
    """The options that only jobs of the job queue have."""

    agent: Annotated[
        str | None,
        typer.Option("--agent", metavar="SLUG", help="The agent of a RESEARCH, BRIEF or PROPOSAL_PREPROCESS job."),
    ] = None
    entity: Annotated[
        list[str] | None,
        typer.Option("--entity", metavar="SLUG", help="An entity that the job is about; may be repeated."),
    ] = None
    run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="The run of the agent that the job belongs to.")
    ] = None

    def asked(self, type_: str, payload: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The request body for a gateway.

        Raises an InputError for a missing agent, and for options that the job queue decides.
        """
        if self.agent is None:
            raise InputError(
                detail=f"A {type_} job is an agent's: say whose with --agent SLUG; `trellis agents` lists them."
            )
        for name, option in _OPTION_OF_FIELD.items():
            if given.get(name) is not None:
                value = str(given[name]) if isinstance(given[name], datetime) else given[name]
                expected = "the job queue decides that; leave it out"
                if name == "job_id":
                    expected = (
                        "the job queue makes the ids of its jobs; give --key, which lets you repeat the submit safely"
                    )
                raise OptionInvalid(option=option, value=value, expected=expected)
        beside = {"agent_slug": self.agent, "entity_refs": self.entity, "run_id": self.run}
        fields = {name: value for name, value in given.items() if name not in _FIELDS_NOT_SENT}
        body: dict[str, Any] = {"job_type": type_, "payload": payload, **beside, **fields}
        return {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in body.items()
            if value is not None
        }

    def refuse(self) -> None:
        """Raise OptionInvalid if one of these options was given for another kind of job."""
        for option, value in (("--agent", self.agent), ("--entity", self.entity), ("--run", self.run)):
            if value:
                kinds = ", ".join(kind.value for kind in JobType)
                raise OptionInvalid(option=option, value=value, expected=f"it is for {kinds} alone")


_FIELDS_NOT_SENT = frozenset({"idempotency_key", "job_id", "lifecycle", "app"})
_OPTION_OF_FIELD = {
    "job_id": "--id",
    "app": "--app",
    "delay_s": "--delay",
    "run_at": "--run-at",
    "max_attempts": "--max-attempts",
    "concurrency_key": "--concurrency-key",
    "concurrency_limit": "--concurrency-limit",
    **values.UNIQUE_OPTIONS,
}


def is_queue_job(type_: str, lifecycle: str | None) -> bool:
    """Whether the job queue handles this type. `--lifecycle leased-job` selects a worker's type of the same name."""
    return lifecycle in {None, QUEUE_JOB.name} and type_ in {kind.value for kind in JobType}


def warn_undriven(cli: Cli, state: str) -> None:
    """Warn that no orchestrator drives queue jobs, if the job is still in its initial state."""
    if state == QUEUE_JOB.initial.name:
        cli.out.note("no orchestrator has taken it up yet: `trellis up` drives queue jobs; start one on this ledger")


def print_how_to_read(cli: Cli, result: Any) -> None:
    """Print the command that shows the result."""
    cli.out.note(cli.command(f"artifacts show {result['artifact_id']}"))


async def submit_queue_job(cli: Cli, request: Mapping[str, Any], key: str | None) -> Submitted:
    """Validate the request as a gateway does, and submit it; raises an InputError, NotAllowed, IdempotencyMismatch."""
    from trellis.worker.kinds import make_job_from_json  # agents and memory: only queue jobs need it

    principal = cli.owner("submit a job of the job queue")
    async with cli.instance() as instance:
        scope = owner_scope(principal.name, KEY_SCOPE) if principal.by_token else KEY_SCOPE
        factory = instance.job_factory(principal, asked_as=None if key is None else (scope, key))
        job = await make_job_from_json(request, factory)
        if key is not None:
            body = json.dumps(request, sort_keys=True, ensure_ascii=False).encode()
            job = replace(
                job, idempotency_key=key, idempotency_scope=KEY_SCOPE, fingerprint=hashlib.sha256(body).digest()
            )
        if principal.by_token:
            job = await scoped_key(instance.ledger, job, principal.name)
        (answer,) = await instance.ledger.submit(Actor(role=Role.GATEWAY, name=principal.name), [job])
    if isinstance(answer, Mismatch):
        raise IdempotencyMismatch(key=key, job_id=answer.job_id)
    return answer
