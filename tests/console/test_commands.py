"""What the console shows under "The same elsewhere" is run as it is copied, and does the same."""

import asyncio
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Awaitable, Callable

import httpx2
import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.artifacts import BOWS, FOUND, brief, finalized
from tests.console.conftest import VIOLIN, ConsoleServer, visit
from tests.console.test_console import Open
from trellis.cli import main
from trellis.lifecycles import Role

SAME = "details:has(> .tabs)"
NOBODY = "http://127.0.0.1:1"
TABS = ("trellis", "curl", "Python")
SHELL = 'curl() {{ printf "%s\\0" "$@"; }}; {}'
"""A shell in which curl prints its arguments: the words are split as a person's shell does, and no curl is needed."""


async def copied(place: Page | Locator, tab: str) -> str:
    """The text of this tab, by the way a person reaches it."""
    box = place.locator(SAME).last
    if await box.get_attribute("open") is None:
        await box.locator("summary").first.click()
    await box.get_by_role("button", name=tab, exact=True).click()
    return await box.locator(".command pre").inner_text()


@pytest.fixture
def execute(server: ConsoleServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Awaitable[str]]:
    """Runs a text of one of the tabs with a token in the environment; returns what it prints.

    The environment names another gateway, where nobody answers: the text itself names the one of the console.
    """
    token = server.token(Role.OWNER, Role.CONTROL_PLANE)
    for name, value in {"TRELLIS_GATEWAY": NOBODY, "TRELLIS_TOKEN": token, "COLUMNS": "400"}.items():
        monkeypatch.setenv(name, value)

    async def run(tab: str, text: str) -> str:
        return await asyncio.to_thread({"trellis": trellis, "curl": curl, "Python": python}[tab], text)

    return run


def trellis(text: str) -> str:
    name, *arguments = shlex.split(text)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    assert (name, code) == ("trellis", 0), f"{text}: {err.getvalue()}"
    return out.getvalue()


def curl(text: str) -> str:
    done = subprocess.run(["sh", "-c", SHELL.format(text)], capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    method, headers, body, address = "GET", dict[str, str](), None, ""
    while words:
        word = words.pop(0)
        if word == "-X":
            method = words.pop(0)
        elif word == "-H":
            name, _, value = words.pop(0).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = words.pop(0)
        elif word != "-sS":
            address = word
    answer = httpx2.request(method, address, headers=headers, content=body)
    assert answer.status_code < 300, f"{text}: {answer.text}"
    return answer.text


def python(text: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "copied", "exec"), {})
    return out.getvalue()


async def test_what_a_screen_shows_is_printed_by_its_commands(
    server: ConsoleServer, open_screen: Open, execute: Callable[[str, str], Awaitable[str]]
):
    (dead,) = server.dead_jobs(1, lambda _: 'it\'s the "end" of $HOME', type_="quoted.mail")
    note, made = (
        server.proposal("one more note"),
        finalized(server, brief("About 60 g.", "TB-03 weighs 61 g.", [FOUND])),
    )
    screens = {
        "overview": ("slo", ""),
        f"proposals?id={note}": ("proposals show", note),
        "runs?q=agent%3Aarchivist-violin%20status%3Acompleted": ("runs list --status", server.run_id),
        f"runs/{server.run_id}": ("runs show", server.run_id),
        "jobs?q=type%3Aquoted.mail%20status%3Adead_lettered": ("jobs --status", dead),
        f"jobs/{dead}": ("job show", dead),
        "dead-letters?q=type%3Aquoted.mail%20reason%3Apolicy_violation": ("dlq list --type", dead),
        "artifacts?q=type%3ARESEARCH_BRIEF": ("artifacts list --type", made),
        f"artifacts/{made}": ("artifacts show", "What a bow weighs"),
        "agents": ("agents list", VIOLIN),
        f"agents/{VIOLIN}": ("agents show", VIOLIN),
        f"agents/{VIOLIN}?part=sources": ("agents sources", BOWS),
        f"agents/{VIOLIN}?part=memory": ("memory read", "ts-03-bass-bar"),
        f"agents/{VIOLIN}?part=history": ("memory history", "facts.md"),
        "workers": ("workers", ""),
        "schedules": ("schedules list", ""),
        "alerts": ("alerts list", ""),
        "authority": ("authority", "jobs.requeue"),
        f"events?correlation={dead}": ("events --correlation", dead),
    }
    screen = await open_screen("/console/overview", Role.OWNER, Role.CONTROL_PLANE)
    for path, (command, expected) in screens.items():
        await visit(screen.page, f"/console/{path}")
        await expect(screen.page.locator(SAME).last).to_contain_text(f"trellis {command}")
        for tab in TABS:
            assert expected in await execute(tab, await copied(screen.page, tab)), f"{path} by {tab}"


@pytest.mark.requirement("DJ-12", "D22")
async def test_what_a_dialog_would_do_is_done_by_its_commands(
    server: ConsoleServer, open_screen: Open, execute: Callable[[str, str], Awaitable[str]]
):
    screen = await open_screen("/console/overview", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page
    dialog = page.get_by_role("dialog")

    async def does(tab: str, path: str, button: str, note: str | None = None) -> None:
        await visit(page, f"/console/{path}")
        await page.get_by_role("button", name=re.compile(f"^{re.escape(button)}")).first.click()
        await expect(dialog).to_be_visible()
        if note is not None:
            await dialog.locator("textarea, input:not([type=radio])").first.fill(note)
        text = await copied(dialog, tab)
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        await execute(tab, text)

    why = 'not "now", it\'s $HOME'
    for tab, waiting in zip(TABS, server.queued_jobs(len(TABS)), strict=True):
        await does(tab, f"jobs/{waiting}", "Cancel the job")
        assert server.status(waiting) == "cancelled", tab
        (dead,) = server.dead_jobs(1, lambda _: "again", type_="again.one")
        await does(tab, "dead-letters?q=type%3Aagain.one", "Requeue (1)", why)
        assert server.status(dead) == "queued", tab
        (dead,) = server.dead_jobs(1, lambda _: "again", type_=f"again.{tab.lower()}")
        await does(tab, f"dead-letters?q=type%3Aagain.{tab.lower()}", "Requeue all that match (1)", why)
        assert server.status(dead) == "queued", tab
        await does(tab, "workers", "Pause page.fetch", why)
        assert server.paused("page.fetch"), tab
        await does(tab, "workers", "Resume page.fetch", why)
        assert not server.paused("page.fetch"), tab
        await does(tab, f"proposals?id={(good := server.proposal('a good note'))}", "Approve")
        assert server.status(good) in {"approved", "applying", "applied"}, tab
        await does(tab, f"proposals?id={(bad := server.proposal('a bad note'))}", "Reject", why)
        assert server.status(bad) == "rejected", tab
    await visit(page, "/console/runs")
    await page.get_by_role("button", name="Start a run").click()
    await page.get_by_label("Agent").select_option(VIOLIN)
    assert "run_" in await execute("curl", await copied(dialog, "curl"))
    assert os.environ["TRELLIS_TOKEN"] not in json.dumps([await copied(dialog, one) for one in TABS])
