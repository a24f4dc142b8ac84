"""What the offline model takes for a pair worth a person's look, and what it does not."""

# ruff: noqa: RUF001 - Ukrainian text

import pytest

from trellis.agents.offline.comparison import ConflictKind, conflicts, denials, statement, subjects
from trellis.agents.offline.plan import QUESTION_CHARS_MAX, QUESTIONS_MAX, Origin, questions


def pair(first: str, second: str, *, refs: tuple[str, str] = ("a.md", "b.md")):
    return conflicts([statement(refs[0], first), statement(refs[1], second)])


@pytest.mark.parametrize(
    "first, second",
    [
        ("The cellar is kept at 12 °C in winter.", "In winter the cellar is kept at 15 °C."),
        ("Relative humidity lies between 40 and 60 percent here.", "Keep a relative humidity of 45–55 % at all times."),
        ("The chapel was built in 1712 by the miller.", "The miller built the chapel in 1721."),
        ("Скриня має 83 см завдовжки.", "Завдовжки скриня має 91 см."),
        ("Retries are made after 15 seconds by the worker.", "The worker makes retries after 30 s."),
        ("The garden has 12 apple trees.", "There are 14 apple trees in the garden."),
        ("The tank T-1 holds 1200 litres.", "By its plate, the tank T-1 holds 900 litres."),
        ("The old orchard has 1200 apple trees.", "There are 900 apple trees in the old orchard."),
        ("Каплицю збудував мельник у 1712 році.", "Мельник збудував каплицю навесні 1721."),
    ],
)
def test_different_figures_for_one_matter_are_a_pair(first, second):
    [found] = pair(first, second)
    assert found.kind is ConflictKind.FIGURES


@pytest.mark.parametrize(
    "first, second",
    [
        ("The cellar is kept at 12 °C in winter.", "In winter the cellar is kept at 12 °C."),
        ("Clock C-1 weighs 4 kg with its case.", "Clock C-2 weighs 5 kg with its case."),
        ("The roof is 40 m long.", "The letter weighs 20 g."),
        ("The chapel was built in 1712.", "The mill burnt down in 1890."),
        ("The stick is 74 cm long.", "The stick weighs 61 g."),
        ("See note 5.", "See note 7."),
        ("The tank T-1 of the old mill holds 1200 litres.", "The tank T-1 of the old mill was made in 1950."),
        ("The old mill has a pump of model 1200.", "The pump of the old mill was made in 1950."),
        ("", ""),
    ],
)
def test_statements_that_agree_or_are_about_another_subject_are_no_disagreement(first, second):
    assert pair(first, second) == []


def test_statements_of_one_source_are_no_disagreement():
    assert pair("The cellar is kept at 12 °C.", "The cellar is kept at 15 °C.", refs=("a.md", "a.md")) == []


def test_a_denial_is_seen_only_about_what_the_question_names():
    yes = statement("a.md", "In 1931 the top of V-3 was taken off and a new bar was set.")
    no = statement("b.md", "Nobody ever took off the top, and the bar is the old one.")
    [found] = denials("Was the top of V-3 taken off, and the bar changed?", [yes, no], [])
    assert found.kind is ConflictKind.DENIAL
    assert denials("Was the top taken off, and the bar changed?", [yes, no], []) == []
    assert denials("Was the top of V-4 taken off?", [yes, no], []) == []


def test_the_words_in_common_are_what_is_asked_about():
    sources = {"a.md": "The bell D-2 weighs 40 kg.", "b.md": "By the book, bell D-2 weighs 55 kg."}
    assert subjects(sources) == ["D-2 bell weighs?"]


def test_questions_come_from_the_owner_the_loops_and_the_sources_in_this_order():
    owner = "Read.\n\n**Questions:**\n\n- Who built it?\n- Why\n  there?\n\nNot this:\n\n- a thing\n"
    sources = {
        "sources/a.md": "# A\n\n## Відкриті питання / Open questions\n\n- Чия це хата?\n\n## Other\n\n- no question\n"
    }
    memory = {"open_loops.md": "- [ ] one: who was there?\n- [x] two: closed\n"}
    asked = questions(owner, sources, memory)
    assert [(one.text, one.origin) for one in asked] == [
        ("Who built it?", Origin.OWNER),
        ("Why there?", Origin.OWNER),
        ("who was there?", Origin.LOOP),
        ("Чия це хата?", Origin.SOURCE),
    ]


def test_questions_are_bounded():
    many = "# Questions\n\n" + "".join(f"- Question number {n}?\n" for n in range(100)) + f"- {'x' * 1_000}?\n"
    asked = questions(many, {f"sources/{n}.md": many.replace("number", f"{n}") for n in range(9)}, {})
    assert len(asked) <= QUESTIONS_MAX
    assert all(len(one.text) <= QUESTION_CHARS_MAX for one in asked)
