"""`trellis memory`: what agents remember and how it came to be, for whoever may read it."""

import asyncio

import pytest

from tests.cli.conftest import Terminal
from trellis.app.instance import open_instance
from trellis.app.settings import Settings

VIOLIN = "archivist-violin"


@pytest.fixture
def planted(local: Terminal) -> Terminal:
    async def plant() -> None:
        async with open_instance(Settings.model_validate({}), local.url) as instance:
            await instance.plant()

    asyncio.run(plant())
    return local


def test_memories_are_listed_read_and_their_history_shown(planted: Terminal):
    listed = {one["agent_id"]: one for one in planted("memory", "--json").records}
    assert set(listed) == {VIOLIN, "architect-guardian"}
    basic = planted("memory", "read", VIOLIN, "--json").record
    wide = planted("memory", "read", VIOLIN, "--wide", "--json").record
    assert (set(basic["files"]), set(wide["files"]) - set(basic["files"])) == (
        {"snapshot.md", "open_loops.md"},
        {"facts.md"},
    )
    assert (wide["version"], wide["token_count"]) == (listed[VIOLIN]["version"], listed[VIOLIN]["token_count"])
    page = planted("memory", "read", VIOLIN, "--wide").out
    assert "ts-03-bass-bar" in page
    assert "facts.md" in page
    changes = planted("memory", "history", VIOLIN, "--json").records
    assert [one["version"] for one in changes] == list(range(listed[VIOLIN]["version"], 0, -1))
    assert "snapshot.md" in planted("memory", "history", VIOLIN).out
    assert "There is no agent nobody" in planted("memory", "read", "nobody").err


@pytest.mark.requirement("D44", "D62")
@pytest.mark.parametrize(
    "role, bound, code",
    [("owner", (), 0), ("frontend", (), 1), ("owner", ("--agent", "architect-guardian"), 1)],
)
def test_a_token_reads_what_its_role_and_its_agent_allow(
    planted: Terminal, monkeypatch: pytest.MonkeyPatch, role: str, bound: tuple[str, ...], code: int
):
    token = planted("token", "issue", "--role", role, *bound).out.strip()
    monkeypatch.setenv("TRELLIS_TOKEN", token)
    for verb in ("read", "history"):
        answer = planted("memory", verb, VIOLIN)
        assert (answer.code, "rule memory.read" in answer.err) == (code, bool(code)), answer.err
    listed = planted("memory", "--json")
    reached = {"frontend": set(), "owner": {"architect-guardian"} if bound else {VIOLIN, "architect-guardian"}}[role]
    assert {one["agent_id"] for one in listed.records} == reached
