"""Texts are cut into passages and sentences that stand in the text exactly."""

# ruff: noqa: RUF001 - quotes as people type them, and Ukrainian

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.nlm.passages import PASSAGE_CHARS_MAX, SENTENCE_CHARS_MAX, passages, sentences
from trellis.nlm.provider import NlmSource
from trellis.nlm.words import stem, stems

DOCUMENT = """---
title: Queue
owner: Ada
---

# Queue

First paragraph. It has
two sentences.

Ways to fail:

- by a transient error,
  which is tried again
- by a permanent one. That ends it.

## Limits

| Name | Value |
|------|------:|
| lease time | 30 s |
| attempts | five |

Title two
---------

1. Stop the workers.
2) Start them again.

> A quotation that runs
> over two lines.

```sh
trellis verify --ledger sqlite:///x.db
```

<!-- not read -->
[link]: target
"""


def shown(text: str) -> list[tuple[tuple[str, ...], list[str]]]:
    return [(part.headings, [one.shown for one in part.sentences]) for part in passages(NlmSource("a.md", text))]


def test_headings_lists_tables_quotations_code_and_front_matter_are_distinguished():
    assert shown(DOCUMENT) == [
        ((), ["title: Queue", "owner: Ada"]),
        (("Queue",), ["First paragraph.", "It has two sentences."]),
        (
            ("Queue",),
            ["Ways to fail:", "by a transient error, which is tried again", "by a permanent one.", "That ends it."],
        ),
        (("Queue", "Limits"), ["Name: lease time; Value: 30 s", "Name: attempts; Value: five"]),
        (("Queue", "Title two"), ["Stop the workers.", "Start them again."]),
        (("Queue", "Title two"), ["A quotation that runs over two lines."]),
        (("Queue", "Title two"), ["trellis verify --ledger sqlite:///x.db"]),
    ]


def test_every_sentence_is_found_in_the_text():
    for part in passages(NlmSource("a.md", DOCUMENT)):
        for sentence in part.sentences:
            assert DOCUMENT[sentence.start : sentence.end].strip() == DOCUMENT[sentence.start : sentence.end] != ""


def test_a_list_brings_the_line_that_leads_to_it_into_each_of_its_passages():
    items = "".join(f"- item number {n} with some words after it\n" for n in range(60))
    made = passages(NlmSource("a.md", f"Before it.\n\nThe list is:\n\n{items}"))
    assert len(made) > 3
    assert [part.sentences[0].shown for part in made[1:]] == ["The list is:"] * (len(made) - 1)
    assert all(part.leads == 1 for part in made[1:])


def test_passages_end_when_they_are_long():
    made = passages(NlmSource("a.md", "This sentence is repeated many times. " * 200))
    assert all(part.sentences[-1].end - part.sentences[0].start < PASSAGE_CHARS_MAX + 100 for part in made)
    assert len(made) > 5


@pytest.mark.parametrize(
    "text, expected",
    [
        ("One. Two! Three? Four… Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        ("See e.g. Fig. 3 and Dr. Who. Then stop.", ["See e.g. Fig. 3 and Dr. Who.", "Then stop."]),
        ("It costs 3.5 euros. Version 1.2 is out.", ["It costs 3.5 euros.", "Version 1.2 is out."]),
        ('He said "stop." Then he left.', ['He said "stop."', "Then he left."]),
        ("Це перше речення. А це друге!", ["Це перше речення.", "А це друге!"]),
        ("Див. розділ 2. Далі буде.", ["Див. розділ 2.", "Далі буде."]),
        ("Роман І. Франка вийшов у 1878 р. українською.", ["Роман І. Франка вийшов у 1878 р. українською."]),
        ("Вул. Хрещатик, м. Київ. «Так», — сказала вона.", ["Вул. Хрещатик, м. Київ.", "«Так», — сказала вона."]),
        ("1. First of all. 2. Second.", ["1. First of all.", "2. Second."]),
        ("Wait... what? No", ["Wait... what?", "No"]),
    ],
)
def test_sentences_end_where_people_end_them(text, expected):
    assert [sentence.shown for sentence in sentences(text, 0, len(text))] == expected


def test_a_sentence_too_long_is_cut_between_words():
    text = "word " * 1_000
    made = sentences(text, 0, len(text))
    assert all(sentence.end - sentence.start <= SENTENCE_CHARS_MAX for sentence in made)
    assert {word for sentence in made for word in sentence.shown.split()} == {"word"}


@pytest.mark.parametrize(
    "words",
    [
        "retry retries retried retrying",
        "lease leases leased",
        "expire expires expired expiry expiration",
        "stop stopped stopping stops",
        "claim claims claimed claiming claimer",
        "process processes",
        "записує записати записував запису записами записують",
        "пропозиція пропозиції пропозицію пропозиціями",
        "пам'ять пам’яті пам'яттю памʼять",
        "година години годину годин",
        "змінилася зміна зміни змінив",
    ],
)
def test_forms_of_a_word_have_the_same_stem(words):
    assert len({stem(word) for word in words.split()}) == 1


def test_different_words_have_different_stems():
    assert len({stem(word) for word in ("job", "lease", "worker", "queue", "agent", "memory", "status", "epoch")}) == 8
    assert stems("D7 and D70, job_id") == ["d7", "d70", "job", "id"]
    assert stems("What is it? Що це?") == []


MARKDOWN = st.lists(
    st.sampled_from(
        [
            "# ",
            "## H",
            "\n",
            "\n\n",
            "- ",
            "1. ",
            "| a | b |",
            "|---|---|",
            "```",
            "> ",
            "---",
            "===",
            "word. ",
            "Слово! ",
            "  ",
            "\t",
            "*",
            ":",
            "\r\n",
            "\u2028",
            "<!-- c -->",
        ]
    ),
    max_size=40,
).map("".join)


@given(st.one_of(MARKDOWN, st.text(max_size=200)))
def test_every_text_can_be_cut_and_nothing_is_cited_that_is_not_there(text):
    at = 0
    for part in passages(NlmSource("a.md", text)):
        for sentence in part.sentences[part.leads :]:
            assert at <= sentence.start < sentence.end <= len(text)
            assert not text[sentence.start].isspace()
            assert not text[sentence.end - 1].isspace()
            at = sentence.end


@pytest.mark.timeout(30)
def test_hostile_texts_take_a_time_that_grows_with_their_length():
    n = 100_000
    for text in (
        "." * n,
        "# " + " " * n + "x",
        "- " * n,
        "|" * n + "\n" + " " * n + "|",
        "```" * n,
        ">" * n,
        "a\n-" * n,
        '."' * n,
    ):
        assert isinstance(passages(NlmSource("a.md", text)), list)
