"""Makes published documents again from the ledger: a bucket that was wiped comes back byte for byte (D14, PIPE-8).

Nothing that is there is changed: what is missing is created, and what has a version is only raised. So it can run beside everything else,
and a second time finds nothing to do.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trellis.engine.ledger import Ledger
from trellis.runs.projector import AUDITED, publications_of
from trellis.runs.publishing import Publisher


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """What a rebuild did."""

    jobs: int = 0
    events: int = 0
    written: int = 0


async def rebuild_objects(
    ledger: Ledger, publisher: Publisher, on_progress: Callable[[Rebuilt], None] = lambda _: None
) -> Rebuilt:
    """Publish every event of every run and proposal that the ledger holds. Raises DocumentDiffers, StoreUnavailable."""
    done = Rebuilt()
    async for history in ledger.histories():
        if history.job.lifecycle not in AUDITED:
            continue
        job = await ledger.job(history.job.job_id)
        payload = b"" if job is None or job.payload is None else job.payload
        written = 0
        for event in history.events:
            written += await publisher.publish(await publications_of(ledger, event, payload))
        done = Rebuilt(jobs=done.jobs + 1, events=done.events + len(history.events), written=done.written + written)
        on_progress(done)
    return done
