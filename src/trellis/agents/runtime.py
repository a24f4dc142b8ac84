"""Runs one agent: context in, structured output out (PIPE-6). The runtime keeps nothing and writes nothing itself.

What holds:
- every model request and every tool call goes through `once`; a run that died anywhere is run again from the start, gets
  what was already paid for from there, and ends with the same bytes;
- an agent has the tools and the ways to propose that its file lists (PIPE-14); a model that asks for others is refused;
- what sources, memory and answers say can become text of a draft and nothing else.

pydantic-ai is imported in a thread when the first agent runs: it takes seconds, and leases are renewed meanwhile.
"""

import asyncio
import importlib
from collections.abc import Callable

from trellis.agents import prompt
from trellis.agents.definition import AgentDefinition
from trellis.agents.models import ModelOptions, check_model, open_model
from trellis.agents.output import AgentOutput
from trellis.agents.run_inputs import AgentContext, DeepMemoryPage, JournalOnce, RunLimits, ToolServices
from trellis.agents.tools import Toolbox

__all__ = ["AgentContext", "DeepMemoryPage", "JournalOnce", "ModelOptions", "RunLimits", "ToolServices", "run_agent"]


async def run_agent(
    definition: AgentDefinition,
    context: AgentContext,
    *,
    desk: ToolServices,
    once: JournalOnce,
    limits: RunLimits,
    left_s: Callable[[], float],
    models: ModelOptions,
) -> AgentOutput:
    """The agent's output. Raises AgentRunError, and what the desk's ports raise."""
    check_model(definition.model, models)
    await asyncio.to_thread(importlib.import_module, "trellis.agents.conversation")
    from trellis.agents import conversation
    from trellis.agents import conversation as journalled

    toolbox = Toolbox(definition, context, desk=desk, once=once, limits=limits, left_s=left_s)
    talk = conversation.OpeningMessages(
        instructions=prompt.system_instructions(definition),
        opening=prompt.opening_message(
            run_id=context.run_id,
            turns=definition.max_steps,
            sources={source.ref: source.text for source in context.sources},
            memory=context.memory,
            params=context.params,
        ),
    )
    async with open_model(definition.model, models) as model:
        kept = journalled.JournalledModel(
            model,
            once=once,
            steps_max=definition.max_steps,
            limits=limits,
            left_s=left_s,
            not_listed=toolbox.not_listed,
        )
        summary = await conversation.run_conversation(definition, talk, model=kept, toolbox=toolbox, limits=limits)
    return AgentOutput(
        proposals=tuple(toolbox.drafts),
        summary=summary,
        refused=tuple(toolbox.refused),
        tool_calls=tuple(toolbox.calls),
        usage=kept.used,
        model=definition.model,
    )
