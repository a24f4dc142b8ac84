"""What the documents tell people to type works, word for word."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from tools import python_reference, settings_reference
from tools.markdown_lines import wrapped
from trellis import __all__ as public
from trellis.cli.reference import reference
from trellis.engine.jobs import heartbeat_for, lease_length_s
from trellis.engine.lease_runner import LeaseRunnerOptions
from trellis.worker.options import HEARTBEAT_S_MAX, HEARTBEAT_S_MIN, LEASE_S_MAX, LEASE_S_MIN, JobOptions

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
OPERATE = ROOT / "docs" / "how-to" / "operate.md"
TESTING = ROOT / "docs" / "how-to" / "test-your-jobs.md"
CALLING = ROOT / "docs" / "how-to" / "call-the-gateway.md"
ASKING = ROOT / "docs" / "how-to" / "submit-queue-jobs.md"
PYTHON = ROOT / "docs" / "reference" / "python.md"


def test_readme_commands_work(tmp_path: Path, environment: dict[str, str]):
    output = run(README, tmp_path, environment)
    assert "hello world" in output
    assert "completed" in output
    assert "\nSources\n" in output
    assert "Research brief: At which relative humidity must TS-02 be kept?" in output
    assert "## Conclusions" in output


def test_tutorial_commands_work(tmp_path: Path, environment: dict[str, str]):
    output = run(TUTORIAL, tmp_path, environment)
    for text in ("validation_failed", "1 passed", "no violation", "scan-2 was asked to stop", "no result, exit code 1"):
        assert text in output, output
    assert "attempt 2 did pages 20 to 60" in output
    assert "key hall" in output, "the third waits for its key"
    assert "At most 2 jobs with key 'hall' may be held at once, and " in output


@pytest.mark.requirement("D65")
def test_the_guides_state_the_bounds_and_defaults_of_leases():
    tutorial = " ".join(TUTORIAL.read_text(encoding="utf-8").split())
    seconds = f"{LEASE_S_MIN:g} to {LEASE_S_MAX:g} s | {JobOptions().lease_s:g} s"
    assert f"| `lease_s` | {seconds} |" in tutorial
    beats = f"{HEARTBEAT_S_MIN:g} to {HEARTBEAT_S_MAX:g} s, and at most a third of `lease_s`"
    assert f"| `heartbeat_s` | {beats} | a third of `lease_s`, at most {heartbeat_for(LEASE_S_MAX):g} s |" in tutorial
    assert f"which allows {lease_length_s(LEASE_S_MAX, HEARTBEAT_S_MAX):g} s" in tutorial
    assert f"With the defaults that is {lease_length_s(60, 15) + 0.5:g} s" in tutorial
    driven = LeaseRunnerOptions()
    silence_s = lease_length_s(driven.lease_s, driven.heartbeat_s)
    assert f"its lease is over: {silence_s:g} s after" in " ".join(ASKING.read_text(encoding="utf-8").split())
    terms = f"a lease of {driven.lease_s:g} s with heartbeats every {driven.heartbeat_s:g} s"
    assert terms in " ".join(OPERATE.read_text(encoding="utf-8").split())


def test_testing_guide_commands_work(tmp_path: Path, environment: dict[str, str]):
    output = run(TESTING, tmp_path, environment)
    assert re.findall(r"\d passed", output) == ["3 passed", "1 passed"], output


@pytest.mark.prove
def test_operators_guide_commands_work(tmp_path: Path, new_postgres_database: Callable[..., str]):
    output = run(OPERATE, tmp_path, {"DATABASE_URL": new_postgres_database()})
    assert "no violation" in output
    assert "the token of shop gives submitter" in output


def test_gateway_guide_commands_work(tmp_path: Path, environment: dict[str, str]):
    output = run(CALLING, tmp_path, environment)
    assert "completed 4 of 4" in output
    assert "rule jobs.requeue" in output
    assert "cancelled" in output
    assert "<title>Trellis</title>" in output
    assert "rejected" in output
    assert output.count(" run.st") == 4, output


def test_readme_names_every_optional_part():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.search(r"`trellis-engine\[([a-z0-9,]+)\]`", README.read_text(encoding="utf-8"))
    assert named is not None
    assert set(named[1].split(",")) == set(project["optional-dependencies"])


@pytest.mark.parametrize("document", [README, TUTORIAL, OPERATE, TESTING, ASKING, PYTHON], ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    targets = [target for target in LINK.findall(document.read_text()) if "://" not in target]
    assert targets
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_the_reference_of_the_command_line_is_what_the_program_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    kept = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert kept == wrapped(reference()), (
        "run: .venv/bin/python -m trellis.cli.reference > docs/reference/cli.md, then make fmt"
    )


def test_the_reference_of_the_python_api_is_what_the_docstrings_say():
    assert PYTHON.read_text(encoding="utf-8") == python_reference.reference(), (
        "run: .venv/bin/python -m tools.python_reference"
    )


def test_the_reference_of_the_settings_has_every_setting_with_its_meaning():
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_reference.reference(), "run: .venv/bin/python -m tools.settings_reference"
    assert [line for line in page.splitlines() if line.endswith("|  |")] == [], "a setting that says nothing"


def test_the_reference_of_the_python_api_has_every_public_name_and_every_option():
    page = PYTHON.read_text(encoding="utf-8")
    assert [name for name in public if f"### {name}\n" not in page and f"| `{name}` |" not in page] == []
    assert [line for line in page.splitlines() if line.endswith("|  |")] == [], "an option that says nothing"
