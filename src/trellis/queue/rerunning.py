"""The run that a requeued job belongs to (D20).

A run that has ended stays closed. When a job of such a run is requeued, a new run of the same agent is begun, with the same parameters
and with `retry_of` in its manifest; the job keeps its id, and what was recorded before keeps the old run. It is begun once for each
generation, however often the job is taken up in it. A job that was never a run's keeps the run id that was made for it.
"""

from trellis.agents.errors import AgentError
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.lifecycles import Phase
from trellis.lifecycles.run import RUN
from trellis.queue.documents import run_of
from trellis.queue.errors import ContextUnavailable, StageHopeless
from trellis.queue.requests import QueueRequest
from trellis.runs.documents import RunRequest
from trellis.runs.errors import AgentNotRunnable, TooManyWaiting
from trellis.runs.layer import OrchestrationLayer, TriggerKind


async def run_of_generation(
    ledger: Ledger, layer: OrchestrationLayer, job_id: JobId, generation: int, request: QueueRequest
) -> str:
    """The run that this generation belongs to, begun now if it has to be; raises StageError."""
    if generation == 0:
        return request.run_id
    events = await ledger.events(job_id)
    before, now = run_of(request, events, generation=generation - 1), run_of(request, events)
    if now != before:
        return now
    run = await ledger.job(JobId(before))
    if run is None or run.payload is None or run.lifecycle != RUN.name:
        return before
    if RUN.by_name[run.state].phase is not Phase.ENDED:
        return before
    try:
        return await layer.trigger(
            request.agent_slug,
            RunRequest.read(run.payload).params,
            kind=TriggerKind.EVENT,
            key=f"requeue:{job_id}:{generation}",
            retry_of=before,
            correlation_id=None if run.correlation_id == run.job_id else run.correlation_id,
        )
    except TooManyWaiting as error:
        raise ContextUnavailable(detail=str(error)) from error
    except (AgentNotRunnable, AgentError) as error:
        raise StageHopeless(detail=str(error)) from error
