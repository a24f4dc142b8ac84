"""Completion and finalization are one statement of the database: there is no moment between them, whoever writes and whoever dies."""

import json
import signal
import subprocess
import sys

import pytest

from tests.ledgers.sqlite.shell import EVENT, Shell
from trellis.lifecycles import LIFECYCLES, event_code

DIES = """
import json, os, signal, sys
import apsw
path, before, event, values = sys.argv[1:]
db = apsw.Connection(path)
db.execute("PRAGMA cache_spill = 1; PRAGMA cache_size = 1; BEGIN IMMEDIATE")
db.execute(before)
db.execute(event, json.loads(values))
assert db.changes() and db.execute("SELECT count(*) FROM trellis_job WHERE version = 2 AND state = 2").fetchall() == [(1,)]
os.kill(os.getpid(), signal.SIGKILL)
"""
COMPLETION = next(t for t in LIFECYCLES["queue-job"].transitions if t.finalizes)


def _both(shell: Shell, job: int, artifact: int) -> list[tuple]:
    return shell.rows("SELECT id, state, version FROM trellis_job WHERE id IN (?, ?) ORDER BY id", job, artifact)


def _completion(shell: Shell, job: int) -> dict:
    return shell.event(job, COMPLETION, LIFECYCLES["queue-job"], min(COMPLETION.actors))


@pytest.mark.requirement("JQ-5", "D15", "D55")
def test_completion_event_inserted_by_hand_also_finalizes_the_artifact(shell: Shell):
    job = shell.job_in("queue-job", "ARTIFACT_WRITE")
    artifact = shell.staged(job)
    shell.complete_with(job, artifact)
    assert _both(shell, job, artifact) == [(job, 6, 6), (artifact, 2, 2)]
    last = shell.rows("SELECT job, type, role, actor, at, cause FROM trellis_event ORDER BY seq DESC LIMIT 2")
    finalized = (artifact, event_code("artifact.finalized"), 3, 1, last[0][4], f"finalized by raw-{job}")
    assert last[1] == finalized, "just before the completion, by the same actor"
    assert last[0][:2] == (job, event_code("job_succeeded"))
    assert shell.rows("SELECT * FROM trellis_finalizing") == []


@pytest.mark.requirement("JQ-5")
def test_a_completion_that_another_guard_refuses_finalizes_nothing(shell: Shell):
    job = shell.job_in("queue-job", "ARTIFACT_WRITE")
    artifact = shell.staged(job)
    shell.name_artifact(job, artifact)
    before = _both(shell, job, artifact)
    for wrong in ({"version": 9}, {"role": 9}, {"epoch": 0}, {"place": 2}):
        with pytest.raises(Exception, match="trellis: "):
            shell.db.execute(EVENT, _completion(shell, job) | wrong)
        assert _both(shell, job, artifact) == before, wrong


@pytest.mark.requirement("JQ-5")
def test_a_refused_completion_changes_nothing_with_recursive_triggers(shell: Shell):
    job = shell.job_in("queue-job", "ARTIFACT_WRITE")
    artifact = shell.staged(job)
    before = _both(shell, job, artifact)
    shell.db.execute("PRAGMA recursive_triggers = ON")
    with pytest.raises(Exception, match="only by the completion of its job"):
        shell.complete_with(job, artifact)
    assert _both(shell, job, artifact) == before


@pytest.mark.requirement("JQ-5")
def test_a_process_killed_before_its_commit_leaves_neither_step(shell: Shell, path):
    job = shell.job_in("queue-job", "ARTIFACT_WRITE")
    artifact = shell.staged(job)
    before, values = _both(shell, job, artifact), json.dumps(_completion(shell, job))
    named = f"INSERT INTO trellis_finalizing VALUES ({job}, {artifact})"
    killed = subprocess.run([sys.executable, "-c", DIES, str(path), named, EVENT, values], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert _both(shell, job, artifact) == before
    assert shell.rows("SELECT * FROM trellis_finalizing") == []
    shell.complete_with(job, artifact)
    assert _both(shell, job, artifact) == [(job, 6, 6), (artifact, 2, 2)]
