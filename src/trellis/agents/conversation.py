"""The loop between a model and the tools, by pydantic-ai. Nothing is decided here that is not journalled elsewhere.

This module imports pydantic-ai, which takes seconds: see `runtime`.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, RunContext, ToolOutput
from pydantic_ai import Tool as AiTool
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits

from trellis.agents.definition import AgentDefinition, Tool
from trellis.agents.desk import RunLimits
from trellis.agents.journalled import JournalledModel
from trellis.agents.output import RefusalCode, ToolRefusal
from trellis.agents.runtime_errors import ModelGarbage
from trellis.agents.tool_schemas import DESCRIPTIONS
from trellis.agents.tools import Reply, Toolbox
from trellis.engine.text import storable
from trellis.storage.memory import markdown

FINISH = "finish"
SUMMARY_CHARS_MAX = 8_000
UNLISTED_RETRIES = 1_000
"""More than a run can have: its steps and tool calls end first, with an error of their own."""


class Finish(BaseModel):
    """The end of the run: what was found, for a person to read."""

    # Whatever else a model writes here is looked at once, to be named and dropped.
    model_config = ConfigDict(extra="allow")
    summary: str = Field(description="What you found and proposed, in a few sentences.")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpeningMessages:
    """What is said to the model."""

    instructions: str
    opening: str


async def run_conversation(
    definition: AgentDefinition, talk: OpeningMessages, *, model: JournalledModel, toolbox: Toolbox, limits: RunLimits
) -> str:
    """Let the model work until it finishes; its summary."""
    agent: Agent[None, Any] = Agent(
        model,
        output_type=[ToolOutput(Finish, name=FINISH), str],
        instructions=talk.instructions,
        deps_type=type(None),
        name=definition.slug,
        model_settings=ModelSettings(temperature=definition.temperature, max_tokens=limits.output_tokens_max),
        tools=[_tool(toolbox, tool) for tool in toolbox.listed],
        retries=UNLISTED_RETRIES,
        end_strategy="graceful",
    )
    try:
        result = await agent.run(talk.opening, usage_limits=UsageLimits(request_limit=None))
    except UnexpectedModelBehavior as error:
        raise ModelGarbage(model=definition.model, reason=str(error)[:200]) from None
    output = result.output
    if isinstance(output, Finish):
        for name in list(output.model_extra or {})[:10]:
            detail = f"{FINISH} takes a summary only; {name[:80]!r} was dropped"
            toolbox.refuse(ToolRefusal(tool=FINISH, code=RefusalCode.FIELD_DROPPED, detail=detail))
        output = output.summary
    return _without_invisible_characters(str(output))[:SUMMARY_CHARS_MAX]


def _without_invisible_characters(text: str) -> str:
    """Without what a person would not see: a summary is read, and never executed or kept as memory."""
    plain = (storable(text) or "").replace("\r\n", "\n").strip()
    return markdown.UNSEEN.sub("\N{REPLACEMENT CHARACTER}", plain)


def _tool(toolbox: Toolbox, tool: Tool) -> AiTool[None]:
    async def call(ctx: RunContext[None], /, **args: Any) -> Reply:
        assert ctx.tool_call_id is not None
        return await toolbox.call(tool, ctx.tool_call_id, args)

    # One at a time, in the order in which the model asked: the journal and the drafts keep that order.
    return AiTool.from_schema(
        call,
        name=tool.value,
        description=DESCRIPTIONS[tool],
        json_schema=toolbox.schema(tool),
        takes_ctx=True,
        sequential=True,
    )
