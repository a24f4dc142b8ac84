"""Statuses and messages, as people see them."""

import re
import time

from playwright.async_api import expect

from tests.console.conftest import PATIENCE_S, ROOT, ConsoleServer
from tests.console.test_console import Open
from trellis.agents.definition import AgentStatus
from trellis.http.operation_shapes import WorkerShape
from trellis.lifecycles import LIFECYCLES, Role

STATUSES = ROOT / "console/app/src/texts-statuses.ts"


def test_every_status_has_a_ukrainian_text():
    translated = set(re.findall(r'^  (\w+): "', STATUSES.read_text(), re.MULTILINE))
    workers = WorkerShape.model_json_schema()["properties"]["state"]["enum"]
    states = {state.name for one in LIFECYCLES.values() for state in one.states}
    assert states | set(AgentStatus) | set(workers) <= translated


async def test_status_is_translated_and_its_identifier_is_the_tooltip(server: ConsoleServer, open_screen: Open):
    (dead,) = server.dead_jobs(1, lambda _: "gone", type_="translated.mail")
    screen = await open_screen(f"/console/jobs/{dead}", Role.OWNER, Role.CONTROL_PLANE)
    badge = screen.page.locator(".page-head .badge")
    await expect(badge).to_have_text("dead lettered")
    await screen.page.get_by_role("button", name="Українською", exact=True).click()
    await expect(badge).to_have_text("недоставлено")
    await expect(badge).to_have_attribute("title", "dead_lettered")


async def test_message_is_seen_in_front_of_a_dialog(server: ConsoleServer, open_screen: Open):
    screen = await open_screen(
        "/console/runs", *(Role.OWNER, Role.CONTROL_PLANE), prepare=lambda page: page.clock.install(), own=True
    )
    page = screen.page
    await page.get_by_role("button", name="Start a run", exact=True).click()
    dialog = page.get_by_role("dialog")
    await dialog.locator("details:has(> .tabs) summary").click()
    await page.clock.pause_at(time.time() + PATIENCE_S)  # a message goes after a few seconds; this one stays
    await dialog.get_by_role("button", name="Copy", exact=True).click()
    message = page.locator(".toast", has_text=re.compile("^(Copied|The text is selected)"))
    await expect(message).to_be_visible()
    on_top = """toast => {
        const box = toast.getBoundingClientRect();
        return toast.contains(document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2));
    }"""
    assert await message.evaluate(on_top)
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await expect(message).to_be_visible()
