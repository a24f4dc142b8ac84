"""The offline model: useful without a key, in both languages, and never a word that is not quoted or fixed."""

# ruff: noqa: RUF001 - Ukrainian text

import re
from datetime import UTC, datetime

import pytest

from tests.agents.runtime.stage import RUN_ID, Stage, agent
from trellis.agents.definition import AgentDefinition, read_definition
from trellis.agents.garden import memory_seed, objects_of
from trellis.agents.offline.comparison import SENTENCES
from trellis.nlm.provider import Language
from trellis.storage.memory.updates import AppliedUpdates, apply_updates

ENGLISH = {
    "sources/register.md": "# Register\n\nThe lamp L-7 burns at 230 volts. It weighs 4 kg with its stand.\n\n"
    "## Open questions\n\n- Who repaired the lamp L-7 in the spring of last year?\n",
    "sources/journal.md": "# Journal\n\nThe lamp L-7 was repaired by the smith in the spring of last year. "
    "The lamp L-7 weighs 6 kg with its stand.\n",
    "sources/weather.md": "# Weather\n\nIt rained often. The roof holds.\n",
}
ENGLISH_BODY = (
    "Compare the notes.\n\nQuestions:\n\n- How much does the lamp L-7 weigh with its stand?\n- Who owns the lake?\n"
)
UKRAINIAN = {
    "sources/реєстр.md": "# Реєстр\n\nДзвін D-2 важить 40 кг разом із язиком. Його відлито у Львові.\n",
    "sources/журнал.md": "# Журнал\n\nЗа журналом дзвін D-2 важить 55 кг разом із язиком. На дзвоні немає жодного напису.\n",
}
UKRAINIAN_BODY = (
    "Порівняй нотатки.\n\n# Запитання\n\n- Скільки важить дзвін D-2 разом із язиком?\n- Хто співає в хорі?\n"
)


def english() -> tuple[Stage, AgentDefinition]:
    return Stage(sources=ENGLISH, memory={"open_loops.md": "- [ ] smith: who repaired the lamp L-7?\n"}), agent(
        body=ENGLISH_BODY
    )


def ukrainian() -> tuple[Stage, AgentDefinition]:
    return Stage(sources=UKRAINIAN, memory={}), agent(body=UKRAINIAN_BODY)


def demo(slug: str) -> tuple[Stage, AgentDefinition]:
    files = {key.split("/", 2)[2]: body for key, body in objects_of(slug).items()}
    definition = read_definition(files["_agent.md"], slug=slug)
    assert isinstance(definition, AgentDefinition)
    sources = {ref: body.decode() for ref, body in files.items() if ref.startswith("sources/")}
    return Stage(sources=sources, memory=dict(memory_seed(slug))), definition


CASES = {
    "english": english,
    "ukrainian": ukrainian,
    "archivist-violin": lambda: demo("archivist-violin"),
    "architect-guardian": lambda: demo("architect-guardian"),
}


def flat(text: str) -> str:
    return re.sub(r"\s*\n\s*(?:>\s?)*|\s+", " ", text).strip()


@pytest.mark.parametrize("case", CASES)
async def test_citations_are_verbatim_excerpts_of_the_sources(case):
    stage, definition = CASES[case]()
    output = await stage.run(definition)
    assert output.proposals
    for draft in output.proposals:
        assert draft.citations
        assert draft.flags == ()
        for one in draft.citations:
            assert stage.sources[one.ref][one.start : one.end] == one.excerpt
    assert output.refused == ()


def test_both_languages_have_the_same_sentences():
    english, ukrainian = (SENTENCES[one].keys() for one in (Language.ENGLISH, Language.UKRAINIAN))
    assert english == ukrainian


@pytest.mark.parametrize("case", CASES)
async def test_every_line_of_a_draft_is_a_quotation_a_question_or_a_fixed_sentence(case):
    stage, definition = CASES[case]()
    output = await stage.run(definition)
    sentences = [text for words in SENTENCES.values() for text in words.values()]
    fixed = [
        re.compile(re.escape(text).replace(r"\{", "{").replace(r"\}", "}").replace("{ref}", "[^ ]+"))
        for text in sentences
    ]
    quoted = flat(" ".join(stage.sources.values()))
    owned = flat(" ".join([definition.instructions, *stage.memory.values(), *stage.sources.values()]))
    labels = [words["question"].split("{")[0] for words in SENTENCES.values()]
    labels += [words["loop"].split("{")[0] for words in SENTENCES.values()]
    for draft in output.proposals:
        for line in filter(None, map(str.strip, draft.text.splitlines())):
            bare = line.removeprefix(">").removeprefix("-").strip()
            said = re.sub(r" \((?:from|з) [^ ]+\)$", "", bare)
            label = next((label for label in labels if bare.startswith(label)), None)
            assert (
                not bare
                or any(pattern.fullmatch(bare) for pattern in fixed)
                or (label is not None and bare.removeprefix(label) in owned)
                or said in quoted
            ), line


@pytest.mark.parametrize("case", CASES)
async def test_the_same_garden_gives_the_same_bytes(case):
    outputs = []
    for _ in range(2):
        stage, definition = CASES[case]()
        outputs.append((await stage.run(definition)).to_bytes())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("case, pair", [("english", ("4 kg", "6 kg")), ("ukrainian", ("40 кг", "55 кг"))])
async def test_different_figures_for_one_matter_become_one_proposal_with_both(case, pair):
    stage, definition = CASES[case]()
    output = await stage.run(definition)
    [doubt] = [draft for draft in output.proposals if draft.action == "propose-comment"]
    assert all(figure in doubt.text for figure in pair)
    assert {one.ref for one in doubt.citations} == {
        ref for ref, text in stage.sources.items() if any(f in text for f in pair)
    }


async def test_the_contradictions_of_the_demo_are_found():
    stage, definition = demo("archivist-violin")
    output = await stage.run(definition)
    doubts = [draft.text for draft in output.proposals if draft.action == "propose-comment"]
    assert any("percent" in text and "05-provenance" in text and "06-humidity" in text for text in doubts)
    assert any("nobody has opened it" in text and "Fitted a new bass bar" in text for text in doubts)
    assert len(doubts) <= 3


@pytest.mark.parametrize("case, language", [("english", Language.ENGLISH), ("ukrainian", Language.UKRAINIAN)])
async def test_offline_model_writes_in_the_language_of_the_instructions(case, language):
    stage, definition = CASES[case]()
    output = await stage.run(definition)
    words = SENTENCES[language]
    assert words["proposed"] in output.summary
    assert words["unanswered"] in output.summary
    assert all(words["reasoning"] == draft.reasoning for draft in output.proposals)


async def test_a_question_that_sources_do_not_answer_is_named_and_not_answered():
    stage, definition = english()
    output = await stage.run(definition)
    assert "- Who owns the lake?" in output.summary
    assert not any("lake" in draft.text for draft in output.proposals)


async def test_a_question_of_one_source_is_answered_by_another():
    stage, definition = english()
    [report] = [draft for draft in (await stage.run(definition)).proposals if draft.action == "propose-summary"]
    assert "Who repaired the lamp L-7 in the spring of last year?" in report.text
    assert "repaired by the smith" in report.text


@pytest.mark.parametrize("case", CASES)
async def test_fact_already_in_memory_is_not_proposed_again(case):
    stage, definition = CASES[case]()
    first = await stage.run(definition)
    updates = [draft.update() for draft in first.proposals if draft.action == "memory-update"]
    assert updates
    applied = apply_updates(stage.memory, updates, datetime(2026, 2, 14, tzinfo=UTC), run_id=RUN_ID)
    assert isinstance(applied, AppliedUpdates)
    again = Stage(sources=stage.sources, memory=applied.files)
    second = await again.run(definition)
    assert second.proposals == ()
    assert (
        SENTENCES[Language.ENGLISH if case != "ukrainian" else Language.UKRAINIAN]["proposed_nothing"] in second.summary
    )


@pytest.mark.parametrize("steps", range(1, 6))
async def test_offline_model_finishes_within_its_steps(steps):
    stage, _ = english()
    output = await stage.run(agent(body=ENGLISH_BODY, max_steps=str(steps)))
    assert bool(output.proposals) == (steps > 1)
    assert len([name for name in stage.journal.entries if name.startswith("model/")]) == min(steps, 4)


@pytest.mark.parametrize(
    "tools",
    [
        "[create-proposal]",
        "[read-context, create-proposal]",
        "[read-memory, create-proposal]",
        "[notebooklm-query, create-proposal]",
        "[read-memory-deep, create-proposal]",
    ],
)
@pytest.mark.parametrize(
    "outputs", ["[propose-edit]", "[propose-tag]", "[memory-update]", "[propose-note]", "[logic-update]"]
)
async def test_offline_model_works_with_any_tools_and_outputs(tools, outputs):
    stage, _ = english()
    output = await stage.run(agent(body=ENGLISH_BODY, tools=tools, safe_outputs=outputs))
    assert output.summary
    assert output.refused == ()
    assert {draft.action for draft in output.proposals} <= set(outputs.strip("[]").split())


async def test_agent_without_sources_and_instructions_proposes_nothing():
    output = await Stage(sources={}, memory={}).run(agent(body=""))
    assert output.proposals == ()
    assert output.summary.startswith("Read 0 sources")


async def test_offline_model_quotes_no_invisible_text():
    hidden = {**ENGLISH, "sources/journal.md": "# J\n\nThe lamp L-7 weighs 6 kg <script>x</script> with its stand.\n"}
    output = await Stage(sources=hidden, memory={}).run(agent(body=ENGLISH_BODY))
    assert output.refused == ()
    assert not any("script" in draft.text for draft in output.proposals)
