"""How a name becomes a model, and what an OpenAI-compatible server that misbehaves does to a run."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.agents.runtime.stage import SOURCES, Stage, agent, propose
from tests.docs.documents import ROOT, blocks
from tests.nlm.endpoint import Endpoint, running_endpoint, serving
from trellis.agents.errors import ModelGarbage, ModelRefused, ModelSettingInvalid, ModelUnavailable, ModelUnknown
from trellis.agents.models import check_model
from trellis.agents.run_io import ModelOptions

KEY = "sk-very-secret-qjxkvzwpfh"
"""No part of it is a number: the port of a server is one, and a message may name it."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with running_endpoint() as server:
        yield server


def stage_at(endpoint: Endpoint) -> Stage:
    return Stage(base_url=endpoint.base_url, key=KEY)


async def test_an_openai_compatible_server_runs_an_agent(endpoint):
    quote = {"ref": "sources/beds.md", "excerpt": "Bed B-1 has roses."}
    endpoint.calls(("read-context", {}))
    endpoint.calls(propose(citations=[quote]))
    endpoint.calls(("finish", {"summary": "One comment."}))
    stage = stage_at(endpoint)
    output = await stage.run(agent(model="openai:test-1"))
    assert output.summary == "One comment."
    assert [one.excerpt for draft in output.proposals for one in draft.citations] == [quote["excerpt"]]
    assert (output.usage.input, output.usage.output) == (300, 30)
    assert output.model == "openai:test-1"
    first = endpoint.received[0]
    assert first.headers["authorization"] == f"Bearer {KEY}"
    assert {tool["function"]["name"] for tool in first.body["tools"]} >= {"read-context", "create-proposal", "finish"}
    assert SOURCES["sources/beds.md"] not in json.dumps(first.body)
    assert not any(KEY.encode() in body for body in stage.journal.entries.values())
    again = await stage.run(agent(model="openai:test-1"))
    assert again == output
    assert len(endpoint.received) == 3


async def test_the_query_of_the_servers_address_goes_with_each_request(endpoint):
    endpoint.calls(("finish", {"summary": "Done."}))
    await Stage(base_url=f"{endpoint.base_url}?api-version=1", key=KEY).run(agent(model="openai:test-1"))
    assert [one.path for one in endpoint.received] == ["/v1/chat/completions?api-version=1"]


async def test_the_model_server_of_the_guide_runs_an_agent():
    page = ROOT / "docs" / "how-to" / "write-an-agent.md"
    (server,) = [text for language, text in blocks(page) if language == "python"]
    names: dict[str, Any] = {"__name__": "model_server"}
    exec(server, names)
    requests: list[dict[str, Any]] = []

    class Model(names["Model"]):
        def do_POST(self) -> None:  # noqa: N802 - the library's name
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(json.loads(body))
            self.rfile = io.BytesIO(body)
            super().do_POST()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            """Tests are quiet."""

    with serving(Model) as base_url:
        note = {names["NOTE"]: "The espresso machine M-1 is kept at 94 degrees during opening hours."}
        output = await Stage(sources=note, base_url=base_url, key="none").run(agent(model="openai:mine"))
    assert output.summary == "I asked for the reason of one figure."
    assert [(draft.target, draft.flags) for draft in output.proposals] == [(names["NOTE"], ())]
    text = page.read_text(encoding="utf-8")
    assert [name for name in requests[-1] if f"`{name}`" not in text] == [], "the guide names every field that is sent"
    roles = [message["role"] for message in requests[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_server_is_worth_another_try_that_repeats_nothing(endpoint, status):
    endpoint.calls(("read-context", {}))
    endpoint.raw(status, b'{"error": {"message": "later"}}')
    stage = stage_at(endpoint)
    with pytest.raises(ModelUnavailable) as caught:
        await stage.run(agent(model="openai:test-1"))
    assert caught.value.retries
    assert len(endpoint.received) == 2
    endpoint.calls(("finish", {"summary": "Done."}))
    assert (await stage.run(agent(model="openai:test-1"))).summary == "Done."
    assert len(endpoint.received) == 3


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_server_that_refuses_ends_the_run_without_naming_the_key(endpoint, status):
    endpoint.raw(
        status, json.dumps({"error": {"message": f"Incorrect API key provided: {KEY} {KEY[:4]}***{KEY[-4:]}"}}).encode()
    )
    with pytest.raises(ModelRefused) as caught:
        await stage_at(endpoint).run(agent(model="openai:test-1"))
    assert not caught.value.retries
    told = str(caught.value) + repr(caught.value.__cause__) + repr(caught.value.data)
    assert not any(KEY[at : at + 4] in told for at in range(len(KEY) - 3))
    assert f"HTTP status {status} (Incorrect API key provided: [key] [key])" in str(caught.value)


async def test_a_server_that_breaks_off_is_unavailable(endpoint):
    endpoint.breaks_off()
    with pytest.raises(ModelUnavailable, match="no connection, or it broke off"):
        await stage_at(endpoint).run(agent(model="openai:test-1"))


async def test_a_model_server_that_is_silent_or_answers_with_a_web_page_is_reported_as_such(endpoint):
    endpoint.hangs()
    with pytest.raises(ModelUnavailable, match=r"no answer within 0\.1 s"):
        await Stage(base_url=endpoint.base_url, key=KEY, request_timeout_s=0.1).run(agent(model="openai:test-1"))
    endpoint.raw(200, b"<html><body>Welcome</body></html>", Content_Type="text/html")
    with pytest.raises((ModelUnavailable, ModelGarbage), match="answered, but not with a chat completion in JSON"):
        await stage_at(endpoint).run(agent(model="openai:test-1"))
    import pydantic_ai

    assert not pydantic_ai.BANNER_ENABLED, "its advertisement would stand in the middle of the progress bar"


CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}
CUSTOM = {"id": "call_1", "type": "custom", "custom": {"name": "finish", "input": "Done."}}


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": []},
        {"choices": [None]},
        {"choices": [CHOICE], "created": 10**15},
        {"choices": [{**CHOICE, "message": {"role": "assistant", "content": None, "tool_calls": [CUSTOM]}}]},
    ],
    ids=["no choice", "an empty choice", "a time without a date", "a custom call"],
)
async def test_a_reply_of_another_form_is_reported_as_such(endpoint, reply: dict[str, Any]):
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "test-1", **reply}
    endpoint.raw(200, json.dumps(body).encode(), Content_Type="application/json")
    with pytest.raises(ModelGarbage, match="answered, but not with a chat completion in JSON"):
        await stage_at(endpoint).run(agent(model="openai:test-1"))


async def test_a_missing_model_server_is_unavailable():
    stage = Stage(base_url="http://anna:planted@127.0.0.1:9/v1", key=KEY)
    with pytest.raises(ModelUnavailable) as caught:
        await stage.run(agent(model="openai:test-1"))
    assert str(caught.value).startswith("Model 'test-1' at http://127.0.0.1:9/v1 does not answer: no connection")
    assert "correct TRELLIS_MODEL_BASE_URL; `trellis doctor` asks the server." in str(caught.value)
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize("name", ["gpt", "'openai:'", "scripted:none", "offline:x", "claude-sonnet"])
async def test_unknown_model_is_refused_by_name_before_the_run_starts(name):
    stage = Stage(base_url="http://127.0.0.1:9", key=KEY)
    with pytest.raises(ModelUnknown) as caught:
        await stage.run(agent(model=name))
    assert name.strip("'") in str(caught.value)
    assert not stage.journal.entries


@pytest.mark.parametrize("options", [ModelOptions(key=KEY), ModelOptions(base_url="http://127.0.0.1:9")])
def test_a_model_without_its_settings_says_what_is_missing(options):
    with pytest.raises(ModelSettingInvalid, match="set TRELLIS_MODEL_"):
        check_model("openai:test-1", options)
    with pytest.raises(ModelSettingInvalid, match="in the environment of the process up@there, which executes the run"):
        check_model("openai:test-1", replace(options, process="the process up@there"))
    assert KEY not in repr(options)


def test_a_model_whose_package_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ModelSettingInvalid, match=r"pip install 'trellis-engine\[openai\]'"):
        check_model("openai:test-1", ModelOptions(base_url="http://127.0.0.1:9", key=KEY))


def test_the_runtime_does_not_import_the_model_library_until_an_agent_runs():
    """It takes seconds, and every command would pay for it."""
    program = "import sys, trellis.agents.runtime, trellis.agents.tools; print('pydantic_ai' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
