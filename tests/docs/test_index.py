"""docs/README.md lists every page, and every link of the index and of the comparison leads somewhere."""

import re
from pathlib import Path

from tests.docs.documents import LINK, ROOT

DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
COMPARISON = DOCS / "explanation" / "coming-from.md"
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")


def anchors(document: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = HEADING.findall(document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_lists_every_page():
    listed = set(LINK.findall(INDEX.read_text(encoding="utf-8")))
    pages = {
        str(page.relative_to(DOCS))
        for folder in ("how-to", "explanation", "reference")
        for page in (DOCS / folder).glob("*.md")
    }
    assert sorted(pages - listed) == [], "add them to docs/README.md"


def wrong_links(page: Path) -> list[str]:
    """The links of a page to files and headings that are not there."""
    text = page.read_text(encoding="utf-8")
    files = [target for target in LINK.findall(text) if "://" not in target and not (page.parent / target).exists()]
    headings = [
        f"{target}#{anchor}"
        for target, anchor in ANCHOR.findall(text)
        if target not in files and anchor not in anchors(page.parent / target if target else page)
    ]
    return [f"{page.relative_to(DOCS)}: {target}" for target in files + headings]


def test_links_between_pages_lead_somewhere():
    assert [wrong for page in sorted(DOCS.rglob("*.md")) for wrong in wrong_links(page)] == []


def test_every_row_of_the_comparison_links_to_a_page_or_says_that_there_is_none():
    lines = re.findall(r"^\| (?!-)(.+) \|$", COMPARISON.read_text(encoding="utf-8"), re.MULTILINE)
    rows = [line.split(" | ") for line in lines if not line.endswith("What differs")]
    assert len(rows) > 50
    assert [row for row in rows if len(row) != 3 or not (row[1] == "—" or "](" in " ".join(row[1:]))] == []
