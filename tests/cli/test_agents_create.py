"""`trellis agents create`: an agent of one's own, valid and runnable from one command, and nothing overwritten."""

import asyncio
import getpass
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Terminal
from trellis.engine.admin_acts import AdminAct, NewAct, this_node
from trellis.engine.jobs import Actor
from trellis.ledgers import open_ledger
from trellis.ledgers.sqlite.ledger import SqliteLedger
from trellis.lifecycles import Role
from trellis.storage.objects.local import LocalObjects

NOTES = {
    "register.md": "# Register\n\nThe boiler B-1 is kept at 94 degrees.\n",
    "manual.md": "# Manual\n\nThe boiler B-1 is kept at 88 degrees.\n",
}
PURPOSE = 'Compares notes: "degrees", and more'


@pytest.fixture
def notes(local: Terminal) -> list[str]:
    folder = Path("notes")
    folder.mkdir()
    for name, text in NOTES.items():
        (folder / name).write_text(text)
    return [word for name in NOTES for word in ("--source", str(folder / name))]


@pytest.mark.requirement("D24")
def test_an_agent_is_made_with_its_sources_and_finds_what_they_disagree_on(local: Terminal, notes: list[str]):
    asked = ("--question", "At how many degrees is the boiler B-1 kept?")
    made = local("agents", "create", "boiler", "--purpose", PURPOSE, *notes, *asked)
    assert made.code == 0, made.err
    assert "run boiler --watch" in made.out
    (listed,) = local("agents", "--json").records
    assert (listed["slug"], listed["status"], listed["description"]) == ("boiler", "active", PURPOSE)
    folder = Path("objects/agents/boiler")
    assert {name: (folder / "sources" / name).read_text() for name in NOTES} == NOTES
    ran = local("run", "boiler", "--watch")
    assert (ran.code, " completed\n" in ran.out) == (0, True)
    found = {one["action"]: one for one in local("proposals", "--json").records}
    comment = found["propose-comment"]
    assert f"  {comment['id']}  propose-comment {comment['target']} (pending)\n" in ran.out
    refs = {citation["ref"] for citation in found["propose-comment"]["content"]["citations"]}
    assert refs == {f"sources/{name}" for name in NOTES}
    for name in NOTES:
        (folder / "sources" / name).unlink()
    assert (
        "it has no sources: put texts (.md, .txt) into agents/boiler/sources/" in local("run", "boiler", "--watch").out
    )


async def acts_of(url: str) -> list[AdminAct]:
    ledger = await open_ledger(url)
    try:
        return [one for one in await ledger.acts() if one.event.startswith("agent.")]
    finally:
        await ledger.close()


@pytest.mark.requirement("OBS-1")
def test_creator_of_an_agent_is_recorded(local: Terminal):
    assert local("agents", "create", "boiler", "--purpose", PURPOSE, "--reason", "winter comes").code == 0
    (act,) = asyncio.run(acts_of(local.url))
    assert (act.subject, act.target, act.role, act.cause) == ("boiler", "active", Role.OWNER, "winter comes")
    assert (act.actor.partition("@")[0], act.node) == (getpass.getuser(), this_node())


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.requirement("OBS-1")
@pytest.mark.parametrize("writes_done", range(4))
def test_crash_never_leaves_an_agent_without_a_recorded_creator(
    local: Terminal, notes: list[str], monkeypatch: pytest.MonkeyPatch, writes_done: int
):
    """Killed before each of the writes: two sources, the act, the agent's file. Asking again finishes what is left.

    What opening an instance writes, such as the probe of its object store, is not counted.
    """
    left, folder = [writes_done], "agents/boiler/"

    def dying(write: Callable[..., Any]) -> Callable[..., Any]:
        async def limited(*arguments: Any, **named: Any) -> Any:
            if isinstance(arguments[1], Actor) or arguments[1].startswith(folder):
                if not left[0]:
                    raise Killed
                left[0] -= 1
            return await write(*arguments, **named)

        return limited

    with monkeypatch.context() as patch:
        patch.setattr(LocalObjects, "put", dying(LocalObjects.put))
        patch.setattr(SqliteLedger, "record_act", dying(SqliteLedger.record_act))
        with pytest.raises(Killed):
            local("agents", "create", "boiler", "--purpose", PURPOSE, *notes)
    file = Path(f"objects/{folder}_agent.md")
    sources = len(list(Path(f"objects/{folder}sources").glob("*.md")))
    made = (sources, len(asyncio.run(acts_of(local.url))), file.exists())
    assert made == (min(writes_done, 2), int(writes_done == 3), False)
    assert local("agents", "create", "boiler", "--purpose", PURPOSE, *notes).code == 0
    assert file.exists()
    assert len(asyncio.run(acts_of(local.url))) == 1 + int(writes_done == 3), "one for each time that it was asked"


@pytest.mark.requirement("OBS-1")
def test_an_agent_that_another_made_first_is_recorded_as_refused(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    record, file = SqliteLedger.record_act, Path("objects/agents/boiler/_agent.md")

    def made_by_another() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("theirs")

    async def overtaken(self: SqliteLedger, actor: Actor, act: NewAct) -> str:
        made_by_another()
        return await record(self, actor, act)

    monkeypatch.setattr(SqliteLedger, "record_act", overtaken)
    answer = local("agents", "create", "boiler", "--purpose", PURPOSE)
    assert (answer.code, file.read_text()) == (1, "theirs")
    assert [act.event for act in asyncio.run(acts_of(local.url))] == ["agent.created", "agent.create.refused"]


def test_creating_an_agent_overwrites_no_file(local: Terminal, notes: list[str]):
    assert local("agents", "create", "boiler", "--purpose", "one", *notes).code == 0
    before = {file: file.read_bytes() for file in Path("objects/agents").rglob("*") if file.is_file()}
    again = local("agents", "create", "boiler", "--purpose", "two")
    assert (again.code, "agents/boiler/_agent.md is there already" in again.err) == (1, True)
    Path("objects/agents/other/sources").mkdir(parents=True)
    kept = Path("objects/agents/other/sources/manual.md")
    kept.write_text("mine")
    beside = local("agents", "create", "other", "--purpose", "two", *notes)
    assert (beside.code, "agents/other/sources/manual.md is there already" in beside.err) == (1, True)
    assert kept.read_text() == "mine"
    assert not Path("objects/agents/other/_agent.md").exists()
    assert {file: file.read_bytes() for file in before} == before


def test_invalid_agent_is_refused_with_what_to_change(local: Terminal):
    Path("photo.md").write_bytes(b"\xff\xd8\xff")
    Path("table.csv").write_text("a,b\n")
    Path("notes").mkdir()
    for words, wrong in (
        (("Boiler",), "is no agent slug"),
        (("boiler", "--model", "gpt"), "use offline, or openai:<model>"),
        (("boiler", "--source", "photo.md"), "photo.md cannot be a source: it is not UTF-8 text"),
        (("boiler", "--source", "table.csv"), "its name must end in .md, .txt, .json"),
        (("boiler", "--source", "missing.md"), "missing.md cannot be a source: it cannot be read"),
        (("boiler", "--source", "http://127.0.0.1:1/log.md"), "A web address cannot be a source: save the page as a"),
        (
            ("boiler", "--source", "notes"),
            "notes cannot be a source: it is a folder; give --source for each .md, .txt or",
        ),
        (("boiler", "--title", "x" * 101), "field name"),
    ):
        answer = local("agents", "create", *words, "--purpose", "p")
        assert (answer.code != 0, wrong in answer.err) == (True, True), answer.err
    assert not Path("objects/agents").exists()


def test_a_model_whose_server_is_not_set_names_the_settings(local: Terminal):
    made = local("agents", "create", "boiler", "--purpose", "p", "--model", "openai:qwen3:8b")
    assert made.code == 0
    assert "set TRELLIS_MODEL_BASE_URL" in made.err
    assert "TRELLIS_MODEL_KEY" in made.err


def test_only_the_owner_makes_agents(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    token = local("token", "issue", "--role", "frontend").out.strip()
    monkeypatch.setenv("TRELLIS_TOKEN", token)
    refused = local("agents", "create", "boiler", "--purpose", "p")
    assert (refused.code, "create an agent" in refused.err) == (1, True)
