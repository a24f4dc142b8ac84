"""A citation counts when its source holds it; nothing else does."""

# ruff: noqa: RUF001 - quotes as people type them

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis.nlm.citations import CITATIONS_MAX, EXCERPT_CHARS_MAX, Folded, verify
from trellis.nlm.provider import Citation, NlmAnswer, NlmSource

TEXT = """# Leases

A lease lasts thirty seconds. It’s renewed «every ten seconds» — all of
a worker's leases in one call.

> Nothing the dead worker
> still sends is **accepted**: an `old epoch` is refused.

The value 2*3 is illegal under rule D7. Пам’ять має два шари.
"""
SOURCE = NlmSource("leases.md", TEXT)


def verified(*citations: Citation, text: str = "answer", confident: bool = True) -> NlmAnswer:
    return verify(NlmAnswer(text=text, citations=citations, confident=confident), (SOURCE,))


def only(excerpt: str, *, source: NlmSource = SOURCE) -> Citation:
    answer = verify(NlmAnswer(text="a", citations=(Citation(source.ref, excerpt),), confident=True), (source,))
    assert answer.flags == ()
    assert answer.confident
    (citation,) = answer.citations
    assert source.text[citation.start : citation.end] == citation.excerpt
    return citation


@pytest.mark.requirement("NLM-7")
def test_an_exact_excerpt_gets_its_span():
    citation = only("A lease lasts thirty seconds.")
    assert citation.start == TEXT.index("A lease lasts")
    assert citation.excerpt == "A lease lasts thirty seconds."


@pytest.mark.parametrize(
    "excerpt, found",
    [
        ("all of a worker's leases in one call", "all of\na worker's leases in one call"),
        ('It\'s renewed "every ten seconds" - all of', "It’s renewed «every ten seconds» — all of"),
        ("It's renewed “every ten seconds” -- all of", "It’s renewed «every ten seconds» — all of"),
        (
            "Nothing the dead worker still sends is accepted: an old epoch is refused.",
            "Nothing the dead worker\n> still sends is **accepted**: an `old epoch` is refused.",
        ),
        ('"A lease lasts thirty seconds."', "A lease lasts thirty seconds."),
        ("…lasts thirty seconds...", "lasts thirty seconds"),
        ("Пам'ять має два шари", "Пам’ять має два шари"),
        ("A\u00a0lease  lasts\u200b thirty\nseconds", "A lease lasts thirty seconds"),
    ],
)
def test_white_space_quotes_dashes_and_emphasis_are_forgiven_and_the_sources_own_text_is_cited(excerpt, found):
    assert only(excerpt).excerpt == found


def test_accents_written_apart_are_the_same_letters():
    apart = NlmSource("a.md", "Цей и\u0306 и\u0306ого друзі живуть у Киі\u0308ві давно.")
    assert only("Цей й його друзі живуть у Київі", source=apart).end < len(apart.text)


@pytest.mark.requirement("NLM-7")
@pytest.mark.parametrize(
    "excerpt",
    [
        "A lease lasts forty seconds.",
        "a lease lasts thirty seconds.",
        "legal under rule D7",
        "The value 23 is illegal",
        "lease lasts thirty … accepted",
        "thirty seconds lasts",
        "lasts thirty second",
    ],
)
def test_other_words_other_case_cut_words_and_gaps_are_not_found(excerpt):
    answer = verified(Citation("leases.md", excerpt))
    assert answer.citations == ()
    assert answer.flags == ("citation_not_found:leases.md", "ungrounded")
    assert not answer.confident


def test_a_citation_is_never_moved_to_another_source():
    other = NlmSource("other.md", "Nothing about that stands here.")
    answer = verify(
        NlmAnswer(text="a", citations=(Citation("other.md", "A lease lasts thirty seconds."),)), (SOURCE, other)
    )
    assert answer.flags == ("citation_not_found:other.md", "ungrounded")


def test_an_unknown_ref_is_flagged_and_made_printable():
    answer = verified(Citation("x\n\x1b[31m" + "y" * 500, "A lease lasts thirty seconds."))
    (flag, ungrounded) = answer.flags
    assert ungrounded == "ungrounded"
    assert flag.startswith("citation_not_found:x\N{REPLACEMENT CHARACTER}")
    assert flag.isprintable()
    assert len(flag) < 250


def test_found_citations_stay_when_others_are_dropped():
    good = Citation("leases.md", "A lease lasts thirty seconds.")
    answer = verified(good, Citation("leases.md", "An invented sentence about leases."))
    assert [citation.excerpt for citation in answer.citations] == [good.excerpt]
    assert answer.flags == ("citation_not_found:leases.md",)
    assert not answer.confident


def test_a_few_letters_show_nothing():
    assert verified(Citation("leases.md", "A lease")).flags == ("citation_too_short:leases.md", "ungrounded")


def test_a_right_span_is_kept_and_a_wrong_one_is_looked_for():
    twice = NlmSource("a.md", "The same sentence. Between. The same sentence.")
    second = twice.text.rindex("The same")
    given = Citation("a.md", "The same sentence.", second, len(twice.text))
    assert verify(NlmAnswer(text="a", citations=(given,)), (twice,)).citations == (given,)
    wrong = Citation("a.md", "The same sentence.", 5, 12)
    assert verify(NlmAnswer(text="a", citations=(wrong,)), (twice,)).citations[0].start == 0


def test_a_span_that_cuts_a_word_is_not_believed():
    at = TEXT.index("legal under rule")
    answer = verified(Citation("leases.md", "legal under rule", at, at + len("legal under rule")))
    assert answer.citations == ()


def test_the_same_citation_twice_counts_once():
    citation = Citation("leases.md", "A lease lasts thirty seconds.")
    assert len(verified(citation, citation).citations) == 1


def test_an_answer_without_citations_is_ungrounded():
    answer = verified()
    assert answer.flags == ("ungrounded",)
    assert not answer.confident


def test_citations_and_text_of_an_answer_are_bounded():
    many = tuple(Citation("leases.md", f"invented sentence number {n}") for n in range(CITATIONS_MAX + 5))
    assert "citations_cut" in verified(*many).flags
    long = verified(Citation("leases.md", "A lease " * EXCERPT_CHARS_MAX), text="x" * 100_000 + "\0\ud800")
    assert len(long.text) == 20_000
    assert "text_cut" in long.flags
    spread = NlmSource("a.md", "eight letters" + " " * EXCERPT_CHARS_MAX + "and more")
    dropped = verify(NlmAnswer(text="a", citations=(Citation("a.md", "eight letters and more"),)), (spread,))
    assert dropped.flags == ("citation_not_found:a.md", "ungrounded")


@pytest.mark.timeout(30)
def test_hostile_sources_take_a_time_that_grows_with_their_length():
    n = 100_000
    for text in ("a" + "*" * n + "b", " " * n, "\n" * n, "> " * n, "-" * n, "." * n, "a\u0301" * n):
        source = NlmSource("a.md", text)
        assert (
            "ungrounded" in verify(NlmAnswer(text="a", citations=(Citation("a.md", "not in there"),)), (source,)).flags
        )


PIECES = st.sampled_from(
    [
        "lease",
        "job",
        " ",
        "  ",
        "\n",
        "\n> ",
        "**",
        "`",
        "«",
        "»",
        "“",
        "'",
        "’",
        "—",
        "-",
        "--",
        "...",
        "и\u0306",
        "їжак",
    ]
)
TEXTS = st.lists(PIECES, max_size=40).map("".join)


@given(TEXTS)
def test_every_stretch_of_folded_text_leads_back_to_a_stretch_that_folds_to_it(text):
    folded = Folded(text)
    for start in range(len(folded.text)):
        end = min(len(folded.text), start + 7)
        begin, stop = folded.span(start, end)
        assert 0 <= begin < stop <= len(text)
        assert Folded(text[begin:stop]).text.strip() in folded.text


@given(TEXTS, TEXTS)
def test_kept_citations_stand_in_their_source_and_a_second_check_changes_none(text, excerpt):
    sources = (NlmSource("a.md", text),)
    once = verify(NlmAnswer(text="a", citations=(Citation("a.md", excerpt),), confident=True), sources)
    for citation in once.citations:
        assert text[citation.start : citation.end] == citation.excerpt
    assert verify(once, sources) == once
