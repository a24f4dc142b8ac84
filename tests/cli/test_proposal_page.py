"""`trellis proposals show`: a person sees what would change, what it rests on, and what somebody tried to hide."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Terminal
from tests.nlm.endpoint import running_endpoint
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.cli.invocation import Cli
from trellis.cli.output import Output
from trellis.engine.errors import LedgerNotMigrated
from trellis.lifecycles import Role
from trellis.proposals.proposal import ProposalContent, ProposalSource
from trellis.proposals.service import ProposalOffer

AGENT = "boiler"
HIDDEN = "on\u202eoff\u200b and \x1b[2Jaway\u2028more"
WRITTEN_OUT = r"on\u202eoff\u200b and \x1b[2Jaway\u2028more"
QUOTE = "The boiler B-1 is kept at\n94 degrees."


def offered(local: Terminal, action: str, target: str, text: str = HIDDEN) -> str:
    """A proposal of this kind about the agent's note; its id."""

    async def make() -> str:
        async with open_instance(Settings.model_validate({}), local.url) as instance:
            offering = instance.proposal_service(instance.actor(Role.GATEWAY))
            content = {
                "summary": "turn it off",
                "change": {"type": "append", "text": text},
                "reasoning": "it is too hot",
                "citations": [{"ref": "sources/note.md", "excerpt": QUOTE, "start": 0, "end": len(QUOTE)}],
                "flags": ["citation_not_found:sources/note.md"],
                "not_found": [{"ref": "sources/note.md", "excerpt": "It may boil over."}],
                "not_read": [{"ref": "sources/log.md", "excerpt": "It was hot in May."}],
            }
            draft = await offering.about_file(AGENT, action, target, content)
            source = ProposalSource(type="agent", identity=f"agent:{AGENT}", run_id=None)
            assert isinstance(draft, ProposalContent)
            made = await offering.make(
                ProposalOffer(
                    agent_slug=AGENT, draft=draft, source=source, priority="high", key=None, correlation_id=None
                )
            )
            return made.id

    return asyncio.run(make())


@pytest.fixture
def boiler(local: Terminal) -> Terminal:
    Path("note.md").write_text(f"{QUOTE}\n")
    Path("log.md").write_text("Checked in May.\n")
    assert local("agents", "create", AGENT, "--purpose", "p", "--source", "note.md", "--source", "log.md").code == 0
    return local


def test_a_proposal_is_shown_as_a_diff_with_its_sources_and_what_hides_is_written_out(boiler: Terminal):
    id_ = offered(boiler, "propose-edit", "sources/note.md")
    page = boiler("proposals", "show", id_).out
    diff = boiler("proposals", "show", id_, "--json").record["diff"]
    assert diff.endswith(f"\n+{HIDDEN}\n"), "for programs it is as it is"
    assert f"\n+{WRITTEN_OUT}\n" in page
    assert not set(HIDDEN) & {"\u202e", "\u200b", "\x1b", "\u2028"} & set(page)
    assert r"characters that cannot be seen, written out here: \u202e, \u200b, \x1b, \u2028" in page
    assert "\nsources/note.md\n  | The boiler B-1 is kept at\n  | 94 degrees.\n" in page
    assert "\nNot found in what the agent read\nsources/note.md\n  ? It may boil over.\n" in page
    unread = "In a source that the agent did not read in this run: compare the words there yourself"
    assert f"\n{unread}\nsources/log.md\n  ? It was hot in May.\n" in page
    assert "it is too hot" in page
    assert f"proposals approve {id_}" in page


def test_a_quoted_source_that_is_gone_or_changed_since_is_named_and_the_proposal_can_be_approved(boiler: Terminal):
    id_ = offered(boiler, "propose-edit", "sources/log.md")
    (source,) = Path.cwd().rglob(f"agents/{AGENT}/sources/note.md")
    assert boiler("proposals", "show", id_, "--json").record["source_warnings"] == []
    source.write_text(f"Now:\n{QUOTE}\n")
    assert boiler("proposals", "show", id_, "--json").record["source_warnings"] == [], "the words are still in it"
    source.write_text("It is cold.\n")
    changed = "sources/note.md has changed: words quoted from it are no longer in it"
    assert boiler("proposals", "show", id_, "--json").record["source_warnings"] == [changed]
    source.unlink()
    assert (
        "\nwarning: sources/note.md is gone: the words quoted from it are from" in boiler("proposals", "show", id_).out
    )
    assert boiler("proposals", "approve", id_).code == 0


@pytest.mark.requirement("PIPE-11")
def test_a_comment_that_was_approved_and_is_proposed_again_counts_as_repeated(
    boiler: Terminal, monkeypatch: pytest.MonkeyPatch
):
    assert (
        boiler("proposals", "approve", offered(boiler, "propose-comment", "sources/note.md", text="Too hot.")).code == 0
    )
    (file,) = Path.cwd().rglob(f"agents/{AGENT}/_agent.md")
    file.write_text(re.sub("^model: .*$", "model: openai:m", file.read_text(), flags=re.MULTILINE))
    comment = {"action": "propose-comment", "target": "sources/note.md", "summary": "s", "text": "Too hot."}
    with running_endpoint() as endpoint:
        endpoint.calls(("create-proposal", comment))
        endpoint.calls(("finish", {"summary": "Done."}))
        monkeypatch.setenv("TRELLIS_MODEL_BASE_URL", endpoint.base_url)
        monkeypatch.setenv("TRELLIS_MODEL_KEY", "none")
        watched = boiler("run", AGENT, "--watch")
    assert "done (applied: it is there already): propose-comment sources/note.md was not proposed again" in watched.out
    (run,) = boiler("runs", "--json").records
    assert (run["proposals"], run["already_proposed"], run["refused_actions"]) == (0, 1, 0)
    assert "refused" not in boiler("runs", "show", run["run_id"]).out


def test_ids_have_one_name_in_listing_and_page(boiler: Terminal):
    id_ = offered(boiler, "propose-edit", "sources/note.md")
    (listed,) = boiler("proposals", "--json").records
    shown = boiler("proposals", "show", id_, "--json").record
    assert listed["id"] == listed["job_id"] == shown["id"] == shown["job_id"] == id_
    assert boiler("proposals", "--status", "pending", "--ids").out == f"{id_}\n"
    assert listed["conflict"] is None
    folder = Path(boiler.url.removeprefix("sqlite:///")).parent / "objects" / "agents" / AGENT
    (folder / "sources" / "note.md").write_text("changed\n")
    assert "conflict" in boiler("proposals").out
    assert (
        boiler("proposals", "--json").record["conflict"]
        == boiler("proposals", "show", id_, "--json").record["conflict"]
    )
    assert [boiler("proposals", *words).out.split()[0].lower() for words in ([], ["show", id_])] == ["proposal"] * 2


@pytest.mark.requirement("D63")
def test_the_diff_of_a_comment_shows_the_annotation_and_leaves_the_source_alone(boiler: Terminal):
    id_ = offered(boiler, "propose-comment", "sources/note.md")
    shown = boiler("proposals", "show", id_, "--json").record
    made = f"agents/{AGENT}/annotations/sources/note.md/{id_}.json"
    assert shown["diff"].startswith(f"--- /dev/null\n+++ {made}\n")
    assert "stored beside the text" in boiler("proposals", "show", id_).out
    assert boiler("proposals", "approve", id_).out == f"{id_} is applied\n", boiler("proposals", "show", id_).out
    assert boiler("proposals", "show", id_, "--json").record["apply_result"]["object_key"] == made
    assert Path(f"objects/agents/{AGENT}/sources/note.md").read_text() == f"{QUOTE}\n"


@pytest.mark.requirement("D22")
def test_an_approval_that_cannot_be_applied_is_refused_and_the_proposal_stays_pending(boiler: Terminal):
    id_ = offered(boiler, "propose-comment", "sources/note.md")
    Path(f"objects/agents/{AGENT}/sources/note.md").write_text("somebody wrote this meanwhile\n")
    page = boiler("proposals", "show", id_).out
    assert f"warning: agents/{AGENT}/sources/note.md has changed since this was proposed" in page
    assert "proposals approve" not in page
    assert "has changed" in boiler("proposals", "show", id_, "--json").record["conflict"]
    answer = boiler("proposals", "approve", id_)
    assert answer.code == 1
    assert f"Proposal {id_} was not approved and is still pending" in answer.err
    assert "reject it and run the agent again" in answer.err
    assert boiler("proposals", "show", id_, "--json").record["status"] == "pending"


@pytest.mark.requirement("D22")
def test_the_page_names_the_pending_proposals_that_exclude_each_other(boiler: Terminal):
    edit, comment = (offered(boiler, action, "sources/note.md") for action in ("propose-edit", "propose-comment"))
    shown = [boiler("proposals", "show", id_, "--json").record for id_ in (edit, comment)]
    assert [(one["rules_out"], one["ruled_out_by"]) for one in shown] == [([comment], []), ([], [edit])]
    assert (
        f"once this one is applied, these can no longer be applied: {comment}" in boiler("proposals", "show", edit).out
    )
    page = boiler("proposals", "show", comment).out
    assert f"approve this one first: it can no longer be applied after: {edit}" in page
    assert boiler("proposals", "approve", comment).code == 0, "a comment leaves its target alone"
    assert boiler("proposals", "approve", edit).out == f"{edit} is applied\n"


def test_a_printed_command_can_be_typed_where_paths_have_spaces(
    local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = f"sqlite:///{tmp_path / 'my data'}/l.db"
    missing = local("jobs", ledger=url).err
    assert f"run `trellis migrate --ledger '{url}'` to make it" in missing
    older = LedgerNotMigrated(found=1, needed=2, url="postgresql://ada:hid'den@db/t")
    assert "run `trellis migrate --ledger 'postgresql://ada:***@db/t'`." in str(older), "without the password"
    cli = Cli(ledger=url, data=None, out=Output(as_json=False))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "my tools" / "trellis")])
    program = f"'{tmp_path}/my tools/trellis'"
    assert cli.command("jobs") == f"{program} jobs --ledger '{url}'"
    assert cli.typed("see `trellis jobs`") == f"see `{cli.command('jobs')}`", "one name of the program in one session"


def test_printed_commands_name_the_place_that_the_command_was_given(boiler: Terminal):
    """A command that is copied from an answer works where the answer came from."""
    id_, place = offered(boiler, "propose-edit", "sources/note.md"), f"--ledger {boiler.url}"
    page = boiler("proposals", "show", id_).out
    assert f"trellis proposals approve {id_} {place}\n" in page
    assert f'--note "why it is wrong" {place}\n' in page
    assert f"`trellis proposals {place}` lists them" in boiler("proposals", "show", "prop_x").err
    assert f"trellis events {id_} {place}\n" in boiler("job", "explain", id_).out
    boiler.submit("import", "{}")
    assert f"`trellis worker MODULE:APP {place}`" in boiler("doctor").out
    spaced = Cli(ledger=None, data=Path("my data"), out=Output(as_json=False))
    assert spaced.typed("see `trellis jobs`") == "see `trellis jobs --data 'my data'`"
    assert spaced.typed("`trellis jobs --ledger=L` and `trellis jobs`") == (
        "`trellis jobs --ledger=L` and `trellis jobs --data 'my data'`"
    ), "a place may be given with an equals sign"
    away = Cli(ledger=None, data=None, gateway="http://gw", out=Output(as_json=False))
    text = "see `trellis job show J`; `trellis token issue --role owner` and `trellis up --data D` are for its machine"
    assert away.typed(text) == text.replace("show J", "show J --gateway http://gw")
    secret = Cli(ledger="postgresql://ada:hidden@db/t", data=None, out=Output(as_json=False))
    assert secret.command("jobs").endswith("trellis jobs --ledger 'postgresql://ada:***@db/t'")
