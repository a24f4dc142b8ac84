"""Runs one agent: context in, structured output out (PIPE-6). The runtime itself stores nothing.

Invariants:
- Every model request and tool call goes through `once`. A run that died is executed again from the start, gets the
  answers already paid for from the journal, and ends with the same bytes.
- An agent has only the tools and actions that its file lists (PIPE-14). Others are refused to the model.
- Text from sources, memory and answers can only become text of a draft.

pydantic-ai is imported in a thread when the first agent runs: it takes seconds, and leases must be renewed meanwhile.
"""

import asyncio
import importlib
from collections.abc import Callable

from trellis.agents.definition import AgentDefinition
from trellis.agents.errors import AgentRunError
from trellis.agents.models import check_model, open_model
from trellis.agents.run_io import AgentContext, AgentOutput, JournalOnce, ModelOptions, RunLimits, ToolServices
from trellis.agents.tools import Toolbox
from trellis.engine.call_times import CallTimes


async def run_agent(
    definition: AgentDefinition,
    context: AgentContext,
    *,
    services: ToolServices,
    once: JournalOnce,
    limits: RunLimits,
    left_s: Callable[[], float],
    models: ModelOptions,
    times: CallTimes,
) -> AgentOutput:
    """Run the agent and return its output; list its calls in `times`. Raises AgentRunError, and what `services` raise."""
    check_model(definition.model, models)
    await asyncio.to_thread(importlib.import_module, "trellis.agents.conversation")
    from trellis.agents import conversation

    toolbox = Toolbox(definition, context, services=services, once=once, limits=limits, left_s=left_s, times=times)
    opening = conversation.opening_message(
        run_id=context.run_id,
        turns=definition.max_steps,
        sources={source.ref: source.text for source in context.sources},
        memory=context.memory,
        params=context.params,
    )
    async with open_model(definition.model, models) as model:
        journalled = conversation.JournalledModel(model, toolbox, models)
        try:
            summary = await conversation.run_conversation(opening, model=journalled, toolbox=toolbox)
        except AgentRunError as error:
            error.refused = tuple(toolbox.refused)
            raise
    return AgentOutput(
        proposals=tuple(toolbox.drafts),
        summary=summary,
        refused=tuple(toolbox.refused),
        tool_calls=tuple(toolbox.calls),
        usage=journalled.used,
        model=definition.model,
    )
