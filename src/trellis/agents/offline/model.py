"""The offline model as a pydantic-ai model. It is stateless: the same messages get the same answer on any machine."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import RequestUsage

from trellis.agents import conversation
from trellis.agents.definition import Tool
from trellis.agents.offline.plan import ConversationState, ToolReply, next_turn
from trellis.agents.run_io import canonical_json
from trellis.storage.memory.layout import count_tokens

NAME = "offline"
_NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)


class OfflineModel(Model[None]):
    """Reads, asks, compares and quotes by fixed rules."""

    @property
    def model_name(self) -> str:
        """Its name in an agent's file."""
        return NAME

    @property
    def system(self) -> str:
        return "trellis"

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        _, parameters = self.prepare_request(model_settings, model_request_parameters)
        # In a thread: comparing large sources takes a while, and leases are renewed by the event loop.
        calls = await asyncio.to_thread(next_turn, view_of(messages, parameters))
        parts = [
            ToolCallPart(call.tool, dict(call.args), tool_call_id=f"{len(messages)}-{number}")
            for number, call in enumerate(calls, 1)
        ]
        input_tokens = sum(count_tokens(_text_of_part(part)) for message in messages for part in message.parts)
        usage = RequestUsage(
            input_tokens=input_tokens, output_tokens=sum(count_tokens(_text_of_part(part)) for part in parts)
        )
        return ModelResponse(parts=parts, usage=usage, model_name=NAME, timestamp=_NO_TIME)


def view_of(messages: list[ModelMessage], parameters: ModelRequestParameters) -> ConversationState:
    """The state of the conversation, from its messages."""
    opening = next(
        (part.content for message in messages for part in message.parts if isinstance(part, UserPromptPart)), ""
    )
    opening = opening if isinstance(opening, str) else ""
    tools = {tool.name: tool for tool in parameters.function_tools}
    memory = {name: text for name, text in conversation.fenced_texts(opening) if name != "params"}
    replies = _replies(messages)
    for reply in replies.get(Tool.READ_MEMORY, []):
        memory |= reply.content.get("files", {})
    proposing = tools.get(Tool.CREATE_PROPOSAL)
    actions: list[str] = proposing.parameters_json_schema["properties"]["action"]["enum"] if proposing else []
    turns = conversation.text_after_label(opening, conversation.TURNS)
    return ConversationState(
        run_id=conversation.text_after_label(opening, conversation.RUN),
        turns=int(turns) if turns.isdigit() else 1,
        owner=conversation.owner_part(_instructions(messages)),
        tools=frozenset(tools),
        actions=tuple(actions),
        memory=memory,
        replies=replies,
    )


def _instructions(messages: list[ModelMessage]) -> str:
    texts = [message.instructions for message in messages if isinstance(message, ModelRequest)]
    return next((text for text in reversed(texts) if text), "")


def _replies(messages: list[ModelMessage]) -> dict[str, list[ToolReply]]:
    """The arguments and reply of every tool call, in order, by tool."""
    arguments: dict[str, Mapping[str, Any]] = {}
    by_tool: dict[str, list[ToolReply]] = {}
    for message in messages:
        for part in message.parts:
            if isinstance(part, ToolCallPart):
                arguments[part.tool_call_id] = part.args_as_dict()
            elif isinstance(part, ToolReturnPart) and isinstance(cast("object", part.content), dict):
                content = cast("dict[str, Any]", part.content)
                by_tool.setdefault(part.tool_name, []).append(ToolReply(arguments.get(part.tool_call_id, {}), content))
    return by_tool


def _text_of_part(part: object) -> str:
    content = part.args if isinstance(part, ToolCallPart) else getattr(part, "content", "")
    return content if isinstance(content, str) else canonical_json(content).decode()
