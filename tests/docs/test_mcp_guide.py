"""docs/how-to/use-from-mcp.md does what it says."""

import re
from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.mcp_server.protocol import INITIALIZED_REVISIONS, STATELESS_REVISIONS
from trellis.mcp_server.tools import LIMIT_MAX, RESULT_BYTES_MAX, TOOLS

PAGE = ROOT / "docs" / "how-to" / "use-from-mcp.md"


@pytest.mark.prove
def test_the_guide_to_mcp_does_what_it_says(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert '"name": "runs_list"' in output.replace('":"', '": "')
    assert "frontend may not submit jobs" in output
    assert '"id":3,"result":{"content"' in output, "through the gateway"
    assert '{"jsonrpc":"2.0","id":1,"result":{"content"' in output, "over HTTP"
    assert "queued" in output.splitlines()[-1]


def test_the_guide_to_mcp_names_every_tool_and_bound():
    text = PAGE.read_text()
    table = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert table == set(TOOLS)
    bounds = (f"{RESULT_BYTES_MAX // 1024} KiB", f"at most {LIMIT_MAX} items")
    assert [word for word in (*bounds, *INITIALIZED_REVISIONS, *STATELESS_REVISIONS) if word not in text] == []
    assert [target for target in LINK.findall(text) if not (PAGE.parent / target).exists()] == []
