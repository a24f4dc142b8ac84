"""A small job application: typed payloads, progress, retries, a batch, a compensation, and a worker that dies.

    trellis worker examples.demo_app:app --ledger sqlite:///demo.db

`testing=True` lets leases be shorter than production allows, so that the crash below is noticed within seconds.
"""

import asyncio
import os
import signal
from dataclasses import dataclass

from trellis import App, Context, Item, RetryPolicy, TransientError, Undo

app = App(testing=True)

LEASE_S, HEARTBEAT_S = 3.0, 1.0


@dataclass
class Document:
    """What to index."""

    title: str
    pages: int = 3


@dataclass
class Indexed:
    """What indexing found."""

    title: str
    words: int


@dataclass
class Payment:
    """Whom to charge, and how much."""

    account: str
    cents: int


@app.job("index.document", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, priority="interactive")
async def index_document(ctx: Context, doc: Document) -> Indexed:
    """Page by page; a later attempt goes on after the last checkpoint."""
    done = ctx.last_checkpoint or 0
    for page in range(done, doc.pages):
        await asyncio.sleep(0.02)
        await ctx.checkpoint(page + 1)
        ctx.progress({"page": page + 1, "of": doc.pages})
        ctx.logger.info("page indexed", page=page + 1)
    return Indexed(title=doc.title, words=100 * doc.pages)


@app.job("call.flaky", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, retry=RetryPolicy(base_s=0.1), max_attempts=4)
async def call_flaky(ctx: Context, fails: int) -> str:
    """Fails as often as it is told, then succeeds."""
    if ctx.attempt <= fails:
        raise TransientError(f"the dependency did not answer (attempt {ctx.attempt})")
    return f"answered at attempt {ctx.attempt}"


@app.job("crash.once", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
async def crash_once(ctx: Context) -> str:
    """Kills its whole worker process at the first attempt, the way an out-of-memory killer would."""
    if ctx.attempt == 1:
        await ctx.checkpoint("about to crash")
        os.kill(os.getpid(), signal.SIGKILL)
    return f"survived: attempt {ctx.attempt} knows {ctx.last_checkpoint!r}"


@app.job("count.words", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, batch=50)
async def count_words(items: list[Item[str]]) -> None:
    """Many at once; each has its own outcome."""
    for item in items:
        item.done(len(item.payload.split()))


@app.job("charge.account", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, compensation="refund.account")
async def charge_account(ctx: Context, payment: Payment) -> str:
    """The journal makes the charge once, however often this runs."""

    async def charge() -> str:
        return f"receipt for {payment.cents} cents, key {ctx.idempotency_key}"

    return await ctx.journal("charge", charge)


@app.job("refund.account", lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
async def refund_account(ctx: Context, undo: Undo[Payment, str]) -> str:
    """Undoes a charge that had succeeded."""
    ctx.logger.info("refunding", charge=undo.job_id)
    return f"refunded {undo.payload.cents} cents to {undo.payload.account}"
