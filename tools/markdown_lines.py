"""Keeps the lines of the documentation within 120 characters: `python -m tools.markdown_lines`, or with `--check`.

Only a paragraph or list item with a longer line is filled again. Code, links and words are not broken, so a line that is
one of them may stay longer, as tables, headings, quotes, HTML, indented code and paragraphs with forced line breaks do.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "deploy/**/*.md", "tests/README.md")
WIDTH = 120
UNBROKEN = re.compile(r"(`+).*?\1|!?\[[^\]]*\]\([^)]*\)|<[^>\s][^>]*>|[^\s]")
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
MARKUP = re.compile(r"[-*+]|\d+[.)]|[#>|=].*|-+")
"""A word that would begin something else at the start of a line."""
UNDERLINE = re.compile(r"\s*(?:=+|-+)\s*")
"""A line that makes a heading of the paragraph before it."""
CODE_INDENT = 4
"""How much deeper than the text around it a line after an empty one is code."""
FENCE = re.compile(r"\s*(```+|~~~+)")
LEFT_ALONE = ("|", "#", ">", "<", "[^")
DEFINITION = re.compile(r"\[[^\]]+\]:")


def wrapped(text: str) -> str:
    """The same Markdown with paragraphs of lines of at most 120 characters."""
    return "\n".join(_lines(text.split("\n")))


def _lines(lines: list[str]) -> Iterator[str]:
    fence, at, margin, may_be_code = "", 0, 0, True
    while at < len(lines):
        line = lines[at]
        opened, indent = FENCE.match(line), len(line) - len(line.lstrip())
        is_code = not fence and may_be_code and indent >= margin + CODE_INDENT
        may_be_code = is_code or not line.strip()
        if line.strip() and not (fence or is_code):
            item = ITEM.match(line)
            margin = len(item[0]) if item else min(margin, indent)
        if is_code:
            pass
        elif opened:
            fence = "" if fence and opened[1].startswith(fence) else fence or opened[1]
        elif not fence and _is_text(line):
            end = next((n for n in range(at + 1, len(lines)) if not _goes_on(lines[n])), len(lines))
            yield from _paragraph(lines[at:end])
            at = end
            continue
        yield line
        at += 1


def _is_text(line: str) -> bool:
    text = line.strip()
    return bool(text) and not text.startswith(LEFT_ALONE) and not DEFINITION.match(text)


def _goes_on(line: str) -> bool:
    """Whether a line is of the same paragraph as the line before."""
    return (
        bool(line.strip())
        and not line.strip().startswith(("|", "#", ">", "<!--"))
        and not (ITEM.match(line) or FENCE.match(line))
    )


def _paragraph(lines: list[str]) -> Iterator[str]:
    is_broken_by_hand = any(line.endswith(("  ", "\\")) for line in lines)
    is_heading = any(UNDERLINE.fullmatch(line) for line in lines[1:])
    if all(len(line) <= WIDTH for line in lines) or is_broken_by_hand or is_heading:
        yield from lines
        return
    item = ITEM.match(lines[0])
    line = item[0] if item else lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    indent, is_empty = " " * len(line), True
    for word in _words(" ".join([lines[0][len(line) :], *lines[1:]])):
        if is_empty or len(line) + 1 + len(word) <= WIDTH or MARKUP.fullmatch(word):
            line += word if is_empty else f" {word}"
        else:
            yield line
            line = indent + word
        is_empty = False
    yield line


def _words(text: str) -> Iterator[str]:
    """The parts of a text between spaces, without a break in code or a link."""
    word, at = "", 0
    while at < len(text):
        part = UNBROKEN.match(text, at)
        if part:
            word, at = word + part[0], part.end()
            continue
        if word:
            yield word
        word, at = "", at + 1
    if word:
        yield word


def main(arguments: list[str]) -> int:
    """Fill the pages again, or with `--check` name those that have longer lines."""
    pages = sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})
    differing = {page: after for page in pages if (after := wrapped(before := page.read_text("utf-8"))) != before}
    for page, text in differing.items():
        if "--check" not in arguments:
            page.write_text(text, "utf-8")
        sys.stderr.write(f"{page.relative_to(ROOT)}: lines of more than {WIDTH} characters\n")
    return int("--check" in arguments and bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
