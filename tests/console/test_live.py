"""What is on the screen stays current: by events, by polling where there are none, and not at all where nobody looks.

The clock of the page is the test's: half a minute of polling takes a moment. It also goes by itself, so that on a busy
machine more is asked for than the steps of the test alone would cause.
"""

import asyncio

import pytest
from playwright.async_api import Page, Request, expect

from tests.console.conftest import PATIENCE_S, VIOLIN, ConsoleServer, visit
from tests.console.test_console import Open
from trellis import connect_sync
from trellis.lifecycles import Role

STEP_S = 5
RETRY_S_MAX = 30
"""The console connects again after so long at the latest."""
STATE = ".side-foot [role=status]"
HIDE = """
    window.away = true;
    Object.defineProperty(document, 'hidden', {get: () => window.away, configurable: true});
    Object.defineProperty(document, 'visibilityState', {get: () => window.away ? 'hidden' : 'visible', configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));
"""
ANSWERED = "fetch('/system/live').then(r => r.text())"
"""Ends when the gateway has answered what the page asked before."""
REFUSALS_MAX = 4
SHOW = "window.away = false; document.dispatchEvent(new Event('visibilitychange'))"


class Requests:
    """The requests that a page sent, without those for the stream of events."""

    def __init__(self, page: Page) -> None:
        self.paths: list[str] = []
        self._under_way: dict[Request, asyncio.Event] = {}
        page.on("request", self._add)
        page.on("requestfinished", self._end)
        page.on("requestfailed", self._end)

    def _add(self, request: Request) -> None:
        path = "/" + request.url.split("/", 3)[3]
        if "/events/stream" not in path and "/assets/" not in path:
            self.paths.append(path)
            self._under_way[request] = asyncio.Event()

    def _end(self, request: Request) -> None:
        ended = self._under_way.pop(request, None)
        if ended is not None:
            ended.set()

    async def within(self, page: Page, seconds: int, path: str = "/") -> int:
        """How many requests for this path the page sends while its clock runs so long, each step with its answers.

        A list that waits for an answer is not asked for again.
        """
        self.paths.clear()
        for _ in range(0, seconds, STEP_S):
            await page.clock.run_for(STEP_S * 1_000)
            async with asyncio.timeout(PATIENCE_S):
                while self._under_way:
                    await next(iter(self._under_way.values())).wait()
            await page.evaluate(ANSWERED)
        return sum(one.startswith(path) and one != "/system/live" for one in self.paths)


async def fragile_stream(page: Page) -> None:
    """A stream of events that opens, that `breakStream()` ends, and that is refused from then on until `mended`."""
    await page.clock.install()
    await page.add_init_script(
        """
        const fetched = window.fetch.bind(window);
        let opened = false;
        window.fetch = (address, options) => {
            if (!String(address).includes('/events/stream') || window.mended) return fetched(address, options);
            if (opened) return Promise.resolve(new Response('{}', {status: 503}));
            opened = true;
            const body = new ReadableStream({start: (stream) => { window.breakStream = () => stream.close(); }});
            return Promise.resolve(new Response(body, {headers: {'Content-Type': 'text/event-stream'}}));
        };
        """
    )


async def breakable_stream(page: Page) -> None:
    """The gateway's own stream of events: `cutStream()` breaks it off, and none begins until `mended` is true.

    `toastTexts` keeps every message that was shown: on the test's clock one is gone after a step.
    """
    await page.clock.install()
    await page.add_init_script(
        """
        window.toastTexts = '';
        new MutationObserver((changes) => {
            for (const change of changes)
                for (const node of change.addedNodes)
                    if (node.classList?.contains('toast') || node.querySelector?.('.toast')) window.toastTexts += node.textContent;
        }).observe(document, {childList: true, subtree: true});
        const fetched = window.fetch.bind(window);
        window.mended = true;
        window.fetch = async (address, options) => {
            if (!String(address).includes('/events/stream')) return fetched(address, options);
            if (!window.mended) return new Response('{}', {status: 503});
            const answer = await fetched(address, options);
            const reader = answer.body.getReader();
            const body = new ReadableStream({
                start: (stream) => { window.cutStream = () => { window.mended = false; stream.error('cut'); void reader.cancel(); }; },
                pull: async (stream) => {
                    const piece = await reader.read();
                    if (piece.done) return;
                    stream.enqueue(piece.value);
                },
            });
            return new Response(body, {headers: answer.headers});
        };
        """
    )


@pytest.mark.requirement("RUN-5")
async def test_event_that_was_missed_while_the_stream_was_broken_arrives_when_it_goes_on(
    server: ConsoleServer, open_screen: Open
):
    screen = await open_screen("/console/runs", Role.OWNER, prepare=breakable_stream, own=True)
    page, positions = screen.page, list[str | None]()
    await expect(page.locator(STATE)).to_contain_text("Live")
    screen.listen(
        "request",
        lambda one: positions.append(one.headers.get("last-event-id")) if "/events/stream" in one.url else None,
    )
    await page.evaluate("window.stayed = true; cutStream()")
    await expect(page.locator(STATE)).to_contain_text("Polling")
    with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        run_id = client.runs.wait(client.runs.start(VIOLIN).run_id, timeout_s=PATIENCE_S).run_id
    assert run_id not in await page.evaluate("toastTexts")
    await page.evaluate("window.mended = true")
    # Only an event says in the list of runs that one has ended. A gateway under load may refuse the first stream.
    for _ in range(0, REFUSALS_MAX * RETRY_S_MAX, STEP_S):
        await page.clock.run_for(STEP_S * 1_000)
        await page.evaluate(ANSWERED)
        if run_id in await page.evaluate("toastTexts"):
            break
    assert run_id in await page.evaluate("toastTexts")
    assert len(set(positions)) == 1, "each stream was asked to go on where the first ended"
    assert None not in positions
    await page.clock.run_for(1_000)
    await expect(page.locator(".grid-row", has_text=run_id)).to_contain_text("completed")
    await expect(page.locator(STATE)).to_contain_text("Live")
    assert await page.evaluate("window.stayed"), "the console was not loaded again"


async def test_console_without_a_stream_polls_what_moves_and_what_rests_and_nothing_that_has_ended_or_is_hidden(
    server: ConsoleServer, open_screen: Open
):
    screen = await open_screen("/console/runs", Role.OWNER, Role.CONTROL_PLANE, prepare=fragile_stream, own=True)
    page, requests = screen.page, Requests(screen.page)
    await expect(page.locator(".grid-row").first).to_be_visible()
    await expect(page.locator(STATE)).to_contain_text("Live")
    assert await requests.within(page, 40, "/runs?") <= 1, (
        "events would come: it is asked once for what was before them"
    )
    await page.evaluate("breakStream()")
    await expect(page.locator(STATE)).to_contain_text("Polling every 5 s")
    assert 3 <= await requests.within(page, 20, "/runs?") <= 8, "runs move: every 5 seconds"

    await page.evaluate(HIDE)
    await expect(page.locator(STATE)).to_contain_text("Paused")
    assert await requests.within(page, 40) == 0, "nobody looks"
    await page.evaluate(SHOW)
    await expect(page.locator(STATE)).to_contain_text("Polling every 5 s")

    await page.get_by_role("link", name="Dead letters", exact=True).click()
    await expect(page.get_by_role("heading", name="Dead letters", exact=True)).to_be_visible()
    await expect(page.locator(".loading")).to_have_count(0)
    assert 1 <= await requests.within(page, 60, "/dlq?") <= 4, "dead letters rest: every 30 seconds"

    await visit(page, f"/console/runs/{server.run_id}")
    await expect(page.locator(".page-head .badge")).to_have_text("completed")
    await expect(page.locator(".loading")).to_have_count(0)
    assert await requests.within(page, 20, f"/runs/{server.run_id}") == 0, "a run that has ended is not asked for again"

    await visit(page, "/console/runs")
    await expect(page.locator(".grid-row").first).to_be_visible()
    await page.evaluate(HIDE)
    await expect(page.locator(STATE)).to_contain_text("Paused")
    await page.evaluate("window.mended = true")
    await page.evaluate(SHOW)
    await expect(page.locator(STATE)).to_contain_text("Live")
    assert await requests.within(page, 40, "/runs?") <= 1, "events come: it is asked once for what was missed"
