"""`trellis batch`: the jobs of a file, and the one that completes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Terminal
from trellis.engine.job_batches import BATCH_MAX


def written(folder: Path, *jobs: Any) -> str:
    file = folder / "jobs.jsonl"
    file.write_text("\n".join(json.dumps(job) for job in jobs) + "\n\n")
    return str(file)


def test_the_jobs_of_a_file_are_a_batch(local: Terminal, tmp_path: Path):
    file = written(
        tmp_path,
        {"type": "page.fetch", "payload": "a", "priority": "critical"},
        {"type": "page.fetch", "run_at": "2031-01-02T03:04:05Z"},
    )
    batch = local("batch", file, "report", '{"day": 7}', "--key", "once", "--json").record
    assert (batch["status"], batch["created"]) == ("suspended", True)
    again = local("batch", file, "report", '{"day": 7}', "--key", "once", "--json").record
    assert (again["job_id"], again["created"]) == (batch["job_id"], False)
    members = local("jobs", "--parent", batch["job_id"], "--json").records
    assert sorted((job["priority"], job["place"]) for job in members) == [("batch", "scheduled"), ("critical", "ready")]
    explained = " ".join(local("job", "explain", batch["job_id"]).out.split())
    assert "2 jobs of its batch" in explained
    assert all(f"{job['job_id']} (page.fetch, queued)" in explained for job in members)
    assert "Next When the jobs of its batch have ended, it goes to queued by itself" in explained
    assert f"trellis jobs --parent {batch['job_id']} " in explained
    assert local("job", "cancel", batch["job_id"]).code == 0
    local("sweep")
    states = {job["status"] for job in local("jobs", "--parent", batch["job_id"], "--json").records}
    assert states == {"cancelled"}


@pytest.mark.parametrize(
    "lines, text",
    [
        (["[1]"], "line 1"),
        (['{"type": "a"}', "{"], "line 2"),
        (['{"type": "a", "colour": 1}'], "job 1"),
        (['{"topic": "job.echo"}'], "only jobs of a type"),
        (['{"type": "a"}'] * (BATCH_MAX + 1), f"at most {BATCH_MAX}"),
    ],
    ids=["no-object", "no-json", "unknown-field", "topic", "too-many"],
)
def test_a_file_that_is_no_batch_is_refused_whole(local: Terminal, tmp_path: Path, lines: list[str], text: str):
    file = tmp_path / "jobs.jsonl"
    file.write_text("\n".join(lines))
    refused = local("batch", str(file), "report")
    assert refused.code == 2
    assert text in " ".join(refused.err.split())
    assert local("jobs", "--json").records == []


def test_a_file_that_is_missing_is_named(local: Terminal, tmp_path: Path):
    refused = local("batch", str(tmp_path / "nothing.jsonl"), "report")
    assert (refused.code, "nothing.jsonl" in refused.err) == (2, True)


APPLICATION = """
from trellis import App, Context
app = App()
@app.job("double")
async def double(ctx: Context, number: int) -> int:
    return 2 * number
@app.job("report", priority="critical")
async def report(ctx: Context) -> None: ...
"""


def test_an_application_checks_the_jobs_of_a_batch_and_sets_their_options(local: Terminal, tmp_path: Path):
    (tmp_path / "batch_shop.py").write_text(APPLICATION)
    for wrong, text in (({"type": "dubble"}, "No handler"), ({"type": "double", "payload": "one"}, "valid integer")):
        refused = local("batch", written(tmp_path, wrong), "report", "--app", "batch_shop:app")
        assert (refused.code, text in " ".join(refused.err.split())) == (2, True), refused.err
    assert local("jobs", "--json").records == []
    file = written(tmp_path, {"type": "double", "payload": 1})
    batch = local("batch", file, "report", "--app", "batch_shop:app", "--json").record
    assert local("job", "show", batch["job_id"], "--json").record["priority"] == "critical"
