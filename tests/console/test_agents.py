"""Agents in the console: what starts one, what it reads and remembers, its slot and queue, and a run with parameters."""

import pytest
from playwright.async_api import expect

from tests.agents.files import agent_file
from tests.console.conftest import VIOLIN, ConsoleServer, slot_held, visit
from tests.console.test_console import Open, check, serious
from trellis import connect_sync
from trellis.agents.catalog import agent_key
from trellis.lifecycles import Role
from trellis.storage.objects.store import CREATE

KEEPER = "gardener"
TRIGGERS = "\n  manual: true\n  cron: '30 4 * * *'\n  events: [proposal.applied, 'run.failed:archivist-violin']"


def planted(server: ConsoleServer, slug: str = KEEPER, **changes: str) -> None:
    """An agent beside those of the garden."""
    assert server.served is not None
    body = agent_file(slug=slug, **changes)
    server.run(server.served.instance.objects.put(agent_key(slug), body, when=CREATE))


@pytest.mark.requirement("RUN-4")
async def test_agent_is_run_with_parameters_and_waits_where_its_slot_is_held(server: ConsoleServer, open_screen: Open):
    with slot_held(server):
        screen = await open_screen(f"/console/agents/{VIOLIN}", Role.OWNER)
        page = screen.page
        await expect(page.get_by_text("Its slot is free")).to_be_visible()
        await page.get_by_role("button", name="Run now", exact=True).click()
        await page.get_by_role("button", name="Add a parameter", exact=True).click()
        await page.get_by_label("Value of parameter 1", exact=True).fill("3")
        await expect(page.locator("dialog [role=alert]")).to_have_text("A value has no name.")
        await page.get_by_label("Name of parameter 1", exact=True).fill("topics")
        await page.locator("dialog details summary").click()
        command = f"trellis run {VIOLIN} --param topics=3 --gateway {server.url}"
        await expect(page.locator("dialog .command pre")).to_have_text(command)
        await screen.shot("agent-run")
        await page.get_by_role("button", name="Start", exact=True).click()
        await page.wait_for_url("**/console/runs/run_*")
        run_id = page.url.rpartition("/")[2]
        await visit(page, f"/console/agents/{VIOLIN}")
        row = page.locator("tr", has_text=run_id)
        await expect(row).to_contain_text("waits, number 1")
        await screen.shot("agent")
        assert await serious(page) == []
    await expect(page.get_by_text("Its slot is free")).to_be_visible()
    await page.get_by_role("link", name="All its runs", exact=True).click()
    await expect(page.locator(".grid-row", has_text=run_id)).to_contain_text("completed")


@pytest.mark.requirement("D24", "RUN-9")
async def test_agent_shows_its_schedule_its_events_and_is_paused_and_activated(
    server: ConsoleServer, open_screen: Open
):
    planted(server, triggers=TRIGGERS)
    planted(server, slug="broken", model="''")
    screen = await open_screen("/console/agents", Role.OWNER)
    page = screen.page
    await expect(page.locator(".grid-row", has_text="broken")).to_contain_text("malformed")
    await expect(page.locator(".grid-row", has_text=KEEPER)).to_contain_text("30 4 * * *")
    await check(screen, "agents")
    await page.get_by_role("link", name=KEEPER, exact=True).click()
    await expect(page.locator(".chips")).to_contain_text("run.failed:archivist-violin")
    instants = page.locator("dd > div", has_text="04:30:00")
    await expect(instants).to_have_count(5)
    await expect(page.get_by_text("0; after 3 it is stopped")).to_be_visible()
    await page.get_by_role("button", name="Pause", exact=True).click()
    await page.get_by_label("Why (optional)", exact=True).fill("its beds are flooded")
    await page.locator("dialog button.primary").click()
    await expect(page.locator(".page-head .badge")).to_have_text("paused")
    await expect(page.get_by_role("button", name="Run now", exact=True)).to_be_disabled()
    await expect(page.get_by_text("It has no schedule that is due.")).to_be_visible()
    await page.get_by_role("button", name="Activate", exact=True).click()
    await page.locator("dialog button.primary").click()
    await expect(page.locator(".page-head .badge")).to_have_text("active")
    await page.get_by_role("button", name="Pause", exact=True).click()
    assert server.served is not None
    server.run(server.served.instance.objects.put(agent_key(KEEPER), agent_file(slug=KEEPER, model="''")))
    await page.locator("dialog button.primary").click()
    await expect(page.locator(".page-head .badge")).to_have_text("malformed")  # read again after the refusal
    await visit(page, "/console/agents/broken")
    await expect(page.locator(".banner.bad")).to_contain_text("field model")


@pytest.mark.requirement("D44")
async def test_memory_of_an_agent_is_read_in_both_layers_and_each_change_shows_its_words(
    server: ConsoleServer, open_screen: Open
):
    update = {"file": "facts.md", "operation": "append", "content": "- TB-02 is made of snakewood."}
    with connect_sync(server.url, token=server.token(Role.ORCHESTRATOR)) as client:
        made = client.memory.propose(VIOLIN, "One more fact", [update], run_id=server.run_id)
    assert made.status == "auto_applied"
    screen = await open_screen(f"/console/agents/{VIOLIN}?part=memory", Role.OWNER)
    page = screen.page
    await expect(page.locator(".text-file", has_text="- TB-02 is made of snakewood.")).to_be_visible()
    await page.get_by_role("button", name="Timeline", exact=True).click()
    await expect(page.locator(".text-file", has_text=made.proposalId)).to_be_visible()
    await screen.shot("agent-memory")
    await page.get_by_role("button", name="Changes of the memory", exact=True).click()
    change = page.locator(".change", has_text=made.proposalId)
    await expect(change).to_contain_text("facts.md +1")
    await change.get_by_role("button", name="Show the change", exact=True).click()
    await expect(change.locator(".diff .add")).to_have_text("+- TB-02 is made of snakewood.")
    await screen.shot("agent-history")
    assert await serious(page) == []
    await page.get_by_role("button", name="Sources", exact=True).click()
    await page.get_by_text("sources/07-bows.md").click()
    await expect(page.locator(".text-file", has_text="Carbon fibre")).to_be_visible()
    await page.set_viewport_size({"width": 390, "height": 844})
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
