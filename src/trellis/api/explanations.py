"""Explains a job to a caller: why it is where it is, what happens next, and what can be done about it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trellis.agents.errors import AgentNotFound
from trellis.agents.refusals import refusal_advice, refusal_text
from trellis.api.context import ApiContext
from trellis.auth.ownership import sees_all
from trellis.documents.run_documents import refused_calls
from trellis.engine.errors import TrellisError
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job, JobFilter, JobPlace
from trellis.lifecycles import LIFECYCLES, Trigger
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN
from trellis.operations.agent_waits import stopped_agent, with_stopped_agent, with_wait
from trellis.operations.dead_letters import letter_of
from trellis.operations.explain import NAMES_MAX, JobExplanation, JobSurroundings, explain, waited_long, waits_for_jobs
from trellis.runs.waits import open_wait
from trellis.worker.requests import KEY_NAMESPACE

if TYPE_CHECKING:  # the bus is imported only for jobs on topics
    from trellis.bus.outcomes.job_tree import Successor

HOLDERS_PAGE = 100
HOLDERS_MAX = 5


async def explanation(context: ApiContext, job: Job, again: "Successor | None") -> JobExplanation:
    """The explanation of a job that the caller may read. `again` is the job that retries it."""
    ledger = context.ledger
    events = tuple(await ledger.events(job.job_id))
    explained = _with_refused_calls(explain(job, events, await _surroundings(context, job, events)), job, events)
    if again is not None:
        explained = _with_retry(explained, again)
    if job.lifecycle == RUN.name and (wait := await open_wait(ledger, job)) is not None:
        explained = with_wait(explained, wait, await ledger.followers(), await ledger.now())
    slug = _agent_of(job)
    return explained if slug is None else await _with_agent(context, explained, slug)


async def _surroundings(context: ApiContext, job: Job, events: Sequence[Event]) -> JobSurroundings:
    """What `explain` needs to know in addition to the job.

    Queues, workers and other jobs are left out for a caller that may read only its own jobs.
    """
    ledger, letter = context.ledger, await letter_of(context.ledger, job)
    key, is_blocked = job.concurrency_key, job.place is JobPlace.BLOCKED
    key_name = None if key is None else key.removeprefix(KEY_NAMESPACE)
    if not sees_all(context.reader, "jobs.read"):
        return JobSurroundings(now=await ledger.now(), workers=None, letter=letter, key_name=key_name)
    holders = await _holders(ledger, job)
    limit = await ledger.key_limit(key) if key is not None and is_blocked else None
    queues = [queue for queue in await ledger.queues() if queue.type == job.type and queue.lifecycle == job.lifecycle]
    now = await ledger.now()
    wants_bus = job.lifecycle == BUS_JOB.name and job.place is not JobPlace.ENDED and waited_long(job, now) is not None
    return JobSurroundings(
        now=now,
        bus_problem=await context.bus_problem() if wants_bus else None,
        queue=queues[0] if queues else None,
        workers=tuple(await ledger.workers()),
        key_holders=holders[:HOLDERS_MAX],
        key_limit=limit,
        key_has_room=limit is not None and len(holders) < min(limit, HOLDERS_PAGE),
        key_name=key_name,
        letter=letter,
        open_children=await _open_children(ledger, job) if waits_for_jobs(job, events[-1] if events else None) else (),
    )


async def _open_children(ledger: Ledger, job: Job) -> tuple[Job, ...]:
    """Children that have not ended, one more than an explanation names: held ones, then ready, blocked and resting ones."""
    children: list[Job] = []
    for place in (JobPlace.LEASED, JobPlace.READY, JobPlace.BLOCKED, JobPlace.SCHEDULED):
        if (room := NAMES_MAX + 1 - len(children)) > 0:
            children += (await ledger.jobs(JobFilter(parent_id=job.job_id, place=place), limit=room)).jobs
    return tuple(children)


async def _holders(ledger: Ledger, job: Job) -> tuple[JobId, ...]:
    """The jobs that have the slots of a blocked job's concurrency key, at most HOLDERS_PAGE of each place."""
    if job.place is not JobPlace.BLOCKED or job.concurrency_key is None:
        return ()
    key, places = job.concurrency_key, (JobPlace.LEASED, JobPlace.READY)
    pages = [await ledger.jobs(JobFilter(concurrency_key=key, place=place), limit=HOLDERS_PAGE) for place in places]
    return tuple(other.job_id for page in pages for other in page.jobs)


def _with_refused_calls(explained: JobExplanation, job: Job, events: Sequence[Event]) -> JobExplanation:
    """The explanation of a failed run, with the calls that were refused to its model and what to change."""
    refused = refused_calls(events) if job.lifecycle == RUN.name else []
    if not refused:
        return explained
    why = [f"Its model was refused {refusal_text(one).rstrip('.')}." for one in refused]
    advice = dict.fromkeys(advice for one in refused if (advice := refusal_advice(one)) is not None)
    look = f"trellis runs show {job.job_id}\tsee its steps and every refused call"
    return replace(
        explained,
        why=(*explained.why, *why),
        next=(*explained.next, *(f"Before the agent runs again: {one}." for one in advice)),
        you_can=(look, *explained.you_can),
    )


def _with_retry(explained: JobExplanation, again: "Successor") -> JobExplanation:
    """The explanation of a failed job, with the job that retries it as the next step while that one may succeed."""
    sentence = f"{again.words[0].upper()}{again.words[1:]}."
    look = () if again.last is None else (f"trellis job explain {again.last.job_id}\tsee how that stands",)
    if again.in_vain:
        return replace(explained, why=(*explained.why, sentence), you_can=(*look, *explained.you_can))
    beside = tuple(line for line in explained.you_can if "job requeue" not in line)
    return replace(explained, next=(sentence,), you_can=(*look, *beside))


async def _with_agent(context: ApiContext, explained: JobExplanation, slug: str) -> JobExplanation:
    """The explanation, extended if the job's agent is stopped."""
    try:
        instance = await context.instance()
        stopped = await stopped_agent(instance.catalog, instance.ledger, slug)
    except AgentNotFound:
        return explained
    except TrellisError as error:
        return replace(explained, why=(*explained.why, f"Whether agent {slug} may run is not known: {error}"))
    return explained if stopped is None else with_stopped_agent(explained, stopped)


def _agent_of(job: Job) -> str | None:
    """The agent of a run or queue job that has not ended or may be requeued."""
    may_go_on = job.place is not JobPlace.ENDED or LIFECYCLES[job.lifecycle].pull(job.state, Trigger.REQUEUE)
    if job.lifecycle not in {RUN.name, QUEUE_JOB.name} or not may_go_on:
        return None
    payload: dict[str, Any] = json.loads(job.payload or b"{}")
    return payload.get("agent_slug")
