"""docs/how-to/trace.md does what it says, and names every span of the chains that the suite goes through."""

from pathlib import Path

import pytest

from tests.docs.documents import ROOT, blocks, run
from tests.gateway.test_bus_tracing import ON_TOPIC, TOPIC
from tests.research.test_tracing import LOOKS, QUEUE_CHAIN, RUN_CHAIN
from trellis.cli.telemetry import EXPORT_S, SERVICE

BUS_CHAIN = {name.replace(TOPIC, "TOPIC") for name in ON_TOPIC} | {"job.stop TOPIC"}
PAGE = ROOT / "docs" / "how-to" / "trace.md"


@pytest.mark.requirement("OBS-6")
def test_the_guide_to_tracing_prints_what_it_says(tmp_path: Path, environment: dict[str, str]):
    printed = [text for language, text in blocks(PAGE) if language == "text"][-1]
    assert run(PAGE, tmp_path, environment) == printed


def test_the_guide_names_every_span():
    text = PAGE.read_text(encoding="utf-8")
    names = {name for name in QUEUE_CHAIN | RUN_CHAIN | LOOKS | BUS_CHAIN if not name.startswith(("GET ", "POST "))}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
    assert (f"for {EXPORT_S:g} s" in text, f"(otherwise `{SERVICE}`)" in text) == (True, True)
