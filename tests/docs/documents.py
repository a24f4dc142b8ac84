"""Runs the code of a document: Python blocks that name a file are written, `sh` blocks are run as one script, in order.

`make` targets are only checked for existence (`--dry-run`): the suite cannot run itself.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
LANGUAGES = {"python", "sh", "text", "mermaid"}
"""Of blocks: the first two are run, the others are output and drawings, which nothing runs."""
PRELUDE = f"""set -euo pipefail
make() {{ command make --dry-run --directory '{ROOT}' "$@" >/dev/null; }}
"""
TIMEOUT_S = 100.0


def blocks(document: Path) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    found = BLOCK.findall(document.read_text(encoding="utf-8"))
    assert {language for language, _ in found} <= LANGUAGES, "a block of another language would never be run"
    return found


def run(document: Path, folder: Path, environment: Mapping[str, str]) -> str:
    """Run the document in an empty folder; what it printed. Fails with the output of the command that failed."""
    script = PRELUDE
    for number, (language, text) in enumerate(blocks(document)):
        if language == "python":
            name = re.match(r"# (\S+\.py)\n", text)
            assert name is not None, f"a Python block begins with the name of its file:\n{text}"
            (folder / f"{number}.part").write_text(text, encoding="utf-8")
            script += f"cp {number}.part {name[1]}\n"
        elif language == "sh":
            script += text
    return _bash(script, folder, environment)


def _bash(script: str, folder: Path, environment: Mapping[str, str]) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = folder / "printed.txt"
    with printed.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env={"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8", "TRELLIS_PORT": "0", **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(TIMEOUT_S)
    finally:
        # Whatever the document left in the background ends with it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output = printed.read_text(encoding="utf-8")
    assert process.returncode == 0, f"exit code {process.returncode}\n{output}"
    return output
