"""The traceback of a failed attempt: stored with its event, bounded, and without passwords or tokens."""

import asyncio
import time

import pytest

from tests.worker.conftest import Stand
from trellis import App, Context, JobFilter, TransientError
from trellis.engine.event_data import data_of, last_traceback
from trellis.engine.text import without_secrets
from trellis.worker.outcomes import CUT, TRACEBACK_CHARS_MAX, traceback_text

ADDRESS = "postgresql://ada:hunter2@db.internal:5432/books"


async def test_every_failed_attempt_keeps_its_own_traceback_in_its_event(stand: Stand):
    app = App()

    @app.job("t")
    async def handler(ctx: Context) -> None:
        raise (TransientError("the first") if ctx.attempt == 1 else LookupError("the second"))

    job = await stand.submit("t", max_attempts=2)
    await stand.run_until_idle(app)
    stand.clock.advance(60)
    await stand.sweep()
    await stand.run_until_idle(app)
    events = {event.type: data_of(event).get("error", {}) for event in await job.events()}
    assert "TransientError: the first" in events["job_retry_scheduled"]["traceback"]
    assert "LookupError: the second" in events["job_dead_lettered"]["traceback"]
    assert "in handler" in events["job_dead_lettered"]["traceback"]


async def test_a_password_in_an_error_reaches_neither_the_traceback_nor_the_dead_letter(stand: Stand):
    app = App()

    @app.job("t")
    def handler(ctx: Context) -> None:
        raise ConnectionError(f"cannot reach {ADDRESS}")

    job = await stand.submit("t", max_attempts=1)
    await stand.run_until_idle(app)
    stored = [event.data or b"" for event in await job.events()]
    assert b"cannot reach postgresql://ada:***@db.internal:5432/books" in b"".join(stored)
    (letter,) = await stand.ledger.dead_letters(JobFilter(), limit=10)
    assert "hunter2" not in letter.last_error
    assert not [one for one in stored if b"hunter2" in one]


async def test_the_traceback_of_a_timeout_shows_where_the_handler_was(stand: Stand):
    app = App()

    async def wait_for_the_printer() -> None:
        await asyncio.Event().wait()

    @app.job("t", timeout_s=1)
    async def handler(ctx: Context) -> None:
        await wait_for_the_printer()

    job = await stand.submit("t", max_attempts=1)
    async with stand.running(app):
        await stand.in_state(job, "dead_lettered", step_s=0.1)
    traceback = last_traceback(await job.events())
    assert traceback is not None
    assert "in wait_for_the_printer" in traceback
    assert traceback.rstrip().endswith("no end after 1 s (timeout_s)")


def test_a_long_traceback_is_cut_at_a_line_and_keeps_its_end():
    error = ValueError("\n".join(f"line {number} of the message" for number in range(1_000)))
    text = traceback_text(error)
    assert text.startswith(f"{CUT}line ")
    assert text.endswith("line 999 of the message\n")
    assert len(text) <= TRACEBACK_CHARS_MAX + len(CUT)


@pytest.mark.parametrize(
    "text, masked",
    [
        (ADDRESS, "postgresql://ada:***@db.internal:5432/books"),
        ("postgresql:///books?password=a,b;c)&user=ada", "postgresql:///books?password=***&user=ada"),
        ("connect(password='hunter 2', user='ada')", "connect(password='***', user='ada')"),
        ("db_password=hunter2&x=1", "db_password=***&x=1"),
        ('{"api_key": "k-123", "refresh_token": "t", "n": 1}', '{"api_key": "***", "refresh_token": "***", "n": 1}'),
        ("X-Api-Key: k-123 was refused", "X-Api-Key: *** was refused"),
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer ***"),
        ("listens on http://host:80/ for ada@example.org", "listens on http://host:80/ for ada@example.org"),
        (
            "3 tokens were left; invalid token: signature expired",
            "3 tokens were left; invalid token: signature expired",
        ),
        ("basic authentication failed", "basic authentication failed"),
    ],
)
def test_secrets_are_masked_and_other_text_stays(text: str, masked: str):
    assert without_secrets(text) == masked


def test_secrets_are_looked_for_in_linear_time():
    for part in ("a-", "a_", "//a:", "token", "token ", "password='", "bearer ", "x" * 50 + "-"):
        text = (part * 40_000)[:40_000]
        began = time.process_time()
        without_secrets(text)
        assert time.process_time() - began < 1, part
