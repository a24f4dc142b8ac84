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


def test_diff_of_a_memory_shows_what_changed_between_two_versions(planted: Terminal):
    newest = planted("memory", "read", VIOLIN, "--json").record["version"]
    whole = planted("memory", "diff", VIOLIN, "0", "--json").record
    assert (whole["from_version"], whole["to_version"]) == (0, newest)
    assert "+++ v" in whole["diff"]
    assert "ts-03-bass-bar" in planted("memory", "diff", VIOLIN, "0", str(newest)).out
    assert "Nothing changed" in planted("memory", "diff", VIOLIN, str(newest)).out
    assert f"the newest is {newest}" in planted("memory", "diff", VIOLIN, "99").err


@pytest.mark.requirement("D24")
def test_agent_is_shown_with_its_definition_and_its_sources(planted: Terminal):
    page = planted("agents", "show", VIOLIN).out
    assert "at most 10 files of sources" in " ".join(page.split()), "it is a limit, not a count"
    assert "offline, temperature 0.2, at most 20 steps" in page
    assert "Do not treat a label as evidence." in page
    assert "There is no agent nobody" in planted("agents", "show", "nobody").err
    found = planted("agents", "sources", VIOLIN, "--json").record
    assert "sources/07-bows.md" in {one["ref"] for one in found["items"]}
    assert 0 < found["tokens"] <= found["tokens_max"]
    assert "sources/07-bows.md" in planted("agents", "sources", VIOLIN).out
    assert "Carbon fibre" in planted("agents", "sources", VIOLIN, "--ref", "sources/07-bows.md").out
    assert "a source that it reads" in planted("agents", "sources", VIOLIN, "--ref", "sources/none.md").err


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
    for verb, *versions in (("read",), ("history",), ("diff", "0")):
        answer = planted("memory", verb, VIOLIN, *versions)
        assert (answer.code, "rule memory.read" in answer.err) == (code, bool(code)), answer.err
    listed = planted("memory", "--json")
    reached = {"frontend": set(), "owner": {"architect-guardian"} if bound else {VIOLIN, "architect-guardian"}}[role]
    assert {one["agent_id"] for one in listed.records} == reached
