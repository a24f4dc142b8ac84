"""Acts in the console: by keyboard alone, in Ukrainian, and refused to a role without authority."""

import re

import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.conftest import VIOLIN, ConsoleServer, slot_held, visit
from tests.console.test_console import Open
from trellis import connect_sync
from trellis.lifecycles import Role

FOCUS = """button => {
    const active = document.activeElement;
    return active === button ? 'button' : active.matches('.skip') ? 'skip' : '';
}"""
AGENTS_MAX = 20
STOPS_MAX = 150
"""More elements than a screen has between the one with the focus and any other."""


async def press(page: Page, name: str, place: Locator | None = None, key: str = "Tab") -> None:
    """Press a button as somebody without a mouse does: go to it by the Tab key, past the menu, then Enter."""
    button = (place or page).get_by_role("button", name=name, exact=True)
    await expect(button).to_be_enabled()
    for _ in range(STOPS_MAX):
        focus = await button.evaluate(FOCUS)
        if focus == "button":
            return await page.keyboard.press("Enter")
        skips = focus == "skip" and key == "Tab" and place is None
        await page.keyboard.press("Enter" if skips else key)
    raise AssertionError(f"the {key} key does not reach {name}")


async def go_to(page: Page, text: str) -> None:
    """Open what the search finds for a text."""
    await page.keyboard.press("Control+k")
    await page.get_by_role("combobox", name="Search", exact=True).press_sequentially(text)
    await expect(page.get_by_role("option", name=text).first).to_be_visible()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name=text, exact=True)).to_be_visible()


@pytest.mark.requirement("RUN-4", "DJ-12", "D22")
async def test_acts_are_done_by_keyboard_alone_and_in_ukrainian(server: ConsoleServer, open_screen: Open):
    (waiting,), note = server.queued_jobs(1), server.proposal("a note in Ukrainian")
    dead = server.dead_jobs(2, lambda _: "the string has snapped", type_="keys.only")
    screen = await open_screen("/console/overview", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page
    dialog = page.get_by_role("dialog")
    await expect(page.locator("main h1")).to_be_visible()

    with slot_held(server):
        await page.keyboard.press("3")
        await press(page, "Start a run")
        await expect(dialog.get_by_role("option", name=VIOLIN)).to_be_attached()
        for _ in range(AGENTS_MAX):
            if await dialog.get_by_label("Agent", exact=True).input_value() != VIOLIN:
                await page.keyboard.press("ArrowDown")
        await press(page, "Start", dialog)
        await page.wait_for_url("**/console/runs/run_*")
        run_id = page.url.rpartition("/")[2]
        await press(page, "Cancel the run")
        await expect(dialog.get_by_role("button", name="Back", exact=True)).to_be_focused()
        await page.keyboard.press("Enter")  # nothing is cancelled by accident
        await expect(dialog).to_have_count(0)
        await press(page, "Cancel the run")
        await press(page, "Cancel the run", dialog)
        await expect(page.get_by_text("Nothing: it has ended.")).to_be_visible()
        with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
            ended = client.runs.get(run_id)
        assert (ended.agent_slug, ended.status) == (VIOLIN, "failed")

    await go_to(page, waiting)
    await press(page, "Cancel the job")
    await press(page, "Cancel the job", dialog)
    await expect(page.locator(".toast", has_text=waiting)).to_be_visible()
    assert server.status(waiting) == "cancelled"

    await page.keyboard.press("5")
    await expect(page.get_by_role("heading", name="Dead letters", exact=True)).to_be_visible()
    await page.keyboard.press("/")
    await page.keyboard.type("type:keys.only")
    await press(page, "Requeue (2)")
    await expect(dialog).to_contain_text("Requeue these jobs (2)?")
    await press(page, "Requeue (2)", dialog)
    await expect(page.locator(".toast", has_text="2 of 2 requeued, 0 refused")).to_be_visible()
    assert {server.status(one) for one in dead} == {"queued"}

    await press(page, "Українською", key="Shift+Tab")
    await page.keyboard.press("2")
    await visit(page, f"/console/proposals?id={note}")
    await expect(page.locator("article .diff .add")).to_have_text("+a note in Ukrainian")
    await page.keyboard.press("a")
    await expect(dialog).to_contain_text("Схвалити саме цю зміну?")
    await press(page, "Схвалити", dialog)
    await expect(page.locator(".toast", has_text=f"Схвалено: {note}")).to_be_visible()
    assert server.status(note) in {"approved", "applying", "applied"}


@pytest.mark.requirement("AUTH-5", "AUTH-7")
async def test_role_without_authority_is_refused_and_led_to_the_cell_that_decided(
    server: ConsoleServer, open_screen: Open
):
    (waiting,), note = server.queued_jobs(1), server.proposal("a note that a frontend may read")
    screen = await open_screen("/console/overview", Role.FRONTEND)
    page = screen.page
    refusal = page.locator("dialog [role=alert]")
    with slot_held(server), connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        run_id = client.runs.start(VIOLIN).run_id
        for path, act, rule, action in (
            (f"proposals?id={note}", "Approve", "proposals.decide", "decide about a proposal"),
            (f"jobs/{waiting}", "Cancel the job", "jobs.cancel", "cancel jobs"),
            (f"runs/{run_id}", "Cancel the run", "runs.cancel", "cancel a run"),
        ):
            await visit(page, f"/console/{path}")
            await page.locator("main button", has_text=re.compile(f"^{act}")).click()
            await page.get_by_role("dialog").get_by_role("button", name=act, exact=True).click()
            await expect(refusal).to_contain_text(f"rule {rule}")
            await expect(refusal).to_contain_text("trellis token issue --role owner,control-plane")
            await refusal.get_by_role("link", name="Why was it refused?", exact=True).click()
            await expect(page.locator(".verdict")).to_contain_text(f"frontend may not {action}.")
            await expect(page.locator(".verdict")).to_contain_text(f"{rule}: frontend = no")
            await expect(page.locator(".matrix tr.chosen td.mine")).to_have_text("no")
        assert (server.status(note), server.status(waiting)) == ("pending", "queued")
        assert client.runs.get(run_id).status in {"requested", "queued"}
        client.runs.cancel(run_id)
        client.proposals.reject(note, "the test has seen it")


@pytest.mark.requirement("D44")
async def test_reader_of_a_proposal_sees_what_would_change_but_no_memory(server: ConsoleServer, open_screen: Open):
    note = server.proposal("a note that a frontend may read")
    with connect_sync(server.url, token=server.token(Role.ORCHESTRATOR)) as client:
        wish = [{"file": "facts.md", "operation": "append", "content": "- A frontend reads this wish."}]
        fact = client.memory.propose(VIOLIN, "A wish", wish, priority="high").proposalId
    screen = await open_screen(f"/console/proposals?id={note}", Role.FRONTEND)
    page = screen.page
    await expect(page.locator("article .diff .add")).to_have_text("+a note that a frontend may read")
    await visit(page, f"/console/proposals?id={fact}")
    await expect(page.locator("article [role=alert]")).to_contain_text("rule memory.read")
    await expect(page.locator("article pre.json").first).to_contain_text("- A frontend reads this wish.")
    await expect(page.locator("article .diff")).to_have_count(0)
    with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        for one in (note, fact):
            client.proposals.reject(one, "the test has seen it")
