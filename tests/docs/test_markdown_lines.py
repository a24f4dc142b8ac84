"""Lines of the documentation are filled to 120 characters without a change of what they say."""

from tools.markdown_lines import WIDTH, wrapped

WORDS = " ".join(["word"] * 40)


def test_a_long_paragraph_and_a_long_item_are_filled_within_the_width():
    lines = wrapped(f"{WORDS}\nand more\n\n  - {WORDS}").split("\n")
    assert all(len(line) <= WIDTH for line in lines)
    assert " ".join(lines[:2]) == f"{WORDS} and more"
    assert lines[3].startswith("  - word")
    assert lines[4].startswith("    word")
    assert wrapped("\n".join(lines)) == "\n".join(lines)


def test_lines_that_fit_are_left_as_they_are():
    text = "one\ntwo\n\n- three\n  four\n"
    assert wrapped(text) == text


def test_code_tables_headings_links_and_forced_breaks_are_not_broken():
    kept = [
        f"```\n{WORDS}\n```",
        f"| {WORDS} |",
        f"# {WORDS}",
        f"> {WORDS}",
        f"<p>{WORDS}</p>",
        f"[name]: {WORDS}",
        f"`{WORDS}`",
        f"[{WORDS}](page.md)",
        f"{WORDS}  \nnext",
        f"    {WORDS}\n    next",
        f"{WORDS}\n====",
        f"---\ntitle: {WORDS}\n---",
        f"- item\n\n      {WORDS}\n      next",
    ]
    assert wrapped("\n\n".join(kept)) == "\n\n".join(kept)


def test_no_line_begins_with_what_would_start_something_else():
    marks = ("-", "1.", "#", "|", ">", "+")
    for mark in marks:
        for start in range(100, 125):
            text = "a" * start + f" {mark} " + "b" * 30
            assert not [line for line in wrapped(text).split("\n")[1:] if line.startswith(mark)], text


def test_the_second_paragraph_of_an_item_is_no_code():
    text = f"1. item\n   - inner\n\n     {WORDS}\n\n    {WORDS}"
    assert all(len(line) <= WIDTH for line in wrapped(text).split("\n"))
