"""Agents of pydantic-ai inside a job: each model request and each tool call is a step of the job's journal.

    agent = Agent("openai:gpt-5", name="clerk")

    @app.job("letter.answer")
    async def answer(ctx: Context, letter: str) -> str:
        result = await run_agent(ctx, agent, letter)
        return result.output

A worker that dies, or a job that waits, changes nothing: the next attempt gets the answers of the model and the results
of the tools from the journal, and goes on where it stopped. Tool calls of one answer run one after another, in the order
of the answer, because a handler makes one durable call at a time.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeVar, cast

from pydantic_ai.agent import Agent, AgentRunResult, EventStreamHandler
from pydantic_ai.agent.abstract import AbstractAgent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    DurabilityEngineSpec,
    DurableOperationBackend,
    DurableOperationId,
    JournalCallableOperationBackend,
    RoleBasedOperationConfig,
    conversation_id_from_run_id,
)
from pydantic_ai.models import Model

from trellis.app.system import SystemClock, new_id
from trellis.engine.errors import PermanentError
from trellis.worker.context import Context
from trellis.worker.durable import CallsOverlap, DurableStepFailed

AgentDepsT = TypeVar("AgentDepsT")
OutputT = TypeVar("OutputT")

TOOL_KEY = "trellis"
"""The key of a tool's metadata that says how the tool is executed."""
USES_CONTEXT: dict[str, Any] = {TOOL_KEY: False}
"""The metadata of an async tool that makes durable calls itself: `@agent.tool(metadata=USES_CONTEXT)`.

Such a tool is no step. It begins again with each attempt, as the handler does, so what it does belongs into `ctx.step`,
`ctx.spawn` or `ctx.wait_signal`.
"""
UNNAMED = "agent"
"""The name in the journal of an agent without a name."""

_is_in_step: ContextVar[bool] = ContextVar("trellis.integrations.pydantic_ai.is_in_step", default=False)
"""Whether this code runs inside a step of an agent: then an agent that a tool runs is part of that step."""


class RunStart(NamedTuple):
    """What the journal has about the beginning of a run, equal in every attempt."""

    run_id: str
    began_at: datetime


class StepBackend(JournalCallableOperationBackend[None]):
    """Executes each operation of an agent as a step of a job."""

    def __init__(self, ctx: Context, capability: "TrellisDurability[Any]") -> None:
        super().__init__(
            agent_name=capability.name,
            default_model_id=capability.default_model_id,
            config=RoleBasedOperationConfig[None](
                model=None, event=None, capability=None, tool=None, resolve_tool=_tool_config
            ),
        )
        self._ctx = ctx

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,  # noqa: ARG002 - the name has it
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],  # noqa: ARG002 - the journal knows a step by its number and name
        config: None,  # noqa: ARG002 - a step has no settings
    ) -> object:
        """The result of one operation: from the journal, or of `body`, which the journal then has."""

        async def marked() -> object:
            token = _is_in_step.set(True)
            try:
                return await body()
            finally:
                _is_in_step.reset(token)

        try:
            return await self._ctx.step(name, marked)
        except DurableStepFailed as failure:
            if isinstance(failure.__cause__, CallsOverlap):
                raise PermanentError(
                    f"{name} made a durable call of its own ({failure.__cause__}). A tool that uses ctx is given "
                    "metadata=USES_CONTEXT, of trellis.integrations.pydantic_ai, and is then no step itself"
                ) from failure
            raise


def _tool_config(_: DurableOperationId, tool: object | None, __: str) -> Literal[False] | None:
    """False for a tool that is executed by the handler itself and not as a step."""
    metadata: Mapping[str, Any] | None = None if tool is None else cast("Any", tool).tool_def.metadata
    return False if metadata is not None and metadata.get(TOOL_KEY) is False else None


class TrellisDurability(BaseDurabilityCapability[AgentDepsT]):
    """The capability that makes one run of an agent durable. `run_agent` adds it to the run."""

    engine_spec = DurabilityEngineSpec(
        engine_name="Trellis",
        durable_unit_noun="step",
        durable_container_noun="job",
        codec=JSON_CODEC,
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        sequential_tools_in_durable_context=True,
        tool_config_key=TOOL_KEY,
    )

    def __init__(
        self,
        ctx: Context,
        start: RunStart,
        *,
        name: str,
        models: Mapping[str, Model] | None,
        event_stream_handler: EventStreamHandler[AgentDepsT] | None,
    ) -> None:
        super().__init__(models=models, event_stream_handler=event_stream_handler, name=name)
        self._ctx, self._start = ctx, start

    @property
    def in_durable_context(self) -> bool:
        """Whether this is the handler's own code, and not a step of it."""
        return not _is_in_step.get()

    def get_durable_operation_backend(self) -> DurableOperationBackend[None]:
        """What executes the operations of the agent."""
        return StepBackend(self._ctx, self)

    def get_default_conversation_id(self, run_id: str) -> str:
        """The conversation of a run that continues none, the same in every attempt."""
        return conversation_id_from_run_id(run_id)

    async def get_run_start_time(self, run_id: str) -> datetime:  # noqa: ARG002 - one capability has one run
        """When the first attempt began the run: its `timeout=` counts from then."""
        return self._start.began_at


async def run_agent(
    ctx: Context,
    agent: AbstractAgent[AgentDepsT, OutputT],
    prompt: Any = None,
    *,
    event_stream_handler: EventStreamHandler[AgentDepsT] | None = None,
    models: Mapping[str, Model] | None = None,
    capabilities: Sequence[AbstractCapability[AgentDepsT]] = (),
    **options: Any,
) -> AgentRunResult[OutputT]:
    """Run an agent as part of a durable job: no model request and no tool call that the journal has happens again.

    Takes the options of `agent.run`. `models` are further models that the run may use, by name; a model that is an
    object and not the agent's own must be one of them. `event_stream_handler` gets the events of the model while a model
    request streams, and each event of a tool as a step of its own. A model or tool that fails makes the attempt fail
    with its error, which is tried again as the job's type says, and the journal keeps what was done before.

    Inside a tool that is a step, the run is part of that step. Raises PermanentError in a sync handler, and as `ctx.step`
    does for a result that is too large and for a journal that is full.
    """
    if not isinstance(ctx, Context):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no types
        raise PermanentError(
            f"run_agent needs the ctx of an async handler, not {type(ctx).__name__}: make the handler `async def`"
        )
    if _is_in_step.get():
        return await agent.run(prompt, event_stream_handler=event_stream_handler, capabilities=capabilities, **options)
    name = agent.name or UNNAMED
    start = await _run_start(ctx, name)
    durability = TrellisDurability[AgentDepsT](
        ctx, start, name=name, models=models, event_stream_handler=event_stream_handler
    )
    options.setdefault("run_id", start.run_id)
    with _durable_sleep(ctx):
        return await agent.run(prompt, capabilities=[*capabilities, durability], **options)


async def _run_start(ctx: Context, name: str) -> RunStart:
    """The id and the beginning of a run, from the journal."""
    entry: list[str] = await ctx.step(f"{name}__run", lambda: [new_id(), datetime.now(UTC).isoformat()])
    return RunStart(entry[0], datetime.fromisoformat(entry[1]))


def _durable_sleep(ctx: Context) -> AbstractContextManager[None]:
    """Lets the waits of an agent, such as between polls of a response in the background, suspend the job."""

    async def sleep(seconds: float) -> None:
        await (SystemClock().sleep(seconds) if _is_in_step.get() else ctx.sleep(max(0.0, seconds)))

    return Agent.using_sleep(sleep)
