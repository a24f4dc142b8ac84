"""A proposal whose target has changed since: the console shows what changed, and approves nothing that cannot be applied."""

import asyncio

import pytest
from playwright.async_api import Route, expect

from tests.bus.safety.holding import held
from tests.console.conftest import VIOLIN, ConsoleServer, visit
from tests.console.test_console import Open, serious
from tests.gateway.world import proposal
from trellis import connect_sync
from trellis.app.wiring import new_id
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.lifecycles import Role
from trellis.proposals import proposal as proposals
from trellis.proposals.proposal import ProposalContent, ProposalSource
from trellis.storage.objects.canonical_json import sha256

LETTERS = "sources/08-letters.md"
GATEWAY = Actor(role=Role.GATEWAY, name="gateway@test")


async def _edit_of_a_text_that_moved_on(server: ConsoleServer) -> JobId:
    """A proposal about a source, and after it another text in that source."""
    assert server.served is not None
    instance, id_ = server.served.instance, JobId(f"prop_2026-01-01_{new_id()[:8]}")
    key = f"agents/{VIOLIN}/{LETTERS}"
    stored = await instance.objects.get(key)
    assert stored is not None
    content = {"summary": "Shorten the letters", "change": {"type": "replace", "text": "# Letters\n"}}
    draft = ProposalContent(action="propose-edit", target=LETTERS, content=content, target_hash=sha256(stored.body))
    source = ProposalSource(type="agent", identity=VIOLIN, run_id=server.run_id)
    body = proposals.body_of(id_, VIOLIN, source, draft, priority="normal")
    await instance.ledger.submit(GATEWAY, [NewJob(job_id=id_, type=proposals.TYPE, lifecycle="proposal", payload=body)])
    await instance.objects.put(key, stored.body + b"\nThe sheet of 1926 was found again.\n")
    return id_


@pytest.mark.requirement("D22")
async def test_proposal_for_a_text_that_has_changed_shows_the_change_and_cannot_be_approved(
    server: ConsoleServer, open_screen: Open
):
    edit = server.run(_edit_of_a_text_that_moved_on(server))
    with connect_sync(server.url, token=server.token(Role.ORCHESTRATOR)) as client:
        wish = [{"file": "facts.md", "operation": "append", "content": "- TB-01 has no hair."}]
        fact = client.memory.propose(VIOLIN, "No hair", wish, priority="high").proposalId
        other = [{"file": "facts.md", "operation": "append", "content": "- The cabinet was moved."}]
        assert client.memory.propose(VIOLIN, "A move", other).status == "auto_applied"

    screen = await open_screen(f"/console/proposals?id={edit}", Role.OWNER)
    page = screen.page
    since = page.locator("section.card", has_text="What has changed since it was proposed")
    await expect(page.locator(".banner.bad")).to_contain_text(f"{LETTERS} has changed since this was proposed")
    await expect(since.locator(".diff .add").last).to_have_text("+The sheet of 1926 was found again.")
    await expect(
        page.locator(".inbox-list button", has_text="Shorten the letters").locator(".badge.bad")
    ).to_be_visible()
    await expect(page.locator(".actions button.primary")).to_be_disabled()
    await page.keyboard.press("a")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await screen.shot("conflict")
    assert await serious(page) == []

    await visit(page, f"/console/proposals?id={fact}")
    await expect(page.locator(".banner.bad")).to_contain_text("the memory was at version")
    await expect(since.locator(".diff .add").last).to_have_text("+- The cabinet was moved.")
    await page.get_by_role("button", name=f"Run {VIOLIN} again", exact=True).click()
    await expect(page.get_by_role("dialog").get_by_label("Agent", exact=True)).to_have_value(VIOLIN)
    await page.keyboard.press("Escape")
    await page.keyboard.press("r")
    await page.keyboard.type("the memory has moved on")
    await page.locator("dialog button.danger").click()
    await expect(page.locator(".toast", has_text=f"Rejected: {fact}")).to_be_visible()
    with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        client.proposals.reject(edit, "the letters have moved on")


@pytest.mark.requirement("D22")
async def test_proposal_is_approved_only_while_its_exact_change_is_shown(server: ConsoleServer, open_screen: Open):
    assert server.served is not None
    order = f"approval-{server.run(held(server.served.instance.ledger, labels={'room': 'the north hall'}))}"
    with connect_sync(server.url, token=server.token(Role.OWNER, Role.ORCHESTRATOR)) as client:
        wishes = [[{"file": "facts.md", "operation": "append", "content": text}] for text in ("- One.", "- Other.")]
        one, other = (client.memory.propose(VIOLIN, "A fact", wish, priority="high").proposalId for wish in wishes)
    may_answer, answers = asyncio.Event(), [False, False, True]

    async def late(route: Route) -> None:
        await may_answer.wait()
        await (route.continue_() if answers.pop(0) else route.abort())

    screen = await open_screen("/console/overview", Role.OWNER)
    page = screen.page
    dialog = page.get_by_role("dialog")
    approve = dialog.get_by_role("button", name="Approve", exact=True)
    await page.route(f"**/proposals/{one}/diff", late)
    await visit(page, f"/console/proposals?id={one}")
    await expect(page.locator(".actions button.primary")).to_be_enabled()
    await page.keyboard.press("a")
    await expect(dialog.locator(".loading")).to_be_visible()
    await expect(approve).to_be_disabled()
    may_answer.set()
    await expect(dialog.get_by_role("alert")).to_be_visible()
    await expect(approve).to_be_disabled()
    await dialog.get_by_role("button", name="Try again", exact=True).click()
    await expect(dialog.locator(".diff .add").last).to_have_text("+- One.")
    await expect(approve).to_be_enabled()
    for place in (dialog, page.locator("article > section")):
        await expect(place.locator(".banner")).to_have_text(
            f"Only one of these and this proposal can be applied, because they change the same version: {other}"
        )
    await page.keyboard.press("Escape")

    await visit(page, f"/console/proposals?id={order}")
    await expect(page.locator("article")).to_contain_text("people-first")
    await page.keyboard.press("a")
    await expect(dialog.locator("pre.json")).to_contain_text('"room": "the north hall"')
    await expect(approve).to_be_enabled()
    with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        for id_ in (one, other, order):
            client.proposals.reject(id_, "the test has seen it")


@pytest.mark.requirement("RUN-5")
async def test_what_could_not_be_confirmed_about_a_proposal_is_shown_before_the_decision(
    server: ConsoleServer, open_screen: Open
):
    assert server.served is not None
    doubt = {"ref": "sources/03-pilots.txt", "excerpt": "Marta drives the crane"}
    id_ = server.run(
        proposal(
            server.served,
            text="Pay 5\u202e001",
            reasoning="It is written there.",
            flags=["citation_not_found:sources/03-pilots.txt"],
            not_found=[doubt],
        )
    )
    screen = await open_screen(f"/console/proposals?id={id_}", Role.OWNER)
    page = screen.page
    listed = page.locator(".inbox-list [aria-current=true]")
    await expect(listed.get_by_text("doubtful")).to_be_visible()
    await expect(listed.locator(".summary")).to_have_text(r"Pay 5\u202e001")
    await expect(page.locator("figure.quote.unverified blockquote")).to_have_text(doubt["excerpt"])
    await expect(page.locator(".actions button.primary")).to_be_enabled()
    await page.keyboard.press("a")
    dialog = page.get_by_role("dialog")
    for place in (page.get_by_role("article"), dialog):
        await expect(place.get_by_role("note").first).to_contain_text("citation_not_found:sources/03-pilots.txt")
        await expect(place.get_by_role("note").first).to_contain_text(
            "Not in sources/03-pilots.txt: “Marta drives the crane”"
        )
        await expect(place.get_by_text("characters that cannot be seen").first).to_contain_text(r"\u202e")
    await expect(dialog.locator(".diff .add").last).to_contain_text(r"Pay 5\u202e001")
    await page.keyboard.press("Escape")

    draft = ProposalContent(action="propose-edit", target="sources/a\u3164.md", content={"summary": "One word"})
    source = ProposalSource(type="agent", identity=VIOLIN, run_id=server.run_id)
    other = JobId(f"prop_2026-01-01_{new_id()[:8]}")
    body = proposals.body_of(other, VIOLIN, source, draft, priority="normal")
    job = NewJob(job_id=other, type=proposals.TYPE, lifecycle="proposal", payload=body)
    server.run(server.served.instance.ledger.submit(GATEWAY, [job]))
    await visit(page, f"/console/proposals?id={other}")
    await expect(page.get_by_text("characters that cannot be seen").first).to_contain_text(r"\u3164")
    await page.keyboard.press("r")
    await expect(dialog).to_contain_text(r"propose-edit sources/a\u3164.md")
