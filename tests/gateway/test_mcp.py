"""The Model Context Protocol over HTTP, asked by the client of its official SDK: each request's token decides."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.gateway.conftest import VIOLIN, Gateway
from tests.gateway.world import SOMEBODY, job, proposal
from trellis.engine.jobs import JobId, NewJob
from trellis.lifecycles import Role
from trellis.mcp_server.protocol import INITIALIZED_REVISIONS, STATELESS_REVISIONS
from trellis.mcp_server.tools import RESULT_BYTES_MAX, TOOLS

if TYPE_CHECKING:
    from mcp import Client


@asynccontextmanager
async def asking(gateway: Gateway, *roles: str, mode: Any = "auto", **who: Any) -> "AsyncGenerator[Client]":
    """The SDK's client with a token of these roles. Imported here: most runs collect this file and do not use it."""
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    transport = httpx2.ASGITransport(app=gateway.app)
    headers = {"Authorization": f"Bearer {gateway.token(*roles, **who)}"}
    async with (
        httpx2.AsyncClient(transport=transport, headers=headers) as http,
        Client(streamable_http_client("http://127.0.0.1:8420/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


async def answer(client: "Client", tool: str, **arguments: Any) -> Any:
    """The structured answer of a tool that succeeds."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    (text,) = result.content
    assert json.loads(text.text) == result.structured_content  # type: ignore[union-attr]
    return result.structured_content


async def refusal(client: "Client", tool: str, **arguments: Any) -> str:
    """The text of a tool's error."""
    result = await client.call_tool(tool, arguments)
    assert (result.is_error, result.structured_content) == (True, None)
    return result.content[0].text  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_both_generations_of_the_protocol_offer_every_tool_with_its_schemas(gateway: Gateway, mode: str):
    async with asking(gateway, "frontend", mode=mode) as client:
        revision = STATELESS_REVISIONS if mode == "auto" else INITIALIZED_REVISIONS
        assert client.server_info is not None
        assert (client.protocol_version, client.server_info.name) == (revision[-1], "trellis")
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == set(TOOLS)
        assert tools["job_submit"].input_schema["properties"]["job"] == {"$ref": "#/$defs/JobRequestBody"}
        assert all(tool.output_schema and tool.output_schema["type"] == "object" for tool in tools.values())
        read_only = {name for name, tool in tools.items() if tool.annotations and tool.annotations.read_only_hint}
        assert {name for name, tool in TOOLS.items() if not tool.changes} == read_only
        assert (await answer(client, "jobs_list"))["items"] == []


async def test_a_person_reads_approves_and_rejects_and_is_recorded_as_the_one_who_decided(gateway: Gateway):
    first, second = await proposal(gateway, text="keep it dry"), await proposal(gateway)
    async with asking(gateway, "owner", name="ada") as client:
        pending = await answer(client, "proposals_list", status="pending", limit=5)
        assert [one["id"] for one in pending["items"]] == [second, first]
        shown = await answer(client, "proposal_show", proposal_id=first)
        assert "keep it dry" in (await answer(client, "proposal_diff", proposal_id=first))["diff"]
        assert "version 1 and not 7" in await refusal(client, "proposal_approve", proposal_id=first, version=7)
        approved = await answer(
            client, "proposal_approve", proposal_id=first, version=shown["version"], note="checked it"
        )
        rejected = await answer(client, "proposal_reject", proposal_id=second, version=1, note="too little in it")
    assert (approved["status"], approved["approval"]["decided_by"]) == ("approved", "ada")
    assert (rejected["status"], rejected["approval"]["decided_by"]) == ("rejected", "ada")
    events = await gateway.instance.ledger.events(JobId(first))
    assert (events[-1].type, events[-1].role, events[-1].actor) == ("proposal.approved", Role.OWNER, "ada")


async def test_a_viewer_reads_and_may_not_decide_start_or_cancel(gateway: Gateway):
    id_, job_id = await proposal(gateway), await job(gateway)
    async with asking(gateway, "frontend", name="vera") as client:
        assert (await answer(client, "proposal_show", proposal_id=id_))["status"] == "pending"
        assert (await answer(client, "job_show", job_id=job_id))["payload"] == {"n": 1}
        for tool, arguments in {
            "proposal_approve": {"proposal_id": id_, "version": 1},
            "proposal_reject": {"proposal_id": id_, "version": 1, "note": "not good enough"},
            "run_start": {"agent": VIOLIN},
            "job_cancel": {"job_id": job_id},
            "job_submit": {"job": {"type": "index"}},
            "comment_propose": {"target": f"{VIOLIN}/notes/x.md", "summary": "s", "text": "t"},
        }.items():
            assert "frontend may not" in await refusal(client, tool, **arguments), tool
        assert (await answer(client, "proposal_show", proposal_id=id_))["status"] == "pending"
    acts = [act for act in await gateway.instance.ledger.acts(limit=50) if act.event == "access.refused"]
    assert {act.subject for act in acts} >= {f"PATCH /proposals/{id_}", "POST /agents/run"}
    assert len(acts) == 6, "each refusal is recorded, at the route that refused"


async def test_runs_are_started_shown_and_cancelled(gateway: Gateway):
    async with asking(gateway, "owner", name="ada") as client:
        started = await answer(client, "run_start", agent=VIOLIN, params={"topic": "bows"}, idempotency_key="k1")
        again = await answer(client, "run_start", agent=VIOLIN, params={"topic": "bows"}, idempotency_key="k1")
        assert (again["run_id"], again["created"]) == (started["run_id"], False)
        assert [one["run_id"] for one in (await answer(client, "runs_list", agent=VIOLIN))["items"]] == [
            started["run_id"]
        ]
        assert (await answer(client, "run_show", run_id=started["run_id"]))["status"] == "requested"
        assert (await answer(client, "run_cancel", run_id=started["run_id"], mode="hard"))["status"] == "failed"
        assert "has ended" in await refusal(client, "run_cancel", run_id=started["run_id"])


async def test_jobs_are_submitted_explained_and_cancelled_in_the_callers_name(gateway: Gateway):
    async with asking(gateway, "submitter", name="sue") as client:
        submitted = await answer(client, "job_submit", job={"type": "index", "payload": {"n": 7}, "max_attempts": 2})
        job_id = submitted["job_id"]
        assert (await answer(client, "job_show", job_id=job_id))["max_attempts"] == 2
        assert (await answer(client, "job_explain", job_id=job_id))["why"]
        assert (await answer(client, "job_cancel", job_id=job_id, reason="a mistake"))["status"] == "cancelled"
    assert {event.actor for event in await gateway.instance.ledger.events(JobId(job_id))} == {"sue"}


async def test_two_tenants_reach_their_own_jobs_alone(gateway: Gateway):
    async with (
        asking(gateway, "submitter", name="sue", tenant="acme") as acme,
        asking(gateway, "submitter", name="sue", tenant="globex") as globex,
    ):
        job_id = (await answer(acme, "job_submit", job={"type": "index"}))["job_id"]
        assert [one["job_id"] for one in (await answer(acme, "jobs_list"))["items"]] == [job_id]
        assert (await answer(globex, "jobs_list"))["items"] == []
        for tool in ("job_show", "job_explain", "job_cancel"):
            assert "may not" in await refusal(globex, tool, job_id=job_id), tool
        assert (await answer(acme, "job_show", job_id=job_id))["status"] == "queued"


async def test_a_comment_becomes_a_proposal_for_a_person(gateway: Gateway):
    async with asking(gateway, "owner", name="ada") as client:
        taken = await answer(
            client,
            "comment_propose",
            target=f"{VIOLIN}/sources/01-about-the-archive.md",
            summary="the numbers differ",
            text="One note says 45 %, the other 60 %.",
        )
        assert (taken["status"], taken["rejection"]) == ("processed", None)
        made = await answer(client, "proposal_show", proposal_id=taken["proposal_id"])
    assert (made["action"], made["status"], made["source"]["identity"]) == ("propose-comment", "pending", "ada")


async def test_wrong_arguments_and_names_are_told_what_to_change(gateway: Gateway):
    async with asking(gateway, "owner") as client:
        assert "stauts: there is no such field (did you mean status?)" in await refusal(
            client, "jobs_list", stauts="queued"
        )
        assert "job.piority: there is no such field (did you mean priority?)" in await refusal(
            client, "job_submit", job={"type": "index", "piority": "batch"}
        )
        assert "limit: Input should be less than or equal to 50" in await refusal(client, "jobs_list", limit=1_000)
        assert "no job" in (await refusal(client, "job_show", job_id="nothing")).lower()
        from mcp import MCPError

        with pytest.raises(MCPError, match=r"no such tool .did you mean jobs_list"):
            await client.call_tool("job_lists", {})


async def test_an_answer_that_is_too_large_is_refused_with_another_way(gateway: Gateway):
    large = json.dumps({"text": "x" * RESULT_BYTES_MAX}).encode()
    await gateway.instance.ledger.submit(SOMEBODY, [NewJob(job_id=JobId("large"), type="work", payload=large)])
    async with asking(gateway, "frontend") as client:
        assert "job_explain says how it stands" in await refusal(client, "job_show", job_id="large")


# --- HTTP ------------------------------------------------------------------------------------------------------------


def message(method: str, /, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


async def test_a_request_without_a_valid_token_is_refused_before_its_message_is_read(gateway: Gateway):
    for client in (gateway.anonymous(), gateway.client(token="no.token.atall")):
        response = await client.post("/mcp", json=message("tools/list"))
        assert (response.status_code, response.headers["WWW-Authenticate"][:6]) == (401, "Bearer")


@pytest.mark.parametrize(
    "origin, status",
    [
        ("http://evil.example", 403),
        ("http://127.0.0.1.evil.example", 403),
        ("null", 403),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8420", 200),
        ("http://[::1]:8420", 200),
    ],
)
async def test_pages_of_other_origins_may_not_use_the_tools(gateway: Gateway, origin: str, status: int):
    response = await gateway.client("owner").post("/mcp", json=message("ping"), headers={"Origin": origin})
    assert response.status_code == status


async def test_a_body_over_the_bound_is_refused(gateway: Gateway):
    large = message("tools/call", name="job_submit", arguments={"job": {"type": "x", "payload": "x" * 2**20}})
    assert (await gateway.client("owner").post("/mcp", json=large)).status_code == 413


async def test_a_notification_is_taken_and_has_no_answer(gateway: Gateway):
    response = await gateway.client("owner").post(
        "/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}
    )
    assert (response.status_code, response.content) == (202, b"")


@pytest.mark.parametrize(
    "body, headers, code, status",
    [
        ({"id": 1, "method": "ping"}, {}, -32600, 400),
        ({"jsonrpc": "2.0", "id": None, "method": "ping"}, {}, -32600, 400),
        ({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}, {}, -32602, 400),
        (message("tools/lists"), {}, -32601, 200),
        (message("tools/call", name="job_shows"), {}, -32602, 200),
        (message("ping"), {"MCP-Protocol-Version": "1999-01-01"}, -32022, 400),
        (message("ping"), {"MCP-Protocol-Version": "2026-07-28"}, -32020, 400),
        (
            message("tools/call", name="job_cancel", _meta={"io.modelcontextprotocol/protocolVersion": "2026-07-28"}),
            {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "job_show"},
            -32020,
            400,
        ),
    ],
)
async def test_messages_that_are_none_or_contradict_their_headers_are_refused(
    gateway: Gateway, body: dict[str, Any], headers: dict[str, str], code: int, status: int
):
    response = await gateway.client("owner").post("/mcp", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_what_a_tool_makes_has_the_correlation_id_of_the_request(gateway: Gateway):
    call = message("tools/call", name="job_submit", arguments={"job": {"type": "index"}})
    response = await gateway.client("owner").post("/mcp", json=call, headers={"X-Correlation-ID": "letter-7"})
    job = await gateway.instance.ledger.job(JobId(response.json()["result"]["structuredContent"]["job_id"]))
    assert job is not None
    assert job.correlation_id == "letter-7"


async def test_there_is_no_stream_to_open_and_no_session_to_end(gateway: Gateway):
    client = gateway.client("owner")
    assert [(await client.get("/mcp")).status_code, (await client.delete("/mcp")).status_code] == [405, 405]
