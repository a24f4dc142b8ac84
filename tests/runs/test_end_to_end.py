"""A real agent of the shipped garden, from request to reviewed proposal: real ledger, store, git memory, answers and runtime."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agents.runtime.stage import FINISH, script
from tests.runs.conftest import GATEWAY, ORCHESTRATOR, Stand
from tests.stopped_tasks import stopped
from trellis.agents.definition import SafeOutput
from trellis.agents.garden import AGENTS, memory_seed, plant
from trellis.agents.refusals import RefusalCode, ToolRefusal
from trellis.agents.run_io import AgentOutput, DraftChange, ModelOptions, RunLimits
from trellis.agents.run_io import ProposalDraft as AgentDraft
from trellis.agents.sources import read_annotations
from trellis.documents import ids
from trellis.documents.publisher import DocumentPublisher, PublishedRuns
from trellis.documents.run_documents import RunRequest
from trellis.engine.call_times import CallTimes
from trellis.engine.jobs import Actor, JobId, RequestId
from trellis.engine.records import JobFilter
from trellis.engine.step_runner import DriveOutcome
from trellis.lifecycles import Role
from trellis.nlm.extractive import ExtractiveProvider
from trellis.nlm.retrying_provider import RetryingProvider
from trellis.proposals import proposal as proposals
from trellis.proposals.apply import ApplyEngine, ApplyOptions
from trellis.runs.memory_readers import RepositoryReader
from trellis.runs.orchestrator import RunDriver, RunDriverOptions, StepContext
from trellis.runs.pipeline import RunSteps
from trellis.runs.projector import Projector
from trellis.storage.memory.layout import ReadMode, count_tokens
from trellis.storage.memory.repository import MemoryRepository, open_memory
from trellis.storage.memory.updates import Operation, Update
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore
from trellis.testing import FakeClock

VIOLIN = "archivist-violin"


class Garden:
    """Everything of one embedded instance, without its loops."""

    def __init__(self, stand: Stand, objects: ObjectStore, memory: MemoryRepository) -> None:
        self.stand = stand
        self.objects = objects
        self.memory = memory
        ledger = stand.ledger
        self.engine = ApplyEngine(
            ledger=ledger,
            actor=Actor(role=Role.APPLY_ENGINE, name="apply@test"),
            objects=objects,
            memory=memory,
            new_id=lambda: f"apply-{next(stand._numbers)}",
            options=ApplyOptions(),
        )
        self.work = RunSteps(
            ledger=ledger,
            orchestrator=ORCHESTRATOR,
            gateway=GATEWAY,
            objects=objects,
            memory=RepositoryReader(memory),
            asking=RetryingProvider(ExtractiveProvider(), clock=stand.clock),
            models=ModelOptions(),
            apply_engine=self.engine,
            clock=stand.clock,
            limits=RunLimits(),
        )
        self.projector = Projector(
            ledger=ledger,
            actor=Actor(role=Role.PROJECTOR, name="projector@test"),
            publisher=DocumentPublisher(objects),
            clock=stand.clock,
        )

    def driver(self) -> RunDriver:
        return RunDriver(
            ledger=self.stand.ledger,
            actor=ORCHESTRATOR,
            clock=self.stand.clock,
            steps=self.work.steps(),
            published=PublishedRuns(self.objects, self.stand.clock).reached,
            options=RunDriverOptions(),
        )

    async def run(self, slug: str) -> tuple[JobId, DriveOutcome]:
        run_id = await self.stand.run_of(slug)
        claimed = await self.stand.claim()
        assert claimed is not None
        driving = asyncio.ensure_future(self.driver().drive(claimed))
        async with asyncio.timeout(60):
            while not driving.done():
                await self.projector.run_once()
                self.stand.clock.advance(0.001)
                await self.stand.ledger.job(run_id)
        while (await self.projector.run_once()).events:
            pass
        return run_id, driving.result()

    async def document(self, key: str) -> dict[str, Any]:
        found = await self.objects.get(key)
        assert found is not None, key
        return json.loads(found.body)

    async def text(self, key: str) -> str:
        found = await self.objects.get(key)
        assert found is not None, key
        return found.body.decode()


@pytest.fixture
async def garden(stand: Stand, tmp_path: Path) -> AsyncGenerator[Garden]:
    objects, memory = await open_objects(f"file://{tmp_path / 'objects'}"), open_memory(tmp_path / "memory")
    await plant(objects)
    for slug in AGENTS:
        memory.commit(
            slug,
            [Update(file=file, operation=Operation.REPLACE, content=text) for file, text in memory_seed(slug).items()],
            expected_version=0,
            run_id="seed",
            proposal_id=f"seed-{slug}",
            reason="the garden is planted",
            auto_approved=False,
            author="owner",
            at=await stand.ledger.now(),
        )
    yield Garden(stand, objects, memory)
    await objects.close()


async def test_memory_update_already_present_is_not_appended_again(garden: Garden, tmp_path: Path):
    slug = AGENTS[0]
    file = tmp_path / "objects" / "agents" / slug / "_agent.md"
    file.write_text(file.read_text().replace("model: offline", "model: scripted:keeper"))

    async def run_appending(*facts: str) -> dict[str, Any]:
        drafts = [
            {"action": "memory-update", "target": "facts.md", "summary": "a fact", "text": fact, "section": section}
            for fact, _, section in (fact.partition("@") for fact in facts)
        ]
        keeper = script([("create-proposal", {k: v for k, v in one.items() if v}) for one in drafts], [FINISH])
        garden.work = replace(garden.work, models=ModelOptions(scripts={"keeper": keeper}))
        run_id, _ = await garden.run(slug)
        return await garden.document(ids.status_key(slug, run_id))

    first = await run_appending("- The lamp is L-1.", "- It is on.@Lamps")
    assert len(first["proposals_created"]) == 1
    again = await run_appending("- The lamp is L-1.", "- It is on.@Lamps")
    assert again["proposals_created"] == []
    assert [(one["action"], one["status"]) for one in again["already_proposed"]] == [("memory-update", "applied")]
    other = await run_appending("- The lamp is L-1.@Lamps", "- It is on.@Lamps", "- The shade is green.")
    assert len(other["proposals_created"]) == 1
    facts = garden.memory.read(slug, ReadMode.WIDE).content["facts.md"].splitlines()
    times = [facts.count(line) for line in ("- It is on.", "- The shade is green.", "- The lamp is L-1.")]
    assert times == [1, 1, 2], "a line in another section is another line"


@pytest.mark.requirement("D22", "D63")
@pytest.mark.parametrize("name", ["листи.md", "the letters of 1926.md", "🎻 letters.md"])
async def test_source_of_any_name_is_commented_on_or_the_model_is_told_why_not(
    garden: Garden, tmp_path: Path, name: str
):
    slug = AGENTS[0]
    folder = tmp_path / "objects" / "agents" / slug
    file = folder / "_agent.md"
    file.write_text(file.read_text().replace("model: offline", "model: scripted:reader"))
    (folder / "sources" / name).write_text("The lamp is L-1.\n")
    draft = {"action": "propose-comment", "target": f"sources/{name}", "summary": "Which?", "text": "Which lamp?"}
    reader = script([("create-proposal", draft)], [FINISH])
    garden.work = replace(garden.work, models=ModelOptions(scripts={"reader": reader}))
    run_id, outcome = await garden.run(slug)
    assert outcome.state == "completed"
    made = (await garden.document(ids.status_key(slug, run_id)))["proposals_created"]
    if name.startswith("🎻"):
        output = await garden.document(ids.step_key(slug, run_id, 2))
        assert made == []
        assert "begin with a letter" in output["result"]["refused"][0]["detail"], output["result"]["refused"]
        return
    owner = Actor(role=Role.OWNER, name="anna")
    await proposals.decide_proposal(
        garden.stand.ledger, owner, JobId(made[0]), approve=True, note=None, request_id=RequestId("yes"), version=1
    )
    assert (await garden.engine.run_once()).applied == 1
    annotations = await read_annotations(garden.objects, slug)
    assert [(one.target, one.text) for one in annotations] == [(f"sources/{name}", "Which lamp?")]


@pytest.mark.requirement("D22", "D23")
async def test_what_a_run_adds_to_its_memory_is_kept_when_the_memory_changed_during_the_run(
    garden: Garden, tmp_path: Path
):
    slug = AGENTS[0]
    file = tmp_path / "objects" / "agents" / slug / "_agent.md"
    file.write_text(file.read_text().replace("model: offline", "model: scripted:keeper"))
    draft = {"action": "memory-update", "target": "facts.md", "summary": "a fact", "text": "- The lamp is L-1."}
    turns, now = script([("create-proposal", draft)], [FINISH]), await garden.stand.ledger.now()

    def keeper(*said: Any) -> Any:
        garden.memory.commit(
            slug,
            [Update(file="snapshot.md", operation=Operation.APPEND, content="A person wrote this.")],
            expected_version=None,
            run_id="by-hand",
            proposal_id=f"by-hand-{garden.memory.read(slug).version}",
            reason="a person was faster",
            auto_approved=False,
            author="owner",
            at=now,
        )
        return turns(*said)

    garden.work = replace(garden.work, models=ModelOptions(scripts={"keeper": keeper}))
    run_id, _ = await garden.run(slug)
    (proposal,) = (await garden.document(ids.status_key(slug, run_id)))["proposals_created"]
    document = await garden.document(ids.proposal_key(slug, proposal))
    assert (document["status"], document["apply_result"]["error"]) == ("applied", None)
    content = garden.memory.read(slug, ReadMode.WIDE).content
    assert "- The lamp is L-1.\n" in content["facts.md"]
    assert "A person wrote this.\n" in content["snapshot.md"]


async def test_a_memory_over_its_limit_is_not_compared_and_the_run_goes_on_and_says_so(
    garden: Garden, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """An agent reads a part of its memory that is within its limit, and proposes what the whole of it has already."""
    slug, fact = AGENTS[0], "- The lamp is L-1."
    file = tmp_path / "objects" / "agents" / slug / "_agent.md"
    file.write_text(file.read_text().replace("model: offline", "model: scripted:keeper").replace(": wide", ": basic"))
    draft = {"action": "memory-update", "target": "facts.md", "summary": "a fact", "text": fact}
    models = ModelOptions(scripts={"keeper": script([("create-proposal", draft)], [FINISH])})
    garden.work = replace(garden.work, models=models)
    first, _ = await garden.run(slug)
    assert len((await garden.document(ids.status_key(slug, first)))["proposals_created"]) == 1

    def counter(text: str) -> int:
        return 13_000 if fact in text else count_tokens(text)

    garden.work = replace(garden.work, memory=RepositoryReader(open_memory(tmp_path / "memory", counter=counter)))
    second, outcome = await garden.run(slug)
    status = await garden.document(ids.status_key(slug, second))
    assert (outcome.state, len(status["proposals_created"])) == ("completed", 1)
    assert "memory_not_compared" in caplog.text
    assert "13" in caplog.text.partition("memory_not_compared")[2]


@pytest.mark.requirement("PIPE-6", "PIPE-7", "OBS-2", "OBS-7")
@pytest.mark.parametrize("slug", AGENTS)
async def test_an_agent_of_the_garden_reads_asks_and_proposes(garden: Garden, slug: str):
    run_id, outcome = await garden.run(slug)
    status = await garden.document(ids.status_key(slug, run_id))
    assert (outcome.state, status["status"], status["error"]) == ("completed", "completed", None)
    assert status["proposals_created"], "a run without a proposal is not worth reading"
    output = await garden.document(ids.output_key(slug, run_id))
    assert [one["id"] for one in output["proposals"]] == status["proposals_created"]
    cited = 0
    for body in output["proposals"]:
        document = await garden.document(ids.proposal_key(slug, body["id"]))
        assert document["status"] in {"pending", "applied"}
        grounds = body["content"].get("grounds") or [body["content"]]
        for citation in (one for ground in grounds for one in ground["citations"]):
            source = await garden.text(f"agents/{slug}/{citation['ref']}")
            assert source[citation["start"] : citation["end"]] == citation["excerpt"]
            cited += 1
    assert cited > 0
    manifest = await garden.document(ids.manifest_key(slug, run_id))
    assert manifest["summary"] == output["summary"]
    assert len(manifest["steps"]) == 4


@pytest.mark.requirement("D22", "AUTH-6")
async def test_only_approved_proposals_are_applied(garden: Garden):
    run_id, _ = await garden.run(VIOLIN)
    output = await garden.document(ids.output_key(VIOLIN, run_id))
    waiting = [body for body in output["proposals"] if body["action"] != proposals.MEMORY_UPDATE]
    assert waiting
    chosen, others = waiting[0], waiting[1:]
    owner = Actor(role=Role.OWNER, name="anna")
    owner = Actor(role=Role.OWNER, name="anna")
    await proposals.decide_proposal(
        garden.stand.ledger, owner, chosen["id"], approve=True, note=None, request_id=RequestId("yes")
    )
    await garden.engine.run_once()
    while (await garden.projector.run_once()).events:
        pass
    document = await garden.document(ids.proposal_key(VIOLIN, chosen["id"]))
    assert document["status"] == "applied", document["apply_result"]
    stored = json.loads(await garden.text(document["apply_result"]["object_key"]))
    assert (stored["text"], stored["approved_by"]) == (chosen["content"]["change"]["text"], "anna")
    for other in others:
        assert (await garden.document(ids.proposal_key(VIOLIN, other["id"])))["status"] == "pending"


@pytest.mark.requirement("PIPE-6")
async def test_an_agent_at_work_returns_proposals_and_a_summary_and_writes_nothing(garden: Garden):
    async def stored() -> tuple[dict[str, bytes], int, str | None]:
        found = [await garden.objects.get(info.key) for info in (await garden.objects.list("")).items]
        jobs = (await garden.stand.ledger.jobs(JobFilter(), limit=10)).jobs
        return {one.key: one.body for one in found if one}, len(jobs), garden.memory.read(VIOLIN).commit

    before, asked = await stored(), step_of(VIOLIN)
    loaded = (await garden.work.load_context(asked)).result
    context = replace(asked, number=2, name="execute-agent", before={"load-context": loaded})
    output = (await garden.work.execute_agent(context)).result
    assert output["proposals"]
    assert output["summary"]
    assert await stored() == before


@pytest.mark.requirement("PIPE-11", "PIPE-15")
async def test_a_second_run_names_what_is_proposed_already_and_proposes_it_again_when_a_source_changed(garden: Garden):
    file = f"agents/{VIOLIN}/_agent.md"
    await garden.objects.put(file, (await garden.text(file)).replace(", memory-update]", "]").encode())
    first, _ = await garden.run(VIOLIN)
    waiting = [
        body
        for body in (await garden.document(ids.output_key(VIOLIN, first)))["proposals"]
        if first not in body["target"]  # a summary is a file of its run
    ]
    no, owner = waiting[0]["id"], Actor(role=Role.OWNER, name="anna")
    owner = Actor(role=Role.OWNER, name="anna")
    await proposals.decide_proposal(
        garden.stand.ledger, owner, no, approve=False, note="nobody needs it", request_id=RequestId("no")
    )
    second, _ = await garden.run(VIOLIN)
    status = await garden.document(ids.status_key(VIOLIN, second))
    manifest = await garden.document(ids.manifest_key(VIOLIN, second))
    states = {one["id"]: one["status"] for one in status["already_proposed"]}
    assert states == {body["id"]: "rejected" if body["id"] == no else "pending" for body in waiting}
    assert manifest["already_proposed"] == status["already_proposed"]
    assert manifest["proposals_created"] == status["proposals_created"]
    output = await garden.document(ids.output_key(VIOLIN, second))
    assert [body["id"] for body in output["proposals"]] == status["proposals_created"]
    assert not {body["target"] for body in output["proposals"]} & {body["target"] for body in waiting}
    ref = waiting[0]["content"]["citations"][0]["ref"]
    key = f"agents/{VIOLIN}/{ref}"
    await garden.objects.put(key, (await garden.text(key) + "\nOne line more.\n").encode())
    third, _ = await garden.run(VIOLIN)
    told = await garden.document(ids.status_key(VIOLIN, third))
    assert no not in {one["id"] for one in told.get("already_proposed", ())}


@pytest.mark.requirement("PIPE-11", "OBS-7")
@pytest.mark.parametrize("change", [DraftChange.CREATE, DraftChange.APPEND])
async def test_text_that_a_memory_file_already_has_is_not_proposed_again(
    garden: Garden, monkeypatch: pytest.MonkeyPatch, change: DraftChange
):
    """A model that always wants the same note, as models do that keep no memory. The run does not load the note."""
    note = AgentDraft(
        action=SafeOutput.PROPOSE_NOTE,
        target="notes/bow.md",
        change=change,
        summary="bow",
        text="By Voirin.",
    )

    async def always(*_: Any, **__: Any) -> AgentOutput:
        refused = ToolRefusal(tool="create-proposal", code=RefusalCode.ACTION_NOT_ALLOWED, detail="no")
        return AgentOutput(proposals=(note,), summary="one note", refused=(refused,))

    monkeypatch.setattr("trellis.runs.pipeline.run_agent", always)
    first, _ = await garden.run(VIOLIN)
    status = await garden.document(ids.status_key(VIOLIN, first))
    (made,) = status["proposals_created"]
    assert (status["refused_actions"], "already_proposed" in status) == (1, False)
    owner = Actor(role=Role.OWNER, name="anna")
    owner = Actor(role=Role.OWNER, name="anna")
    await proposals.decide_proposal(
        garden.stand.ledger, owner, made, approve=True, note=None, request_id=RequestId("yes")
    )
    await garden.engine.run_once()
    second, _ = await garden.run(VIOLIN)
    (equal,) = (await garden.document(ids.manifest_key(VIOLIN, second)))["already_proposed"]
    assert equal == {"id": made, "status": "applied", "action": "propose-note", "target": "notes/bow.md"}
    assert (await garden.document(ids.output_key(VIOLIN, second)))["proposals"] == []


async def apply(garden: Garden, proposal: JobId) -> None:
    owner = Actor(role=Role.OWNER, name="anna")
    owner = Actor(role=Role.OWNER, name="anna")
    await proposals.decide_proposal(
        garden.stand.ledger, owner, proposal, approve=True, note=None, request_id=RequestId(proposal)
    )
    await garden.engine.run_once()


@pytest.mark.requirement("PIPE-11", "OBS-7")
async def test_an_applied_edit_is_not_proposed_again_and_the_run_names_it(garden: Garden, tmp_path: Path):
    folder = tmp_path / "objects" / "agents" / VIOLIN
    file, source = folder / "_agent.md", min(folder.glob("sources/*.md"))
    file.write_text(file.read_text().replace("model: offline", "model: scripted:editor"))
    ref = f"sources/{source.name}"
    draft = {"action": "propose-edit", "target": ref, "summary": "bow", "text": "## Bow\n\nBy Voirin."}
    models = ModelOptions(scripts={"editor": script([("create-proposal", draft)], [FINISH])})
    garden.work = replace(garden.work, models=models)
    first, _ = await garden.run(VIOLIN)
    (made,) = (await garden.document(ids.status_key(VIOLIN, first)))["proposals_created"]
    await apply(garden, made)
    assert source.read_text().endswith("\n\n## Bow\n\nBy Voirin.\n")
    second, _ = await garden.run(VIOLIN)
    status = await garden.document(ids.status_key(VIOLIN, second))
    assert status["proposals_created"] == []
    assert status["already_proposed"] == [{"id": made, "status": "applied", "action": "propose-edit", "target": ref}]
    source.write_text(source.read_text().replace("By Voirin.", "By Voirin, 1880."))
    third, _ = await garden.run(VIOLIN)
    status = await garden.document(ids.status_key(VIOLIN, third))
    assert len(status["proposals_created"]) == 1, "the file has other lines now"


@pytest.mark.requirement("PIPE-11")
async def test_the_offline_model_does_not_repeat_an_applied_edit(garden: Garden, tmp_path: Path):
    file = tmp_path / "objects" / "agents" / VIOLIN / "_agent.md"
    actions = "[propose-edit, propose-note, propose-summary, propose-comment, memory-update]"
    file.write_text(file.read_text().replace(actions, "[propose-edit]"))
    first, _ = await garden.run(VIOLIN)
    applied = [made["id"] for made in (await garden.document(ids.output_key(VIOLIN, first)))["proposals"]]
    for made in applied:
        await apply(garden, made)
    second, _ = await garden.run(VIOLIN)
    known = (await garden.document(ids.status_key(VIOLIN, second)))["already_proposed"]
    assert [(one["id"], one["status"]) for one in known] == [(made, "applied") for made in applied]


@pytest.mark.requirement("D63")
async def test_an_approved_comment_on_a_disagreement_leaves_the_disagreement_in_the_evidence(garden: Garden):
    run_id, _ = await garden.run(VIOLIN)
    first = await garden.document(ids.output_key(VIOLIN, run_id))
    comment, *_ = [body for body in first["proposals"] if body["action"] == "propose-comment"]
    owner = Actor(role=Role.OWNER, name="anna")
    owner = Actor(role=Role.OWNER, name="anna")
    await proposals.decide_proposal(
        garden.stand.ledger, owner, comment["id"], approve=True, note=None, request_id=RequestId("yes")
    )
    await garden.engine.run_once()
    again, _ = await garden.run(VIOLIN)
    loaded = [(await garden.document(ids.step_key(VIOLIN, run, 1)))["result"] for run in (run_id, again)]
    assert loaded[1]["sources"] == loaded[0]["sources"]
    assert [one["proposal_id"] for one in loaded[1]["annotations"]] == [comment["id"]]
    second = await garden.document(ids.output_key(VIOLIN, again))
    assert comment["content"]["change"]["text"] not in [
        body["content"]["change"]["text"] for body in second["proposals"] if body["action"] == "propose-comment"
    ]


@pytest.mark.requirement("RUN-7")
async def test_an_agent_that_is_not_there_fails_the_run_with_a_reason(garden: Garden):
    run_id, outcome = await garden.run("nobody-here")
    status = await garden.document(ids.status_key("nobody-here", run_id))
    assert (outcome.state, status["error"]) == ("failed", "INTERNAL_ERROR: there is no agent nobody-here")


@pytest.mark.requirement("PIPE-11", "PIPE-12")
@pytest.mark.parametrize("after", [1, 3, 6])
async def test_an_orchestrator_that_dies_while_the_agent_works_pays_for_nothing_twice(garden: Garden, after: int):
    run_id = await garden.stand.run_of(VIOLIN)
    claimed = await garden.stand.claim()
    assert claimed is not None

    async def kept() -> int:
        journal = await garden.stand.ledger.read_journal(run_id)
        return sum(name.startswith(("model/", "tool/")) for name in journal)

    driving = asyncio.ensure_future(garden.driver().drive(claimed))
    async with asyncio.timeout(60):
        while await kept() < after:
            await garden.projector.run_once()
            garden.stand.clock.advance(0.001)
    driving.cancel()
    await stopped(driving)
    before = await garden.stand.ledger.read_journal(run_id)
    await garden.stand.lose_leases()
    claimed = await garden.stand.claim()
    assert claimed is not None
    again = asyncio.ensure_future(garden.driver().drive(claimed))
    async with asyncio.timeout(60):
        while not again.done():
            await garden.projector.run_once()
            garden.stand.clock.advance(0.001)
            await garden.stand.ledger.job(run_id)
    assert again.result().state == "completed"
    while (await garden.projector.run_once()).events:
        pass
    journal = await garden.stand.ledger.read_journal(run_id)
    assert before.items() <= journal.items(), "what was answered before the death was asked again"
    models = sorted(name for name in journal if name.startswith("model/"))
    assert models == [f"model/{number:02}" for number in range(1, len(models) + 1)]
    status = await garden.document(ids.status_key(VIOLIN, run_id))
    assert status["proposals_created"]


@pytest.mark.requirement("PIPE-7", "D22")
async def test_an_approved_logic_update_becomes_part_of_the_instructions_of_the_next_run(garden: Garden):
    loaded = (await garden.work.load_context(step_of(VIOLIN))).result
    draft = AgentDraft(
        action=SafeOutput.LOGIC_UPDATE,
        target="_agent.md",
        change=DraftChange.REPLACE,
        summary="be stricter",
        text="Never trust a date without a document.",
    )
    (made,) = await garden.work._drafts(VIOLIN, loaded, [draft])
    proposal = proposals.make_proposal("run_2026-02-14_080000_abc123", VIOLIN, 1, made)
    await proposals.store_proposals(garden.stand.ledger, ORCHESTRATOR, [proposal])
    body = json.loads(proposal.body)
    assert (body["target"], body["requiresHumanReview"]) == ("pseudocode.md", True)
    assert not await proposals.auto_approve(garden.stand.ledger, GATEWAY, proposal.id, body)
    before = await garden.text(f"agents/{VIOLIN}/_agent.md")
    owner = Actor(role=Role.OWNER, name="anna")
    owner = Actor(role=Role.OWNER, name="anna")
    await proposals.decide_proposal(
        garden.stand.ledger, owner, proposal.id, approve=True, note=None, request_id=RequestId("yes")
    )
    assert (await garden.engine.run_once()).applied == 1
    again = (await garden.work.load_context(step_of(VIOLIN))).result
    assert again["logic"] == "Never trust a date without a document.\n"
    assert await garden.text(f"agents/{VIOLIN}/_agent.md") == before


def step_of(slug: str) -> StepContext:
    async def once(name: str, make: Any, /) -> bytes:
        return await make()

    return StepContext(
        run_id="run_2026-02-14_080000_abc123",
        number=1,
        name="load-context",
        request=RunRequest(slug, "manual", {}),
        before={},
        once=once,
        left_s=lambda: 60.0,
        calls=CallTimes(clock=FakeClock()),
    )
