"""Artifacts in the console: one view for each type, citations compared with the sources, two compared word by word."""

import pytest
from playwright.async_api import expect

from tests.artifacts.desk import draft
from tests.console.artifacts import BOWS, FOUND, brief, finalized
from tests.console.conftest import ConsoleServer, visit
from tests.console.test_console import Open, serious
from trellis.artifacts.content import JobType
from trellis.lifecycles import Role

INVENTED = "Every violin bow weighs exactly 60 g."


@pytest.mark.requirement("ART-2")
async def test_artifact_shows_which_citations_are_in_its_sources_and_leads_to_the_passage(
    server: ConsoleServer, open_screen: Open
):
    first = finalized(server, brief("A bow weighs about 60 g.", "TB-03 weighs 61 g.", [FOUND]))
    second = finalized(server, brief("A bow weighs 58 to 63 g.", "TB-03 weighs 61 g.", [FOUND, INVENTED]))
    screen = await open_screen(f"/console/artifacts?q=run:{server.run_id}", Role.OWNER)
    page = screen.page
    await expect(page.locator(".grid-row", has_text=second)).to_contain_text("RESEARCH BRIEF")
    await screen.shot("artifacts")
    await page.get_by_role("link", name=second, exact=True).click()
    await expect(page.get_by_role("heading", name="What a bow weighs", exact=True)).to_be_visible()
    await expect(page.locator(".page-head .badge.good")).to_contain_text("final since")
    await expect(page.get_by_text("1 of 2 citations found word for word")).to_be_visible()
    await expect(page.locator(".quote.verified")).to_contain_text(FOUND)
    await expect(page.locator(".quote.unverified")).to_contain_text(INVENTED)
    await screen.shot("artifact")
    assert await serious(page) == []
    await page.locator("button.cite.good", has_text=BOWS).click()
    await expect(page.locator("dialog mark")).to_be_in_viewport()
    assert await page.locator("dialog mark").inner_text() == FOUND
    await page.keyboard.press("Escape")

    await page.get_by_label("Compare with", exact=True).select_option(first)
    await expect(page.locator(".diff .remove del").first).to_have_text("about ")
    await expect(page.locator(".diff .add").first).to_have_text("+A bow weighs 58 to 63 g.")
    await expect(page.locator(".diff .add", has_text=INVENTED)).to_be_visible()
    await screen.shot("artifacts-compared")
    assert await serious(page) == []


@pytest.mark.requirement("ART-2")
async def test_every_type_of_artifact_has_a_view_of_its_own(server: ConsoleServer, open_screen: Open):
    made = {one: finalized(server, draft(one), one) for one in (JobType.BRIEF, JobType.PROPOSAL_PREPROCESS)}
    screen = await open_screen(f"/console/artifacts/{made[JobType.BRIEF]}", Role.OWNER)
    page = screen.page
    await expect(page.locator(".prose")).to_have_text("A bow is strung.")
    await expect(page.locator(".facts .pair")).to_contain_text("Bow")
    await visit(page, f"/console/artifacts/{made[JobType.PROPOSAL_PREPROCESS]}")
    await expect(page.locator(".diff .add", has_text='"tags"')).to_be_visible()
    await expect(page.locator(".badge.warn", has_text="warning")).to_be_visible()
    await expect(page.locator("meter")).to_have_attribute("value", "0.91")
    await screen.shot("artifact-draft")
    await page.set_viewport_size({"width": 390, "height": 844})
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert await serious(page) == []
