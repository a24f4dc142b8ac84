"""The tools: what each is called and takes, and the request to the gateway that it makes."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import pydantic

from trellis.engine.errors import Refused
from trellis.http.client import GatewayClient
from trellis.http.operation_shapes import JobExplained, JobListed
from trellis.http.shapes import (
    InboxTaken,
    JobShape,
    JobSubmitted,
    JobWhole,
    Page,
    ProposalDiff,
    ProposalShape,
    RunDetail,
    RunListed,
    RunStarted,
    Stopped,
)
from trellis.worker.kinds import JobRequestBody

LIMIT_DEFAULT = 20
LIMIT_MAX = 50
FEWER = "ask for fewer with `limit`"
RESULT_BYTES_MAX = 256 * 1024
"""The most bytes of one answer. A model's context has less room than a program's memory."""

Id = Annotated[str, pydantic.Field(min_length=1, max_length=250)]
Text = Annotated[str, pydantic.Field(max_length=4_000)]


class ResultTooLarge(Refused):
    """The answer has {size} bytes, and a tool may answer {most}: {remedy}."""

    code = "PAYLOAD_TOO_LARGE"


class ToolInput(pydantic.BaseModel):
    """What a tool takes. Unknown names are refused."""

    model_config = pydantic.ConfigDict(extra="forbid")


class PageInput(ToolInput):
    """Which part of a list."""

    limit: int = pydantic.Field(LIMIT_DEFAULT, ge=1, le=LIMIT_MAX, description="How many items at most.")
    cursor: str | None = pydantic.Field(None, max_length=200, description="The next_cursor of the answer before.")


class ChangeInput(ToolInput):
    """A change, which may be repeated safely with the same key."""

    idempotency_key: str | None = pydantic.Field(
        None, min_length=1, max_length=200, description="Repeat the call with the same key and it takes effect once."
    )


class RunsInput(PageInput):
    """Which runs."""

    agent: Id | None = pydantic.Field(None, description="Only runs of this agent.")
    status: Id | None = pydantic.Field(None, description="Only runs of this status, such as running or failed.")


class RunShowInput(ToolInput):
    """One run."""

    run_id: Id


class RunStartInput(ChangeInput):
    """The agent and its parameters."""

    agent: Id = pydantic.Field(description="The slug of the agent.")
    params: dict[str, Any] = pydantic.Field(default_factory=dict[str, Any], description="Parameters of the run.")


class RunCancelInput(ChangeInput):
    """The run, and why it shall end."""

    run_id: Id
    mode: Literal["soft", "hard"] = pydantic.Field("soft", description="soft asks it to stop, hard ends it now.")
    reason: Text | None = None


class ProposalsInput(PageInput):
    """Which proposals."""

    status: (
        Literal["pending", "approved", "auto_approved", "applying", "failed", "applied", "rejected", "expired"] | None
    ) = pydantic.Field(None, description="pending: those that wait for a person.")


class ProposalShowInput(ToolInput):
    """One proposal, or one held job."""

    proposal_id: Id


class CommentInput(ChangeInput):
    """A comment on a text."""

    target: Id = pydantic.Field(
        description="A text that exists: agent/sources/file.md, which are the agent_slug and the target of a proposal."
    )
    summary: Text = pydantic.Field(min_length=1, description="What the comment is about, in one line.")
    text: str = pydantic.Field(min_length=1, max_length=20_000)


class ApproveInput(ChangeInput):
    """The proposal as it was read, and a note for the record."""

    proposal_id: Id
    version: int = pydantic.Field(ge=1, description="The version that was read: another one is not approved.")
    note: Text | None = None


class RejectInput(ChangeInput):
    """The proposal as it was read, and why it is rejected."""

    proposal_id: Id
    version: int = pydantic.Field(ge=1, description="The version that was read: another one is not rejected.")
    note: Text = pydantic.Field(min_length=1, description="Why, in ten characters or more.")


class JobsInput(PageInput):
    """Which jobs."""

    type: Id | None = pydantic.Field(None, description="Only jobs of this type.")
    status: Id | None = pydantic.Field(None, description="Only jobs of this status, such as queued or failed.")
    lifecycle: Literal["leased-job", "queue-job", "bus-job"] | None = None
    correlation_id: Id | None = None
    parent_id: Id | None = pydantic.Field(None, description="Only jobs that this one caused.")


class JobShowInput(ToolInput):
    """One job."""

    job_id: Id


class JobSubmitInput(ChangeInput):
    """The job, as POST /jobs takes it."""

    job: JobRequestBody


class JobCancelInput(ChangeInput):
    """The job, and why it shall end."""

    job_id: Id
    mode: Literal["soft", "hard"] = pydantic.Field(
        "soft", description="soft asks its worker to stop, hard ends it now."
    )
    reason: Text | None = None


@dataclass(frozen=True, kw_only=True)
class McpTool:
    """One tool."""

    name: str
    description: str
    takes: type[ToolInput]
    answers: type[pydantic.BaseModel]
    request: Callable[[GatewayClient, Any], Awaitable[pydantic.BaseModel]]
    """The request to the gateway, with what the tool takes."""
    changes: bool
    """Whether it changes something."""
    decides: bool
    """Whether it is the decision of a person: only a token makes it."""
    if_large: str
    """What to do about an answer that is too large."""

    @cached_property
    def document(self) -> dict[str, Any]:
        """The tool as `tools/list` shows it."""
        hints = {"readOnlyHint": not self.changes, "openWorldHint": False}
        if self.changes:
            hints |= {"destructiveHint": self.name.endswith(("cancel", "reject", "approve")), "idempotentHint": False}
        return {
            "name": self.name,
            "description": self.description,
            "inputSchema": self.takes.model_json_schema(),
            "outputSchema": self.answers.model_json_schema(mode="serialization"),
            "annotations": hints,
        }

    async def call(self, client: GatewayClient, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The answer as JSON. Raises pydantic.ValidationError for wrong arguments, and what the gateway refuses with."""
        answer = await self.request(client, self.takes.model_validate(arguments))
        document = answer.model_dump(mode="json")
        size = len(json.dumps(document).encode())
        if size > RESULT_BYTES_MAX:
            raise ResultTooLarge(size=size, most=RESULT_BYTES_MAX, remedy=self.if_large)
        return document


TOOLS: dict[str, McpTool] = {}
"""The tools by name, in the order in which they are listed."""

RequestT = TypeVar("RequestT", bound=Callable[[GatewayClient, Any], Awaitable[pydantic.BaseModel]])


def tool(*, changes: bool = False, decides: bool = False, if_large: str = FEWER) -> Callable[[RequestT], RequestT]:
    """Makes a tool of a request to the gateway: its name, its description, what it takes and what it answers."""

    def add(request: RequestT) -> RequestT:
        types, description = get_type_hints(request), " ".join((request.__doc__ or "").split())
        TOOLS[request.__name__] = McpTool(
            name=request.__name__,
            description=description,
            takes=types["given"],
            answers=types["return"],
            request=request,
            changes=changes,
            decides=decides,
            if_large=if_large,
        )
        return request

    return add


def _page(given: PageInput) -> dict[str, Any]:
    return {"limit": given.limit, "cursor": given.cursor}


@tool()
async def runs_list(client: GatewayClient, given: RunsInput) -> Page[RunListed]:
    """List runs of agents, newest first."""
    return await client.runs.list(agent=given.agent, status=given.status, **_page(given))


@tool(if_large="a person can read it with `trellis runs show`")
async def run_show(client: GatewayClient, given: RunShowInput) -> RunDetail:
    """Show one run: its status, its step, its proposals and its error."""
    return await client.runs.get(given.run_id)


@tool(changes=True)
async def run_start(client: GatewayClient, given: RunStartInput) -> RunStarted:
    """Start a run of an agent. It goes on by itself; run_show says how it stands."""
    return await client.runs.start(given.agent, given.params, idempotency_key=given.idempotency_key)


@tool(changes=True)
async def run_cancel(client: GatewayClient, given: RunCancelInput) -> Stopped:
    """End a run that has not ended."""
    return await client.runs.cancel(
        given.run_id, mode=given.mode, reason=given.reason, idempotency_key=given.idempotency_key
    )


@tool()
async def proposals_list(client: GatewayClient, given: ProposalsInput) -> Page[ProposalShape]:
    """List proposals of agents and held jobs, newest first. status=pending: what waits for a person."""
    return await client.proposals.list(status=given.status, **_page(given))


@tool(if_large="a person can read it with `trellis proposals show`")
async def proposal_show(client: GatewayClient, given: ProposalShowInput) -> ProposalShape:
    """Show one proposal: its text, its citations, its version, and who decided about it."""
    return await client.proposals.get(given.proposal_id)


@tool(if_large="a person can read it with `trellis proposals show`")
async def proposal_diff(client: GatewayClient, given: ProposalShowInput) -> ProposalDiff:
    """Show as a unified diff what applying a proposal would change now."""
    return await client.proposals.diff(given.proposal_id)


@tool(changes=True)
async def comment_propose(client: GatewayClient, given: CommentInput) -> InboxTaken:
    """Comment on the text that a proposal is about, or on any text of an agent. The comment is a proposal itself: it
    stands beside the text once a person has approved it.
    """
    payload = {"summary": given.summary, "change": {"type": "append", "text": given.text}}
    return await client.inbox.submit("propose-comment", given.target, payload, idempotency_key=given.idempotency_key)


@tool(changes=True, decides=True)
async def proposal_approve(client: GatewayClient, given: ApproveInput) -> ProposalShape:
    """Approve a proposal, which is then applied, or let a held job go. It is recorded as the decision of the person
    whose token this is: call it only when that person has said so.
    """
    return await client.proposals.approve(
        given.proposal_id, given.note, version=given.version, idempotency_key=given.idempotency_key
    )


@tool(changes=True, decides=True)
async def proposal_reject(client: GatewayClient, given: RejectInput) -> ProposalShape:
    """Reject a proposal or a held job, and say why. It is recorded as the decision of the person whose token this is:
    call it only when that person has said so.
    """
    return await client.proposals.reject(
        given.proposal_id, given.note, version=given.version, idempotency_key=given.idempotency_key
    )


@tool()
async def jobs_list(client: GatewayClient, given: JobsInput) -> Page[JobListed]:
    """List jobs that you may read, newest first, with what each waits for."""
    return await client.jobs.list(
        type_=given.type,
        status=given.status,
        lifecycle=given.lifecycle,
        correlation_id=given.correlation_id,
        parent_id=given.parent_id,
        **_page(given),
    )


@tool(if_large="job_explain says how it stands, and a person can read it with `trellis job show`")
async def job_show(client: GatewayClient, given: JobShowInput) -> JobWhole:
    """Show one job with its payload, its progress, its result and its last error."""
    return await client.jobs.get(given.job_id)


@tool(if_large="a person can read it with `trellis job explain`")
async def job_explain(client: GatewayClient, given: JobShowInput) -> JobExplained:
    """Explain why a job is where it is, what happens next, and what can be done about it."""
    return await client.jobs.explain(given.job_id)


@tool(changes=True)
async def job_submit(client: GatewayClient, given: JobSubmitInput) -> JobSubmitted:
    """Submit a job. It is stored before the answer comes; job_show says how it stands."""
    body = given.job.model_dump(mode="json", exclude_unset=True)
    return await client.jobs.submit_asked(body, idempotency_key=given.idempotency_key)


@tool(changes=True)
async def job_cancel(client: GatewayClient, given: JobCancelInput) -> JobShape:
    """End a job that has not ended."""
    return await client.jobs.cancel(
        given.job_id, mode=given.mode, reason=given.reason, idempotency_key=given.idempotency_key
    )
