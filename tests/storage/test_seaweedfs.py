"""The S3 server of the tests leaves nothing behind."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_seaweedfs_server_ends_and_cleans_up_when_its_owner_is_killed():
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, guard, folder = owner.stdout.readline().split()
    exits = [os.pidfd_open(int(pid)), os.pidfd_open(int(guard))]
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    for process in exits:
        assert select.select([process], [], [], 20)[0]
        os.close(process)
    assert not Path(folder).exists()


_OWNER = """
import sys
from tests.servers.seaweedfs import SeaweedServer
server = SeaweedServer.start()
print(server.pid, server._guard.pid, server.folder, flush=True)
sys.stdin.read()
"""
