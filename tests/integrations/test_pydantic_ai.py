"""An agent of pydantic-ai in a durable job: what the journal has is neither asked of the model nor done by a tool again."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterable
from datetime import datetime, timedelta, tzinfo
from typing import Any, cast

import pytest
from pydantic_ai import Agent, ModelRetry, RunContext, UsageLimits
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    PartDeltaEvent,
    TextPart,
    TextPartDelta,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.toolsets import DynamicToolset, FunctionToolset

from tests.worker.test_every_ledger import caller, ledger, url  # noqa: F401 - fixtures
from trellis.app.wiring import make_worker
from trellis.engine.errors import JobEnded, TransientError
from trellis.engine.jobs import PAYLOAD_BYTES_MAX, Lease
from trellis.engine.ledger import Ledger
from trellis.engine.records import SweepOptions
from trellis.engine.retry_policy import RetryPolicy
from trellis.engine.verify import verify
from trellis.integrations import pydantic_ai
from trellis.integrations.pydantic_ai import USES_CONTEXT, run_agent
from trellis.testing import sandbox
from trellis.worker import durable
from trellis.worker.app import App
from trellis.worker.context import Context, SyncContext
from trellis.worker.options import WorkerOptions


def answers(messages: list[ModelMessage]) -> int:
    """How often the model has answered in this conversation."""
    return sum(isinstance(message, ModelResponse) for message in messages)


def traveller(calls: list[str]) -> Agent[Context, str]:
    """An agent that asks for the weather of two cities at once, then for an approval, and then says what it was told."""

    def model(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        calls.append("model")
        match answers(messages):
            case 0:
                cities = [ToolCallPart("weather", {"city": city}) for city in ("Bonn", "Rome")]
                return ModelResponse(parts=cities)
            case 1:
                return ModelResponse(parts=[ToolCallPart("approval", {})])
            case _:
                parts = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
                return ModelResponse(parts=[TextPart("; ".join(str(part.content) for part in parts))])

    agent = Agent(FunctionModel(model), name="traveller", deps_type=Context)

    @agent.tool_plain
    async def weather(city: str) -> str:
        calls.append(city)
        return f"{city} is sunny"

    @agent.tool(metadata=USES_CONTEXT)
    async def approval(run: RunContext[Context]) -> str:
        return f"approved by {await run.deps.wait_signal('approved')}"

    return agent


def travels(calls: list[str]) -> App:
    app, agent = App(), traveller(calls)

    @app.job("travel", lease_s=30)
    async def travel(ctx: Context) -> list[Any]:
        result = await run_agent(ctx, agent, "where to?", deps=ctx)
        return [result.output, result.usage.requests, len(result.new_messages()), result.run_id]

    return app


OUTPUT = "Bonn is sunny; Rome is sunny; approved by ada"
CALLS = ["model", "Bonn", "Rome", "model", "model"]


@pytest.mark.parametrize("committed", [False, True], ids=["before", "after"])
async def test_an_agent_survives_a_death_at_each_write_of_its_job(committed: bool):
    deaths = 0
    for write in itertools.count(1):
        calls: list[str] = []
        async with sandbox(travels(calls)) as box:
            box.crash_at(write, committed=committed)
            job = await box.submit("travel")
            await box.signal(job, "approved", "ada")
            await box.run_until_idle(skip_waits=True)
            output, requests, messages, _ = await job.result(timeout_s=0)
            assert (output, requests, messages) == (OUTPUT, 3, 6)
            extra = len(calls) - len(CALLS)
            assert extra == 0 if committed else extra <= 1, "only what was not journaled before the death is repeated"
            assert (await verify(box.ledger)).ok
            if not box.crashed:
                break
            deaths += 1
    assert deaths >= len(CALLS) + 2


async def test_a_job_whose_agent_waits_for_a_person_is_suspended_and_asks_nobody_again():
    calls: list[str] = []
    async with sandbox(travels(calls)) as box:
        job = await box.submit("travel")
        await box.run_until_idle(skip_waits=True)
        assert ((await job.status()).state, calls) == ("suspended", CALLS[:4])
        await box.signal(job, "approved", "ada")
        await box.run_until_idle()
        output, _, _, run_id = await job.result(timeout_s=0)
        assert (output, calls) == (OUTPUT, CALLS)
        journal = await box.ledger.read_journal(job.id)
        steps = [name for name in journal if ":step:" in name]
        assert len(steps) == 1 + len(CALLS), "the run, and one entry for each model request and tool call"
        assert any(run_id.encode() in body for body in journal.values())


class BreaksAtEntries:
    """A ledger whose worker fails at the first write of each journal entry: before it is stored, or after."""

    def __init__(self, real: Ledger, *, stored: bool) -> None:
        self._ledger, self._stored = real, stored
        self.broken: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def journal(self, lease: Lease, entry: str, body: bytes) -> Any:
        is_first = entry not in self.broken
        self.broken.add(entry)
        if is_first and self._stored:
            await self._ledger.journal(lease, entry, body)
        if is_first:
            raise TransientError("the connection broke")
        return await self._ledger.journal(lease, entry, body)


@pytest.mark.parametrize("stored", [False, True], ids=["before", "after"])
async def test_attempts_that_end_at_each_entry_repeat_only_what_the_journal_lacks(ledger: Ledger, stored: bool):  # noqa: F811 - the fixture
    app, calls = App(), list[str]()
    agent = traveller(calls)

    @app.job("travel", retry=RetryPolicy(base_s=0.01, max_s=0.02), max_attempts=20)
    async def travel(ctx: Context) -> str:
        return (await run_agent(ctx, agent, "where to?", deps=ctx)).output

    trellis, breaking = caller(ledger, app), BreaksAtEntries(ledger, stored=stored)
    job = await trellis.submit("travel")
    await trellis.signal(job.id, "approved", "ada")
    options = WorkerOptions(name="w", sweep=SweepOptions(interval_s=0.05))
    async with make_worker(app, cast("Ledger", breaking), options):
        assert await asyncio.wait_for(job.result(), 60) == OUTPUT
    assert calls == (CALLS if stored else [call for call in CALLS for _ in range(2)])
    assert len(breaking.broken) == len(CALLS) + 2, "the run, each call, and the signal"


# --- failures --------------------------------------------------------------------------------------------------------


def app_of(agent: Agent[Any, Any], **options: Any) -> App:
    """One job that runs this agent."""
    app = App()

    @app.job("ask", retry=RetryPolicy(base_s=0.01, max_s=0.02), max_attempts=3)
    async def ask(ctx: Context, question: str) -> Any:
        return (await run_agent(ctx, agent, question, deps=ctx, **options)).output

    return app


async def test_a_model_that_fails_is_asked_again_by_the_next_attempt_and_the_tools_are_not():
    calls: list[str] = []

    def model(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        calls.append("model")
        if len(calls) == 3:
            raise ModelHTTPError(503, "function", "overloaded")
        return ModelResponse(parts=[TextPart("done") if answers(messages) else ToolCallPart("note", {})])

    agent = Agent(FunctionModel(model))

    @agent.tool_plain
    def note() -> str:
        calls.append("note")
        return "noted"

    async with sandbox(app_of(agent)) as box:
        assert await box.run("ask", "?") == "done"
    assert calls == ["model", "note", "model", "model"]


async def test_retries_that_a_tool_asks_for_are_replayed():
    """A model that was told to try again is not told so twice, and its retries are counted as they happened."""
    calls: list[str] = []

    def model(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        calls.append("model")
        number = answers(messages)
        return ModelResponse(parts=[ToolCallPart("guess", {"n": number}) if number < 2 else TextPart("two")])

    agent = Agent(FunctionModel(model))

    @agent.tool(retries=1)
    async def guess(run: RunContext[Any], n: int) -> str:
        calls.append(f"guess {n} retry {run.retry}")
        if n < 1:
            raise ModelRetry("higher")
        return "right"

    async with sandbox(app_of(agent)) as box:
        box.crash_at(7)
        assert await box.run("ask", "?") == "two"
        assert box.crashed
    assert [call for call in calls if call != "model"] == ["guess 0 retry 0", "guess 1 retry 1"]


async def test_usage_limits_count_the_requests_that_the_journal_has():
    agent = Agent(TestModel(call_tools=["note"]), deps_type=Context)

    @agent.tool(metadata=USES_CONTEXT)
    async def note(run: RunContext[Context]) -> None:
        await run.deps.sleep(60)  # the handler begins again, with the first request from the journal

    async with sandbox(app_of(agent, usage_limits=UsageLimits(request_limit=1))) as box:
        with pytest.raises(JobEnded, match="request_limit of 1"):
            await box.run("ask", "?")
    async with sandbox(app_of(agent, usage_limits=UsageLimits(request_limit=2))) as box:
        assert await box.run("ask", "?") == '{"note":null}'


async def test_the_timeout_of_a_run_counts_from_its_first_attempt(monkeypatch: pytest.MonkeyPatch):
    class HourAgo(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # pyright: ignore[reportIncompatibleMethodOverride]
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr(pydantic_ai, "datetime", HourAgo)
    async with sandbox(app_of(Agent(TestModel()), timeout=7_200)) as box:
        assert await box.run("ask", "?") == "success (no tool calls)"
    async with sandbox(app_of(Agent(TestModel()), timeout=1_800)) as box:
        with pytest.raises(JobEnded, match=r"(?i)timeout|timed out"):
            await box.run("ask", "?")


async def test_model_settings_reach_the_model():
    seen: list[Any] = []

    def model(_: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append(info.model_settings)
        return ModelResponse(parts=[TextPart("done")])

    async with sandbox(app_of(Agent(FunctionModel(model)), model_settings={"temperature": 0.5})) as box:
        await box.run("ask", "?")
    assert [one["temperature"] for one in seen] == [0.5]


async def test_a_tool_that_uses_ctx_as_a_step_is_told_what_to_change():
    agent = Agent(TestModel(), deps_type=Context)

    @agent.tool
    async def approval(run: RunContext[Context]) -> None:
        await run.deps.wait_signal("approved")

    async with sandbox(app_of(agent)) as box:
        with pytest.raises(JobEnded, match=r"call_tool:approval made a durable call .* metadata=USES_CONTEXT"):
            await box.run("ask", "?")


async def test_a_result_that_does_not_fit_the_journal_fails_the_job_with_its_size():
    agent = Agent(TestModel())

    @agent.tool_plain
    def dump() -> str:
        return "x" * (PAYLOAD_BYTES_MAX + 1)

    async with sandbox(app_of(agent)) as box:
        with pytest.raises(JobEnded, match=f"{PAYLOAD_BYTES_MAX}"):
            await box.run("ask", "?")


async def test_a_journal_that_is_full_fails_the_job_and_names_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(durable, "JOURNAL_ENTRIES_MAX", 3)
    agent = Agent(TestModel())

    @agent.tool_plain
    def note() -> None: ...

    async with sandbox(app_of(agent)) as box:
        with pytest.raises(JobEnded, match=r"may have 3 .* ctx\.continue_as_new"):
            await box.run("ask", "?")


async def test_a_sync_handler_is_told_that_agents_need_an_async_one():
    app = App()

    @app.job("ask")
    def ask(ctx: SyncContext) -> None:
        asyncio.run(run_agent(cast("Context", ctx), Agent(TestModel())))  # pyright: ignore[reportArgumentType]

    async with sandbox(app) as box:
        with pytest.raises(JobEnded, match="make the handler `async def`"):
            await box.run("ask")


async def test_tools_that_are_given_with_the_run_are_refused():
    """They would not be steps."""
    late = FunctionToolset[Context](id="late")
    late.add_function(lambda: None, name="late")
    async with sandbox(app_of(Agent(TestModel()), toolsets=[late])) as box:
        with pytest.raises(JobEnded, match="cannot be added at runtime with Trellis"):
            await box.run("ask", "?")


async def test_a_toolset_that_is_made_for_each_step_is_journaled_too():
    asked: list[str] = []

    def tools(_: RunContext[Any]) -> FunctionToolset[Any]:
        asked.append("made")
        toolset = FunctionToolset[Any]()
        toolset.add_function(lambda: asked.append("called"), name="note")
        return toolset

    agent = Agent(TestModel(), toolsets=[DynamicToolset(tools, id="late")])
    app = app_of(agent)

    @app.job("wait")
    async def wait(ctx: Context) -> str:
        result = await run_agent(ctx, agent, "?")
        await ctx.sleep(60)
        return result.output

    async with sandbox(app) as box:
        assert await box.run("wait") == '{"note":null}'
    assert asked.count("called") == 1


# --- conversations, streams and agents in tools ------------------------------------------------------------------------


async def test_a_conversation_goes_on_over_waits_and_has_its_new_messages_each_time():
    app, calls = App(), list[int]()

    def model(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        calls.append(len(messages))
        return ModelResponse(parts=[TextPart(f"answer {len(calls)}")])

    agent = Agent(FunctionModel(model), name="talker")

    @app.job("talk")
    async def talk(ctx: Context) -> list[Any]:
        first = await run_agent(ctx, agent, "one")
        await ctx.sleep(3600)
        second = await run_agent(ctx, agent, "two", message_history=first.all_messages())
        assert first.run_id != second.run_id
        return [first.output, second.output, len(second.new_messages()), len(second.all_messages())]

    async with sandbox(app) as box:
        assert await box.run("talk") == ["answer 1", "answer 2", 2, 4]
    assert calls == [1, 3]


async def test_a_stream_is_handled_while_the_model_speaks_and_only_once():
    app, seen = App(), list[str]()

    async def speak(messages: list[ModelMessage], _: AgentInfo) -> AsyncGenerator[str | dict[int, DeltaToolCall]]:
        if answers(messages) == 0:
            yield {0: DeltaToolCall(name="note", json_args="{}")}
            return
        for word in ("all ", "is ", "well"):
            yield word

    agent = Agent(FunctionModel(stream_function=speak))

    @agent.tool_plain
    def note() -> str:
        return "noted"

    async def handle(_: RunContext[Any], events: AsyncIterable[Any]) -> None:
        async for event in events:
            delta = event.delta if isinstance(event, PartDeltaEvent) else None
            seen.append(str(delta.content_delta) if isinstance(delta, TextPartDelta) else event.event_kind)

    @app.job("talk")
    async def talk(ctx: Context) -> str:
        result = await run_agent(ctx, agent, "?", event_stream_handler=handle)
        await ctx.sleep(60)
        return result.output

    async with sandbox(app) as box:
        assert await box.run("talk") == "all is well"
    assert [one for one in seen if one in {"is ", "well"}] == ["is ", "well"]
    assert [one for one in seen if one.startswith("function_tool")] == ["function_tool_call", "function_tool_result"]


async def test_an_agent_in_a_tool_is_part_of_the_step_of_that_tool():
    calls: list[str] = []
    helper = Agent(FunctionModel(lambda *_: calls.append("helper") or ModelResponse(parts=[TextPart("helped")])))
    agent = Agent(TestModel(), deps_type=Context, name="boss")

    @agent.tool
    async def delegate(run: RunContext[Context]) -> str:
        return (await run_agent(run.deps, helper, "help", usage=run.usage)).output

    async with sandbox(app_of(agent)) as box:
        box.crash_at(6)
        assert await box.run("ask", "?") == '{"delegate":"helped"}'
        assert box.crashed
    assert calls == ["helper"]
