"""The console, as a person uses it: in a browser, by mouse and by keyboard alone, in two languages."""

import gzip
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from tests.console.conftest import ROOT, VIOLIN, ConsoleServer, Screen, visit
from trellis import connect_sync
from trellis.gateway.console import FILES, PAGE
from trellis.lifecycles import Role

Open = Callable[..., Awaitable[Screen]]
AXE = ROOT / "console" / "node_modules" / "axe-core" / "axe.min.js"
HOSTILE = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>\"'>javascript:window.hacked=1"
NUMBERED = 5
"""How many screens of the menu are reached by a number key, at least."""


@pytest.mark.requirement("RUN-5")
async def test_run_is_started_and_watched_to_its_end(server: ConsoleServer, open_screen: Open):
    screen = await open_screen("/console/runs", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page
    await page.get_by_role("button", name="Start a run").click()
    await page.get_by_label("Agent").select_option(VIOLIN)
    await page.get_by_role("button", name="Start", exact=True).click()
    await expect(page.locator(".page-head .badge")).to_have_text("completed")
    started = page.url.rpartition("/")[2]
    await expect(page.locator(".toast", has_text=f"completed: {started}")).to_be_visible()
    await expect(page.get_by_text("4 of 4 steps")).to_be_visible()
    await expect(page.locator(".bar-step")).to_have_count(5)  # one of them explains the colour
    await expect(page.locator(".state-box.current")).to_have_count(1)
    await expect(page.locator(".edge.taken")).to_have_count(3)
    await expect(page.get_by_text("Nothing: it has ended.")).to_be_visible()
    await screen.shot("run")
    await page.emulate_media(color_scheme="dark")
    await screen.shot("run-dark")


@pytest.mark.requirement("D22")
async def test_proposal_is_approved_and_another_rejected_by_keyboard_alone(server: ConsoleServer, open_screen: Open):
    screen = await open_screen(f"/console/proposals?id={server.proposals[-1]}", Role.OWNER)
    page = screen.page
    entries = page.locator(".inbox-list button")
    await expect(entries.first).to_be_visible()
    before = await entries.count()
    await expect(page.locator(".diff .add").first).to_be_visible()
    await expect(page.locator(".quote.verified").first).to_be_visible()
    first = await page.locator("article").get_attribute("aria-label")
    await page.keyboard.press("j")
    await expect(page.locator("article")).not_to_have_attribute("aria-label", first or "")
    await expect(page.locator("article .diff .add").first).to_be_visible()
    await expect(page.locator(".quote.verified").first).to_be_visible()
    await screen.shot("proposals")
    await page.keyboard.press("k")
    await expect(page.locator("article")).to_have_attribute("aria-label", first or "")

    await page.keyboard.press("a")
    await expect(page.get_by_role("dialog")).to_contain_text("Approve exactly this change?")
    await expect(page.locator("dialog .diff .add").first).to_be_visible()
    await screen.shot("approve")
    await page.keyboard.press("Enter")  # the focus is on the way back: nothing is approved by accident
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await expect(entries).to_have_count(before)
    await page.keyboard.press("a")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.locator(".toast")).to_contain_text("Approved: prop_")
    await expect(entries).to_have_count(before - 1)

    await page.keyboard.press("r")
    await page.keyboard.type("too short")
    await expect(page.locator("dialog button.danger")).to_be_disabled()
    await page.keyboard.type(", says the keeper")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(entries).to_have_count(before - 2)
    await page.get_by_role("button", name="rejected").click()
    await expect(page.locator("article")).to_contain_text("rejected")
    rejected = re.findall(r"Rejected: (prop_\S+)", await page.locator(".toasts").inner_text())
    await page.goto(f"{server.url}/console/proposals?status=rejected&id={rejected[-1]}")
    await expect(page.locator("article")).to_contain_text("too short, says the keeper")


@pytest.mark.requirement("D22")
async def test_dialog_of_a_decision_stays_with_its_proposal(server: ConsoleServer, open_screen: Open):
    first = server.proposal("the first note")
    screen = await open_screen("/console/proposals", Role.OWNER)
    page = screen.page
    dialog, entries = page.get_by_role("dialog"), page.locator(".inbox-list button")
    await expect(page.locator("article .diff .add")).to_have_text("+the first note")
    await expect(page).to_have_url(re.compile(f"id={first}"))
    await page.keyboard.press("a")
    await expect(dialog).to_contain_text(f"You approve version 1 of {first}.")
    second = server.proposal("the second note")
    await expect(entries.first).to_contain_text("the second note")
    await expect(dialog).to_contain_text(f"You approve version 1 of {first}.")
    await expect(dialog.locator(".diff .add")).to_have_text("+the first note")

    with connect_sync(server.url, token=server.token(Role.OWNER, name="taras")) as client:
        client.proposals.reject(first, "somebody else was faster")
        await expect(dialog).to_have_count(0)
        await expect(page.locator(".toast")).to_contain_text(f"{first} was changed or decided meanwhile")
        await page.keyboard.press("j")
        await expect(page.locator("article .diff .add")).to_have_text("+the second note")
        await expect(dialog).to_have_count(0)
        client.proposals.reject(second, "the test has seen it")


@pytest.mark.requirement("D22")
async def test_proposals_are_loaded_page_by_page_and_one_outside_of_the_list_is_decided_by_key(
    server: ConsoleServer, open_screen: Open
):
    oldest, *newer = [server.proposal(f"page note {number}") for number in range(3)]

    async def short_pages(page: Page) -> None:
        async def shortened(route: Route) -> None:
            await route.continue_(url=route.request.url.replace("limit=200", "limit=2"))

        await page.route("**/proposals?*limit=200*", shortened)

    screen = await open_screen(f"/console/proposals?id={oldest}", Role.OWNER, prepare=short_pages)
    page = screen.page
    listed = page.locator(".inbox-list button", has_text="page note")
    await expect(listed).to_have_count(2)
    await expect(page.locator(".nav .count").first).to_have_text("2+")
    await expect(page.locator("article .diff .add")).to_have_text("+page note 0")
    await page.keyboard.press("a")
    await expect(page.get_by_role("dialog")).to_contain_text(oldest)
    await page.keyboard.press("Escape")
    await page.get_by_role("button", name="Load more").click()
    await expect(listed).to_have_count(3)
    await page.keyboard.press("r")
    await page.keyboard.type("the test has seen it")
    await page.locator("dialog button.danger").click()
    await expect(listed).to_have_count(2)
    with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        for one in newer:
            client.proposals.reject(one, "the test has seen it")


async def test_citation_leads_to_the_marked_passage_of_its_source(server: ConsoleServer, open_screen: Open):
    screen = await open_screen(f"/console/proposals?status=all&id={server.proposals[-1]}", Role.OWNER)
    quote = screen.page.locator(".quote.verified").first
    cited = await quote.locator("blockquote").inner_text()
    await quote.get_by_role("button", name="Show in the source").click()
    await expect(screen.page.locator("dialog mark")).to_be_in_viewport()
    assert (await screen.page.locator("dialog mark").inner_text()).split() == cited.split()
    await screen.shot("citation")


@pytest.mark.requirement("DJ-12")
async def test_group_of_dead_letters_is_requeued_after_its_exact_number_was_shown(
    server: ConsoleServer, open_screen: Open
):
    ids = server.dead_jobs(3, lambda at: f"mailbox {at} is full")
    server.dead_jobs(1, lambda _: "no such host")
    screen = await open_screen("/console/dead-letters", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page
    group = page.locator("section.card", has_text="is full")
    await expect(group).to_contain_text("jobs: 3")
    await screen.shot("dead-letters")
    await group.get_by_role("button", name="Requeue (3)").click()
    await expect(page.get_by_role("dialog")).to_contain_text("Requeue these jobs (3)?")
    await page.locator("dialog button.primary").click()
    await expect(page.locator(".toast")).to_contain_text("3 of 3 requeued, 0 refused")
    await expect(group).to_have_count(0)
    assert {server.status(one) for one in ids} == {"queued"}
    await page.get_by_role("combobox", name="Filter").fill("type:mail.send host")
    await expect(page.get_by_role("button", name="Requeue all that match (1)")).to_be_visible()


@pytest.mark.requirement("DJ-12")
async def test_all_that_a_filter_matches_are_counted_and_requeued_by_the_gateway(
    server: ConsoleServer, open_screen: Open
):
    ids = server.dead_jobs(230, lambda at: f"page {at} of {HOSTILE}", type_="bulk.import")
    (other,) = server.dead_jobs(1, lambda _: "not of this type", type_="bulk.other")
    screen = await open_screen("/console/dead-letters?q=type%3Abulk.import", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.url.endswith("/dlq/requeue") else None)
    await page.get_by_role("button", name="Requeue all that match (230)").click()
    await expect(page.get_by_role("dialog")).to_contain_text("Requeue these jobs (230)?")
    assert sent == [], "it is only counted so far"
    await page.get_by_label("Why (optional)").fill("the bulk is mended")
    await screen.shot("requeue")
    await page.locator("dialog button.primary").click()
    await expect(page.locator(".toast")).to_contain_text("230 of 230 requeued, 0 refused")
    reason = {"filter": {"type": "bulk.import"}, "reason": "the bulk is mended"}
    assert sent == [{**reason, "limit": 200}, {**reason, "limit": 30}]
    assert {server.status(one) for one in (ids[0], ids[-1])} == {"queued"}
    assert server.status(other) == "dead_lettered"


@pytest.mark.requirement("AUTH-5")
async def test_refusal_names_the_rule_and_the_way_out(server: ConsoleServer, open_screen: Open):
    server.dead_jobs(1, lambda _: "refused for the owner")
    screen = await open_screen("/console/dead-letters", Role.OWNER)
    page = screen.page
    await (
        page.locator("section.card", has_text="refused for the owner").get_by_role("button", name="Requeue (1)").click()
    )
    await page.locator("dialog button.primary").click()
    await expect(page.locator("dialog [role=alert]")).to_contain_text("rule jobs.requeue")
    await expect(page.locator("dialog [role=alert]")).to_contain_text("trellis token issue --role owner,control-plane")


async def test_sign_in_by_token_by_link_and_out(server: ConsoleServer, open_screen: Open):
    screen = await open_screen("/console/runs")
    page = screen.page
    await page.get_by_label("Token").fill("no token at all")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("alert")).to_contain_text("This is no token")
    wrong = server.token(Role.OWNER)[:-4] + "AAAA"
    await page.get_by_label("Token").fill(wrong)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("alert")).to_contain_text("did not take the token")
    await screen.shot("sign-in")
    await page.get_by_label("Token").fill(server.token(Role.OWNER))
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_label("Token")).to_be_visible()

    code = server.codes.new_code()
    linked = await open_screen(f"/console/proposals#code={code}")
    await expect(linked.page.get_by_role("heading", name="Proposals")).to_be_visible()
    assert "code" not in linked.page.url
    await expect(linked.page.locator(".who")).to_have_text("iryna: owner, control-plane")
    again = await open_screen(f"/#code={code}")
    await expect(again.page.get_by_role("alert")).to_contain_text("it was used before")


@pytest.mark.requirement("PIPE-13")
async def test_console_keeps_no_domain_data_in_the_browser(server: ConsoleServer, open_screen: Open):
    screen = await open_screen(f"/console/runs/{server.run_id}", Role.OWNER)
    await expect(screen.page.locator(".page-head .badge")).to_have_text("completed")
    kept = await screen.page.evaluate("[Object.keys(sessionStorage), Object.keys(localStorage)].flat()")
    routing = [one for one in kept if one.startswith("tsr-")]
    assert sorted(set(kept) - set(routing)) == ["seeded", "trellis.token"]
    assert await screen.page.context.cookies() == []


@pytest.mark.requirement("PIPE-13", "RUN-5")
async def test_gateway_that_is_gone_leaves_what_was_known_and_comes_back(server: ConsoleServer, open_screen: Open):
    screen = await open_screen("/console/runs", Role.OWNER)
    page = screen.page
    rows = page.locator(".grid-row")
    await expect(rows.first).to_be_visible()
    known = await rows.count()
    server.stop()
    try:
        await expect(page.get_by_text("The gateway does not answer. You see what was last known at")).to_be_visible()
        assert await rows.count() == known
        await screen.shot("offline")
    finally:
        server.start()
    await expect(page.locator(".side-foot [role=status]")).to_contain_text("Live")
    await expect(page.get_by_text("The gateway does not answer.")).to_have_count(0)


async def test_filter_completes_and_stays_in_the_address(server: ConsoleServer, open_screen: Open):
    screen = await open_screen("/console/runs", Role.OWNER)
    page = screen.page
    await expect(page.locator(".grid-row").first).to_be_visible()
    await page.keyboard.press("/")
    await page.keyboard.type("sta")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await page.keyboard.type("fail")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("No run fits the filter")).to_be_visible()
    await page.wait_for_url("**/console/runs?q=status*")
    await page.get_by_role("combobox", name="Filter").fill("status:completed agent:archivist-violin")
    await expect(page.locator(".grid-row").first).to_be_visible()
    await screen.shot("runs")


async def test_every_screen_passes_axe_in_both_themes_and_languages(server: ConsoleServer, open_screen: Open):
    server.dead_jobs(1, lambda _: HOSTILE)
    axe = AXE.read_text()
    for theme, locale in (("light", "en-GB"), ("dark", "uk-UA")):
        screen = await open_screen(
            "/console/overview", Role.OWNER, Role.CONTROL_PLANE, color_scheme=theme, locale=locale
        )
        page = screen.page
        await expect(page.locator("main h1")).to_be_visible()
        for number, path in enumerate(await screens_of(page), start=1):
            if number <= NUMBERED:
                await page.keyboard.press(str(number))
            else:
                await visit(page, path)
            await page.wait_for_url(f"**{path}*")
            await expect(page.locator("main h1")).to_be_visible()
            await expect(page.locator(".loading")).to_have_count(0)
            assert await serious(page, axe) == [], f"{path} in {theme}"
            if theme == "dark":
                await screen.shot(f"{path.rpartition('/')[2]}-dark-uk")
        assert await page.locator("html").get_attribute("lang") == locale[:2]


async def screens_of(page: Any) -> list[str]:
    """The addresses of the screens that the menu leads to."""
    return await page.locator("nav a").evaluate_all("all => all.map(one => one.getAttribute('href'))")


async def serious(page: Any, axe: str) -> list[str]:
    """What axe finds that keeps somebody out."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(axe)
    run = "axe.run({resultTypes: ['violations']}).then(r => JSON.stringify(r.violations))"
    found = json.loads(await page.evaluate(run))
    return [
        f"{one['id']}: {node['html'][:160]}"
        for one in found
        if one["impact"] in {"serious", "critical"}
        for node in one["nodes"]
    ]


@pytest.mark.requirement("D22")
async def test_every_dialog_passes_axe_keeps_the_focus_and_closes_by_keyboard(server: ConsoleServer, open_screen: Open):
    (dead,), (waiting,) = server.dead_jobs(1, lambda _: "closed", type_="dialog.dead"), server.queued_jobs(1)
    note = server.proposal("a note for dialogs")
    axe = AXE.read_text()
    screen = await open_screen("/console/overview", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page
    dialog = page.get_by_role("dialog")
    for path, button in (
        (f"proposals?id={note}", "^Approve"),
        (f"proposals?id={note}", "^Reject"),
        (f"proposals?status=all&id={server.proposals[-1]}", "^Show in the source"),
        ("runs", "^Start a run"),
        (f"runs/{server.run_id}", "^Start"),
        (f"jobs/{waiting}", "^Cancel the job"),
        ("dead-letters?q=type%3Adialog.dead", "^Requeue all that match"),
        (f"jobs/{dead}", "^Keyboard"),
    ):
        await visit(page, f"/console/{path}")
        opener = page.get_by_role("button", name=re.compile(button)).first
        await expect(opener).to_be_enabled()
        await opener.focus()
        await page.keyboard.press("Enter")
        await expect(dialog).to_be_visible()
        await expect(dialog.locator(".loading")).to_have_count(0)
        assert await serious(page, axe) == [], f"{button} of {path}"
        for _ in range(3):
            await page.keyboard.press("Tab")
            inside = "document.activeElement === document.body || document.activeElement.closest('dialog') !== null"
            assert await page.evaluate(inside), f"{button} of {path}"
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
    for path in (f"runs/{server.run_id}", f"jobs/{dead}"):
        await visit(page, f"/console/{path}")
        await expect(page.get_by_role("heading", name=path.partition("/")[2])).to_be_visible()
        assert await serious(page, axe) == [], path


async def test_phone_sized_screens_have_everything_without_sideways_scrolling(server: ConsoleServer, open_screen: Open):
    screen = await open_screen("/console/overview", Role.OWNER, viewport={"width": 390, "height": 844})
    page = screen.page
    await expect(page.locator("main h1")).to_be_visible()
    for path in (*await screens_of(page), f"/console/runs/{server.run_id}", "/console/proposals?status=all"):
        await visit(page, path)
        await page.wait_for_url(f"**{path.partition('?')[0]}*")
        await expect(page.locator("main h1")).to_be_visible()
        await expect(page.locator(".loading")).to_have_count(0)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    await expect(page.locator("article")).to_be_visible()
    await screen.shot("phone")


def test_first_screen_is_small(built: None):
    page = (FILES / PAGE).read_text()
    sizes = {name: len(gzip.compress((FILES / name).read_bytes())) for name in re.findall(r'"/(assets/[^"]+)"', page)}
    assert any(name.endswith(".js") for name in sizes)
    assert sum(sizes.values()) <= 250_000, sizes


@pytest.mark.prove
@pytest.mark.quiet
async def test_first_of_100_000_jobs_are_shown_within_a_second(server: ConsoleServer, open_screen: Open):
    server.queued_jobs(100_000)
    screen = await open_screen("/console/overview", Role.OWNER)
    page = screen.page
    await expect(page.locator("main h1")).to_be_visible()
    shown_ms = await page.evaluate(
        """async () => {
            const began = performance.now();
            document.querySelector('a[href="/console/jobs"]').click();
            while (document.querySelector('.grid-row') === null) await new Promise(requestAnimationFrame);
            return performance.now() - began;
        }"""
    )
    assert shown_ms < 1_000
    frames_ms = await page.evaluate(
        """async () => {
            const body = document.querySelector('.grid-body');
            const frames = [];
            for (let frame = 0; frame < 240; frame += 1) {
                const began = performance.now();
                body.scrollTop += 400;
                await new Promise(requestAnimationFrame);
                frames.push(performance.now() - began);
            }
            return frames.sort((a, b) => a - b);
        }"""
    )
    assert frames_ms[len(frames_ms) // 2] < 34, "it scrolls smoothly: half of the frames take two ticks at most"
    assert await page.locator(".grid-row").count() < 80, "only the rows on screen are drawn"
    assert await page.evaluate("document.querySelector('.grid-body').scrollTop") > 30_000
