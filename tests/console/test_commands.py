"""What the console shows under "The same elsewhere" is run as it is copied, and does the same."""

import asyncio
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx2
import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.artifacts import BOWS, FOUND, brief, finalized
from tests.console.conftest import ROOT, VIOLIN, ConsoleServer, visit
from tests.console.test_console import Open
from trellis import connect_sync
from trellis.cli import main
from trellis.lifecycles import Role

SAME = "details:has(> .tabs)"
GUARDIAN = "architect-guardian"
NOBODY = "http://127.0.0.1:1"
TABS = ("trellis", "curl", "Python")
READ_TABS = """async (box, tabs) => {
    const texts = {};
    box.open = true;
    for (const tab of tabs) {
        [...box.querySelectorAll('.tabs button')].find(one => one.textContent === tab).click();
        await new Promise(requestAnimationFrame);
        texts[tab] = box.querySelector('.command pre').textContent;
    }
    return texts;
}"""
SHELL = 'curl() {{ printf "%s\\0" "$@"; }}; {}'
"""A shell in which curl prints its arguments: the words are split as a person's shell does, and no curl is needed."""


async def copied(place: Page | Locator) -> dict[str, str]:
    """The text of each tab."""
    box = place.locator(SAME).last
    texts = await box.evaluate(READ_TABS, TABS)
    assert list(texts) == list(TABS)
    return texts


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
        f"jobs?q=correlation%3A{dead}%20lifecycle%3Aleased-job": (
            f"jobs --lifecycle leased-job --correlation {dead}",
            dead,
        ),
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
        for tab, text in (await copied(screen.page)).items():
            assert expected in await execute(tab, text), f"{path} by {tab}"


def test_hints_name_the_gateway_for_just_the_commands_that_can_ask_one():
    listed = re.search(r"LOCAL.*?\]\);", (ROOT / "console/app/src/lib/commands.ts").read_text(), re.DOTALL)
    assert listed is not None
    local = set(re.findall(r'"([a-z ]+)"', listed[0]))
    described = re.split(r"\n(?=#+ )", (ROOT / "docs/reference/cli.md").read_text())
    asks = {
        one.splitlines()[0].partition("trellis ")[2]: "--gateway" in one for one in described if "# trellis " in one
    }
    groups = {name.partition(" ")[0] for name in asks if " " in name}
    wrong = {
        name
        for name, takes in asks.items()
        if name not in groups and takes is bool({name, name.partition(" ")[0]} & local)
    }
    assert wrong == set()


async def test_act_on_a_group_is_one_command_with_the_filter_that_selects_it(
    server: ConsoleServer, open_screen: Open, execute: Callable[[str, str], Awaitable[str]]
):
    screen = await open_screen("/console/overview", Role.OWNER, Role.CONTROL_PLANE)
    dialog = screen.page.get_by_role("dialog")
    for tab in TABS:
        jobs = server.dead_jobs(25, lambda at: f"line {at} is busy", type_=f"group.{tab.lower()}")
        await visit(screen.page, f"/console/dead-letters?q=type%3Agroup.{tab.lower()}")
        await screen.page.get_by_role("button", name="Requeue (25)", exact=True).click()
        text = (await copied(dialog))[tab]
        assert not any(one in text for one in jobs), text
        await screen.page.keyboard.press("Escape")
        await execute(tab, text)
        assert {server.status(one) for one in jobs} == {"queued"}, tab


async def test_acts_on_schedules_agents_and_the_policy_are_done_by_their_commands(
    server: ConsoleServer,
    open_screen: Open,
    execute: Callable[[str, str], Awaitable[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    add = "trellis schedules add copied --cron '0 2 * * *' --type report.copied"
    await execute("trellis", f"{add} --gateway {server.url}")
    screen = await open_screen("/console/schedules", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page

    async def texts(button: str, note: str | None = None) -> list[str]:
        dialog = page.get_by_role("dialog")
        await page.get_by_role("button", name=button, exact=True).click()
        if note is not None:
            await dialog.get_by_role("textbox").fill(note)
        by_tab = await copied(dialog)
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        return [by_tab[tab] for tab in TABS]

    with connect_sync(server.url, token=server.token(Role.OWNER, Role.CONTROL_PLANE)) as client:
        why = 'it\'s "late"'
        runs, pauses = await texts("Run now copied"), await texts("Pause copied", why)
        client.schedules.pause("copied")
        await page.reload()
        resumes = await texts("Resume copied", why)
        for tab, run, pause, resume in zip(TABS, runs, pauses, resumes, strict=True):
            await execute(tab, resume)
            assert not client.schedules.get("copied").paused, tab
            before = len(client.jobs.list(type_="report.copied").items)
            await execute(tab, run)
            assert len(client.jobs.list(type_="report.copied").items) == before + 1, tab
            await execute(tab, pause)
            assert client.schedules.get("copied").paused, tab
        await visit(page, f"/console/agents/{GUARDIAN}")
        pauses = await texts("Pause", why)
        client.agents.pause(GUARDIAN)
        await page.reload()
        activates = await texts("Activate", why)
        for tab, pause, activate in zip(TABS, pauses, activates, strict=True):
            await execute(tab, activate)
            assert client.agents.get(GUARDIAN).status == "active", tab
            await execute(tab, pause)
            assert client.agents.get(GUARDIAN).status == "paused", tab
        client.agents.activate(GUARDIAN)
    submit = f"trellis submit --topic job.code.lint '{{}}' --json --gateway {server.url}"
    job_id = json.loads(await execute("trellis", submit))["job_id"]
    await visit(page, "/console/policy")
    await page.get_by_role("button", name="Insert an example", exact=True).click()
    policy = await page.locator("textarea").input_value()
    (tmp_path / "policy.toml").write_text(policy)
    monkeypatch.chdir(tmp_path)
    for card, expected in (("What would be decided", "everything-else"), ("Try another policy", job_id)):
        box = page.locator("section.card", has=page.get_by_role("heading", name=re.compile(card)))
        for tab, text in (await copied(box)).items():
            assert expected in await execute(tab, text), f"{card} by {tab}"


@pytest.mark.requirement("DJ-12", "D22")
async def test_what_a_dialog_would_do_is_done_by_its_commands(
    server: ConsoleServer, open_screen: Open, execute: Callable[[str, str], Awaitable[str]]
):
    (first,) = server.dead_jobs(1, lambda _: "again", type_="again.all")
    screen = await open_screen("/console/overview", Role.OWNER, Role.CONTROL_PLANE)
    page = screen.page
    dialog = page.get_by_role("dialog")

    async def offered(path: str, button: str, note: str | None = None) -> dict[str, str]:
        """What the dialog of a button shows to be copied."""
        await visit(page, f"/console/{path}")
        await page.get_by_role("button", name=re.compile(f"^{re.escape(button)}")).first.click()
        await expect(dialog).to_be_visible()
        if note is not None:
            await dialog.locator("textarea, input:not([type=radio])").first.fill(note)
        texts = await copied(dialog)
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        return texts

    async def each_does(texts: dict[str, str], ids: Sequence[str], states: set[str]) -> None:
        """Each tab does it to one of things that are alike; the dialog was that of the first of them."""
        for (tab, text), id_ in zip(texts.items(), ids, strict=True):
            assert ids[0] in text, tab
            await execute(tab, text.replace(ids[0], id_))
            assert server.status(id_) in states, tab

    why = 'not "now", it\'s $HOME'
    jobs = server.queued_jobs(len(TABS))
    await each_does(await offered(f"jobs/{jobs[0]}", "Cancel the job"), jobs, {"cancelled"})
    dead = server.dead_jobs(1, lambda _: "again", type_="again.one")
    texts = await offered("dead-letters?q=type%3Aagain.one", "Requeue (1)", why)
    dead += server.dead_jobs(len(TABS) - 1, lambda _: "again", type_="again.one")
    await each_does(texts, dead, {"queued"})
    good, bad = ([server.proposal(text) for _ in TABS] for text in ("a good note", "a bad note"))
    await each_does(await offered(f"proposals?id={good[0]}", "Approve"), good, {"approved", "applying", "applied"})
    await each_does(await offered(f"proposals?id={bad[0]}", "Reject", why), bad, {"rejected"})

    requeue = await offered("dead-letters?q=type%3Aagain.all", "Requeue all that match (1)", why)
    pause, paused = await offered("workers", "Pause page.fetch", why), server.paused
    await execute("trellis", pause["trellis"])
    resume = await offered("workers", "Resume page.fetch", why)
    for tab in TABS:
        await execute(tab, requeue[tab])
        assert server.status(first) == "queued", tab
        (first,) = server.dead_jobs(1, lambda _: "again", type_="again.all")
        await execute(tab, pause[tab])
        assert paused("page.fetch"), tab
        await execute(tab, resume[tab])
        assert not paused("page.fetch"), tab

    await visit(page, "/console/runs")
    await page.get_by_role("button", name="Start a run", exact=True).click()
    await page.get_by_label("Agent", exact=True).select_option(VIOLIN)
    texts = await copied(dialog)
    assert "run_" in await execute("curl", texts["curl"])
    assert os.environ["TRELLIS_TOKEN"] not in json.dumps(texts)
