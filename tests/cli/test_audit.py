"""`trellis audit` and `trellis retention`, as a person types them."""

import asyncio
import json
import re

import pytest

from tests.cli.conftest import Terminal
from tests.runs.tampering import SqliteTampering
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.app.wiring import token_key
from trellis.cli.invocation import sqlite_path
from trellis.engine.alerts import AlertRound
from trellis.engine.jobs import Actor
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.runs.projector import Projector


async def _publish(url: str) -> None:
    async with open_instance(Settings.model_validate({}), url) as instance:
        (projector,) = (one for one in instance.services() if isinstance(one, Projector))
        while (await projector.run_once()).events:
            pass
        await projector.release()


@pytest.fixture
def used(local: Terminal) -> Terminal:
    """An instance with a job that ended, one that waits, and a paused type; all of it published and sealed."""
    local.submit("greet", '"world"', "--id", "first")
    local.submit("greet", '"later"', "--id", "second", "--delay", "1h")
    for job_id in ("first", local.submit("greet")):
        assert local("job", "cancel", job_id, "--cause", "not needed").code == 0
    assert local("queues", "pause", "greet", "--reason", "stocktaking").code == 0
    asyncio.run(_publish(local.url))
    return local


@pytest.mark.requirement("OBS-1", "D57")
def test_verify_is_clean_and_then_names_what_was_changed(used: Terminal):
    answer = used("audit", "verify")
    assert (answer.code, "no violation" in answer.out) == (0, True), answer.out + answer.err
    path = sqlite_path(used.url)
    assert path is not None
    first = "(SELECT id FROM trellis_submission WHERE job_id = 'first')"
    SqliteTampering(path)._run((f"UPDATE trellis_event SET cause = 'another' WHERE version = 2 AND job = {first}", ()))
    changed = used("audit", "verify", "--json")
    assert changed.code == 1
    first, counts = changed.records
    assert (first["place"], first["event_id"], counts["violations"]) == ("ledger", "first-2", 1)
    assert "the ledger has another record of it than the one that was sealed" in used("audit", "verify").out


@pytest.mark.requirement("OBS-1")
def test_head_is_printed_signed_and_found_again(used: Terminal):
    head = used("audit", "head", "--json").record
    assert (head["number"], len(head["sha256"])) == (1, 64)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", head["at"]), "as everywhere else"
    assert head["sha256"] in used("audit", "head").out
    assert used("audit", "verify", "--head", head["sha256"]).code == 0
    assert used("audit", "verify", "--head", "f" * 64).code == 1
    assert "64 hexadecimal digits" in used("audit", "verify", "--head", "f").err
    assert "the records that are older than the chain are gone" in used("audit", "verify", "--unproven", "f" * 64).out
    assert "64 hexadecimal digits" in used("audit", "verify", "--unproven", "f").err

    from joserfc import jws

    key = token_key(used.url, Settings.model_validate({}))
    signed = jws.deserialize_compact(used("audit", "head", "--sign").out.strip(), key.key, algorithms=[key.algorithm])
    assert json.loads(signed.payload)["sha256"] == head["sha256"]
    assert signed.headers()["typ"] == "trellis-audit-head+jws"


def test_head_of_an_instance_that_seals_nothing_says_who_does(local: Terminal):
    answer = local("audit", "head")
    verified = local("audit", "verify")
    assert (verified.code, f"Nothing is sealed yet: `trellis up --ledger {local.url}` seals" in verified.err) == (
        0,
        True,
    )
    assert (answer.code, f"Nothing is sealed yet: `trellis up --ledger {local.url}` seals" in answer.err) == (1, True)


@pytest.mark.requirement("D61")
def test_retention_shows_what_would_go_and_lets_it_go(used: Terminal, monkeypatch: pytest.MonkeyPatch):
    (row,) = used("retention", "plan", "--json").records
    assert (row["lifecycle"], row["state"], row["ended"], row["removable"]) == ("leased-job", "cancelled", 2, 0)
    monkeypatch.setenv("TRELLIS_RETENTION_DAYS", "off")
    assert "for ever" in used("retention", "plan").out
    assert used("retention", "apply", "--json").record["jobs"] == 0
    for days in ("0", "-1", "0.0001", "nan"):
        monkeypatch.setenv("TRELLIS_RETENTION_DAYS", days)
        refused = used("retention", "plan").err
        assert "TRELLIS_RETENTION_DAYS: days must be at least 0.05 (72 minutes" in refused
        assert f" (off keeps jobs for ever), not {days!r}\n" in refused
    monkeypatch.setenv("TRELLIS_RETENTION_DAYS", "off")
    for state, problem in (
        ("=0", "days must be at least 0.05"),
        ("=-1", "days must be"),
        ("", "write LIFECYCLE.STATUS=DAYS"),
    ):
        monkeypatch.setenv("TRELLIS_RETENTION_STATES", f"leased-job.cancelled{state}")
        refused = used("retention", "plan").err
        assert f"TRELLIS_RETENTION_STATES: {problem}" in refused
    monkeypatch.setattr("trellis.engine.records.KEEP_DAYS_MIN", 0.0)  # what ended a moment ago
    monkeypatch.setenv("TRELLIS_RETENTION_STATES", "leased-job.cancelled=0")
    row = used("retention", "plan", "--json").records[0]
    assert (row["removable"], row["keys"]) == (1, 1), "the id that was given answers for a day"
    assert "1 by an idempotency key or a given id, which must answer for 24 hours" in " ".join(
        used("retention", "plan").out.split()
    )
    assert used("retention", "apply", "--reason", "spring cleaning").out.startswith("1 job removed with 2 events")
    asyncio.run(_publish(used.url))
    answer = used("audit", "verify")
    assert answer.code == 0, answer.out
    monkeypatch.setenv("TRELLIS_RETENTION_STATES", "leased-job.canceled=1")
    assert (
        "no job ends in the state leased-job.canceled; did you mean leased-job.cancelled?\n"
        in used("retention", "plan").err
    )


@pytest.mark.requirement("D61", "AUTH-1")
def test_retention_is_run_by_operators_alone(used: Terminal, monkeypatch: pytest.MonkeyPatch):
    token = used("token", "issue", "--role", "submitter").out.strip()
    monkeypatch.setenv("TRELLIS_TOKEN", token)
    monkeypatch.setenv("TRELLIS_RETENTION_DAYS", "1")
    refused = used("retention", "apply")
    assert (refused.code, "control-plane" in refused.err) == (1, True), refused.err


@pytest.mark.requirement("OBS-4")
def test_alerts_of_a_ledger_that_nobody_evaluates_say_so(trellis: Terminal):
    answer = trellis("alerts")
    assert (answer.code, "Nobody has looked for alerts on this ledger yet" in answer.err) == (0, True), answer.err

    async def look(stale_s: float) -> None:
        ledger = await open_ledger(trellis.url)
        began = await ledger.alert_mark()
        actor = Actor(role=Role.CONTROL_PLANE, name="o")
        await ledger.observe_alerts(actor, AlertRound(mark=began.mark, scopes=(), observed=(), stale_s=stale_s))
        await ledger.close()

    asyncio.run(look(stale_s=0.0))
    stale, page = trellis("alerts").err, "Nobody looks for alerts on this ledger now, and the last one did 0."
    assert page in stale, "the last round is out of date"
    asyncio.run(look(stale_s=60.0))
    assert trellis("alerts").err == "No alert is open, and none was resolved lately.\n"
