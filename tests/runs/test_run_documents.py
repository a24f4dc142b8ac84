"""Published documents as pure functions of what the ledger recorded."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.runs.conftest import Stand
from trellis.agents.errors import SlugInvalid
from trellis.documents import audit, ids, run_documents
from trellis.documents.run_documents import RunFacts
from trellis.engine.admin_acts import this_node
from trellis.engine.jobs import CancelMode, JobId, RequestId
from trellis.storage.objects.canonical_json import sha256, timestamp

from .conftest import ORCHESTRATOR

SCHEMA_3_1 = [
    "run_id",
    "agent_slug",
    "status",
    "trigger",
    "started_at",
    "finished_at",
    "current_step",
    "steps_total",
    "steps_completed",
    "proposals_created",
    "error",
    "version",
]


async def finished(stand: Stand) -> tuple[JobId, RunFacts, dict[str, bytes]]:
    run_id = await stand.run_of()
    assert (await stand.drive()).state == "completed"
    return run_id, await stand.facts(run_id), await stand.ledger.read_journal(run_id)


def until(facts: RunFacts, version: int) -> RunFacts:
    """The facts as of the event with that version."""
    return replace(facts, events=facts.events[:version])


def statuses(facts: RunFacts) -> list[dict[str, object]]:
    return [json.loads(run_documents.status(until(facts, version))) for version in range(1, len(facts.events) + 1)]


@pytest.mark.requirement("RUN-3", "D14", "D18")
async def test_status_has_the_fields_of_the_schema_and_one_version(stand: Stand):
    run_id, facts, _ = await finished(stand)
    told = statuses(facts)
    assert [list(status) for status in told] == [SCHEMA_3_1] * len(told)
    assert [status["status"] for status in told] == ["requested", "queued", *["running"] * 5, "completed"]
    assert [status["steps_completed"] for status in told] == [0, 0, 0, 1, 2, 3, 4, 4]
    assert [status["current_step"] for status in told] == [None, None, *ids.STEPS, "finalize", "finalize"]
    assert [status["version"] for status in told] == list(range(1, 9))
    assert {status["started_at"] for status in told} == {timestamp(facts.events[0].ts)}
    assert [status["finished_at"] for status in told[:-1]] == [None] * 7
    assert told[-1]["finished_at"] == timestamp(facts.events[-1].ts)
    assert told[-1]["run_id"] == run_id
    assert told[-1]["proposals_created"] == ["prop_1"]
    assert told[4]["proposals_created"] == []


def publications(facts: RunFacts, journal: Mapping[str, bytes]) -> list[run_documents.Publication]:
    return [*run_documents.step_publications(facts, journal), *run_documents.state_publications(facts)]


@pytest.mark.requirement("PIPE-8", "PIPE-10", "PIPE-15", "OBS-2", "OBS-7", "D11")
async def test_run_documents_are_published_in_the_order_readers_rely_on(stand: Stand):
    run_id, facts, journal = await finished(stand)
    folder = f"agents/archivist-violin/runs/{run_id}/"
    order = [
        [put.key.removeprefix(folder) for put in publications(until(facts, version), journal)]
        for version in range(1, len(facts.events) + 1)
    ]
    assert order == [
        ["status.json"],
        ["status.json"],
        ["status.json"],
        ["steps/01-load-context.json", "status.json"],
        ["steps/02-execute-agent.json", "status.json"],
        ["output/proposal.json", "steps/03-persist-results.json", "status.json"],
        ["steps/04-finalize.json", "status.json"],
        ["manifest.json", "status.json"],
    ]


@pytest.mark.requirement("PIPE-15")
async def test_the_manifest_names_every_step_file_with_its_digest(stand: Stand):
    _, facts, journal = await finished(stand)
    manifest = json.loads(run_documents.manifest(facts))
    assert list(manifest) == [
        "run_id",
        "agent_slug",
        "trigger",
        "status",
        "started_at",
        "finished_at",
        "steps",
        "proposals_created",
        "artifacts",
        "summary",
        "error",
    ]
    for step in manifest["steps"]:
        assert list(step) == ["name", "file", "sha256", "started_at", "finished_at"]
    assert [step["sha256"] for step in manifest["steps"]] == [
        sha256(journal[f"step/{number:02}"]) for number in range(1, 5)
    ]
    assert [step["file"] for step in manifest["steps"]] == [ids.step_file(number) for number in range(1, 5)]
    assert (manifest["status"], manifest["summary"], manifest["error"]) == ("completed", "nothing to change", None)


@pytest.mark.requirement("PIPE-15", "D19")
@pytest.mark.parametrize("queued", [False, True])
async def test_a_run_cancelled_before_it_began_publishes_a_manifest_too(stand: Stand, queued: bool):
    run_id = await stand.run_of(queued=queued)
    await stand.ledger.cancel(
        ORCHESTRATOR, run_id, CancelMode.HARD, RequestId("c"), grace_s=0, cause="the owner changed their mind"
    )
    facts = await stand.facts(run_id)
    puts = publications(facts, {})
    assert [put.key.rpartition("/")[2] for put in puts] == ["manifest.json", "status.json"]
    for put in puts:
        assert json.loads(put.body)["error"] == "CANCELLED: the owner changed their mind"


@pytest.mark.requirement("OBS-1", "D35", "D70")
async def test_an_audit_record_has_the_fields_of_the_source_document_and_the_whole_event(stand: Stand):
    _, facts, _ = await finished(stand)
    event = facts.events[2]
    (known,) = await stand.ledger.recorded([event])
    record = json.loads(audit.to_bytes(known))
    assert list(record)[:7] == ["ts", "event", "actor", "job_id", "from", "to", "node"]
    assert record["actor"] == "orchestration-layer"
    assert (record["event"], record["from"], record["to"], record["node"]) == (
        "run.started",
        "queued",
        "running",
        this_node(),
    )
    assert ids.audit_key(event.ts, event.id) == f"audit/{event.ts:%Y%m%d}/{event.id}.json"


async def test_the_same_facts_give_the_same_bytes(stand: Stand):
    run_id, facts, journal = await finished(stand)
    again, kept = await stand.facts(run_id), await stand.ledger.read_journal(run_id)
    for version in range(1, len(facts.events) + 1):
        assert publications(until(facts, version), journal) == publications(until(again, version), kept)


@pytest.mark.requirement("D12", "D21")
def test_ids_are_made_and_read_in_their_forms():
    at = datetime(2026, 2, 14, 8, 0, tzinfo=UTC)
    run_id = ids.make_run_id(at, "abc1239999")
    assert run_id == "run_2026-02-14_080000_abc123"
    assert ids.run_date("run_2026-02-24_abc123") == "2026-02-24"
    one = ids.proposal_id(run_id, 1, "propose-edit", "notes/a.md", b"text")
    assert one == ids.proposal_id(run_id, 1, "propose-edit", "notes/a.md", b"text")
    assert re.fullmatch(r"prop_2026-02-14_[0-9a-f]{12}", one)
    assert ids.proposal_key("gardener", one) == f"agents/gardener/proposals/{one}.json"
    others = {
        ids.proposal_id("run_2026-02-14_080001_abc123", 1, "propose-edit", "notes/a.md", b"text"),
        ids.proposal_id(run_id, 2, "propose-edit", "notes/a.md", b"text"),
        ids.proposal_id(run_id, 1, "propose-tag", "notes/a.md", b"text"),
        ids.proposal_id(run_id, 1, "propose-edit", "notes/b.md", b"text"),
        ids.proposal_id(run_id, 1, "propose-edit", "notes/a.md", b"texts"),
        ids.proposal_id(run_id, 1, "propose-editn", "otes/a.md", b"text"),
    }
    assert len(others | {one}) == 7


@pytest.mark.parametrize("slug", ["", "-a", "A", "a/b", "..", "a" * 64, "a.b", "\u0430"])
def test_a_slug_that_could_leave_its_folder_is_refused(slug: str):
    with pytest.raises(SlugInvalid):
        ids.run_folder(slug, "run_2026-02-14_080000_abc123")


@pytest.mark.parametrize(
    "run_id", ["", "run_", "run_2026-02-14_080000_abc12/", "../run_2026-02-14_abc123", "run_2026-02-14_080000_ABC123"]
)
def test_a_run_id_that_is_none_is_refused(run_id: str):
    with pytest.raises(ids.RunIdInvalid):
        ids.run_folder("a", run_id)
