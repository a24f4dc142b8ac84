"""What the documents tell people to type works, word for word."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.cli.reference import reference

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
OPERATE = ROOT / "docs" / "how-to" / "operate.md"


def test_the_readme_does_what_it_says(tmp_path: Path):
    assert "hello world" in run(README, tmp_path, {})


def test_the_tutorial_does_what_it_says(tmp_path: Path):
    output = run(TUTORIAL, tmp_path, {})
    for text in ("validation_failed", "1 passed", "no violation"):
        assert text in output, output


def test_the_operators_guide_does_what_it_says(tmp_path: Path, new_postgres_database: Callable[..., str]):
    output = run(OPERATE, tmp_path, {"DATABASE_URL": new_postgres_database()})
    assert "no violation" in output


@pytest.mark.parametrize("document", [README, TUTORIAL, OPERATE], ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    targets = [target for target in LINK.findall(document.read_text()) if "://" not in target]
    assert targets
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_the_reference_of_the_command_line_is_what_the_program_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    kept = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert kept == reference(), "run: .venv/bin/python -m trellis.cli.reference > docs/reference/cli.md"
