"""A person is asked once for the same, whoever proposes it and however often: on either ledger, also when all come at the same moment."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.runs.conftest import GATEWAY, ORCHESTRATOR, Stand
from tests.runs.test_proposal import EDIT, LOGIC, MEMORY, OWNER
from trellis.engine.jobs import Actor, JobId, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, SweepOptions
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.proposals import proposal as proposals
from trellis.proposals.proposal import EqualProposal, Proposal, ProposalContent, sources_changed

SLUG = "archivist-violin"
AT_ONCE = 8
BOWS = {"sources/bows.md": "aa", "sources/pegs.md": "bb"}
CITED = {
    "summary": "94 is wrong",
    "change": {"type": "append", "text": "see pegs"},
    "citations": [{"ref": "sources/pegs.md", "excerpt": "88"}],
}
NOTE = ProposalContent(action="propose-comment", target="sources/bows.md", content=CITED, target_hash="aa")


@pytest.fixture
async def either(either_url: str) -> AsyncGenerator[Ledger]:
    ledger = await open_ledger(either_url)
    yield ledger
    await ledger.close()


def of_run(number: int, draft: ProposalContent, *, sources: dict[str, str] | None = None, **options: str) -> Proposal:
    run_id = f"run_2026-02-14_080000_{number:06}"
    return proposals.make_proposal(run_id, SLUG, 1, draft, sources=BOWS if sources is None else sources, **options)


async def stored(ledger: Ledger, proposal: Proposal) -> JobId | EqualProposal:
    (answer,) = await proposals.store_proposals(ledger, ORCHESTRATOR, [proposal])
    return answer


async def made(ledger: Ledger) -> list[JobId]:
    return [job.job_id for job in (await ledger.jobs(JobFilter(lifecycle="proposal"), limit=50)).jobs]


async def reject(ledger: Ledger, proposal: Proposal) -> None:
    await proposals.decide_proposal(
        ledger, OWNER, proposal.id, approve=False, note="the source is right", request_id=RequestId(proposal.id)
    )


@pytest.mark.requirement("PIPE-11")
async def test_proposal_that_waits_for_a_person_is_not_repeated_by_another_run(either: Ledger):
    first, second = of_run(1, NOTE), of_run(2, NOTE)
    assert await stored(either, first) == first.id
    assert await stored(either, second) == EqualProposal(id=first.id, status="pending")
    other_words = ProposalContent(
        action=NOTE.action, target=NOTE.target, content={**CITED, "summary": "x"}, target_hash="aa"
    )
    assert await stored(either, of_run(3, other_words)) == EqualProposal(id=first.id, status="pending")
    assert await stored(either, first) == first.id, "a step that is done again finds its own"
    assert await made(either) == [first.id]


@pytest.mark.requirement("PIPE-11")
async def test_concurrent_runs_with_equal_proposals_create_one(either: Ledger, monkeypatch: pytest.MonkeyPatch):
    """All of them find that nothing equal is there before any of them goes on."""
    looked, look = asyncio.Barrier(AT_ONCE), proposals.find_equal

    async def together(*given: Any, **options: Any) -> EqualProposal | None:
        found = await look(*given, **options)
        if found is None:
            await looked.wait()
        return found

    monkeypatch.setattr(proposals, "find_equal", together)
    answers = await asyncio.gather(*(stored(either, of_run(number, NOTE)) for number in range(AT_ONCE)))
    (winner,) = await made(either)
    assert [answer for answer in answers if isinstance(answer, str)] == [winner]
    assert answers.count(EqualProposal(id=winner, status="pending")) == AT_ONCE - 1


@pytest.mark.requirement("PIPE-11")
async def test_rejected_proposal_comes_again_only_when_its_sources_changed(either: Ledger):
    first = of_run(1, NOTE)
    await stored(either, first)
    await reject(either, first)
    rejected = EqualProposal(id=first.id, status="rejected")
    assert await stored(either, of_run(2, NOTE)) == rejected
    assert await stored(either, of_run(3, NOTE, sources={**BOWS, "sources/bows.md": "other"})) == rejected, "not cited"
    changed = of_run(4, NOTE, sources={**BOWS, "sources/pegs.md": "other"})
    assert await stored(either, changed) == changed.id


@pytest.mark.requirement("PIPE-11")
async def test_a_proposal_that_expired_or_can_no_longer_be_applied_may_come_again(stand: Stand):
    first = of_run(1, NOTE)
    await stored(stand.ledger, first)
    now_other = ProposalContent(action=NOTE.action, target=NOTE.target, content=CITED, target_hash="other")
    fresh = of_run(2, now_other)
    assert await stored(stand.ledger, fresh) == fresh.id, "the first is for a text that is gone"
    assert isinstance(await stored(stand.ledger, of_run(4, NOTE)), EqualProposal), "not while the first is pending"
    for _ in range(73):
        stand.clock.advance(3600.0)
        await stand.ledger.sweep(Actor(role=Role.SWEEPER, name="test"), SweepOptions(elect=False))
    again = of_run(3, NOTE)
    assert await stored(stand.ledger, again) == again.id


async def test_memory_updates_that_need_no_person_are_all_made(stand: Stand):
    for number in (1, 2):
        proposal = of_run(number, MEMORY)
        assert await stored(stand.ledger, proposal) == proposal.id
        await proposals.auto_approve(stand.ledger, GATEWAY, proposal.id, json.loads(proposal.body))


async def test_equal_drafts_of_one_run_become_one_proposal(stand: Stand):
    one, twin, other = (
        proposals.make_proposal("run_2026-02-14_080000_000001", SLUG, number, draft)
        for number, draft in enumerate((EDIT, EDIT, LOGIC), 1)
    )
    answers = await proposals.store_proposals(stand.ledger, ORCHESTRATOR, [one, twin, other])
    assert answers == [one.id, EqualProposal(id=one.id, status="pending"), other.id]


async def test_equal_drafts_of_one_run_name_the_proposal_that_is_stored(stand: Stand):
    waiting = of_run(1, EDIT)
    await stored(stand.ledger, waiting)
    twins = [proposals.make_proposal("run_2026-02-14_080000_000002", SLUG, number, EDIT) for number in (1, 2)]
    answers = await proposals.store_proposals(stand.ledger, ORCHESTRATOR, twins)
    assert answers == [EqualProposal(id=waiting.id, status="pending")] * 2
    assert await made(stand.ledger) == [waiting.id]


@pytest.mark.parametrize(
    "before, now, changed",
    [
        ({"a": "1", "b": "1"}, {"a": "1", "b": "2"}, False),
        ({"a": "1"}, {"a": "2"}, True),
        ({"a": "1"}, {"b": "1"}, True),
        (None, {"a": "1"}, False),
    ],
    ids=["another", "cited", "gone", "unknown"],
)
def test_only_sources_that_are_cited_count(before: dict[str, str] | None, now: dict[str, str], changed: bool):
    content = {"citations": [{"ref": "a", "excerpt": "x"}]}
    bodies = [{"content": content, **({} if one is None else {"sources_read": one})} for one in (before, now)]
    assert sources_changed(*bodies) is changed


def test_without_citations_every_source_counts():
    bodies = [{"content": {}, "sources_read": {"a": "1", "b": b}} for b in ("1", "2")]
    assert sources_changed(*bodies)
