"""The log of a run: what is recorded about it, in the order of time, and as a text file."""

from pathlib import Path

from playwright.async_api import expect

from tests.console.conftest import ConsoleServer
from tests.console.test_console import Open
from trellis.lifecycles import Role


async def test_log_of_a_run_has_its_events_and_steps_in_order_and_is_downloaded(
    server: ConsoleServer, open_screen: Open, tmp_path: Path
):
    screen = await open_screen(f"/console/runs/{server.run_id}", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page
    shown = page.get_by_label("Log", exact=True)
    await expect(shown).to_contain_text("running → completed")
    await expect(shown).to_contain_text("began")
    async with page.expect_download() as begun:
        await page.get_by_role("button", name="Download as text", exact=True).click()
    file = await begun.value
    assert file.suggested_filename == f"{server.run_id}.log.txt"
    await file.save_as(tmp_path / "log.txt")
    lines = [line.split(maxsplit=2) for line in (tmp_path / "log.txt").read_text().splitlines()]
    times, sources = [one[0] for one in lines], {one[1] for one in lines}
    assert times == sorted(times)
    assert {"event", "step"} <= sources
    assert any("→ completed" in one[2] for one in lines)
