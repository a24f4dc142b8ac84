"""A program that is forked from the ready process behaves like one that an interpreter of its own runs."""

import json
import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from tests.servers.ready_python import ready_python

PROGRAM = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ["SAID"], sys.stdin.read(), os.getpid()]), flush=True)
print("to whom it concerns", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
WAITS = """
import os, signal
print(os.getpid(), flush=True)
signal.pause()
"""
ENDED_S_MAX = 60.0


@pytest.mark.parametrize("code", [0, 7])
def test_forked_program_has_the_arguments_folder_environment_and_streams_of_its_start(tmp_path: Path, code: int):
    done = subprocess.run(
        [ready_python(), "-c", PROGRAM, str(code), "two"],
        cwd=tmp_path,
        env={**os.environ, "SAID": "yes"},
        input="read this",
        capture_output=True,
        text=True,
        check=False,
    )
    argv, folder, said, read, _ = json.loads(done.stdout)
    assert (argv, folder, said, read) == (["-c", str(code), "two"], str(tmp_path), "yes", "read this")
    assert (done.returncode, done.stderr) == (code, "to whom it concerns\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_forked_program_ends_with_the_script_that_started_it(number: signal.Signals):
    with subprocess.Popen([ready_python(), "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        forked = os.pidfd_open(int(process.stdout.readline()))
        process.send_signal(number)
        ended, _, _ = select.select([forked], [], [], ENDED_S_MAX)
        assert ended, "the forked program still runs"
        assert process.wait() == (128 + number if number == signal.SIGTERM else -number)
    os.close(forked)
