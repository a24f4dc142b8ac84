"""The screens for operators, in a browser: workers and queues, schedules, alerts, policy, authority, and the search."""

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest
from playwright.async_api import Page, Route, expect

from tests.console.conftest import OPERATOR, PATIENCE_S, VIOLIN, ConsoleServer, Screen, visit
from tests.console.test_console import check, serious
from trellis import App, Context, connect_sync
from trellis.app.wiring import new_id
from trellis.engine.alerts import AlertObservation, AlertRound
from trellis.engine.jobs import Actor, Claim, ClaimId, JobId, NewJob, Turn, TypeClaim
from trellis.lifecycles import Role
from trellis.testing import run_until_idle

Open = Callable[..., Awaitable[Screen]]
WORKER = Actor(role=Role.WORKER, name="press-1")
TYPE = "press.print"


def held_job(server: ConsoleServer) -> JobId:
    """A job that a worker holds, and the worker's heartbeat."""
    assert server.served is not None
    ledger = server.served.instance.ledger
    job_id = JobId(new_id())

    async def made() -> None:
        await ledger.submit(OPERATOR, [NewJob(job_id=job_id, type=TYPE, payload=b"{}")])
        await ledger.heartbeat_worker(WORKER, b'{"types":["press.print"],"concurrency":4}')
        asked = Claim(claim_id=ClaimId(new_id()), types=(TypeClaim(type=TYPE),))
        turn = await ledger.turn(Turn(actor=WORKER, claim=asked))
        assert [one.lease.job_id for one in turn.claimed] == [job_id]

    server.run(made())
    return job_id


@pytest.mark.requirement("D35")
async def test_worker_its_lease_and_its_queue_are_shown_and_the_queue_is_paused(
    server: ConsoleServer, open_screen: Open
):
    job_id = held_job(server)
    screen = await open_screen("/console/workers", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page
    worker = page.get_by_role("group", name="Worker processes", exact=True).locator("tr", has_text="press-1")
    await expect(worker).to_contain_text("alive")
    await expect(worker).to_contain_text("1 / 4")
    lease = page.get_by_role("group", name="Leases", exact=True).locator("tr", has_text=job_id)
    await expect(lease).to_contain_text("press-1")
    await expect(lease).to_contain_text(re.compile(r"[12]?\d s"))  # of 30 s, counting down
    queue = page.get_by_role("group", name="Queues and topics", exact=True).locator("tr", has_text=TYPE)
    await queue.get_by_role("button", name=f"Pause {TYPE}", exact=True).click()
    await page.get_by_label("Why (optional)", exact=True).fill("paper is out")
    await page.get_by_role("dialog").get_by_text("The same elsewhere").click()
    await expect(page.get_by_role("dialog")).to_contain_text(f"trellis queues pause {TYPE} --reason 'paper is out'")
    await page.get_by_role("dialog").get_by_role("button", name="Pause", exact=True).click()
    await expect(queue).to_contain_text("paused")
    with connect_sync(server.url, token=server.token(Role.CONTROL_PLANE)) as client:
        assert [one.paused for one in client.system.queues().items if one.type == TYPE] == [True]
        client.system.resume(TYPE)
    await check(screen, "workers")  # until it is asked for again
    await expect(queue.get_by_role("button", name=f"Pause {TYPE}", exact=True)).to_be_visible()


@pytest.mark.requirement("RUN-9")
async def test_schedule_is_paused_and_its_job_is_submitted_now(server: ConsoleServer, open_screen: Open):
    with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        client.schedules.add("nightly", cron="0 2 * * *", tz="Europe/Kyiv", type_="report.daily", payload={"all": True})
    screen = await open_screen("/console/schedules", Role.OWNER)
    page = screen.page
    row = page.locator("tr", has_text="nightly")
    await row.get_by_role("button", name="nightly", exact=True).click()
    await expect(page.get_by_role("dialog")).to_contain_text("Missed instants")
    await page.keyboard.press("Escape")
    await row.get_by_role("button", name="Pause nightly", exact=True).click()
    await page.get_by_role("dialog").get_by_role("button", name="Pause", exact=True).click()
    await expect(row).to_contain_text("paused")
    await check(screen, "schedules")
    await row.get_by_role("button", name="Run now nightly", exact=True).click()
    await page.get_by_role("dialog").get_by_role("button", name="Run now", exact=True).click()
    await page.wait_for_url("**/console/jobs/*")
    await expect(page.locator(".page-head")).to_contain_text("report.daily")
    assert server.status(page.url.rpartition("/")[2]) == "queued"


@pytest.mark.requirement("OBS-4")
async def test_alert_shows_what_to_do_first_and_its_runbook(server: ConsoleServer, open_screen: Open):
    assert server.served is not None
    seen = AlertObservation(
        id=new_id(), name="jobs-wait", subject=TYPE, value=400.0, text=f"A job of type {TYPE} waits."
    )
    checked = AlertRound(mark=0, scopes=(), observed=(seen,))
    server.run(server.served.instance.ledger.observe_alerts(OPERATOR, checked))
    screen = await open_screen("/console/alerts", Role.OWNER)
    page = screen.page
    alert = page.get_by_role("region", name="jobs-wait", exact=True).filter(has_text=seen.text)
    await expect(alert).to_contain_text("Check that a worker serves the type")
    await check(screen, "alerts")
    await alert.get_by_role("button", name="Runbook", exact=True).click()
    await expect(page.get_by_role("dialog").get_by_role("heading", name="What to do", exact=True)).to_be_visible()
    await expect(page.locator("dialog li code").first).to_have_text("trellis queues")
    await screen.shot("runbook")
    assert await serious(page, "dialog") == []


@pytest.mark.requirement("BUS-4")
async def test_policy_is_asked_about_a_job_and_another_one_is_tried(server: ConsoleServer, open_screen: Open):
    with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        client.jobs.submit_topic("job.press.delete", {"page": 1})
    screen = await open_screen("/console/policy?topic=job.press.delete", Role.OWNER)
    page = screen.page
    await page.get_by_label("Kind of actor", exact=True).select_option("service")
    await page.get_by_role("button", name="Decide", exact=True).click()
    await expect(page.locator(".verdict")).to_contain_text("allow")
    await page.get_by_role("button", name="Insert an example", exact=True).click()
    await page.get_by_role("button", name="Decide", exact=True).click()
    await expect(page.locator(".verdict tr.chosen")).to_contain_text("no-deletes-by-services")
    await expect(page.locator(".verdict").first).to_contain_text("only a person may delete")
    await page.get_by_role("button", name="Simulate", exact=True).click()
    await expect(page.get_by_role("group", name="Try another policy", exact=True)).to_contain_text("job.press.delete")
    await check(screen, "policy")


@pytest.mark.requirement("AUTH-7")
async def test_refused_call_leads_to_the_cell_of_the_table_that_decided(server: ConsoleServer, open_screen: Open):
    server.dead_jobs(1, lambda _: "refused, and explained")
    screen = await open_screen("/console/dead-letters", Role.OWNER)
    page = screen.page
    group = page.locator("section.card", has_text="refused, and explained")
    await group.get_by_role("button", name="Requeue (1)", exact=True).click()
    await page.locator("dialog button.primary").click()
    await expect(page.locator("dialog [role=alert]")).to_contain_text("rule jobs.requeue")
    await page.get_by_role("link", name="Why was it refused?", exact=True).click()
    verdict = page.locator(".verdict")
    await expect(verdict).to_contain_text("owner may not requeue jobs.")
    await expect(verdict).to_contain_text("jobs.requeue: owner = no")
    await expect(verdict).to_contain_text("trellis token issue --role control-plane")
    await page.get_by_label("Role", exact=True).select_option("control-plane")
    await expect(verdict).to_contain_text("control-plane may requeue jobs.")
    chosen = page.locator(".matrix tr.chosen")
    await expect(chosen.locator("td.mine")).to_have_text("yes")
    await check(screen, "authority")


async def search(page: Page, text: str) -> None:
    await page.keyboard.press("Control+k")
    await page.get_by_role("combobox", name="Search", exact=True).fill(text)


async def test_search_finds_ids_agents_errors_and_screens_by_keyboard(server: ConsoleServer, open_screen: Open):
    (dead,) = server.dead_jobs(1, lambda _: "the ink has dried up")
    screen = await open_screen("/console/overview", Role.OWNER)
    page = screen.page
    await expect(page.locator("main h1")).to_be_visible()
    await search(page, "ink dried")
    await expect(page.get_by_role("option", name="the ink has dried up")).to_have_attribute("aria-selected", "true")
    await screen.shot("search")
    assert await serious(page, "dialog") == []
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"**/console/jobs/{dead}")
    await search(page, server.run_id)
    await expect(page.get_by_role("option", selected=True)).to_contain_text(server.run_id)
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"**/console/runs/{server.run_id}")
    chosen = page.get_by_role("option", selected=True)
    await search(page, "violin")
    await expect(chosen).to_contain_text(VIOLIN)
    await page.keyboard.press("Enter")
    await page.wait_for_url(f"**/console/agents/{VIOLIN}")
    await search(page, "authority")
    await expect(chosen).to_contain_text("Authority")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Authority", exact=True)).to_be_visible()
    await search(page, "nothing has these words")
    await expect(page.get_by_text("Nothing fits.")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.requirement("OBS-3")
async def test_overview_counts_what_needs_somebody_and_says_why_jobs_are_stuck(
    server: ConsoleServer, open_screen: Open
):
    server.queued_jobs(1, type_="ink.refill")
    screen = await open_screen("/console/overview", Role.OWNER)
    page = screen.page
    tiles = page.get_by_role("region", name="Needs attention", exact=True)
    await expect(tiles.get_by_role("link", name="Stuck jobs")).to_have_class(re.compile("urgent"))
    await expect(page.locator(".causes li", has_text="ink.refill")).to_contain_text("has no live worker; ready jobs: 1")
    await check(screen, "overview")
    await tiles.get_by_role("link", name="Stuck jobs").click()
    await expect(page.get_by_text("Jobs are ready that no live worker serves.")).to_be_visible()


@pytest.mark.requirement("OBS-3", "RUN-4")
async def test_run_shows_the_calls_of_its_steps_and_is_started_again_with_its_parameters(
    server: ConsoleServer, open_screen: Open
):
    with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        first = client.runs.wait(client.runs.start(VIOLIN, {"topic": "bows"}).run_id, timeout_s=PATIENCE_S).run_id
    screen = await open_screen(f"/console/runs/{first}", Role.OWNER)
    page = screen.page
    await expect(page.locator("dl.facts")).to_contain_text("topic = bows")
    await expect(page.locator("svg .call-nlm").first).to_be_attached()
    await page.get_by_text("2 execute-agent").last.click()
    await expect(page.locator(".step[open]")).to_contain_text("notebooklm-query")
    await check(screen, "run-calls")
    await page.get_by_role("button", name="Start again", exact=True).click()
    await expect(page.get_by_label("Name of parameter 1", exact=True)).to_have_value("topic")
    await expect(page.get_by_label("Value of parameter 1", exact=True)).to_have_value("bows")
    await page.get_by_role("button", name="Start", exact=True).click()
    await page.wait_for_url(re.compile(f"/console/runs/(?!{first})"))
    await expect(page.locator("dl.facts")).to_contain_text("topic = bows")


def not_found_after(moment: asyncio.Event) -> Callable[[Route], Awaitable[None]]:
    async def answer(route: Route) -> None:
        await moment.wait()
        await route.fulfill(status=404, json={"status": 404, "code": "NOT_FOUND", "detail": "It left the ledger."})

    return answer


@pytest.mark.requirement("RUN-4")
async def test_run_is_started_again_as_shown_or_says_what_is_no_longer_known(server: ConsoleServer, open_screen: Open):
    """The agent is not among those listed; the answer about the parameters comes late, and says that they are gone."""
    late = asyncio.Event()

    async def unlisted(page: Page) -> None:
        await page.route("**/agents?*", lambda route: route.fulfill(json={"items": [{"slug": "aaa-other"}]}))
        await page.route(f"**/runs/{server.run_id}/request", not_found_after(late))

    screen = await open_screen(f"/console/runs/{server.run_id}", Role.OWNER, prepare=unlisted)
    page = screen.page
    again = page.get_by_role("button", name="Start again", exact=True)
    await expect(again).to_be_disabled()
    late.set()
    await again.click()
    await expect(page.get_by_role("dialog")).to_contain_text("parameters of the earlier run are no longer known")
    chosen = page.get_by_label("Agent", exact=True)
    await expect(chosen.get_by_role("option")).to_have_text([VIOLIN, "aaa-other"])
    assert await chosen.evaluate("box => box.selectedOptions[0].text") == VIOLIN
    async with page.expect_request("**/agents/run") as started:
        await page.get_by_role("button", name="Start", exact=True).click()
    assert (await started.value).post_data_json == {"agent_slug": VIOLIN, "params": {}}
    await page.wait_for_url(re.compile(f"/console/runs/(?!{server.run_id})"))


@pytest.mark.requirement("RUN-4")
async def test_run_can_be_started_again_while_its_parameters_are_asked_for_once_more(
    server: ConsoleServer, open_screen: Open
):
    """They are no longer known. The page asks for all that it shows once more when its stream of events opens."""
    opens, answers = asyncio.Event(), asyncio.Event()
    answers.set()

    async def held(route: Route) -> None:
        await opens.wait()
        await route.continue_()

    async def late(page: Page) -> None:
        await page.route(f"**/runs/{server.run_id}/request", not_found_after(answers))
        await page.route("**/events/stream", held)

    screen = await open_screen(f"/console/runs/{server.run_id}", Role.OWNER, prepare=late)
    page = screen.page
    again = page.get_by_role("button", name="Start again", exact=True)
    await expect(again).to_be_enabled()
    answers.clear()
    async with page.expect_request(f"**/runs/{server.run_id}/request"):
        opens.set()
    await again.click()
    await expect(page.get_by_role("dialog")).to_contain_text("parameters of the earlier run are no longer known")
    answers.set()


async def test_job_or_screen_that_is_not_there_leads_to_the_list(server: ConsoleServer, open_screen: Open):
    screen = await open_screen("/console/jobs/no-such-job", Role.OWNER)
    page = screen.page
    await expect(page.get_by_role("alert")).to_contain_text("There is no job 'no-such-job'")
    assert await serious(page) == []
    await page.get_by_role("link", name="Show the list", exact=True).click()
    await expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()
    await visit(page, "/console/no-such-screen")
    await expect(page.get_by_role("heading", name="There is no such screen", exact=True)).to_be_visible()
    assert await serious(page) == []


@pytest.mark.requirement("RUN-5")
async def test_events_of_a_correlation_id_are_looked_up_and_the_feed_is_followed(
    server: ConsoleServer, open_screen: Open
):
    (dead,) = server.dead_jobs(1, lambda _: "the paper is wet")
    screen = await open_screen(f"/console/jobs/{dead}", Role.OWNER)
    page = screen.page
    await page.locator("dl.facts").get_by_role("link", name=dead).click()
    found = page.get_by_role("group", name="Events", exact=True)
    await expect(found.get_by_role("row")).to_have_count(3)
    await expect(found).to_contain_text("queued → dead_lettered")
    await expect(found).to_contain_text("operator control-plane")
    await check(screen, "events")
    await page.get_by_label("Correlation id", exact=True).fill("")
    await page.get_by_label("Lifecycle", exact=True).select_option("leased-job")  # runs of other tests may still end
    await page.get_by_role("button", name="Look up", exact=True).click()
    await expect(page.get_by_text("Nothing has happened since")).to_be_visible()
    (late,) = server.dead_jobs(1, lambda _: "and now the ink")
    await expect(found.get_by_role("link", name=late).first).to_be_visible()


async def test_act_and_copy_work_over_plain_http_from_another_machine(server: ConsoleServer, open_screen: Open):
    (dead,) = server.dead_jobs(1, lambda _: "the plate is bent", type_="plain.http")

    async def insecure(page: Page) -> None:
        await page.add_init_script("delete Crypto.prototype.randomUUID; delete Navigator.prototype.clipboard")

    path = "/console/dead-letters?q=type%3Aplain.http"
    screen = await open_screen(path, Role.CONTROL_PLANE, prepare=insecure, own=True)
    page = screen.page
    await page.get_by_role("button", name="Requeue (1)", exact=True).click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_text("The same elsewhere").click()
    await dialog.get_by_role("button", name="Copy", exact=True).click()
    await expect(page.locator(".toast", has_text="The text is selected")).to_be_visible()
    assert f"trellis dlq requeue {dead}" in await page.evaluate("getSelection().toString()")
    assert await page.evaluate("[typeof crypto.randomUUID, typeof navigator.clipboard]") == ["undefined"] * 2
    await dialog.get_by_role("button", name="Requeue (1)", exact=True).click()
    await expect(page.locator(".toast", has_text="1 of 1 requeued, 0 refused")).to_be_visible()
    assert server.status(dead) == "queued"


@pytest.mark.requirement("DJ-12")
@pytest.mark.parametrize("leave", ["Stop", "Escape"])
async def test_requeue_that_runs_ends_when_somebody_stops_or_leaves_it(
    server: ConsoleServer, open_screen: Open, leave: str
):
    (dead,) = server.dead_jobs(1, lambda _: "the drum is stuck", type_=f"stop.{leave.lower()}")
    screen = await open_screen(f"/console/dead-letters?q=type%3Astop.{leave.lower()}", Role.CONTROL_PLANE)
    page = screen.page
    asked, ended = asyncio.Event(), asyncio.Event()
    await page.route("**/dlq/requeue", lambda _: asked.set())  # it reaches no gateway, and is not answered
    screen.listen("requestfailed", lambda one: ended.set() if one.url.endswith("/dlq/requeue") else None)
    await page.get_by_role("button", name="Requeue (1)", exact=True).click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Requeue (1)", exact=True).click()
    await asyncio.wait_for(asked.wait(), PATIENCE_S)
    stopped = page.locator(".toast", has_text="0 of 1 requeued, 0 refused")
    if leave == "Stop":
        await dialog.get_by_role("button", name="Stop", exact=True).click()
        await expect(stopped).to_be_visible()
        await expect(dialog.locator("progress")).to_be_visible()
        await expect(dialog).to_contain_text("Stopped. The last request was interrupted")
        await dialog.get_by_role("button", name="Back", exact=True).click()
    else:
        await page.keyboard.press("Escape")
        await expect(stopped).to_be_visible()
    await asyncio.wait_for(ended.wait(), PATIENCE_S)
    await expect(dialog).to_have_count(0)
    assert server.status(dead) == "dead_lettered"


async def test_requeue_of_more_than_are_counted_does_not_call_the_number_exact(
    server: ConsoleServer, open_screen: Open
):
    (dead,) = server.dead_jobs(1, lambda _: "one of many", type_="many.letters")

    async def many(route: Route) -> None:
        letter = {"job_id": dead, "type": "many.letters", "reason_code": "timeout", "last_error": "", "at": ""}
        await route.fulfill(json={"items": [letter] * 20_000, "next_cursor": "more"})

    screen = await open_screen("/console/dead-letters?q=type%3Amany.letters", Role.CONTROL_PLANE)
    page = screen.page
    await expect(page.get_by_role("button", name="Requeue all that match (1)", exact=True)).to_be_visible()
    await page.route("**/dlq?*", many)
    await page.get_by_role("button", name="Requeue all that match (1)", exact=True).click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("Requeue these jobs (20000+)?")
    await expect(dialog).to_contain_text("More than 20000 match: 20000 are requeued, and the rest stays here.")
    await expect(dialog).not_to_contain_text("exact number")
    assert server.status(dead) == "dead_lettered"


@pytest.mark.requirement("DJ-12")
async def test_the_traceback_of_the_last_failure_is_on_the_screen_of_its_job(server: ConsoleServer, open_screen: Open):
    assert server.served is not None
    ledger, app = server.served.instance.ledger, App()

    @app.job("press.fold")
    async def fold(ctx: Context) -> None:
        raise ValueError("the sheet is torn")

    job_id = JobId(new_id())
    server.run(ledger.submit(OPERATOR, [NewJob(job_id=job_id, type="press.fold", payload=b"null", max_attempts=1)]))
    server.run(run_until_idle(app, ledger))
    screen = await open_screen(f"/console/jobs/{job_id}", Role.OWNER)
    failure = screen.page.get_by_label("Last failure", exact=True)
    await expect(failure).to_contain_text("Traceback (most recent call last)")
    await expect(failure).to_contain_text("ValueError: the sheet is torn")
    assert not await serious(screen.page)
