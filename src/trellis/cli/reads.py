"""Ledger reads that several commands share."""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter, JobPlace, Signal
from trellis.operations.dead_letters import letter_of
from trellis.operations.explain import JobSurroundings

if TYPE_CHECKING:  # HTTP is imported only when it is used
    from trellis.http.client import GatewayClient
    from trellis.http.shapes import SignalShape

HOLDERS_PAGE = 100
HOLDERS_MAX = 5
KINDS = {"job_heartbeat": "progress", "job_lease_renewed": "renewed"}
"""Short names of signals that are not log lines."""


async def surroundings(ledger: Ledger, job: Job) -> JobSurroundings:
    """What `explain` needs to know in addition to the job."""
    queues = [queue for queue in await ledger.queues() if queue.type == job.type and queue.lifecycle == job.lifecycle]
    return JobSurroundings(
        now=await ledger.now(),
        queue=queues[0] if queues else None,
        workers=tuple(await ledger.workers()),
        key_holders=await _holders(ledger, job),
        letter=await letter_of(ledger, job),
    )


async def _holders(ledger: Ledger, job: Job) -> tuple[JobId, ...]:
    if job.place is not JobPlace.BLOCKED or job.concurrency_key is None:
        return ()
    page = await ledger.jobs(JobFilter(concurrency_key=job.concurrency_key), limit=HOLDERS_PAGE)
    held = [other.job_id for other in page.jobs if other.place in {JobPlace.LEASED, JobPlace.READY}]
    return tuple(held[:HOLDERS_MAX])


async def gateway_signals(client: "GatewayClient", job_id: str) -> "Sequence[SignalShape]":
    """The log lines of a job through a gateway; none of a job of the NLM backend, or from an older gateway."""
    from trellis.http.errors import NotFound  # HTTP is imported only when it is used

    try:
        return await client.jobs.signals(job_id)
    except NotFound:
        return []


def read_signal(job_id: str, signal: "SignalShape") -> Signal:
    """A log line of a gateway's document, as the ledger has it."""
    data, at = json.dumps(signal.data).encode(), datetime.fromisoformat(signal.ts)
    return Signal(job_id=JobId(job_id), type=signal.type, ts=at, data=None if signal.data is None else data)


def signal_lines(signal: Signal) -> Iterator[str]:
    """A log line or progress signal in readable form; a traceback on separate lines."""
    said: Any = json.loads(signal.data) if signal.data else None
    if not isinstance(said, dict) or "event" not in said:
        told = "" if said is None else f" {json.dumps(said, ensure_ascii=False)}"
        yield f"{signal.ts:%H:%M:%S} {KINDS.get(signal.type, signal.type):<8}{told}".rstrip()
        return
    line = cast("dict[str, Any]", said)
    fields: dict[str, Any] = {**line.get("fields", {}), **({"dropped": line["dropped"]} if "dropped" in line else {})}
    traceback = str(fields.pop("traceback", ""))
    told = "".join(f" {name}={_value(value)}" for name, value in fields.items())
    yield f"{signal.ts:%H:%M:%S} {line.get('level', ''):<8} {line['event']}{told}"
    yield from (f"    {one}" for one in traceback.splitlines())


def _value(value: Any) -> str:
    plain = isinstance(value, str) and value != "" and not any(c.isspace() or c in '="' for c in value)
    return value if plain else json.dumps(value, ensure_ascii=False)
