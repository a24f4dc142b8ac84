"""Long lists show what is newest, and say where they end."""

from playwright.async_api import Page, Route, expect

from tests.console.conftest import OPERATOR, ConsoleServer, visit
from tests.console.test_console import Open
from trellis.app.wiring import new_id
from trellis.engine.jobs import DeadLetterReason, Move, ReasonCode, RequestId, Stage
from trellis.lifecycles import Role

DEATHS = 101
"""Each death and each requeue is an event: more than one page of them."""


def restless_job(server: ConsoleServer) -> str:
    """A job that was given up and requeued again and again; the last cause says so."""
    (job_id,) = server.queued_jobs(1, type_="restless")
    death = DeadLetterReason(reason_code=ReasonCode.POLICY_VIOLATION, stage=Stage.INPUT, last_error="again")

    async def moved() -> None:
        assert server.served is not None
        for at in range(DEATHS):
            for target, reason in (("dead_lettered", death), ("queued", None)):
                request, cause = RequestId(new_id()), f"{target} {at}"
                move = Move(job_id=job_id, target=target, request_id=request, cause=cause, death=reason)
                await server.served.instance.ledger.move(OPERATOR, move)

    server.run(moved())
    return job_id


async def test_newest_events_of_a_job_are_shown_first_and_older_ones_on_demand(
    server: ConsoleServer, open_screen: Open
):
    job_id = restless_job(server)
    screen = await open_screen(f"/console/jobs/{job_id}", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page
    rows = page.locator("section.card", has=page.get_by_role("heading", name="Events", exact=True)).locator("tbody tr")
    await expect(rows).to_have_count(200)
    await expect(rows.last).to_contain_text(f"queued {DEATHS - 1}")
    await expect(page.get_by_text("3 older events are not shown.")).to_be_visible()
    await page.get_by_role("button", name="Show older ones", exact=True).click()
    await expect(rows).to_have_count(2 * DEATHS + 1)
    await expect(rows.first).to_contain_text("→ queued")
    await expect(page.get_by_text("older events are not shown")).to_have_count(0)


async def many(page: Page) -> None:
    """A gateway with 120 agents, and as many open alerts as it gives."""

    async def agents(route: Route) -> None:
        after = "cursor=" in route.request.url
        names = [f"agent-{at:03}" for at in (range(60, 120) if after else range(60))]
        items = [{"slug": name, "status": "active", "name": name} for name in names]
        await route.fulfill(json={"items": items, "next_cursor": None if after else "agent-059"})

    async def alerts(route: Route) -> None:
        alert = {"name": "jobs-wait", "text": "x", "action": "y", "raised_at": "2026-01-01T00:00:00Z", "state": "open"}
        await route.fulfill(json={"items": [{**alert, "id": str(at)} for at in range(200)], "evaluated": True})

    await page.route("**/agents?*", agents)
    await page.route("**/alerts?open=true*", alerts)


async def test_lists_of_choices_are_whole_and_counts_say_that_there_are_more(server: ConsoleServer, open_screen: Open):
    screen = await open_screen("/console/runs", Role.OWNER, Role.CONTROL_PLANE, prepare=many)
    page = screen.page
    await page.get_by_role("button", name="Start a run", exact=True).click()
    await expect(page.get_by_label("Agent", exact=True).locator("option")).to_have_count(120)
    await page.keyboard.press("Escape")
    await visit(page, "/console/overview")
    await expect(page.locator("a.tile", has_text="Alerts").locator(".tile-value")).to_have_text("200+")
