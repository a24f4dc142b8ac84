"""`_agent.md`: what a good file means, what is wrong with a bad one, and how its status changes."""

import hashlib
import itertools
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.files import FIELDS, NOW, agent_file, line_of
from trellis.agents.definition import (
    STATUS_CHANGES,
    AgentDefinition,
    AgentMalformed,
    AgentStatus,
    ContextOptions,
    EventTrigger,
    SafeOutput,
    Tool,
    TriggerEvent,
    Triggers,
    may_change,
    read_definition,
    with_status,
)
from trellis.agents.errors import DefinitionMalformed, StatusChangeRefused
from trellis.agents.frontmatter import FILE_BYTES_MAX, PROBLEMS_MAX
from trellis.storage.memory.layout import ReadMode


def good(data: bytes, slug: str | None = None) -> AgentDefinition:
    read = read_definition(data, slug=slug)
    assert isinstance(read, AgentDefinition), read
    return read


def bad(data: bytes, slug: str | None = None) -> AgentMalformed:
    read = read_definition(data, slug=slug)
    assert isinstance(read, AgentMalformed), read
    assert read.problems
    return read


# -- good files --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D24")
def test_a_file_is_read_with_its_defaults():
    data = agent_file()
    assert good(data, slug="gardener") == AgentDefinition(
        name="Gardener",
        slug="gardener",
        version="1.2.3",
        description="Looks after the beds.",
        model="offline",
        tools=(Tool.READ_CONTEXT, Tool.NOTEBOOKLM_QUERY, Tool.CREATE_PROPOSAL),
        safe_outputs=(SafeOutput.PROPOSE_EDIT, SafeOutput.MEMORY_UPDATE),
        status=AgentStatus.ACTIVE,
        created_at=datetime(2026, 2, 14, 8, tzinfo=UTC),
        updated_at=datetime(2026, 2, 15, 8, tzinfo=timezone(timedelta(hours=2))),
        created_by="owner",
        temperature=0.3,
        max_steps=5,
        triggers=Triggers(manual=True, cron=None, events=()),
        context=ContextOptions(folder="sources", max_sources=10, mode=ReadMode.BASIC),
        instructions="Weed, then water.",
        sha256=hashlib.sha256(data).hexdigest(),
    )


@pytest.mark.requirement("D24")
def test_the_same_bytes_are_parsed_once_and_judged_for_each_folder():
    data = agent_file()
    assert read_definition(data, slug="gardener") is read_definition(bytes(bytearray(data)), slug="gardener")
    assert isinstance(read_definition(data, slug="other"), AgentMalformed)


def test_every_optional_field_is_read():
    read = good(
        agent_file(
            temperature="0.75",
            max_steps="20",
            triggers="\n  manual: false\n  cron: '0  6 * * mon-fri'\n  events:\n  - proposal.applied\n  - job.ended:a:b",
            context="{folder: sources/letters, max_sources: 3, mode: wide}",
        )
    )
    assert (read.temperature, read.max_steps) == (0.75, 20)
    assert read.triggers == Triggers(
        manual=False,
        cron="0 6 * * mon-fri",
        events=(EventTrigger(TriggerEvent.PROPOSAL_APPLIED), EventTrigger(TriggerEvent.JOB_ENDED, "a:b")),
    )
    assert read.context == ContextOptions(folder="sources/letters", max_sources=3, mode=ReadMode.WIDE)


@pytest.mark.parametrize(
    "empty",
    [{"triggers": ""}, {"triggers": "{cron: null, events: null}"}, {"context": "~"}, {"triggers": "{events: []}"}],
)
def test_an_empty_optional_field_is_as_if_left_out(empty: dict[str, str]):
    read, plain = good(agent_file(**empty)), good(agent_file())
    assert (read.triggers, read.context) == (plain.triggers, plain.context)


@pytest.mark.parametrize(
    "written, moment",
    [
        ("2026-02-14", datetime(2026, 2, 14, tzinfo=UTC)),
        ("'2026-02-14T08:00:00Z'", datetime(2026, 2, 14, 8, tzinfo=UTC)),
        ("2026-02-14 08:00:00.5+02:00", datetime(2026, 2, 14, 6, 0, 0, 500_000, tzinfo=UTC)),
    ],
)
def test_moments_are_taken_as_people_write_them(written: str, moment: datetime):
    assert good(agent_file(created_at=written)).created_at == moment


def test_a_byte_order_mark_and_windows_line_ends_change_nothing_but_the_digest():
    plain = agent_file(body="One.\n\nTwo.\n")
    odd = b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n")
    assert good(odd) == replace(good(plain), sha256=hashlib.sha256(odd).hexdigest())


def test_a_rule_in_the_instructions_does_not_end_them():
    assert good(agent_file(body="Above.\n\n---\n\nBelow.\n")).instructions == "Above.\n\n---\n\nBelow."


def test_a_description_may_have_several_lines():
    assert good(agent_file(description=">\n  One\n  two.\n")).description == "One two."


def test_only_an_active_agent_may_run():
    runnable = [status for status in AgentStatus if good(agent_file(status=status.value)).may_run]
    assert runnable == [AgentStatus.ACTIVE]


def test_odd_but_harmless_files_are_good_with_a_warning():
    nothing = good(agent_file(body="\n"))
    early = good(agent_file(updated_at="2020-01-01"))
    assert "no instructions" in str(nothing.warnings[0])
    assert "updated_at" in str(early.warnings[0])
    assert not good(agent_file()).warnings


# -- bad files ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D24")
@pytest.mark.parametrize("field", FIELDS)
def test_a_required_field_that_is_missing_is_named(field: str):
    (problem,) = bad(agent_file(without=field)).problems
    assert (problem.field, problem.wrong) == (field, "the field is missing")


@pytest.mark.requirement("D24")
@pytest.mark.parametrize(
    "field, value, expected, suggestion",
    [
        ("name", "''", "text of 1 to 100", None),
        ("name", "17", "put it in quotes", None),
        ("name", "on", "put it in quotes", None),
        ("name", "[a]", "text of 1 to 100", None),
        ("name", f"{'x' * 101}", "text of 1 to 100", None),
        ("name", '"a\\tb"', "plain text", None),
        ("description", "", "text of 1 to 1000", None),
        ("slug", "Gardener", "lower-case", None),
        ("slug", "../x", "lower-case", None),
        ("slug", "-x", "lower-case", None),
        ("slug", "x" * 64, "at most 63", None),
        ("version", "1.0", "1.0.0", None),
        ("version", "v1.0.0", "1.0.0", None),
        ("version", "1.02.0", "1.0.0", None),
        ("model", "'a b'", "name of a model", None),
        ("tools", "read-context", "a list of", None),
        ("tools", "[]", "a list of", None),
        ("tools", "[read-context]", "create-proposal among the tools", None),
        ("tools", "[create-proposal, write-memory]", "one of read-context", "read-memory"),
        ("tools", "[create-proposal, create-proposal]", "it once", None),
        ("tools", "[create-proposal, [read-context]]", "one of read-context", None),
        ("safe_outputs", "[propose_edit]", "one of propose-edit", "propose-edit"),
        ("safe_outputs", "[approve]", "one of propose-edit", None),
        ("status", "activ", "one of draft, active", "active"),
        ("status", "Active", "one of draft, active", "active"),
        ("status", "null", "one of draft, active", None),
        ("status", "|\n  active", "in one line", None),
        ("created_at", "yesterday", "2026-02-14T08:00:00Z", None),
        ("created_at", "2026-02-14T08:00:00", "with Z or an offset", None),
        ("created_at", "2026-02-30", "2026-02-14T08:00:00Z", None),
        ("temperature", "1.1", "a number from 0.0 to 1.0", None),
        ("temperature", "hot", "a number from 0.0 to 1.0", None),
        ("temperature", ".nan", "a number from 0.0 to 1.0", None),
        ("max_steps", "0", "a whole number from 1 to 20", None),
        ("max_steps", "21", "a whole number from 1 to 20", None),
        ("max_steps", "5.0", "a whole number from 1 to 20", None),
        ("max_steps", "0x5", "a whole number from 1 to 20", None),
        ("triggers", "manual", "fields of its own", None),
        ("triggers.manual", "{manual: yes}", "true or false", "true"),
        ("triggers.manual", "{manual: flase}", "true or false", "false"),
        ("triggers.cron", "{cron: '61 * * * *'}", "five fields", None),
        ("triggers.cron", "{cron: [1]}", "five fields", None),
        ("triggers.events", "{events: [tick]}", "inbox.item.created", None),
        ("triggers.events", "{events: [proposal.aplied]}", "inbox.item.created", "proposal.applied"),
        ("triggers.events", "{events: ['job.eneded:import']}", "job.ended:TYPE", "job.ended:import"),
        ("triggers.events", "{events: [job.ended]}", "such as job.ended:import", None),
        ("triggers.events", "{events: ['job.ended: import']}", "such as job.ended:import", None),
        ("triggers.events", "{events: ['proposal.applied:x']}", "proposal.applied alone", None),
        ("triggers.events", "{events: ['inbox.item.created:mail']}", "one of run, job, propose-artifact", None),
        ("triggers.events", "{events: [run.completed]}", "the slug of another agent", None),
        ("triggers.events", "{events: ['run.failed:Not A Slug']}", "the slug of another agent", None),
        ("triggers.events", "{events: ['run.completed:gardener']}", "never start runs of itself", None),
        ("triggers.events", "{events: ['job.ended:x', 'job.ended:x']}", "it once", None),
        ("triggers.events", f"{{events: [{', '.join(f'job.ended:x{n}' for n in range(21))}]}}", "at most 20", None),
        ("triggers.manul", "{manul: true}", "one of manual, cron, events", "manual"),
        ("context.folder", "{folder: runs}", "`sources`", None),
        ("context.folder", "{folder: sources/../runs}", "`sources`", None),
        ("context.folder", "{folder: sources/}", "`sources`", None),
        ("context.max_sources", "{max_sources: 51}", "a whole number from 1 to 50", None),
        ("context.mode", "{mode: deep}", "one of basic, wide", None),
    ],
)
def test_invalid_field_is_reported_with_its_line_name_and_expected_value(
    field: str, value: str, expected: str, suggestion: str | None
):
    name = field.partition(".")[0]
    data = agent_file(**{name: value})
    (problem,) = bad(data).problems
    assert problem.line == line_of(data, f"{name}:")
    assert problem.field == field
    assert expected in problem.expected
    assert problem.suggestion == suggestion
    assert str(problem).startswith(f"line {problem.line}, field {field}: ")


@pytest.mark.parametrize(
    "misspelt, meant", [("Name", "name"), ("safe-outputs", "safe_outputs"), ("desciption", "description")]
)
def test_a_misspelt_required_field_is_one_problem_with_a_suggestion(misspelt: str, meant: str):
    data = agent_file(without=meant, **{misspelt: FIELDS[meant]})
    (problem,) = bad(data).problems
    assert (problem.field, problem.suggestion) == (misspelt, meant)
    assert problem.line == line_of(data, misspelt)


def test_unknown_field_of_an_agent_file_is_a_problem():
    (problem,) = bad(agent_file(colour="green")).problems
    assert (problem.field, problem.suggestion) == ("colour", None)
    assert "safe_outputs" in problem.expected


def test_a_field_that_comes_twice_is_a_problem_in_its_second_line():
    data = agent_file().replace(b"status: active\n", b"status: active\nstatus: paused\n")
    (problem,) = bad(data).problems
    first = line_of(data, "status:")
    assert (problem.field, problem.line) == ("status", first + 1)
    assert f"first in line {first}" in problem.wrong


def test_syntax_error_between_fields_of_front_matter_is_reported():
    data = agent_file(model="offline\n...")
    (problem,) = bad(data).problems
    assert problem.line == line_of(data, "tools:")


def test_a_field_whose_name_is_a_list_is_a_problem():
    data = agent_file(context="\n  ? [a, b]\n  : c")
    (problem,) = bad(data).problems
    assert (problem.field, problem.line) == ("context", line_of(data, "  ?"))


def test_no_more_problems_are_told_than_a_person_reads():
    assert len(bad(agent_file(body="\0" * 200, status="activ")).problems) == PROBLEMS_MAX


def test_the_folder_and_the_file_must_name_one_agent():
    (problem,) = bad(agent_file(), slug="other").problems
    assert (problem.field, problem.suggestion) == ("slug", "other")


def test_every_problem_is_told_at_once_in_the_order_of_lines():
    data = agent_file(slug="-x", version="1", status="activ", max_steps="99", triggers="{manul: true}", zzz="1")
    problems = bad(data).problems
    assert [problem.field for problem in problems] == [
        "slug",
        "version",
        "status",
        "max_steps",
        "triggers.manul",
        "zzz",
    ]
    assert [problem.line for problem in problems] == sorted(problem.line for problem in problems)


def test_a_field_that_cannot_be_read_does_not_hide_the_others():
    data = agent_file(name="a: b", tools="[create-proposal", model="&x offline", version="1.0", status="activ")
    found = {problem.field: problem for problem in bad(data).problems}
    assert set(found) == {"name", "tools", "model", "version", "status"}
    assert "quotes" in found["name"].expected
    assert "]" in found["tools"].expected
    assert "anchor" in found["model"].wrong
    assert all(found[field].line == line_of(data, f"{field}:") for field in found)


def test_tab_is_reported_with_its_line_beside_the_other_problems():
    data = agent_file(status="activ").replace(b"model: ", b"model:\t")
    tab, status = bad(data).problems
    assert (tab.line, tab.expected) == (line_of(data, "model:"), "spaces")
    assert status.field == "status"


@pytest.mark.parametrize(
    "data, wrong, suggestion",
    [
        (b"", "does not begin with front matter", None),
        (b"# Gardener\n", "begins with '# Gardener'", None),
        (b"\n---\nname: a\n---\n", "does not begin with front matter", None),
        (b"--\nname: a\n---\n", "begins with '--'", "---"),
        ("—\nname: a\n---\n".encode(), "begins with '—'", "---"),
        (b"---\nname: a\n", "has no end", None),
        (b"---\nname: a\n ---\nx", "has no end", None),
        (b"---\n---\n", "is empty", None),
        (b"---\n# only a comment\n---\n", "is empty", None),
        (b"---\n- a\n- b\n---\n", "has no fields", None),
        (b"---\njust words\n---\n", "has no fields", None),
        ("\ufeff---\nname: a\n---\n".encode("utf-16"), "UTF-16", None),
        (b"x" * (FILE_BYTES_MAX + 1), f"{FILE_BYTES_MAX + 1} bytes", None),
        (b"---\n" + b"# words\n" * 3000 + b"---\n", "24000 characters", None),
    ],
)
def test_a_file_without_readable_front_matter_says_so(data: bytes, wrong: str, suggestion: str | None):
    (problem,) = bad(data).problems
    assert wrong in problem.wrong
    assert problem.suggestion == suggestion
    assert problem.expected


def test_bytes_that_are_not_utf_8_are_told_with_their_line_beside_other_problems():
    data = agent_file(status="activ").replace(b"Gardener", b"Gard\xffner")
    name, status = bad(data).problems
    assert (name.line, "not UTF-8" in name.wrong) == (line_of(data.replace(b"\xff", b"?"), "name"), True)
    assert status.field == "status"


@pytest.mark.parametrize("character", ["\0", "\x1b", "\x85", "\u2028", "\u202e", "\ufeff", "\U000e0041", "\r"])
def test_characters_that_hide_or_reorder_text_are_refused_everywhere(character: str):
    for data in (agent_file(name=f"a{character}b"), agent_file(body=f"Water.\nDo{character} not.\n")):
        assert any(f"U+{ord(character):04X}" in problem.wrong for problem in bad(data).problems)


BOMBS = {
    "billion laughs": "a: &a [x,x,x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\nname: *c",
    "alias": "name: &n Gardener\ncreated_by: *n",
    "merge": "base: &b {name: x}\n<<: *b",
    "deep list": "name: " + "[" * 8000,
    "deep table": "name: " + "{a: " * 3000,
    "deep blocks": "\n".join(" " * depth + "a:" for depth in range(150)),
    "many values": "name: [" + "1," * 8000 + "]",
    "many fields": "\n".join(f"f{number}:" for number in range(2000)),
    "many broken fields": "\n".join(f"f{number}: [" for number in range(1500)),
    "python": "name: !!python/object/apply:os.system [echo]",
    "long key": "? " + "x" * 15_000 + "\n: y",
    "documents": "name: a\n... \nname: b",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_front_matter_is_refused_soon(bomb: str):
    begun = time.process_time()
    problems = bad(f"---\n{BOMBS[bomb]}\n---\nx\n".encode()).problems
    assert time.process_time() - begun < 3
    assert len(problems) <= PROBLEMS_MAX
    assert all(len(str(problem)) < 1000 for problem in problems)


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_no_bytes_make_the_reader_fail(data: bytes):
    for candidate in (data, b"---\n" + data + b"\n---\n", b"---\nname: " + data + b"\n---\n"):
        read_definition(candidate)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_file_is_read_or_told_with_lines_that_exist(data: st.DataObject):
    whole = agent_file(triggers="{cron: '0 6 * * *'}", context="\n  mode: wide")
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 5)))
    put = data.draw(
        st.sampled_from([b"", b"\t", b":", b"[", b'"', b"'", b"&", b"*", b"\n", b"- ", b"{", b"\xc3", b"---\n"])
    )
    damaged = whole[:start] + put + whole[end:]
    read = read_definition(damaged)
    if isinstance(read, AgentMalformed):
        assert all(1 <= problem.line <= damaged.count(b"\n") + 1 for problem in read.problems)


# -- status ------------------------------------------------------------------------------------------------------


CHANGES = {
    ("draft", "active"),
    ("draft", "archived"),
    ("active", "paused"),
    ("active", "error"),
    ("active", "archived"),
    ("paused", "active"),
    ("paused", "archived"),
    ("error", "active"),
    ("error", "paused"),
    ("error", "archived"),
}


@pytest.mark.requirement("D24")
@pytest.mark.parametrize("source, target", list(itertools.product(AgentStatus, AgentStatus)))
def test_a_status_changes_as_declared_and_not_otherwise(source: AgentStatus, target: AgentStatus):
    data = agent_file(status=source.value)
    allowed = source is target or (source.value, target.value) in CHANGES
    assert may_change(source, target) is allowed
    if allowed:
        assert good(with_status(data, target, at=NOW)).status is target
    else:
        with pytest.raises(StatusChangeRefused) as refused:
            with_status(data, target, at=NOW)
        assert all(word in str(refused.value) for word in STATUS_CHANGES[source])


def test_the_same_status_again_changes_no_byte():
    data = agent_file()
    assert with_status(data, AgentStatus.ACTIVE, at=NOW) == data


def test_a_malformed_file_is_not_touched():
    with pytest.raises(DefinitionMalformed, match="slug"):
        with_status(agent_file(slug="-"), AgentStatus.PAUSED, at=NOW)


def test_a_moment_without_an_offset_is_no_moment():
    with pytest.raises(ValueError, match="offset"):
        with_status(agent_file(), AgentStatus.PAUSED, at=datetime(2026, 1, 1))  # noqa: DTZ001 - this is what is refused


def _rendered(order: list[str], quotes: dict[str, str], odd: dict[str, str], end: str, values: dict[str, str]) -> bytes:
    lines = ["---"]
    for name in order:
        quote = quotes.get(name, "")
        lines.append(f"{name}:{odd['space']}{quote}{values[name]}{quote}{odd['after']}")
    lines += [odd["comment"], "---", "status: draft", "updated_at: 1970", odd["body"]]
    return (odd["mark"] + end.join(lines)).encode()


@given(
    order=st.permutations(list(FIELDS)),
    quotes=st.fixed_dictionaries({name: st.sampled_from(["", "'", '"']) for name in ("status", "updated_at")}),
    odd=st.fixed_dictionaries(
        {
            "space": st.sampled_from([" ", "   "]),
            "after": st.sampled_from(["", "  ", " # status: draft"]),
            "comment": st.sampled_from(["", "# status: draft", "# ї «»"]),
            "body": st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=20),
            "mark": st.sampled_from(["", "\ufeff"]),
        }
    ),
    end=st.sampled_from(["\n", "\r\n"]),
    target=st.sampled_from([AgentStatus.PAUSED, AgentStatus.ERROR, AgentStatus.ARCHIVED]),
)
def test_a_change_of_status_leaves_every_other_byte(order, quotes, odd, end, target):
    before = _rendered(order, quotes, odd, end, dict(FIELDS))
    changed = {**FIELDS, "status": target.value, "updated_at": "2026-11-15T07:30:15.123Z"}
    assert with_status(before, target, at=NOW) == _rendered(order, quotes, odd, end, changed)
