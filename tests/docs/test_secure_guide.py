"""docs/how-to/secure.md does what it says, and its figures are those of the code."""

from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.app.settings import Settings
from trellis.http_server.bodies import (
    BODY_BYTES_MAX,
    BODY_S,
    DEPTH_MAX,
    LARGE_BODY_BYTES_MAX,
    PIECES_MAX,
    UNDER_WAY_BYTES_MAX,
)
from trellis.http_server.server import ServerOptions

PAGE = ROOT / "docs" / "how-to" / "secure.md"


@pytest.mark.prove
def test_security_guide_commands_work(tmp_path: Path):
    output = run(PAGE, tmp_path, {})
    assert "is owner with it for 10 min" in output
    assert (tmp_path / "token").read_text().count(".") == 2
    targets = [target for target in LINK.findall(PAGE.read_text()) if "://" not in target]
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []


def test_the_guide_names_every_setting_of_keys_and_certificates_and_the_bounds_in_force():
    text = PAGE.read_text(encoding="utf-8")
    named = [name for name in Settings.model_fields if name.startswith(("tls_", "token_", "callback_"))]
    told_elsewhere = {"token_file"}
    assert [name for name in named if f"TRELLIS_{name.upper()}" not in text and name not in told_elsewhere] == []
    server = ServerOptions(host="x", port=0)
    for told in (
        f"{server.head_bytes_max // 1024} KiB, {server.headers_max} of them, {server.head_s:g} s",
        f"{BODY_BYTES_MAX // 1024**2} MiB ({LARGE_BODY_BYTES_MAX // 1024**2} MiB",
        f"{DEPTH_MAX} levels, {BODY_S:g} s, {PIECES_MAX:,} values",
        f"{UNDER_WAY_BYTES_MAX // 1024**2} MiB of all requests that are being read",
        f"Connections: {server.connections_max:,}",
        f"finished within {server.drain_s} s",
    ):
        assert told in text, told
