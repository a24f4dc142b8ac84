"""What an agent's tools do, and what they refuse."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.runtime.stage import FINISH, RUN_ID, SOURCES, Stage, agent, propose, script
from trellis.agents.definition import Tool
from trellis.agents.drafts import FIELDS
from trellis.agents.refusals import RefusalCode
from trellis.agents.run_io import AgentOutput, DraftChange
from trellis.agents.sources import Annotation
from trellis.nlm.provider import NlmRefused
from trellis.storage.memory.errors import MemoryOverLimit
from trellis.storage.memory.layout import DeepPart

READ = [("read-context", {})]
QUOTE = {"ref": "sources/beds.md", "excerpt": "The north bed is watered every 3 days in summer."}


def replies(messages: list[Any]) -> list[dict[str, Any]]:
    return [part.content for message in messages for part in message.parts if part.part_kind == "tool-return"]


async def heard(stage: Stage, *calls: tuple[str, Any], **fields: str) -> list[dict[str, Any]]:
    """What a model gets back for these calls."""
    told: list[Any] = []

    def listening(messages, info):
        told[:] = messages
        return script(list(calls), [FINISH])(messages, info)

    stage.scripts["listening"] = listening
    await stage.run(agent(model="scripted:listening", **fields))
    return replies(told)


@pytest.mark.requirement("PIPE-14")
async def test_only_listed_tools_are_shown_to_the_model():
    shown: list[str] = []

    def looking(messages, info):
        shown[:] = [tool.name for tool in info.function_tools]
        return script("Done.")(messages, info)

    stage = Stage(scripts={"looking": looking})
    await stage.run(agent(model="scripted:looking", tools="[create-proposal, read-context]"))
    assert shown == ["create-proposal", "read-context"]


@pytest.mark.requirement("PIPE-14", "AUTH-4", "PIPE-5")
@pytest.mark.parametrize("tool", ["read-memory-deep", "notebooklm-query", "write-memory", "__import__", ""])
async def test_a_tool_that_is_not_listed_cannot_be_called(tool):
    stage = Stage()
    args = {"what": "decisions", "question": "What is there to know about the beds?"}
    output = await stage.play([(tool, args)], [FINISH], tools="[read-context, create-proposal]")
    assert not stage.deep_reads
    assert not stage.asked
    assert [(call.name, call.ok) for call in output.tool_calls] == [(tool, False)]
    assert [(one.tool, one.code) for one in output.refused] == [(tool, RefusalCode.TOOL_NOT_LISTED)]
    assert not [name for name in stage.journal.entries if name.startswith("tool/")]


@pytest.mark.requirement("AUTH-4", "PIPE-5")
async def test_layer_2_is_read_by_the_explicit_tool_and_never_by_itself():
    stage = Stage()
    await stage.play([("read-context", {}), ("read-memory", {"mode": "wide"})], [FINISH])
    assert not stage.deep_reads
    stage = Stage()
    told = await heard(stage, ("read-memory-deep", {"what": "runs", "limit": 3, "before": "x"}))
    assert stage.deep_reads == [(DeepPart.RUNS, "x", 3)]
    assert told[0]["items"] == stage.deep


@pytest.mark.requirement("PIPE-6")
async def test_reading_gives_whole_sources_as_data():
    told = await heard(Stage(), ("read-context", {"refs": ["sources/water.md"]}), ("read-context", {}))
    assert [source["ref"] for source in told[0]["sources"]] == ["sources/water.md"]
    assert {source["ref"]: source["text"] for source in told[1]["sources"]} == SOURCES
    assert all("no orders" in reply["note"] for reply in told)


@pytest.mark.requirement("PIPE-4", "PIPE-6")
async def test_memory_is_read_by_mode():
    stage = Stage(memory={"snapshot.md": "S\n", "facts.md": "F\n"})
    told = await heard(stage, ("read-memory", {}), ("read-memory", {"mode": "wide"}), ("read-memory", {"mode": "deep"}))
    assert told[0]["files"] == {"snapshot.md": "S\n"}
    assert told[1]["files"] == {"snapshot.md": "S\n", "facts.md": "F\n"}
    assert told[2]["refused"] == RefusalCode.FIELD_INVALID


@pytest.mark.requirement("PIPE-4")
async def test_memory_over_its_limit_is_refused_and_never_cut():
    stage = Stage()

    async def over(mode):
        raise MemoryOverLimit(what="The wide memory", agent_id="gardener", tokens=13_000, limit=12_200)

    stage.read_memory = over
    [told] = await heard(stage, ("read-memory", {"mode": "wide"}))
    assert told["refused"] == RefusalCode.NOT_READABLE
    assert "13000" in told["reason"]


@pytest.mark.requirement("NLM-7")
async def test_a_question_is_answered_with_citations():
    [told] = await heard(Stage(), ("notebooklm-query", {"question": "How often is the north bed watered?"}))
    assert {one["ref"] for one in told["citations"]} == set(SOURCES)
    assert all(one["excerpt"] in SOURCES[one["ref"]] for one in told["citations"])


@pytest.mark.parametrize(
    "args, code",
    [
        ({}, RefusalCode.FIELD_MISSING),
        ({"question": ""}, RefusalCode.FIELD_INVALID),
        ({"question": "x" * 5_000}, RefusalCode.FIELD_INVALID),
        ({"question": 7}, RefusalCode.FIELD_MISSING),
        ({"question": "Who?", "sources": ["sources/none.md"]}, RefusalCode.NOT_FOUND),
        ({"question": "Who?", "sources": ["../other/sources/a.md"]}, RefusalCode.NOT_FOUND),
    ],
)
async def test_a_question_that_cannot_be_asked_is_refused_to_the_model(args, code):
    output = await Stage().play([("notebooklm-query", args)], [FINISH])
    assert [one.code for one in output.refused] == [code]


async def test_a_provider_that_says_no_ends_the_run():
    stage = Stage()

    async def refuses(question, deadline_s):
        raise NlmRefused(provider="openai", reason="HTTP 401")

    stage.ask = refuses
    with pytest.raises(NlmRefused):
        await stage.play([("notebooklm-query", {"question": "Who?"})], [FINISH])


@pytest.mark.parametrize("raw", ["{", "[1, 2]", '"text"', '{"a": NaN}', "null", '{"question": "\\ud800"}'])
async def test_arguments_that_are_no_object_are_refused_and_crash_nothing(raw):
    output = await Stage().play([("notebooklm-query", raw), ("create-proposal", raw)], [FINISH])
    assert [call.ok for call in output.tool_calls] == [False, False]
    assert not output.proposals


async def test_arguments_named_like_the_programs_own_are_arguments_like_others():
    odd = {"ctx": 1, "self": 2, "tool": "x", "args": {}}
    output = await Stage().play([("read-context", odd), propose(**odd)], [FINISH])
    assert [call.ok for call in output.tool_calls] == [True, True]
    assert "field_dropped:ctx" in output.proposals[0].flags


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)
_KEYS = st.sampled_from([*FIELDS, "file", "content", "refs", "sources", "question", "mode", "what", "limit", "before"])
_VALUES = _JSON | st.sampled_from(
    ["propose-edit", "memory-update", "facts.md", "sources/beds.md", "close", ["sources/beds.md"]]
)


@given(calls=st.lists(st.tuples(st.sampled_from(list(Tool)), st.dictionaries(_KEYS, _VALUES)), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_no_arguments_crash_a_tool_and_every_call_is_accounted_for(calls):
    async def play():
        return await Stage().play([(tool.value, args) for tool, args in calls], [FINISH])

    output = asyncio.run(play())
    assert [call.name for call in output.tool_calls] == [tool for tool, _ in calls]
    assert sum(not call.ok for call in output.tool_calls) == len(output.refused)
    assert AgentOutput.from_dict(json.loads(output.to_bytes())) == output


# -- create-proposal ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("PIPE-6")
async def test_a_proposal_is_only_added_to_the_output():
    output = await Stage().play(READ, [propose(citations=[QUOTE])], [FINISH])
    [draft] = output.proposals
    assert (draft.action, draft.target, draft.change) == ("propose-comment", "sources/beds.md", DraftChange.APPEND)
    [citation] = draft.citations
    assert SOURCES[citation.ref][citation.start : citation.end] == citation.excerpt == QUOTE["excerpt"]
    assert draft.flags == ()


COMMENT = Annotation(
    kind="comment",
    target="sources/beds.md",
    target_sha256="",
    text="The compost is two years old.",
    author="agent:gardener",
    approved_by="anna",
    approved_at="2026-02-14T08:00:00.000Z",
    proposal_id="prop_1",
)


@pytest.mark.requirement("D63")
async def test_an_annotation_is_shown_apart_from_its_source_and_is_no_evidence():
    stage = Stage(annotations=(COMMENT,))
    quote = {"ref": "sources/beds.md", "excerpt": COMMENT.text}
    output = await stage.play(READ, [propose(citations=[quote])], [FINISH])
    [draft] = output.proposals
    assert draft.citations == ()
    assert draft.flags != ()
    read = json.loads(next(body for name, body in stage.journal.entries.items() if b'"annotations"' in body))["reply"]
    assert [one["text"] for one in read["annotations"]] == [COMMENT.text]
    assert all(COMMENT.text not in one["text"] for one in read["sources"])


async def test_a_comment_that_is_stored_beside_its_source_is_not_proposed_again():
    output = await Stage(annotations=(COMMENT,)).play(READ, [propose(text=COMMENT.text)], [FINISH])
    assert output.proposals == ()
    assert [(one.code, one.approved_before) for one in output.refused] == [(RefusalCode.DUPLICATE, True)]


async def test_a_repeated_annotation_is_stored_with_a_code_that_older_programs_know():
    """An orchestrator of the version before may take over a run, and reads what its first steps have stored."""
    output = await Stage(annotations=(COMMENT,)).play(READ, [propose(text=COMMENT.text)], [FINISH])
    [stored] = output.to_dict()["refused"]
    assert (stored["code"], stored["approved_before"]) == ("duplicate", True)
    from_a_newer_program = {**output.to_dict(), "refused": [{**stored, "unknown": 1}]}
    assert AgentOutput.from_dict(from_a_newer_program) == output, "a field that is not known is ignored"


async def test_proposals_beside_the_final_answer_count():
    output = await Stage().play([propose(), FINISH])
    assert len(output.proposals) == 1
    assert output.summary == "Done."


async def test_a_summary_holds_nothing_a_person_would_not_see():
    output = await Stage().play([("finish", {"summary": " One\r\ntwo\u202e\x00\x1b[31m " + "x" * 9_000})])
    assert output.summary.startswith("One\ntwo\ufffd\ufffd\ufffd[31m x")
    assert len(output.summary) == 8_000


async def test_a_citation_that_no_source_holds_is_dropped_and_flagged():
    invented = {"ref": "sources/beds.md", "excerpt": "The owner approved everything in advance."}
    output = await Stage().play(READ, [propose(citations=[QUOTE, invented])], [FINISH])
    [draft] = output.proposals
    assert [one.excerpt for one in draft.citations] == [QUOTE["excerpt"]]
    assert draft.flags == ("citation_not_found:sources/beds.md",)
    assert [one.ref for one in draft.not_found] == ["sources/beds.md"], "a person sees the invented words"
    assert output == AgentOutput.from_dict(output.to_dict())


async def test_a_source_that_was_not_read_cannot_be_cited():
    calls = [("read-context", {"refs": ["sources/water.md"]})], [propose(citations=[QUOTE])], [FINISH]
    output = await Stage().play(*calls)
    [draft] = output.proposals
    assert draft.citations == ()
    assert draft.flags == ("citation_not_read:sources/beds.md", "ungrounded"), "the source has the words"
    assert (draft.not_found, [one.excerpt for one in draft.not_read]) == ((), [QUOTE["excerpt"]])
    assert output == AgentOutput.from_dict(output.to_dict())


async def test_words_that_an_unread_source_does_not_have_are_not_found():
    invented = {"ref": "sources/beds.md", "excerpt": "The owner approved everything in advance."}
    calls = [("read-context", {"refs": ["sources/water.md"]})], [propose(citations=[invented])], [FINISH]
    [draft] = (await Stage().play(*calls)).proposals
    assert draft.flags == ("citation_not_found:sources/beds.md", "ungrounded")
    assert (len(draft.not_found), draft.not_read) == (1, ())


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"action": "logic-update", "target": "_agent.md"}, RefusalCode.ACTION_NOT_ALLOWED),
        ({"action": "propose-tag"}, RefusalCode.ACTION_NOT_ALLOWED),
        ({"action": "approve"}, RefusalCode.ACTION_NOT_ALLOWED),
        ({"action": ["propose-edit"]}, RefusalCode.ACTION_NOT_ALLOWED),
        ({"action": None}, RefusalCode.ACTION_NOT_ALLOWED),
        ({"target": None}, RefusalCode.FIELD_MISSING),
        ({"target": "_agent.md"}, RefusalCode.TARGET_NOT_ALLOWED),
        ({"target": "agents/other/sources/a.md"}, RefusalCode.TARGET_NOT_ALLOWED),
        ({"action": "propose-note", "target": "../other/notes/a.md"}, RefusalCode.TARGET_NOT_ALLOWED),
        ({"action": "propose-note", "target": "/notes/a.md"}, RefusalCode.TARGET_NOT_ALLOWED),
        ({"action": "propose-note", "target": "notes/../_agent.md"}, RefusalCode.TARGET_NOT_ALLOWED),
        ({"action": "propose-note", "target": "notes\\a.md"}, RefusalCode.TARGET_NOT_ALLOWED),
        ({"action": "propose-note", "target": "runs/x/status.json"}, RefusalCode.TARGET_NOT_ALLOWED),
        ({"action": "propose-note", "target": "notes/a.sh"}, RefusalCode.TARGET_NOT_ALLOWED),
        ({"action": "propose-note", "target": "sources/beds.md"}, RefusalCode.TARGET_NOT_ALLOWED),
        ({"action": "propose-summary", "target": "notes/a.md"}, RefusalCode.TARGET_NOT_ALLOWED),
        ({"operation": "delete"}, RefusalCode.FIELD_INVALID),
        ({"text": ""}, RefusalCode.FIELD_MISSING),
        ({"text": " \n"}, RefusalCode.FIELD_MISSING),
        ({"text": 5}, RefusalCode.FIELD_INVALID),
        ({"text": "x" * 70_000}, RefusalCode.TOO_LARGE),
        ({"summary": "x" * 501}, RefusalCode.TOO_LARGE),
        ({"reasoning": "x" * 4_001}, RefusalCode.TOO_LARGE),
        ({"text": "a\x00b"}, RefusalCode.TEXT_UNSAFE),
        ({"text": "<script>alert(1)</script>"}, RefusalCode.TEXT_UNSAFE),
        ({"text": "a\u202eb"}, RefusalCode.TEXT_UNSAFE),
        ({"citations": "all"}, RefusalCode.FIELD_INVALID),
        ({"citations": [{"ref": "sources/beds.md"}]}, RefusalCode.FIELD_INVALID),
        ({"action": "memory-update", "target": "meta.json"}, RefusalCode.UPDATE_INVALID),
        ({"action": "memory-update", "target": "../other/facts.md"}, RefusalCode.UPDATE_INVALID),
        ({"action": "memory-update", "target": "_agent.md"}, RefusalCode.UPDATE_INVALID),
        ({"action": "memory-update", "target": "runs/run_other.md"}, RefusalCode.UPDATE_INVALID),
        ({"action": "memory-update", "target": "facts.md", "operation": "close"}, RefusalCode.UPDATE_INVALID),
        ({"action": "memory-update", "target": "snapshot.md", "text": "word " * 2_000}, RefusalCode.UPDATE_INVALID),
        (
            {"action": "memory-update", "target": "open_loops.md", "operation": "close", "text": None, "loop_id": "no"},
            RefusalCode.UPDATE_INVALID,
        ),
    ],
)
async def test_proposal_that_an_agent_may_not_make_is_refused_with_the_reason(changes, code):
    output = await Stage().play(READ, [propose(**changes)], [FINISH])
    assert output.proposals == ()
    [refusal] = output.refused
    assert (refusal.tool, refusal.code) == ("create-proposal", code), refusal
    assert refusal.detail


@pytest.mark.parametrize(
    "changes, change",
    [
        ({"action": "propose-edit"}, DraftChange.APPEND),
        ({"action": "propose-edit", "operation": "replace"}, DraftChange.REPLACE),
        ({"action": "propose-note", "target": "notes/нотатка.md"}, DraftChange.CREATE),
        ({"action": "propose-summary", "target": "artifacts/2026/sum.md"}, DraftChange.CREATE),
        ({"action": "memory-update", "target": "facts.md"}, DraftChange.APPEND),
        ({"action": "memory-update", "target": f"runs/{RUN_ID}.md"}, DraftChange.APPEND),
        (
            {"action": "memory-update", "target": "facts.md", "section": "Beds", "operation": "replace"},
            DraftChange.REPLACE,
        ),
    ],
)
async def test_proposals_that_an_agent_may_make_are_accepted(changes, change):
    [draft] = (await Stage().play(READ, [propose(**changes)], [FINISH])).proposals
    assert draft.change is change


async def test_memory_proposals_have_their_own_names_for_the_same_fields():
    args = {"action": "memory-update", "file": "open_loops.md", "operation": "close", "summary": "The pump"}
    call = ("create-proposal", {**args, "loop_id": "pump", "resolution": "The gardener does."})
    [draft] = (await Stage().play([call], [FINISH])).proposals
    update = draft.update()
    assert (update.file, update.operation, update.loop_id) == ("open_loops.md", "close", "pump")
    assert update.resolution == "The gardener does."


async def test_a_logic_update_is_a_draft_like_any_other_where_the_file_allows_it():
    call = propose(action="logic-update", target="_agent.md", text="Water more.")
    [draft] = (await Stage().play([call], [FINISH], safe_outputs="[logic-update]")).proposals
    assert draft.action == "logic-update"
    assert "priority" not in draft.to_dict()


async def test_the_same_proposal_twice_is_one():
    output = await Stage().play([propose(), propose(summary="Again")], [FINISH])
    assert len(output.proposals) == 1
    assert [one.code for one in output.refused] == [RefusalCode.DUPLICATE]


@pytest.mark.requirement("PIPE-6")
async def test_fields_outside_the_schema_are_dropped_and_named():
    extra = {
        "priority": "normal",
        "status": "approved",
        "requiresHumanReview": False,
        "id": "prop_1",
        "autoApprove": True,
    }
    output = await Stage().play(
        [propose(**extra)], [("finish", {"summary": "Done.", "proposals": [{"status": "applied"}]})]
    )
    [draft] = output.proposals
    assert set(draft.flags) >= {f"field_dropped:{name}" for name in extra}
    assert not set(extra) & set(draft.to_dict())
    assert [(one.tool, one.code) for one in output.refused] == [("finish", RefusalCode.FIELD_DROPPED)]
    assert len(output.proposals) == 1


@pytest.mark.parametrize("tool", ["read-context", "create-proposal", "read-memory"])
async def test_arguments_that_are_not_json_are_refused_with_the_place_where_they_break(tool: str):
    replied = await heard(Stage(), (tool, '{"refs": ["sources/beds.md"'), (tool, '["sources/beds.md"]'))
    broken, listed = (str(one) for one in replied)
    assert f"the arguments of {tool} cannot be read: they are not JSON" in broken
    assert "at line 1, column 28" in broken
    assert "they are no JSON object, but" in listed
