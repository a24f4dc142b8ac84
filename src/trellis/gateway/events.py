"""Live events: the form in which ledger events are streamed, and which ones a listener gets (RUN-5).

One ledger event is one event of the stream, with one `type`: a completed step is not a change of status. Each event is
authorized by the same rules as a request for the thing itself. A filter can only narrow that.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from trellis.agents.errors import SlugInvalid
from trellis.api.feed import rule_of
from trellis.auth.matrices import permit
from trellis.auth.principals import Principal
from trellis.documents import ids
from trellis.documents.errors import RunIdInvalid
from trellis.documents.run_documents import STEP_DONE
from trellis.engine.errors import InputError, NotAllowed
from trellis.engine.jobs import JobId
from trellis.engine.records import Event
from trellis.gateway.visibility import RunDocument
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.proposal import PROPOSAL
from trellis.lifecycles.run import RUN
from trellis.storage.objects.canonical_json import timestamp

RUN_STATUS = "run.status.changed"
RUN_STEP = "run.step.completed"
PROPOSAL_CREATED = "proposal.created"
PROPOSAL_STATUS = "proposal.status.changed"
ARTIFACT_STATUS = "artifact.status.changed"
JOB_STATUS = "job.status.changed"
JOB_RECORDED = "job.recorded"
"""An event that leaves the job's state unchanged, such as its compensation."""

StreamType = Literal[
    "run.status.changed",
    "run.step.completed",
    "proposal.created",
    "proposal.status.changed",
    "artifact.status.changed",
    "job.status.changed",
    "job.recorded",
]
_TYPES_OF: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        RUN.name: frozenset({RUN_STATUS, RUN_STEP}),
        PROPOSAL.name: frozenset({PROPOSAL_CREATED, PROPOSAL_STATUS}),
        ARTIFACT.name: frozenset({ARTIFACT_STATUS}),
    }
)
_TYPES_OF_JOBS = frozenset({JOB_STATUS, JOB_RECORDED})
_NOT_STREAMED = frozenset({"staged", "discarded"})
"""Artifact states that are not streamed: readers learn only of artifacts that are final (ART-7)."""
OF_AGENTS = frozenset({RUN.name, PROPOSAL.name})
"""Lifecycles whose jobs belong to an agent."""


class NothingWanted(InputError):
    """No event can be of type {types} and of lifecycle {lifecycle!r}; leave one of the two out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedEvent:
    """An event as it is streamed, with the fields that decide which listeners get it."""

    position: str
    frame: bytes
    type: str
    lifecycle: str
    job_id: JobId
    runs: tuple[str, ...]
    """The names of the run it belongs to: the run id and, if there is one, its short form."""
    agent_slug: str | None
    secret: bool = False
    """Whether no listener may get it."""
    document: RunDocument | None = None
    """The published document in which readers see the event; None if they read it from the ledger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFilter:
    """What a listener asked for. None and empty mean no restriction."""

    run: str | None = None
    agent: str | None = None
    job: str | None = None
    types: frozenset[str] = frozenset()
    lifecycle: str | None = None

    def lifecycles(self) -> tuple[str, ...]:
        """The lifecycles that can have such events; raises NothingWanted."""
        names = tuple(
            name
            for name in LIFECYCLES
            if self.lifecycle in {None, name} and (not self.types or self.types & types_of(name))
        )
        if not names:
            raise NothingWanted(types=" or ".join(sorted(self.types)), lifecycle=self.lifecycle)
        return names


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamView:
    """What one listener gets: all jobs of `whole` lifecycles, its own jobs of `own` ones, narrowed by `filter`."""

    filter: StreamFilter
    whole: frozenset[str]
    own: frozenset[str] = frozenset()
    principal: Principal | None = None
    """The principal whose own jobs count for `own`."""

    @property
    def only(self) -> str | None:
        """The one visible lifecycle, if there is exactly one. The ledger then reads only that one."""
        seen = self.whole | self.own
        return next(iter(seen)) if len(seen) == 1 else None

    def shows(self, event: StreamedEvent, *, own: bool = False) -> bool:
        """Whether the listener gets this event; `own` says that its job belongs to the listener."""
        wanted = self.filter
        return (
            not event.secret
            and (event.lifecycle in self.whole or (own and event.lifecycle in self.own))
            and (not wanted.types or event.type in wanted.types)
            and (wanted.run is None or wanted.run in event.runs)
            and (wanted.agent is None or wanted.agent == event.agent_slug)
            and (wanted.job is None or wanted.job == event.job_id)
        )


def types_of(lifecycle: str) -> frozenset[str]:
    """The event types that a lifecycle has in the stream."""
    return _TYPES_OF.get(lifecycle, _TYPES_OF_JOBS)


def view_of(principal: Principal, filter_: StreamFilter) -> StreamView:
    """What the principal may see of what it asked for; raises NotAllowed if that is nothing, NothingWanted."""
    candidates = filter_.lifecycles()
    whole = frozenset(name for name in candidates if _may(principal, name, own=False))
    own = frozenset(name for name in candidates if name not in whole and _may(principal, name, own=True))
    if not whole and not own:
        permit(principal, rule_of(candidates[0]))
    if not own:
        return StreamView(filter=filter_, whole=whole)
    return StreamView(filter=filter_, whole=whole, own=own, principal=principal)


def _may(principal: Principal, lifecycle: str, *, own: bool) -> bool:
    try:
        permit(principal, rule_of(lifecycle), own=own)
        permit(principal, "events.read", own=own)  # a listener limited to its own jobs gets no artifacts of others
    except NotAllowed:
        return False
    return True


# --- wire format ---------------------------------------------------------------------------------------------------


def to_streamed_event(
    event: Event,
    position: str,
    agent_slug: str | None,
    run_id: str | None = None,
    proposals: Sequence[str] | None = None,
) -> StreamedEvent:
    """The event as it is sent.

    `run_id` is the run that caused it, if that differs from its correlation id. `proposals` are those a run had created
    when it ended.
    """
    type_, about = _about(event)
    data: dict[str, Any] = {
        "type": type_,
        **about,
        **({} if proposals is None else {"proposals_created": list(proposals)}),
        **({"agentSlug": agent_slug} if event.lifecycle in OF_AGENTS else {}),
        "eventId": event.id,
        "version": event.version,
        "ts": timestamp(event.ts),
        "correlationId": event.correlation_id,
    }
    run = event.job_id if event.lifecycle == RUN.name else run_id or event.correlation_id
    short = ids.short_form(run)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return StreamedEvent(
        position=position,
        frame=f"id: {position}\ndata: {text}\n\n".encode(),
        type=type_,
        lifecycle=event.lifecycle,
        job_id=event.job_id,
        runs=(run,) if short is None else (run, short),
        agent_slug=agent_slug,
        secret=event.lifecycle == ARTIFACT.name and event.target in _NOT_STREAMED,
        document=_document(event, agent_slug),
    )


def _document(event: Event, agent_slug: str | None) -> RunDocument | None:
    """The run's status.json; None for other lifecycles.

    Also None if the agent is unknown: then retention removed the run, which it does only after publication.
    """
    if event.lifecycle != RUN.name or agent_slug is None:
        return None
    try:
        return RunDocument(event.job_id, ids.status_key(agent_slug, event.job_id), event.version, event.ts)
    except (RunIdInvalid, SlugInvalid):  # inserted into the ledger without the gateway: such a run is never published
        return None


def _about(event: Event) -> tuple[str, dict[str, Any]]:
    if event.lifecycle == RUN.name:
        if event.type == STEP_DONE:
            return RUN_STEP, {"runId": event.job_id, "step": _step(event)}
        return RUN_STATUS, {"runId": event.job_id, "status": event.target}
    if event.lifecycle == PROPOSAL.name:
        type_ = PROPOSAL_CREATED if event.source is None else PROPOSAL_STATUS
        return type_, {"proposalId": event.job_id, "status": event.target}
    if event.lifecycle == ARTIFACT.name:
        return ARTIFACT_STATUS, {"artifactId": event.job_id, "status": event.target}
    type_ = JOB_RECORDED if event.source == event.target else JOB_STATUS
    about = {"jobId": event.job_id, "lifecycle": event.lifecycle, "status": event.target}
    return type_, {**about, "event": event.type} if type_ == JOB_RECORDED else about


def _step(event: Event) -> int | None:
    """The number of the completed step; None if the event does not record it."""
    data: Any = json.loads(event.data) if event.data else None
    return data.get("step") if isinstance(data, dict) else None  # type: ignore[reportUnknownMemberType]


def first_frame(position: str, retry_ms: int) -> bytes:
    """The first frame of every stream. Its position lets a listener resume even if it never got an event."""
    return f"retry: {retry_ms}\nid: {position}\n\n".encode()


def keep_alive_frame(position: str) -> bytes:
    """A comment that keeps the connection open, with the position, so that skipped events are not read again."""
    return f": still here\nid: {position}\n\n".encode()


def closing_frame(text: str) -> bytes:
    """A comment that says why the stream ends."""
    return f": {text}\n\n".encode()
