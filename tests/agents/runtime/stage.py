"""A stage for one agent: real sources, the real extractive provider, a journal that can crash, and scripts as models."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.agents.files import agent_file
from trellis.agents.definition import AgentDefinition, read_definition
from trellis.agents.run_io import AgentContext, AgentOutput, DeepMemoryPage, ModelOptions, RunLimits, ToolServices
from trellis.agents.runtime import run_agent
from trellis.agents.sources import AgentSource, Annotation
from trellis.engine.call_times import CallTimes
from trellis.nlm.extractive import ExtractiveProvider
from trellis.nlm.provider import NlmAnswer, NlmQuestion
from trellis.storage.memory.layout import DeepPart, ReadMode
from trellis.testing import FakeClock

RUN_ID = "run_2026-02-14_080000_abc123"
ALL_TOOLS = "[read-context, read-memory, read-memory-deep, notebooklm-query, create-proposal]"
ALL_OUTPUTS = "[propose-edit, propose-summary, propose-note, propose-comment, memory-update]"
SOURCES = {
    "sources/beds.md": "# Beds\n\nThe north bed is watered every 3 days in summer. Bed B-1 has roses.\n",
    "sources/water.md": "# Water\n\nThe north bed is watered every 5 days in summer. The pump is never left on.\n",
}
MEMORY = {
    "snapshot.md": "# Snapshot\n\nTwo beds.\n",
    "open_loops.md": "# Open loops\n\n- [ ] pump: who turns off the pump?\n",
}


class Crash(Exception):
    """The process is gone."""


@dataclass
class Journal:
    """What a ledger keeps. `crash_after`: right after that many new entries were kept, the process is gone."""

    entries: dict[str, bytes] = field(default_factory=dict)
    made: Counter[str] = field(default_factory=Counter)
    crash_after: int | None = None

    async def once(self, name: str, make: Callable[[], Awaitable[bytes]], /) -> bytes:
        if name not in self.entries:
            self.made[name] += 1
            self.entries[name] = await make()
            if self.crash_after is not None and sum(self.made.values()) >= self.crash_after:
                self.crash_after = None
                raise Crash
        return self.entries[name]


@dataclass
class Stage:
    """Everything one run is given; what it asked of the world is counted."""

    sources: Mapping[str, str] = field(default_factory=lambda: dict(SOURCES))
    memory: Mapping[str, str] = field(default_factory=lambda: dict(MEMORY))
    deep: Mapping[str, str] = field(default_factory=lambda: {"000001": "## We chose roses\n"})
    journal: Journal = field(default_factory=Journal)
    limits: RunLimits = field(default_factory=RunLimits)
    left_s: Callable[[], float] = lambda: 60.0
    scripts: dict[str, Callable[..., Any]] = field(default_factory=dict)
    base_url: str | None = None
    key: str | None = None
    request_timeout_s: float = 60.0
    params: Mapping[str, Any] = field(default_factory=dict)
    annotations: tuple[Annotation, ...] = ()
    asked: list[str] = field(default_factory=list)
    deep_reads: list[tuple[DeepPart, str | None, int]] = field(default_factory=list)
    clock: FakeClock = field(default_factory=FakeClock)
    times: CallTimes = field(init=False)
    provider: ExtractiveProvider = field(default_factory=ExtractiveProvider)

    def __post_init__(self) -> None:
        self.times = CallTimes(clock=self.clock)

    async def ask(self, question: NlmQuestion, deadline_s: float) -> NlmAnswer:
        self.asked.append(question.text)
        prepared = await self.provider.prepare(question.sources)
        return await self.provider.query(prepared, question, deadline_s=deadline_s)

    async def read_memory(self, mode: ReadMode) -> Mapping[str, str]:
        return {name: text for name, text in self.memory.items() if mode is ReadMode.WIDE or name != "facts.md"}

    async def read_memory_deep(self, part: DeepPart, before: str | None, limit: int) -> DeepMemoryPage:
        self.deep_reads.append((part, before, limit))
        return DeepMemoryPage(items=self.deep)

    async def run(self, definition: AgentDefinition) -> AgentOutput:
        found = tuple(AgentSource(ref=ref, text=text, sha256="") for ref, text in sorted(self.sources.items()))
        return await run_agent(
            definition,
            AgentContext(
                run_id=RUN_ID,
                sources=found,
                annotations=self.annotations,
                memory=self.memory,
                params=self.params,
            ),
            services=ToolServices(ask=self.ask, read_memory=self.read_memory, read_memory_deep=self.read_memory_deep),
            once=self.journal.once,
            limits=self.limits,
            left_s=self.left_s,
            models=ModelOptions(
                base_url=self.base_url, key=self.key, scripts=self.scripts, request_timeout_s=self.request_timeout_s
            ),
            times=self.times,
        )

    async def play(self, *turns: Sequence[tuple[str, Any]] | str, **fields: str) -> AgentOutput:
        """Run an agent whose model says exactly this, turn by turn."""
        self.scripts["play"] = script(*turns)
        return await self.run(agent(model="scripted:play", **fields))


def agent(*, body: str = "Look after the beds.\n", **fields: str) -> AgentDefinition:
    given = {"tools": ALL_TOOLS, "safe_outputs": ALL_OUTPUTS, "max_steps": "8", **fields}
    read = read_definition(agent_file(body=body, **given))
    assert isinstance(read, AgentDefinition), read
    return read


def script(*turns: Sequence[tuple[str, Any]] | str) -> Callable[..., Any]:
    """A model that says the next of these at each request; the last one again and again."""

    def model(messages: list[Any], _info: Any) -> Any:
        from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart

        turn = turns[min(sum(message.kind == "response" for message in messages), len(turns) - 1)]
        if isinstance(turn, str):
            return ModelResponse(parts=[TextPart(turn)])
        return ModelResponse(parts=[ToolCallPart(name, args) for name, args in turn])

    return model


def propose(**changes: Any) -> tuple[str, dict[str, Any]]:
    """A call of create-proposal that would be accepted, with these changes."""
    args = {
        "action": "propose-comment",
        "target": "sources/beds.md",
        "summary": "The notes differ",
        "text": "Look at both.",
        "reasoning": "They differ.",
        "citations": [],
        **changes,
    }
    return "create-proposal", {name: value for name, value in args.items() if value is not None}


FINISH = ("finish", {"summary": "Done."})
