"""Proposals: deterministic, decided by people, and never more than their action allows."""

import json

import pytest

from tests.runs.conftest import GATEWAY, ORCHESTRATOR, Stand
from trellis.documents.errors import NoteTooShort, ProposalConflict, ProposalNotFound
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import Actor, JobId, Moved, NotMoved, RequestId
from trellis.engine.records import JobFilter, SweepOptions
from trellis.lifecycles import Role
from trellis.proposals import proposal as proposals
from trellis.proposals.proposal import Proposal, ProposalContent, has_lines

RUN = "run_2026-02-14_080000_abc123"
OWNER = Actor(role=Role.OWNER, name="anna")
EDIT = ProposalContent(action="propose-edit", target="sources/bows.md", content={"text": "new"}, target_hash="ab")
MEMORY = ProposalContent(action="memory-update", target="facts.md", content={"operation": "append", "content": "- a"})
LOGIC = ProposalContent(action="logic-update", target="logic", content={"text": "do otherwise"})


async def stored(stand: Stand, draft: ProposalContent, *, priority: str = "normal") -> Proposal:
    proposal = proposals.make_proposal(RUN, "archivist-violin", 1, draft, priority=priority)
    assert await proposals.store_proposals(stand.ledger, ORCHESTRATOR, [proposal]) == [proposal.id]
    return proposal


async def published(stand: Stand, proposal: Proposal) -> dict[str, object]:
    put = proposals.publication(proposal.body, await stand.ledger.events(proposal.id))
    assert put.key == f"agents/archivist-violin/proposals/{proposal.id}.json"
    return json.loads(put.body)


@pytest.mark.requirement("PIPE-7", "PIPE-11", "D21")
async def test_storing_the_same_proposals_again_makes_no_second_one(stand: Stand):
    proposal = await stored(stand, EDIT)
    await stored(stand, EDIT)
    assert len((await stand.ledger.jobs(JobFilter(lifecycle="proposal"), limit=10)).jobs) == 1
    assert (await published(stand, proposal))["status"] == "pending"


async def test_proposal_with_a_used_id_and_another_body_is_refused(stand: Stand):
    proposal = await stored(stand, EDIT)
    other = proposals.make_proposal(RUN, "archivist-violin", 2, LOGIC)
    forged = Proposal(id=proposal.id, run_id=RUN, body=other.body)
    with pytest.raises(ProposalConflict):
        await proposals.store_proposals(stand.ledger, ORCHESTRATOR, [forged])


@pytest.mark.requirement("PIPE-7", "D22")
@pytest.mark.parametrize(
    "draft, priority, expected",
    [(MEMORY, "normal", True), (MEMORY, "high", False), (LOGIC, "normal", False), (EDIT, "normal", False)],
    ids=["memory", "memory-high", "logic", "edit"],
)
async def test_only_a_memory_update_of_normal_priority_approves_itself(
    stand: Stand, draft: ProposalContent, priority: str, expected: bool
):
    proposal = await stored(stand, draft, priority=priority)
    body = json.loads(proposal.body)
    assert await proposals.auto_approve(stand.ledger, GATEWAY, proposal.id, body) is expected
    document = await published(stand, proposal)
    assert document["status"] == ("auto_approved" if expected else "pending")
    assert body["requiresHumanReview"] is (draft is LOGIC or priority == "high")


@pytest.mark.requirement("PIPE-7")
async def test_words_of_the_model_change_neither_kind_nor_priority(stand: Stand):
    sly = {"text": "x", "requiresHumanReview": False, "priority": "normal", "action": "memory-update", "id": "prop_1"}
    proposal = await stored(stand, ProposalContent(action="logic-update", target="logic", content=sly))
    body = json.loads(proposal.body)
    assert (body["action"], body["requiresHumanReview"]) == ("logic-update", True)
    assert not await proposals.auto_approve(stand.ledger, GATEWAY, proposal.id, body)


@pytest.mark.requirement("D22")
async def test_a_person_approves_once_and_the_document_says_who(stand: Stand):
    proposal = await stored(stand, EDIT)
    for _ in range(2):
        answer = await proposals.decide_proposal(
            stand.ledger, OWNER, proposal.id, approve=True, note="good find", request_id=RequestId("r1")
        )
        assert isinstance(answer, Moved)
    document = await published(stand, proposal)
    approval = document["approval"]
    assert document["status"] == "approved"
    assert isinstance(approval, dict)
    assert (approval["decided_by"], approval["decision_note"]) == ("anna", "good find")
    assert document["version"] == 2


@pytest.mark.requirement("D22")
@pytest.mark.parametrize("note", [None, "", "too short", "          x        "])
async def test_rejecting_needs_a_reason(stand: Stand, note: str | None):
    proposal = await stored(stand, EDIT)
    with pytest.raises(NoteTooShort):
        await proposals.decide_proposal(
            stand.ledger, OWNER, proposal.id, approve=False, note=note, request_id=RequestId("r1")
        )
    assert (await published(stand, proposal))["status"] == "pending"


@pytest.mark.requirement("D22")
async def test_a_decision_is_final(stand: Stand):
    proposal = await stored(stand, EDIT)
    no = await proposals.decide_proposal(
        stand.ledger, OWNER, proposal.id, approve=False, note="the source is right", request_id=RequestId("r1")
    )
    assert isinstance(no, Moved)
    late = await proposals.decide_proposal(
        stand.ledger, OWNER, proposal.id, approve=True, note=None, request_id=RequestId("r2")
    )
    assert isinstance(late, NotMoved)
    assert late.state == "rejected"


@pytest.mark.requirement("AUTH-6")
@pytest.mark.parametrize("role", [role for role in Role if role is not Role.OWNER])
async def test_only_a_person_decides_a_proposal(stand: Stand, role: Role):
    proposal = await stored(stand, EDIT)
    with pytest.raises(NotAllowed):
        await proposals.decide_proposal(
            stand.ledger, Actor(role=role, name="x"), proposal.id, approve=True, note=None, request_id=RequestId("r")
        )
    assert (await published(stand, proposal))["status"] == "pending"


async def test_unknown_proposal_is_not_found(stand: Stand):
    with pytest.raises(ProposalNotFound, match="prop_nothing"):
        await proposals.decide_proposal(
            stand.ledger, OWNER, JobId("prop_nothing"), approve=True, note=None, request_id=RequestId("r")
        )


@pytest.mark.requirement("D22")
async def test_an_undecided_proposal_expires_after_three_days(stand: Stand):
    proposal = await stored(stand, EDIT)
    stand.clock.advance(proposals.TTL_S + 1)
    for _ in range(3):
        await stand.ledger.sweep(Actor(role=Role.SWEEPER, name="test"), SweepOptions(elect=False))
    document = await published(stand, proposal)
    assert document["status"] == "expired"
    assert proposals.TTL_S == 72 * 3600


@pytest.mark.parametrize("block", ["plain", "    if x:\n        y", "- item  ", "  - nested\n  - more\n"])
def test_a_file_has_the_lines_that_were_appended_to_it(block: str):
    assert has_lines(f"# Title\n\n{block}\nmore\n", block)
    assert has_lines(f"# Title\r\n\r\n{block}\r\nmore\r\n".replace("\n", "\r\n").replace("\r\r", "\r"), block)
    assert not has_lines(f"# Title\n\nnot {block}\nmore\n", block)
