"""Jobs on topics in the command line: build a request, and describe a job's state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from trellis.cli import values
from trellis.cli.invocation import Cli
from trellis.engine.errors import OptionInvalid
from trellis.engine.records import Event, Job, Signal
from trellis.lifecycles.bus_job import BUS_JOB


@dataclass(frozen=True, kw_only=True)
class TopicOptions:
    """The options that only jobs on topics have."""

    topic: Annotated[str | None, typer.Option("--topic", help="The topic, instead of TYPE: a job for the bus.")] = None
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="NAME=TEXT", help="A label of the job; may be repeated.")
    ] = None
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="ID", help="The tenant of a job on a topic.")] = None
    context: Annotated[
        str | None, typer.Option("--context", metavar="POINTER", help="A pointer to the payload, instead of PAYLOAD.")
    ] = None
    request: Annotated[
        str | None, typer.Option("--request", metavar="JSON", help="More fields of the bus request: JSON, @file or -.")
    ] = None

    def named(
        self, type_: str | None, payload: str | None, lifecycle: str | None
    ) -> tuple["TopicOptions", str, str | None]:
        """These options, the job's name, and its payload. With --topic the only argument is the payload.

        Raises OptionInvalid.
        """
        if self.topic is None:
            if type_ is None:
                raise OptionInvalid(option="TYPE", value=None, expected="name the job type, or a topic with --topic")
            meant = lifecycle == BUS_JOB.name
            return replace(self, topic=type_ if meant else None), type_, payload
        if payload is not None:
            raise OptionInvalid(option="--topic", value=self.topic, expected=f"it stands for TYPE; leave out {type_!r}")
        if lifecycle not in {None, BUS_JOB.name}:
            raise OptionInvalid(option="--lifecycle", value=lifecycle, expected=f"a job on a topic is a {BUS_JOB.name}")
        return self, self.topic, type_

    def asked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the request except its payload; raises OptionInvalid for options that the topic decides."""
        for name, option in _OPTION_OF_FIELD.items():
            if given.get(name) is not None:
                raise OptionInvalid(
                    option=option, value=str(given[name]), expected="the topic decides that; leave it out"
                )
        more, deadline_s = self._more(), given.get("deadline_s")
        deadline = None if deadline_s is None else {"deadline_ms": max(1, round(deadline_s * 1000))}
        request: dict[str, Any] = {
            "topic": self.topic,
            "priority": given.get("priority") or more.get("priority", "batch"),
            "job_id": given.get("job_id"),
            "parent_job_id": given.get("parent_id"),
            "tenant_id": self.tenant,
            "context_ptr": self.context,
            "labels": _merged_field(more, "labels", values.pairs("--label", self.label or ())),
            "budget": _merged_field(more, "budget", deadline),
        }
        return more | {name: value for name, value in request.items() if value is not None}

    def _more(self) -> dict[str, Any]:
        """The fields given with --request. Separate options take precedence."""
        more = values.payload("--request", self.request)
        if more is not None and not isinstance(more, dict):
            raise OptionInvalid(option="--request", value=self.request, expected="give a JSON object")
        given = cast("dict[str, Any]", more or {})
        from trellis.bus.requests import TopicSubmitOptions

        for name in given:
            if name not in TopicSubmitOptions.__annotations__:
                fields = ", ".join(sorted(TopicSubmitOptions.__annotations__))
                raise OptionInvalid(
                    option="--request", value=name, expected=f"its fields are {fields}; say all else beside it"
                )
        return {name: value for name, value in given.items() if value is not None}

    def refuse(self) -> None:
        """Raise OptionInvalid if one of these options was given for another kind of job."""
        beside = {"--label": self.label, "--tenant": self.tenant, "--context": self.context, "--request": self.request}
        for option, value in beside.items():
            if value:
                raise OptionInvalid(option=option, value=value, expected="it is for jobs on a topic; add --topic TOPIC")


_OPTION_OF_FIELD = {
    "app": "--app",
    "delay_s": "--delay",
    "run_at": "--run-at",
    "max_attempts": "--max-attempts",
    "concurrency_key": "--concurrency-key",
    "concurrency_limit": "--concurrency-limit",
    **values.UNIQUE_OPTIONS,
}


def _merged_field(more: Mapping[str, Any], name: str, options: dict[str, Any] | None) -> dict[str, Any] | None:
    """An object field with the values of options merged over those of --request."""
    if not options:
        return None
    value: Any = more.get(name, {})
    if not isinstance(value, dict):
        raise OptionInvalid(option="--request", value=value, expected=f"{name} must be an object")
    return {**value, **options}


def print_context_hint(cli: Cli, document: Mapping[str, Any]) -> None:
    """Print how to see the worker's input, which the document only points to."""
    job_id = document.get("job_id")
    if job_id and document.get("context_ptr") and not cli.out.as_json:
        cli.out.note(f"what its worker is given: `trellis job context {job_id}`")


def bus_job_facts(
    cli: Cli, job: Job, events: Sequence[Event], signals: Sequence[Signal]
) -> list[tuple[str, str | Text]]:
    """The facts of `job show` that only jobs on topics have."""
    from trellis.bus.documents import (  # the bus is imported only for its jobs
        context_pointer,
        decision_of,
        dispatch_of,
        hold_of,
        refused_of,
        report_of,
        requeue_cause,
        worker_of,
    )
    from trellis.operations.explain import approval_of

    report, hold, decision = report_of(job, events), hold_of(job, events), decision_of(events)
    sent, worker = dispatch_of(events), worker_of(job, events)
    given = context_pointer(job, events)
    facts: list[tuple[str, str | Text]] = [
        ("context at", f"{given}: {cli.command(f'job context {job.job_id}')}" if given else ""),
        ("run again", requeue_cause(job) or ""),
        ("worker", worker or ("whoever listens" if sent is not None else "")),
        ("took", f"{report['execution_ms']} ms" if report.get("execution_ms") else ""),
        ("error", ": ".join(filter(None, (report.get("error_code"), report.get("error_message"))))),
        ("result at", str(report.get("result_ptr") or "")),
        ("waits for", "" if hold is None else f"{hold.kind}: {hold.reason}"),
        ("safety", "" if decision is None else f"{decision['decision']} by rule {decision['rule']}"),
        ("approved", "" if (approved := approval_of(events)) is None else f"by {approved.actor}"),
        ("refused", "" if not (late := refused_of(signals)) else f"{len(late)} reports that changed nothing"),
    ]
    return [(name, value) for name, value in facts if value]
