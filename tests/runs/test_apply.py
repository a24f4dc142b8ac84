"""What approved proposals do, once each, and what they cannot do."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import GATEWAY, ORCHESTRATOR, Stand
from tests.stopped_tasks import stopped
from trellis.agents.definition import ContextOptions
from trellis.agents.sources import read_annotations, read_sources
from trellis.documents.errors import TargetRefused
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import Actor, JobId, Lease, RequestId
from trellis.lifecycles import Role
from trellis.proposals import proposal as proposals
from trellis.proposals.apply import LOST_MAX, ApplyEngine, ApplyOptions, ApplyReport, apply_until_settled
from trellis.proposals.proposal import Proposal, ProposalContent, checked_target
from trellis.runs.projector import Projector
from trellis.storage.memory.layout import ReadMode
from trellis.storage.memory.repository import MemoryRepository, open_memory
from trellis.storage.objects.canonical_json import sha256, timestamp
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore, PutCondition, PutRefused, PutStored

SLUG = "archivist-violin"
RUN = "run_2026-02-14_080000_abc123"
OWNER = Actor(role=Role.OWNER, name="anna")
NOTE = f"agents/{SLUG}/sources/bows.md"
BEFORE = b"# Bows\n"


class Workshop:
    """Ledger, store, memory and apply engines of one test."""

    def __init__(self, stand: Stand, objects: ObjectStore, memory: MemoryRepository) -> None:
        self.stand = stand
        self.objects = objects
        self.memory = memory
        self._ordinal = 0

    def engine(self, name: str = "apply@test") -> ApplyEngine:
        return ApplyEngine(
            ledger=self.stand.ledger,
            actor=Actor(role=Role.APPLY_ENGINE, name=name),
            objects=self.objects,
            memory=self.memory,
            new_id=lambda: f"{name}-{self.stand.clock()}-{id(object())}-{next(self.stand._numbers)}",
            options=ApplyOptions(),
        )

    async def approved(
        self, action: str, target: str, content: dict[str, Any], target_hash: str | None = None
    ) -> Proposal:
        self._ordinal += 1
        draft = ProposalContent(action=action, target=target, content=content, target_hash=target_hash)
        proposal = proposals.make_proposal(RUN, SLUG, self._ordinal, draft)
        await proposals.store_proposals(self.stand.ledger, ORCHESTRATOR, [proposal])
        if not await proposals.auto_approve(self.stand.ledger, GATEWAY, proposal.id, json.loads(proposal.body)):
            await proposals.decide_proposal(
                self.stand.ledger, OWNER, proposal.id, approve=True, note=None, request_id=RequestId(proposal.id)
            )
        return proposal

    async def document(self, proposal: JobId) -> dict[str, Any]:
        job = await self.stand.ledger.job(proposal)
        assert job is not None
        assert job.payload is not None
        return json.loads(proposals.document(job.payload, await self.stand.ledger.events(proposal)))

    async def body(self, key: str) -> bytes | None:
        found = await self.objects.get(key)
        return None if found is None else found.body


@pytest.fixture
async def workshop(stand: Stand, tmp_path: Path) -> AsyncGenerator[Workshop]:
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    yield Workshop(stand, objects, open_memory(tmp_path / "memory"))
    await objects.close()


def edit(text: str, kind: str = "replace") -> dict[str, Any]:
    return {"summary": "a better text", "change": {"type": kind, "text": text}}


def remember(content: str, version: int = 0) -> dict[str, Any]:
    updates = [{"file": "facts.md", "operation": "append", "content": content}]
    return {"summary": "a new fact", "updates": updates, "expected_version": version}


@pytest.mark.requirement("D22", "AUTH-6")
@pytest.mark.parametrize(
    "kind, expected", [("replace", b"new\n"), ("append", b"# Bows\n\nnew\n")], ids=["replace", "append"]
)
async def test_an_approved_edit_changes_its_file_once(workshop: Workshop, kind: str, expected: bytes):
    await workshop.objects.put(NOTE, BEFORE)
    proposal = await workshop.approved("propose-edit", "sources/bows.md", edit("new", kind), sha256(BEFORE))
    assert await workshop.engine().run_once() == ApplyReport(applied=1)
    assert await workshop.body(NOTE) == expected
    document = await workshop.document(proposal.id)
    assert document["status"] == "applied"
    assert document["apply_result"] == {"git_commit": None, "object_key": NOTE, "error": None}
    assert await workshop.engine().run_once() == ApplyReport()


async def test_a_new_file_is_made(workshop: Workshop):
    await workshop.approved("propose-note", "notes/idea.md", edit("an idea", "create"))
    assert await workshop.engine().run_once() == ApplyReport(applied=1)
    assert await workshop.body(f"agents/{SLUG}/notes/idea.md") == b"an idea\n"


@pytest.mark.requirement("D22")
async def test_a_file_that_changed_meanwhile_is_a_conflict_and_stays(workshop: Workshop):
    await workshop.objects.put(NOTE, b"# Bows, rewritten\n")
    proposal = await workshop.approved("propose-edit", "sources/bows.md", edit("new"), sha256(BEFORE))
    assert await workshop.engine().run_once() == ApplyReport(failed=1)
    document = await workshop.document(proposal.id)
    assert document["status"] == "failed"
    assert document["apply_result"]["error"].startswith("conflict: ")
    assert await workshop.body(NOTE) == b"# Bows, rewritten\n"


ANNOTATION = f"agents/{SLUG}/annotations/sources/bows.md/{{}}.json"


@pytest.mark.requirement("D63")
@pytest.mark.parametrize("action, kind", [("propose-comment", "comment"), ("propose-tag", "tag")])
@pytest.mark.parametrize("change", ["append", "replace", "create"])
async def test_an_approved_comment_is_stored_beside_its_source_and_not_in_it(
    workshop: Workshop, action: str, kind: str, change: str
):
    await workshop.objects.put(NOTE, BEFORE)
    proposal = await workshop.approved(action, "sources/bows.md", edit("88, not 94", change), sha256(BEFORE))
    assert await workshop.engine().run_once() == ApplyReport(applied=1)
    assert await workshop.body(NOTE) == BEFORE
    key = ANNOTATION.format(proposal.id)
    decided = (await workshop.stand.ledger.events(proposal.id))[1]
    assert json.loads(await workshop.body(key) or b"") == {
        "kind": kind,
        "target": "sources/bows.md",
        "target_sha256": sha256(BEFORE),
        "text": "88, not 94",
        "author": f"agent:{SLUG}",
        "approved_by": "anna",
        "approved_at": timestamp(decided.ts),
        "proposal_id": proposal.id,
        "run_id": RUN,
    }
    assert (await workshop.document(proposal.id))["apply_result"]["object_key"] == key
    assert [one.text for one in await read_annotations(workshop.objects, SLUG)] == ["88, not 94"]
    sources = await read_sources(workshop.objects, SLUG, ContextOptions())
    assert [(one.ref, one.text) for one in sources.items] == [("sources/bows.md", BEFORE.decode())]


@pytest.mark.requirement("D22")
async def test_a_comment_on_a_source_that_changed_meanwhile_is_a_conflict(workshop: Workshop):
    await workshop.objects.put(NOTE, b"# Bows, rewritten\n")
    proposal = await workshop.approved("propose-comment", "sources/bows.md", edit("no"), sha256(BEFORE))
    assert await workshop.engine().run_once() == ApplyReport(failed=1)
    assert (await workshop.document(proposal.id))["apply_result"]["error"].startswith("conflict: ")
    assert await workshop.body(ANNOTATION.format(proposal.id)) is None


@pytest.mark.requirement("PIPE-11")
async def test_an_engine_that_died_after_storing_a_comment_leaves_one_annotation(workshop: Workshop):
    await workshop.objects.put(NOTE, BEFORE)
    proposal = await workshop.approved("propose-comment", "sources/bows.md", edit("twice"), sha256(BEFORE))
    body = json.loads(proposal.body)
    first = await workshop.engine("dies")._annotate(proposal.id, body)
    await workshop.objects.put(NOTE, b"# Bows, rewritten after the comment was stored\n")
    assert await workshop.engine().run_once() == ApplyReport(applied=1)
    page = await workshop.objects.list(f"agents/{SLUG}/annotations/")
    assert [one.key for one in page.items] == [first["object_key"]]


@pytest.mark.requirement("D22")
async def test_an_undecided_or_rejected_proposal_is_never_applied(workshop: Workshop):
    await workshop.objects.put(NOTE, BEFORE)
    pending, rejected = (
        proposals.make_proposal(
            RUN,
            SLUG,
            1,
            ProposalContent(
                action="propose-edit", target="sources/bows.md", content=edit(text), target_hash=sha256(BEFORE)
            ),
        )
        for text in ("new", "newer")
    )
    await proposals.store_proposals(workshop.stand.ledger, ORCHESTRATOR, [pending, rejected])
    await proposals.decide_proposal(
        workshop.stand.ledger, OWNER, rejected.id, approve=False, note="not convincing", request_id=RequestId("r")
    )
    assert await workshop.engine().run_once() == ApplyReport()
    assert await workshop.body(NOTE) == BEFORE


@pytest.mark.requirement("AUTH-6", "D23")
async def test_a_memory_update_becomes_one_commit_that_names_its_proposal(workshop: Workshop):
    proposal = await workshop.approved("memory-update", "facts.md", remember("- The bow is by Voirin."))
    assert await workshop.engine().run_once() == ApplyReport(applied=1)
    document = await workshop.document(proposal.id)
    (entry,) = workshop.memory.history(SLUG).entries
    assert document["apply_result"]["git_commit"] == entry.commit
    assert entry.proposal_id == proposal.id
    assert "Voirin" in workshop.memory.read(SLUG, ReadMode.WIDE).content["facts.md"]


@pytest.mark.requirement("OBS-1", "AUTH-6")
async def test_a_commit_to_a_memory_has_one_audit_record_that_names_it(workshop: Workshop):
    proposal = await workshop.approved("memory-update", "facts.md", remember("- The bow is by Voirin."))
    assert await workshop.engine().run_once() == ApplyReport(applied=1)
    (entry,) = workshop.memory.history(SLUG).entries
    projector = Projector(
        ledger=workshop.stand.ledger,
        actor=Actor(role=Role.PROJECTOR, name="projector@test"),
        publisher=DocumentPublisher(workshop.objects),
        clock=workshop.stand.clock,
    )
    while (await projector.run_once()).events:
        pass
    await projector.release()
    keys = [info.key for info in (await workshop.objects.list("audit/")).items]
    records = [json.loads(await workshop.body(key) or b"") for key in keys]
    (found,) = [one for one in records if (one.get("data") or {}).get("git_commit") == entry.commit]
    told = {name: found[name] for name in ("event", "actor", "job_id", "from", "to")}
    assert told == {
        "event": "proposal.applied",
        "actor": "apply-engine",
        "job_id": proposal.id,
        "from": "applying",
        "to": "applied",
    }


@pytest.mark.requirement("D23")
async def test_a_memory_that_moved_on_is_a_conflict(workshop: Workshop):
    await workshop.approved("memory-update", "facts.md", remember("- One."))
    late = await workshop.approved("memory-update", "facts.md", remember("- Two."))
    assert await workshop.engine().run_once() == ApplyReport(applied=1, failed=1)
    document = await workshop.document(late.id)
    assert "at version 0 when this was proposed and is at 1 now" in document["apply_result"]["error"]
    assert len(workshop.memory.history(SLUG).entries) == 1


@pytest.mark.requirement("PIPE-11", "D22")
@pytest.mark.parametrize("action", ["propose-edit", "memory-update"])
async def test_an_engine_that_died_after_writing_does_not_write_twice(
    workshop: Workshop, action: str, monkeypatch: pytest.MonkeyPatch
):
    await workshop.objects.put(NOTE, BEFORE)
    if action == "propose-edit":
        proposal = await workshop.approved(action, "sources/bows.md", edit("new", "append"), sha256(BEFORE))
    else:
        proposal = await workshop.approved(action, "facts.md", remember("- Once."))

    async def die(*_: object) -> None:
        raise KeyboardInterrupt

    dying = workshop.engine("dying")
    monkeypatch.setattr(dying, "_settle", die)
    with pytest.raises(KeyboardInterrupt):
        await dying.run_once()
    for _ in range(70):
        await workshop.stand.lose_leases()
        if (await workshop.document(proposal.id))["status"] != "applying":
            break
    # A lost engine leaves `failed`, without an error; the next one goes on with it, without asking anybody.
    assert (await workshop.document(proposal.id))["status"] == "failed"
    assert await workshop.engine("second").run_once() == ApplyReport(applied=1)
    assert (await workshop.document(proposal.id))["status"] == "applied"
    if action == "propose-edit":
        assert await workshop.body(NOTE) == b"# Bows\n\nnew\n"
    else:
        assert len(workshop.memory.history(SLUG).entries) == 1


async def lose_an_engine(workshop: Workshop, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def die(*_: object) -> None:
        raise KeyboardInterrupt

    dying = workshop.engine(name)
    monkeypatch.setattr(dying, "_do", die)
    with pytest.raises(KeyboardInterrupt):
        await dying.run_once()


@pytest.mark.requirement("D22")
async def test_a_proposal_that_loses_every_engine_waits_for_a_person(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    proposal = await workshop.approved("memory-update", "facts.md", remember("- Once."))
    for number in range(LOST_MAX):
        await lose_an_engine(workshop, f"dying-{number}", monkeypatch)
        await workshop.stand.lose_leases()
    engine = workshop.engine()
    assert await engine.run_once() == ApplyReport()
    assert await engine.run_once() == ApplyReport()
    assert (await workshop.document(proposal.id))["status"] == "failed"
    assert await engine.apply_now(proposal.id, RequestId("again")) == "applied"


@pytest.mark.requirement("D22")
async def test_a_proposal_that_was_refused_is_not_tried_again_by_itself(workshop: Workshop):
    await workshop.objects.put(NOTE, b"# Bows, rewritten\n")
    proposal = await workshop.approved("propose-edit", "sources/bows.md", edit("new"), sha256(BEFORE))
    assert await workshop.engine().run_once() == ApplyReport(failed=1)
    await workshop.objects.put(NOTE, BEFORE)
    engine = workshop.engine("second")
    assert await engine.run_once() == ApplyReport()
    assert await engine.apply_now(proposal.id, RequestId("again")) == "applied"


@pytest.mark.requirement("PIPE-11", "D22")
@pytest.mark.parametrize("other", ["alive", "dead"])
async def test_waiting_for_a_proposal_waits_for_the_apply_engine_that_holds_it(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, other: str
):
    stand = workshop.stand
    proposal = await workshop.approved("memory-update", "facts.md", remember("- Once."))
    has_it, go_on = asyncio.Event(), asyncio.Event()
    first = workshop.engine("first")
    do = first._do

    async def slowly(lease: Lease, body: Any) -> dict[str, Any]:
        has_it.set()
        await go_on.wait()
        return await do(lease, body)

    monkeypatch.setattr(first, "_do", slowly)
    applying = asyncio.ensure_future(first.run_once())
    await has_it.wait()
    if other == "dead":
        applying.cancel()
        await stopped(applying)
    settling = apply_until_settled(stand.ledger, workshop.engine("second"), stand.clock, proposal.id, 300.0)
    waiting = asyncio.ensure_future(settling)
    await stand.until(lambda: stand.clock.sleeping > 0)
    assert not waiting.done(), "another engine has it, and nobody knows yet what becomes of it"
    go_on.set()
    if other == "dead":
        await stand.lose_leases()
    await stand.until(waiting.done, step_s=0.05)
    assert waiting.result() == "applied"
    await stopped(applying)
    assert len(workshop.memory.history(SLUG).entries) == 1


@pytest.mark.requirement("D22")
@pytest.mark.parametrize(
    "other, told, body",
    [(None, ApplyReport(applied=1), b"# Bows\n\nnew\n"), (b"another", ApplyReport(failed=1), b"another")],
    ids=["same", "another"],
)
async def test_a_twin_that_put_the_same_a_moment_earlier_is_no_conflict(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, other: bytes | None, told: ApplyReport, body: bytes
):
    await workshop.objects.put(NOTE, BEFORE)
    await workshop.approved("propose-edit", "sources/bows.md", edit("new", "append"), sha256(BEFORE))
    put = workshop.objects.put

    async def second(key: str, body: bytes, *, when: PutCondition) -> PutStored | PutRefused:
        await put(key, other or body, when=when)
        return await put(key, body, when=when)

    monkeypatch.setattr(workshop.objects, "put", second)
    assert await workshop.engine().run_once() == told
    assert await workshop.body(NOTE) == body


@pytest.mark.requirement("PIPE-11", "D22")
@pytest.mark.parametrize(
    "kind, before, after",
    [
        ("append", b"# Bows", b"# Bows\n\nnew\n"),
        ("append", b"# Bows\n\n\n", b"# Bows\n\nnew\n"),
        ("append", b"", b"new\n"),
        ("append", None, b"new\n"),
        ("replace", BEFORE, b"new\n"),
        ("create", None, b"new\n"),
    ],
)
async def test_a_file_that_is_as_approved_is_applied_though_no_note_of_it_is_left(
    workshop: Workshop, kind: str, before: bytes | None, after: bytes
):
    """As after the ledger was made again, which does not bring back notes of what was under way."""
    expected = None if before is None else sha256(before)
    await workshop.objects.put(NOTE, after)
    await workshop.approved("propose-edit", "sources/bows.md", edit("new", kind), expected)
    assert await workshop.engine().run_once() == ApplyReport(applied=1)
    assert await workshop.body(NOTE) == after


@pytest.mark.requirement("D22")
@pytest.mark.parametrize("there", [b"# Bows\n\nold\n\nnew\n", b"# Bows\nnew\n", b"new\n", b"# Bows\n\nnew\n\nnew\n"])
async def test_a_file_that_only_ends_as_approved_is_a_conflict(workshop: Workshop, there: bytes):
    await workshop.objects.put(NOTE, there)
    await workshop.approved("propose-edit", "sources/bows.md", edit("new", "append"), sha256(BEFORE))
    assert await workshop.engine().run_once() == ApplyReport(failed=1)
    assert await workshop.body(NOTE) == there


@pytest.mark.requirement("D22")
async def test_an_error_that_nobody_foresaw_ends_its_proposal_and_no_other(workshop: Workshop):
    updates = [{"file": "facts.md", "operation": "explode"}]
    content = {"summary": "impossible", "updates": updates, "expected_version": 0}
    bad = await workshop.approved("memory-update", "facts.md", content)
    good = await workshop.approved("propose-note", "notes/idea.md", edit("an idea", "create"))
    engine = workshop.engine()
    assert await engine.run_once() == ApplyReport(applied=1, failed=1)
    document = await workshop.document(bad.id)
    assert (document["status"], document["apply_result"]["error"][:10]) == ("failed", "ValueError")
    assert "explode" in document["apply_result"]["error"]
    assert (await workshop.document(good.id))["status"] == "applied"
    assert await engine.run_once() == ApplyReport(), "it waits for a person"


@pytest.mark.requirement("AUTH-6")
@pytest.mark.parametrize(
    "action, target",
    [
        ("propose-edit", "_agent.md"),
        ("propose-edit", "runs/run_1/status.json"),
        ("propose-edit", "proposals/prop_1.json"),
        ("propose-edit", "sources/../_agent.md"),
        ("propose-edit", "sources/"),
        ("propose-edit", "/sources/a.md"),
        ("propose-edit", "sources/.hidden.md"),
        ("propose-edit", "sources/ a.md"),
        ("propose-edit", "sources/a\u202edm.md"),
        ("propose-edit", "sources/a\\b.md"),
        ("propose-edit", "sources/" + "ї" * 101 + ".md"),
        ("propose-edit", "sources/1/2/3/4/5/6.md"),
        ("propose-edit", "pseudocode.md"),
        ("logic-update", "_agent.md"),
        ("logic-update", "sources/a.md"),
        ("apply-everything", "sources/a.md"),
    ],
)
def test_proposal_for_a_forbidden_target_is_refused(action: str, target: str):
    with pytest.raises(TargetRefused):
        checked_target(action, target)


@pytest.mark.requirement("D22")
async def test_short_ledger_outage_leaves_the_proposal_to_the_next_engine(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    proposal = await workshop.approved("propose-note", "notes/idea.md", edit("an idea", "create"))

    async def away(job_id: JobId) -> dict[str, bytes]:
        raise LedgerUnavailable(reason="gone")

    with monkeypatch.context() as patched:
        patched.setattr(workshop.stand.ledger, "read_journal", away)
        with pytest.raises(LedgerUnavailable):
            await workshop.engine().run_once()
    assert await workshop.stand.state(proposal.id) == "applying"
    await workshop.stand.lose_leases()
    await workshop.engine("other").run_once()
    assert await workshop.stand.state(proposal.id) == "applied"
