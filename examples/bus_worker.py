"""Handlers for topics of the bus: the same functions as for jobs of a ledger, named like topics.

trellis worker examples.bus_worker:app --bus nats://127.0.0.1:4222 --name reader-1
"""

import asyncio
from dataclasses import dataclass

from trellis import App, Context, PermanentError, SyncContext, TransientError

app = App()


@dataclass
class Text:
    """What to count."""

    text: str


@dataclass
class Counted:
    """What was found."""

    words: int
    characters: int


@app.job("job.text.count")
def count(ctx: SyncContext, asked: Text) -> Counted:
    """A plain function runs on a thread."""
    ctx.logger.info("counting", characters=len(asked.text))
    return Counted(words=len(asked.text.split()), characters=len(asked.text))


@app.job("job.text.reverse", timeout_s=30)
async def reverse(ctx: Context, asked: Text) -> str:
    """Word by word; it stops between two words when nobody wants it any more."""
    words = asked.text.split()
    for number in range(len(words)):
        if ctx.cancelled:
            return ""
        ctx.progress({"percent": 100 * number // len(words), "step": "reverse", "message": words[number]})
        await asyncio.sleep(0.01)
    return " ".join(reversed(words))


@app.job("job.text.flaky")
async def flaky(ctx: Context, fails: int) -> str:
    """Fails as often as it is told: worth another attempt where the topic is idempotent, else a new job is made of it."""
    if fails < 0:
        raise PermanentError("nothing fails less often than never", error_code="INVALID_INPUT")
    if ctx.attempt <= fails:
        raise TransientError("the dependency is away", error_code="DEPENDENCY_AWAY")
    return f"answered at attempt {ctx.attempt}"
