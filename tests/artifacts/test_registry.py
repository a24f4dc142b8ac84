"""Staging, reading and listing artifacts: one for each attempt, seen by nobody before its job is complete, and never changed after it."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

import pytest

from tests.artifacts.desk import (
    BACKEND,
    CONTENTS,
    DAY_S,
    OPERATOR,
    ORCHESTRATOR,
    PROJECT,
    RUN_ID,
    SLUG,
    Counted,
    Desk,
    advance,
    call_nlm,
    complete,
    draft,
    queue_job,
)
from trellis.app.wiring import new_id
from trellis.artifacts import rows
from trellis.artifacts.content import ContentInvalid, JobType
from trellis.artifacts.rows import (
    STORED_BYTES_MAX,
    ArtifactFinal,
    ArtifactGone,
    ArtifactIdInvalid,
    ArtifactLost,
    ArtifactTooLarge,
    NothingExpected,
    TooYoung,
    TypeNotYielded,
)
from trellis.engine.errors import InvalidTransition, LeaseConflictError, NotAllowed
from trellis.engine.jobs import Actor, Epoch, JobId, Move, NewJob, NotMoved, RequestId
from trellis.engine.records import RetentionOptions
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.storage.objects.canonical_json import encode, sha256
from trellis.storage.objects.store import CREATE, PutRefused

SCHEMA = (
    *("artifact_id", "job_id", "run_id", "type", "agent_slug", "created_at", "finalized", "finalized_at", "version"),
    *("url", "entity_refs", "tags", "content", "sources"),
)
SUBMITTER = Actor(role=Role.SUBMITTER, name="somebody")
STORED = ("artifact_id", "job_id", "run_id", "type", "agent_slug", "created_at", "entity_refs", "tags")


@pytest.mark.requirement("ART-1", "ART-2", "ART-6", "ART-7", "D15")
@pytest.mark.parametrize("job_type", JobType)
async def test_a_finalized_artifact_is_the_document_of_the_schema_and_its_url_leads_to_its_bytes(
    desk: Desk, job_type: JobType
):
    lease = await desk.waiting(job_type)
    staged = await desk.stage(lease)
    desk.clock.advance(20.0)
    assert await complete(desk.ledger, desk.artifacts, lease, staged.artifact_id)
    at_once = await desk.artifacts.read(staged.artifact_id)
    await desk.publish()
    document = await desk.artifacts.read(staged.artifact_id)
    assert document == at_once  # from the staged blob, then from the published object
    assert document is not None
    assert tuple(document) == SCHEMA
    type_, content = CONTENTS[job_type]
    assert document == {
        "artifact_id": staged.artifact_id,
        "job_id": lease.job_id,
        "run_id": RUN_ID,
        "type": type_.value,
        "agent_slug": SLUG,
        "created_at": "2026-01-01T00:00:00.000Z",
        "finalized": True,
        "finalized_at": "2026-01-01T00:00:20.000Z",
        "version": 1,
        "url": document["url"],
        "entity_refs": ["bow"],
        "tags": ["test"],
        "content": content,
        "sources": [{"ref": "sources/bows.md", "excerpt": "A bow is strung with horsehair."}],
    }
    key = f"projects/{sha256(PROJECT.encode())[:16]}/artifacts/{staged.artifact_id}.json"
    assert unquote(urlsplit(document["url"]).path).endswith(f"/objects/{key}")
    body = await asyncio.to_thread(lambda: urlopen(document["url"]).read())
    assert body == await desk.body(key)
    assert (sha256(body), len(body)) == (staged.sha256, staged.size)
    assert body == encode({name: document[name] for name in (*STORED, "content", "sources")})


@pytest.mark.requirement("ART-7", "D15")
async def test_a_staged_or_discarded_artifact_is_there_for_no_reader(desk: Desk):
    lease = await desk.waiting()
    staged = await desk.stage(lease)
    assert rows.is_artifact_id(staged.artifact_id)
    assert not any(staged.row.fields("file:///x")[name] for name in ("finalized", "finalized_at", "version", "url"))
    assert await desk.artifacts.read(staged.artifact_id) is None
    assert (await desk.artifacts.page(limit=10)).rows == ()
    await desk.publish()
    assert await desk.keys() == [staged.row.staged_key]
    assert await desk.artifacts.discard(BACKEND, staged.artifact_id, cause="given up")
    assert await desk.artifacts.read(staged.artifact_id) is None


@pytest.mark.requirement("ART-4", "PIPE-11")
async def test_ten_equal_stages_at_once_make_one_artifact(desk: Desk):
    lease = await desk.waiting()
    answers = await asyncio.gather(*(desk.stage(lease) for _ in range(10)))
    assert sum(answer.created for answer in answers) == 1
    assert len({(answer.artifact_id, answer.sha256, answer.size) for answer in answers}) == 1
    assert await desk.keys() == [answers[0].row.staged_key]
    assert len(await desk.artifacts.of_job(lease.job_id)) == 1


@pytest.mark.requirement("ART-4", "ART-8", "ART-3")
async def test_repeated_artifact_of_an_attempt_or_a_job_returns_the_first_and_final_content_is_fixed(
    desk: Desk,
):
    lease = await desk.waiting()
    first = await desk.stage(lease)
    other = draft(title="Another title")
    again = await desk.stage(lease, other)
    assert (again.created, again.artifact_id, again.sha256) == (False, first.artifact_id, first.sha256)
    before = await desk.body(first.row.staged_key)
    assert await complete(desk.ledger, desk.artifacts, lease, first.artifact_id)
    await desk.publish()
    for epoch in (lease.epoch, Epoch(lease.epoch + 1), None):
        with pytest.raises(ArtifactFinal, match=first.artifact_id):
            await desk.stage(lease, other, epoch)
        after = await desk.stage(lease, epoch=epoch)
        assert (after.created, after.artifact_id, after.sha256) == (False, first.artifact_id, first.sha256)
    assert await desk.body(first.row.key) == before
    assert len(await desk.artifacts.of_job(lease.job_id)) == 1


@pytest.mark.requirement("ART-4", "D15")
async def test_a_row_whose_blob_never_came_is_completed_by_the_same_content_and_by_no_other(desk: Desk):
    lease = await desk.waiting()
    staged = await desk.stage(lease)
    body = await desk.body(staged.row.staged_key)
    assert await desk.objects.delete(staged.row.staged_key)
    with pytest.raises(ArtifactGone, match="other content"):
        await desk.stage(lease, draft(title="Another title"))
    assert (await desk.stage(lease)).artifact_id == staged.artifact_id
    assert await desk.body(staged.row.staged_key) == body


@pytest.mark.requirement("D15", "ART-3")
async def test_a_zombie_of_an_older_epoch_can_neither_stage_nor_replace_the_winner(desk: Desk):
    old = await desk.waiting()
    zombies = await desk.stage(old)
    new = await desk.retried(old)
    with pytest.raises(LeaseConflictError):
        await desk.stage(old)
    winner = await desk.stage(new, draft(title="The winner"))
    assert winner.created
    rows = {row.artifact_id: row.state for row in await desk.artifacts.of_job(old.job_id)}
    assert rows == {zombies.artifact_id: "discarded", winner.artifact_id: "staged"}
    await advance(desk.ledger, new, "NOTEBOOKLM_CALL", "response_received")
    with pytest.raises(InvalidTransition, match="discarded"):
        await advance(desk.ledger, new, "ARTIFACT_WRITE", "complete", finalizes=zombies.artifact_id)
    assert await advance(desk.ledger, new, "ARTIFACT_WRITE", "complete", finalizes=winner.artifact_id)
    with pytest.raises(ArtifactFinal, match=winner.artifact_id):
        await desk.stage(old)
    read = await desk.artifacts.read(winner.artifact_id)
    assert read is not None
    assert read["content"]["title"] == "The winner"


@pytest.mark.requirement("D15")
async def test_artifact_staged_while_its_attempt_ends_is_discarded_at_once(desk: Desk):
    old = await desk.waiting()
    as_it_was = await desk.job(old.job_id)
    await desk.retried(old)
    with pytest.raises(LeaseConflictError):
        await desk.artifacts.stage(BACKEND, draft(), job=as_it_was)
    assert [row.state for row in await desk.artifacts.of_job(old.job_id)] == ["discarded"]


@pytest.mark.requirement("JQ-13", "ART-2")
async def test_artifact_is_staged_only_for_a_waiting_job_and_of_its_type(desk: Desk):
    lease = await desk.waiting(JobType.BRIEF)
    with pytest.raises(TypeNotYielded, match="BRIEF and yields a BRIEF, not a RESEARCH_BRIEF"):
        await desk.stage(lease, draft(JobType.RESEARCH))
    with pytest.raises(ContentInvalid, match="word_count"):
        await desk.stage(lease, draft(JobType.BRIEF, word_count=5))
    with pytest.raises(LeaseConflictError):
        await desk.stage(lease, epoch=Epoch(lease.epoch + 1))
    for new in (
        NewJob(job_id=JobId(new_id()), type="work", payload=b"{}"),
        NewJob(job_id=JobId(new_id()), type="RESEARCH", lifecycle="queue-job", payload=b"[]"),
        queue_job(new_id(), job_type=JobType.RESEARCH),
    ):
        await desk.ledger.submit(ORCHESTRATOR if new.lifecycle == "queue-job" else SUBMITTER, [new])
        with pytest.raises(NothingExpected):
            await desk.artifacts.stage(BACKEND, draft(), job=await desk.job(new.job_id))
    assert await desk.keys() == []
    await advance(desk.ledger, lease, "NOTEBOOKLM_CALL", "response_received")
    with pytest.raises(NothingExpected, match="ARTIFACT_WRITE"):
        await desk.stage(lease)


async def test_an_artifact_that_would_be_too_large_is_refused_and_leaves_nothing(desk: Desk):
    lease = await desk.waiting()
    section = {"heading": "h", "body": "ж" * 199_000, "sources": []}
    with pytest.raises(ArtifactTooLarge, match=str(STORED_BYTES_MAX)):
        await desk.stage(lease, draft(sections=[section] * 45))
    assert (await desk.keys(), await desk.artifacts.of_job(lease.job_id)) == ([], ())
    assert (await desk.stage(lease, draft(sections=[section] * 20))).size > 7 * 1024 * 1024


@pytest.mark.requirement("ART-8", "ART-5")
@pytest.mark.parametrize("actor", [ORCHESTRATOR, OPERATOR])
async def test_only_the_nlm_backend_makes_artifacts_and_only_an_operator_discards_them(desk: Desk, actor: Actor):
    lease = await desk.waiting()
    with pytest.raises(NotAllowed, match=r"artifacts\.write"):
        await desk.artifacts.stage(actor, draft(), job=await desk.job(lease.job_id))
    for other in (ORCHESTRATOR, BACKEND):
        with pytest.raises(NotAllowed, match=r"artifacts\.cleanup"):
            await desk.artifacts.cleanup(other)
    assert await desk.keys() == []


@pytest.mark.requirement("ART-3")
async def test_a_finalized_artifact_cannot_be_changed_in_the_registry_or_in_the_object_store(desk: Desk):
    staged = await desk.finalized()
    await desk.publish()
    before = await desk.body(staged.row.key)
    for target, actor in (("staged", BACKEND), ("discarded", ORCHESTRATOR), ("discarded", BACKEND)):
        move = Move(job_id=staged.artifact_id, target=target, request_id=RequestId(new_id()))
        assert isinstance(await desk.ledger.move(actor, move), NotMoved)
    assert not await desk.artifacts.discard(ORCHESTRATOR, staged.artifact_id, cause="no")
    assert isinstance(await desk.objects.put(staged.row.key, b"{}", when=CREATE), PutRefused)
    await desk.objects.put(staged.row.key, b"{}")  # as somebody with the store's own credentials can
    document = await desk.artifacts.read(staged.artifact_id)
    assert document is not None
    assert document["content"] == CONTENTS[JobType.RESEARCH][1]
    await desk.objects.put(staged.row.key, before or b"")


@pytest.mark.requirement("ART-3")
async def test_artifact_bytes_with_a_wrong_hash_are_not_returned(desk: Desk):
    staged = await desk.finalized()
    for key in (staged.row.key, staged.row.staged_key):
        await desk.objects.put(key, b'{"content": {}, "sources": []}')
    document = await desk.artifacts.read(staged.artifact_id)  # the journal of its job still has them
    assert document is not None
    assert document["content"] == CONTENTS[JobType.RESEARCH][1]
    lease = await desk.waiting()
    lost = await desk.stage(lease)
    await advance(desk.ledger, lease, "NOTEBOOKLM_CALL", "response_received")
    assert await advance(desk.ledger, lease, "ARTIFACT_WRITE", "complete", finalizes=lost.artifact_id)
    await desk.objects.put(lost.row.staged_key, b"{}")
    with pytest.raises(ArtifactLost, match=lost.artifact_id):
        await desk.artifacts.read(lost.artifact_id)


async def test_finalized_artifacts_are_listed_newest_first_by_type_by_job_and_in_pages(desk: Desk):
    made = [await desk.finalized(kind) for kind in (JobType.RESEARCH, JobType.BRIEF, JobType.RESEARCH)]
    await desk.stage(await desk.waiting())
    ids = [one.artifact_id for one in reversed(made)]
    found, cursor = list[str](), None
    while True:
        page = await desk.artifacts.page(limit=2, cursor=cursor)
        found += [row.artifact_id for row in page.rows]
        if (cursor := page.cursor) is None:
            break
    assert found == ids
    by_type = await desk.artifacts.page(limit=10, type_=made[1].row.type)
    assert [row.artifact_id for row in by_type.rows] == [made[1].artifact_id]
    by_job = await desk.artifacts.page(limit=10, job_id=made[0].row.job_id)
    assert [row.artifact_id for row in by_job.rows] == [made[0].artifact_id]


@pytest.mark.requirement("ART-7")
@pytest.mark.parametrize(
    "hostile",
    [
        "",
        ".",
        "../../audit/20260101/x",
        "art-../../../etc/passwd",
        "art-00000000-0000-4000-8000-000000000000/../x",
        "art-00000000-0000-4000-8000-000000000000\n",
        "art-00000000-0000-4000-8000-00000000000G",
        "art-00000000-0000-1000-8000-000000000000",
        "ART-00000000-0000-4000-8000-000000000000",
        "art-00000000-0000-4000-8000-000000000000.json",
        "art-\0",
        "art-%2e%2e",
        "art-" + "0" * 10_000,
        "art-00000000-0000-4000-8000-\N{FULLWIDTH DIGIT ZERO}00000000000",
    ],
)
async def test_a_hostile_id_names_nothing(desk: Desk, hostile: str):
    assert await desk.artifacts.row(hostile) is None
    assert await desk.artifacts.read(hostile) is None
    assert await desk.artifacts.staged_bytes(hostile) is None
    for key in (rows.staged_key, rows.artifact_key):
        with pytest.raises(ArtifactIdInvalid):
            key(rows.project_id(PROJECT), hostile)
    with pytest.raises(ArtifactIdInvalid):
        rows.artifact_key(hostile, "art-00000000-0000-4000-8000-000000000000")


async def test_a_job_of_the_lifecycle_that_the_registry_did_not_make_is_no_artifact(desk: Desk):
    for number, payload in enumerate((b"null", b"{}", b'{"cid": "../../x"}', b"not json", b'{"job_id": 1}')):
        id_ = JobId(rows.make_artifact_id(f"00000000-0000-4000-8000-00000000000{number}"))
        await desk.ledger.submit(BACKEND, [NewJob(job_id=id_, type="BRIEF", lifecycle="artifact", payload=payload)])
        assert await desk.artifacts.row(id_) is None
    await desk.publish()
    assert len([key for key in await desk.keys("audit/") if "/art-" in key]) == 5


@pytest.mark.requirement("ART-5", "OBS-1")
async def test_a_cleanup_takes_what_is_old_enough_with_one_audit_record_each_and_its_bytes(desk: Desk):
    old = [await desk.finalized() for _ in range(3)]
    await desk.publish()
    desk.clock.advance(60 * DAY_S)
    young = await desk.finalized()
    await desk.publish()
    assert (await desk.artifacts.cleanup(OPERATOR)).rows == ()
    desk.clock.advance(30 * DAY_S + 1)
    would = await desk.artifacts.cleanup(OPERATOR, dry_run=True)
    assert [row.artifact_id for row in would.rows] == [one.artifact_id for one in old]
    assert all([await desk.body(one.row.key) for one in old])
    first = await desk.artifacts.cleanup(OPERATOR, limit=2)
    assert ([row.artifact_id for row in first.rows], first.more) == ([one.artifact_id for one in old[:2]], True)
    rest = await desk.artifacts.cleanup(OPERATOR, limit=2)
    assert ([row.artifact_id for row in rest.rows], rest.more) == ([old[2].artifact_id], False)
    assert (await desk.artifacts.cleanup(OPERATOR)).rows == ()
    await desk.publish()
    for one in old:
        assert await desk.artifacts.read(one.artifact_id) is None
        assert (await desk.body(one.row.key), await desk.body(one.row.staged_key)) == (None, None)
        (record,) = [key for key in await desk.keys("audit/") if key.endswith(f"/{one.artifact_id}-3.json")]
        told = json.loads(await desk.body(record) or b"")
        assert (told["event"], told["from"], told["to"]) == ("artifact.removed", "finalized", "removed")
        assert told["actor"] == "control-plane"
    assert await desk.artifacts.read(young.artifact_id) is not None


@pytest.mark.requirement("ART-5")
async def test_no_cleanup_takes_what_the_settings_keep(desk: Desk):
    staged = await desk.finalized()
    desk.clock.advance(89 * DAY_S)
    with pytest.raises(TooYoung, match="kept for 90 days"):
        await desk.artifacts.cleanup(OPERATOR, older_than_days=1)
    assert (await desk.artifacts.cleanup(OPERATOR)).rows == ()
    assert await desk.artifacts.read(staged.artifact_id) is not None


@pytest.mark.requirement("ART-5")
async def test_a_cleanup_looks_at_what_is_old_enough_and_at_nothing_that_was_removed_or_made_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trellis.artifacts.registry.CLEANUP_PAGE", 3)
    late = await desk.waiting()
    early = await desk.stage(late)  # made first, and final as the last one
    made = [(await desk.finalized()).artifact_id for _ in range(8)]  # all of one moment
    desk.clock.advance(6 * DAY_S)
    assert await complete(desk.ledger, desk.artifacts, late, early.artifact_id)
    desk.clock.advance(85 * DAY_S)
    for _ in range(4):
        await desk.finalized()
    first = await desk.artifacts.cleanup(OPERATOR, limit=6)
    assert ([row.artifact_id for row in first.rows], first.more) == (made[:6], True)
    counted = Counted(desk.ledger)
    rest = await replace(desk.artifacts, ledger=counted).cleanup(OPERATOR, limit=6, dry_run=True)  # type: ignore[arg-type]
    assert ([row.artifact_id for row in rest.rows], rest.more) == (made[6:], False)
    assert counted.calls == {"now": 1, "jobs": 2, "job": 2}


@pytest.mark.requirement("ART-4")
async def test_a_job_that_has_the_id_of_one_that_retention_removed_has_an_artifact_of_its_own(
    desk: Desk, tmp_path: Path
):
    ledger = await open_ledger(f"sqlite:///{tmp_path / 'retained.db'}", clock=desk.clock)
    desk = replace(desk, ledger=ledger)
    earlier = await desk.finalized()
    desk.clock.advance(31 * DAY_S)
    await ledger.retain(RetentionOptions())
    assert [row.artifact_id for row in await desk.artifacts.of_job(earlier.row.job_id)] == [earlier.artifact_id]
    lease = await call_nlm(ledger, queue_job(earlier.row.job_id))
    assert lease.epoch == earlier.row.epoch
    made = await desk.stage(lease, draft(title="Another title"))
    assert (made.created, made.artifact_id != earlier.artifact_id) == (True, True)
    assert (await desk.stage(lease)).artifact_id == made.artifact_id
    assert [row.artifact_id for row in await desk.artifacts.of_job(lease.job_id)] == [made.artifact_id]
    assert await desk.artifacts.read(earlier.artifact_id) is not None
    await ledger.close()


async def test_a_project_of_another_name_still_finds_what_it_had(desk: Desk):
    made = await desk.finalized()
    await desk.publish()
    renamed = replace(desk.artifacts, cid=rows.project_id("another garden"))
    document = await renamed.read(made.artifact_id)
    assert document is not None
    assert document["url"].endswith(made.row.key)
    lease = await desk.waiting()
    staged = await renamed.stage(BACKEND, draft(), job=await desk.job(lease.job_id))
    assert staged.row.staged_key.startswith(f"projects/{rows.project_id('another garden')}/staged/")
