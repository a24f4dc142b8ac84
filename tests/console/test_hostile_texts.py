"""Texts of others are shown, and never executed: in every field that somebody can fill, and wherever it is shown."""

import json
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.agents.files import agent_file
from tests.console.conftest import OPERATOR, VIOLIN, ConsoleServer, visit
from tests.console.test_console import Open, screens_of
from tests.gateway.world import artifact
from trellis import connect_sync
from trellis.agents.catalog import agent_key
from trellis.app.wiring import new_id
from trellis.engine.alerts import TEXT_CHARS_MAX, AlertObservation, AlertRound
from trellis.engine.jobs import Actor, JobId
from trellis.http.errors import RequestInvalid
from trellis.lifecycles import Role

MARK = "window.hacked=1"
CORPUS = (
    f"<script>{MARK}</script>",
    f"<img src=/hacked onerror={MARK}>",
    f"<svg/onload={MARK}>",
    f"<iframe srcdoc='<script>parent.{MARK}</script>'></iframe>",
    f"<details open ontoggle={MARK}>",
    f"<a href=javascript:{MARK}>here</a>",
    f"[here](javascript:{MARK}) ![it](/hacked)",
    f"\"'`--></title></style></textarea></script><script>{MARK}</script>",
    f"{{{{constructor.constructor('{MARK}')()}}}}${{{MARK}}}",
    f"<math><mtext></p><style><img src=/hacked onerror={MARK}></style>",
    "<link rel=stylesheet href=/hacked><style>@import '/hacked';</style><base href=//x/><meta http-equiv=refresh content=0;/hacked>",
    f"javascript:{MARK}//data:text/html,<script>{MARK}</script>",
)
HOSTILE = " ".join(CORPUS)
SHOWN = f"<script>{MARK}</script>"
REMEMBERED = "<img src=/hacked> <a href=//x/>here</a> ![it](/hacked) {{constructor.constructor('window.hacked=1')()}}"
"""A memory takes no active HTML at all; this much passes."""
SLUG = "hostile"


def hostile_jobs(server: ConsoleServer) -> tuple[JobId, JobId]:
    """A dead letter, and a job that waits, with such texts wherever somebody else can put one."""
    payload = json.dumps({HOSTILE: HOSTILE}).encode()
    (dead,) = server.dead_jobs(
        1, lambda _: HOSTILE, "x.hostile", cause=HOSTILE[:400], payload=payload, correlation_id=SHOWN
    )
    (good,) = server.queued_jobs(1, "x.good", payload=payload, concurrency_key=SHOWN)
    return dead, good


def hostile_agent(server: ConsoleServer) -> str:
    """A run of an agent whose definition, sources and parameters are such texts."""
    assert server.served is not None
    objects = server.served.instance.objects
    quoted = json.dumps(HOSTILE)
    definition = agent_file(slug=SLUG, name=json.dumps(SHOWN), description=quoted, body=f"# {HOSTILE}\n")
    source = f"# {HOSTILE}\n\nA bow {HOSTILE} is strung.\n".encode()
    server.run(objects.put(agent_key(SLUG), definition))
    server.run(objects.put(f"agents/{SLUG}/sources/01-bows.md", source))
    with connect_sync(server.url, token=server.token(Role.OWNER)) as client:
        started = client.runs.start(SLUG, {"question": HOSTILE}).run_id
        return client.runs.wait(started, timeout_s=60).run_id


def hostile_operations(server: ConsoleServer) -> None:
    """A worker, an alert, a schedule, a paused queue and a memory, each with such texts where it takes one."""
    assert server.served is not None
    ledger = server.served.instance.ledger
    worker = Actor(role=Role.WORKER, name=f"press {SHOWN}")
    server.run(ledger.heartbeat_worker(worker, json.dumps({"types": [HOSTILE], "concurrency": 1}).encode()))
    text = HOSTILE[:TEXT_CHARS_MAX]
    seen = AlertObservation(id=new_id(), name="jobs-wait", subject=f"x.{SHOWN}", value=400.0, text=text)
    server.run(ledger.observe_alerts(OPERATOR, AlertRound(mark=0, scopes=(), observed=(seen,))))
    roles = (Role.OWNER, Role.CONTROL_PLANE, Role.ORCHESTRATOR)
    with connect_sync(server.url, token=server.token(*roles, name=f"owner {SHOWN}")) as client:
        texts = {"payload": {HOSTILE: HOSTILE}, "concurrency_key": SHOWN, "reason": HOSTILE[:400]}
        good: dict[str, Any] = {"name": "hostile-times", "cron": "0 2 * * *", "type_": "x.good"}
        client.schedules.add(**good, **texts)
        for field in ("name", "cron", "tz", "type_"):
            with pytest.raises(RequestInvalid):
                client.schedules.add(**{**good, field: SHOWN})
    with connect_sync(server.url, token=server.token(*roles)) as client:
        client.system.pause("x.good", reason=SHOWN)
        change = {"file": "facts.md", "operation": "append", "content": f"- {REMEMBERED}"}
        for text, version, status in ((HOSTILE, 0, "failed"), (REMEMBERED, None, "auto_applied")):
            made = client.memory.propose(VIOLIN, f"A fact {text}", [change], expected_version=version)
            assert made.status == status
        with pytest.raises(RequestInvalid):
            client.memory.propose(VIOLIN, "A fact", [{**change, "content": f"- {HOSTILE}"}])


async def look_at(page: Page, path: str) -> None:
    """Go to a screen, open all that is folded in it, and see that nothing was executed."""
    await visit(page, path)
    await expect(page.locator("main h1, main .empty h2, main .empty h1, main article").first).to_be_visible()
    await expect(page.locator(".loading")).to_have_count(0)
    await page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert await page.evaluate("window.hacked") is None, path


async def look_at_schedules(page: Page, server: ConsoleServer) -> None:
    """See a schedule with such texts, pause it with one, and see a list with such texts in every field.

    The gateway takes no such name, type or time. The console shows whatever it is answered.
    """
    hostile = dict.fromkeys(
        ("name", "cron", "tz", "type", "topic", "owner", "skipped", "last_job", "last_run"), HOSTILE
    )
    listed = {"agent": None, "paused": False, "next_at": None, "last_at": None, "registered_at": None, **hostile}
    detail = {**listed, "misfire": HOSTILE, "overlap": HOSTILE, "next": [], "payload": {HOSTILE: HOSTILE}}
    dialog = page.get_by_role("dialog")
    await look_at(page, "/console/schedules")
    await expect(page.locator("tr", has_text="hostile-times")).to_contain_text(f"owner {SHOWN}")
    await page.get_by_role("button", name="hostile-times", exact=True).click()
    await expect(dialog).to_contain_text(SHOWN)
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await page.get_by_role("button", name="Pause hostile-times", exact=True).click()
    await dialog.get_by_label("Why (optional)", exact=True).fill(HOSTILE[:400])
    answer = {"items": [listed, {**listed, "agent": HOSTILE}], "next_cursor": None}
    await page.route(f"{server.url}/schedules", lambda route: route.fulfill(json=answer))
    await page.route(f"{server.url}/schedules/%3C*", lambda route: route.fulfill(json=detail))
    await dialog.get_by_role("button", name="Pause", exact=True).click()
    cells = page.locator("main td", has_text=SHOWN)
    await expect(cells).to_have_count(10)  # of both rows: name, what it starts, when, its last job and its owner
    await cells.first.get_by_role("button").click()
    await expect(dialog).to_contain_text(SHOWN)
    await expect(dialog.locator("dd", has_text=SHOWN)).to_have_count(3)
    await page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    for act in ("Run now", "Pause"):
        await page.locator(f'main button[aria-label^="{act} <"]').click()
        await expect(dialog).to_contain_text(SHOWN)
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
    assert await page.evaluate("window.hacked") is None


async def type_in_every_field(page: Page, note: JobId, dead: JobId) -> None:
    """Put such texts into reasons, filters, the search and a policy, and act with them."""
    dialog = page.get_by_role("dialog")
    await look_at(page, f"/console/proposals?id={note}")
    await expect(page.locator(".actions button.primary")).to_be_enabled()
    await page.keyboard.press("a")
    await expect(dialog).to_contain_text(SHOWN)
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    await page.keyboard.press("r")
    await dialog.locator("textarea").fill(HOSTILE)
    await dialog.locator("button.danger").click()
    await expect(page.locator(".toast", has_text=f"Rejected: {note}")).to_be_visible()
    await look_at(page, "/console/dead-letters?q=type%3Ax.hostile")
    await page.get_by_role("button", name="Requeue (1)", exact=True).click()
    await dialog.get_by_label("Why (optional)", exact=True).fill(HOSTILE[:400])
    await dialog.get_by_role("button", name="Requeue (1)", exact=True).click()
    await expect(page.locator(".toast", has_text="1 of 1 requeued")).to_be_visible()
    await look_at(page, f"/console/jobs/{dead}")
    await expect(page.locator("tr", has_text="requeue").get_by_text(SHOWN).first).to_be_attached()
    for path in ("/console/runs", "/console/jobs", "/console/dead-letters"):
        await look_at(page, path)
        await page.get_by_role("combobox", name="Filter", exact=True).fill(HOSTILE[:400])
        await page.wait_for_url("**q=*")
    await page.keyboard.press("Control+k")
    await page.get_by_role("combobox", name="Search", exact=True).fill(HOSTILE[:200])
    await page.get_by_role("combobox", name="Search", exact=True).fill(SLUG)
    await expect(dialog.get_by_role("option").filter(has_text=SLUG).first).to_be_visible()
    await page.keyboard.press("Escape")
    await look_at(page, "/console/policy?topic=job.press.delete")
    rule = f'[[rules]]\nid = "x"\ndecision = "deny"\nreason = {json.dumps(HOSTILE[:400])}\nmatch = {{ topics = ["job.>"] }}\n'
    for text, place in ((rule, ".verdict"), (HOSTILE, "main [role=alert]")):
        await page.locator("textarea").fill(text)
        await page.get_by_role("button", name="Decide", exact=True).click()
        await expect(page.locator(place).first).to_contain_text(SHOWN if place == ".verdict" else "")


@pytest.mark.requirement("PIPE-13")
async def test_texts_of_others_are_shown_and_execute_nothing(server: ConsoleServer, open_screen: Open):
    dead, good = hostile_jobs(server)
    note = server.proposal(
        HOSTILE,
        reasoning=HOSTILE,
        citations=[{"ref": SHOWN, "excerpt": HOSTILE}, {"ref": f"javascript:{MARK}", "excerpt": "x"}],
    )
    run_id = hostile_agent(server)
    hostile_operations(server)
    assert server.served is not None
    made = server.run(artifact(server.served, title=SHOWN, summary=HOSTILE, conclusions=[HOSTILE]))
    screen = await open_screen("/console/overview")
    page = screen.page
    dialogs, asked = list[str](), list[str]()
    screen.listen("dialog", lambda one: dialogs.append(one.message))
    screen.listen("request", lambda one: asked.append(one.url))
    await page.get_by_label("Token", exact=True).fill(HOSTILE)
    await page.get_by_role("button", name="Sign in", exact=True).click()
    await page.get_by_label("Token", exact=True).fill(
        server.token(Role.OWNER, Role.CONTROL_PLANE, name=f"iryna {SHOWN}")
    )
    await page.get_by_role("button", name="Sign in", exact=True).click()
    await expect(page.locator(".who")).to_contain_text(SHOWN)

    shown = {
        f"/console/proposals?id={note}": 4,
        f"/console/jobs/{dead}": 3,
        f"/console/jobs/{good}": 1,
        "/console/dead-letters?q=type%3Ax.hostile": 1,
        f"/console/runs/{run_id}": 1,
        f"/console/agents/{SLUG}": 2,
        f"/console/agents/{SLUG}?part=sources": 1,
        f"/console/artifacts/{made}": 2,
        "/console/workers": 1,
        "/console/alerts": 2,
    }
    for path, times in shown.items():
        await look_at(page, path)
        await expect(page.get_by_text(SHOWN).nth(times - 1)).to_be_attached()
    for part in ("memory", "history"):
        await look_at(page, f"/console/agents/{VIOLIN}?part={part}")
        await expect(page.get_by_text(REMEMBERED).first).to_be_attached()
    later = {f"/console/{one}" for one in ("runs", "jobs", "schedules", "policy")}
    seen = {path.partition("?")[0] for path in shown} | later
    for path in (*(one for one in await screens_of(page) if one not in seen), "/console/%3Cscript%3E?q=%3Cscript%3E"):
        await look_at(page, path)
    await look_at_schedules(page, server)
    await type_in_every_field(page, note, dead)
    with connect_sync(server.url, token=server.token(Role.OWNER, Role.CONTROL_PLANE)) as client:
        client.schedules.remove("hostile-times")
        client.system.resume("x.good")

    assert await page.evaluate("window.hacked") is None
    assert dialogs == []
    assert [one for one in asked if "/hacked" in one or not one.startswith(server.url)] == []
    hrefs = await page.locator("a").evaluate_all("all => all.map(one => one.protocol)")
    assert set(hrefs) == {"http:"}
