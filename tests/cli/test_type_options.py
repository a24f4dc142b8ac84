"""Submits from the command line: typed payloads for key functions, declared options without --app, misspelt options."""

from pathlib import Path

import pytest

from tests.cli.conftest import Terminal

CRAWLER = """
from dataclasses import dataclass

from trellis import App, Context

app = App()


@dataclass
class Fetch:
    url: str


@app.job("http.fetch", concurrency_key=lambda fetch: fetch.url, max_attempts=4)
async def fetch(ctx: Context, fetch: Fetch) -> None: ...
"""


@pytest.mark.requirement("D66")
def test_type_options_declared_by_an_application_hold_for_submits_without_it(trellis: Terminal, tmp_path: Path):
    (tmp_path / "crawler_of_walk.py").write_text(CRAWLER)
    payload = '{"url": "https://example.org"}'
    job_id = trellis.submit("http.fetch", payload, "--app", "crawler_of_walk:app")
    assert trellis("job", "show", job_id, "--json").record["concurrency_key"] == "user:https://example.org"
    refused = trellis("submit", "http.fetch", payload)
    assert refused.code != 0
    assert "--app" in refused.err
    assert "--concurrency-key" in refused.err
    named = trellis.submit("http.fetch", payload, "--concurrency-key", "here")
    record = trellis("job", "show", named, "--json").record
    assert (record["concurrency_key"], record["max_attempts"]) == ("user:here", 4)
    assert trellis("jobs", "--json").records[0]["job_id"] == named, "the refused one was not written"


PACED = """
from trellis import App, Context

app = App()


@app.job("crm.push", concurrency_key=lambda push: push["customer"], rate=50, rate_per_key=0.5, burst_per_key=1)
async def push(ctx: Context, push: dict[str, str]) -> None: ...
"""


def test_jobs_that_wait_for_the_rate_of_their_key_are_shown(trellis: Terminal, tmp_path: Path):
    (tmp_path / "paced_of_walk.py").write_text(PACED)
    payload = '{"customer": "acme"}'
    jobs = [trellis.submit("crm.push", payload, "--app", "paced_of_walk:app") for _ in range(2)]
    (queue,) = [one for one in trellis("queues", "--json").records if one["type"] == "crm.push"]
    assert (queue["ready"], queue["blocked"], queue["rate_per_key"]) == (1, 1, 0.5)
    assert "0.5/s per key" in trellis("queues").out
    assert "waiting for the rate of its key 'acme' (0.5 a second)" in trellis("job", "explain", jobs[1]).out
    refused = trellis("submit", "crm.push", payload)
    assert refused.code != 0
    assert "--concurrency-key" in refused.err


def test_a_misspelt_option_names_the_one_that_was_meant(local: Terminal):
    refused = local("submit", "snz", "--max-atempts", "77")
    assert refused.code != 0
    assert "--max-attempts" in refused.err
    assert local("jobs", "--json").out == ""


def test_unique_jobs_are_submitted_once_and_replaced(trellis: Terminal):
    first = trellis("submit", "work", '{"n": 1}', "--unique", "args", "--json").record
    again = trellis("submit", "work", '{"n":1}', "--unique", "args")
    assert again.out.strip() == first["job_id"]
    assert "nothing new was written" in again.err
    second = trellis(
        "submit", "work", '{"n": 1}', "--unique", "args", "--debounce", "5m", "--debounce-max", "1h", "--json"
    )
    assert second.record["replaced"] == first["job_id"]
    refused = trellis("submit", "work", '{"n": 1}', "--unique", "args", "--on-conflict", "raise")
    assert refused.code != 0
    assert second.record["job_id"] in refused.err
    wrong = trellis("submit", "work", "--unique", "k", "--while", "later")
    assert wrong.code != 0
    assert "waiting, unfinished" in wrong.err


def test_the_command_checks_a_payload_before_it_asks_for_its_key(trellis: Terminal, tmp_path: Path):
    (tmp_path / "crawler_of_walk.py").write_text(CRAWLER)
    refused = trellis("submit", "http.fetch", '{"ulr": "/"}', "--app", "crawler_of_walk:app")
    assert refused.code != 0
    assert "did you mean url" in refused.err
    assert "concurrency_key" not in refused.err
