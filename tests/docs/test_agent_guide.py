"""docs/how-to/write-an-agent.md does what it says, and names every field and every choice of an agent's file."""

from pathlib import Path

from tests.docs.documents import LINK, ROOT, run
from trellis.agents.definition import AgentStatus, SafeOutput, Tool, TriggerEvent

PAGE = ROOT / "docs" / "how-to" / "write-an-agent.md"
FIELDS = (
    *("name", "description", "slug", "version", "created_at", "updated_at", "created_by", "model", "tools"),
    *("safe_outputs", "status", "temperature", "max_steps", "triggers.manual", "triggers.cron", "triggers.events"),
    *("context.folder", "context.max_sources", "context.mode"),
)


def test_agent_guide_commands_work(tmp_path: Path, environment: dict[str, str]):
    output = run(PAGE, tmp_path, environment)
    assert "The espresso machine M-1 is kept at 94 degrees" in output
    assert "is kept at 88 degrees" in output
    assert "\nSources\nsources/01-machine.md\n" in output
    assert "is applied" in output
    assert "ask the technician" in output
    assert "object key  agents/cafe/annotations/sources/01-machine.md/" in output
    assert (tmp_path / "objects/agents/cafe/sources/01-machine.md").read_text() == (
        tmp_path / "notes/01-machine.md"
    ).read_text(), "a comment leaves its source alone"
    assert "facts.md" in output


def test_the_guide_names_every_field_and_choice():
    text = PAGE.read_text(encoding="utf-8")
    choices = (*Tool, *SafeOutput, *AgentStatus, *TriggerEvent)
    assert [name for name in (*FIELDS, *choices) if f"`{name}`" not in text and str(name) not in text] == []
    targets = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []
