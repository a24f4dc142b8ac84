"""Explains why a run or a job of an agent does not continue: a dependency is unavailable, or its agent is stopped."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from trellis.agents.catalog import AgentMissing, Catalog
from trellis.agents.definition import AgentMalformed, AgentStatus
from trellis.agents.errors import AgentError
from trellis.engine.ledger import Ledger
from trellis.engine.records import SubscriberRecord
from trellis.engine.subscription import PROJECTOR
from trellis.engine.text import duration
from trellis.operations.explain import JobExplanation
from trellis.runs.agent_status import FAILURES_MAX, last_act_on, last_failure
from trellis.runs.waits import UpstreamWait


def with_wait(
    explanation: JobExplanation, wait: UpstreamWait, followers: Iterable[SubscriberRecord], now: datetime
) -> JobExplanation:
    """Adds to a run's explanation what it waits for: a dependency or its agent."""
    if not wait.is_bounded:
        return replace(explanation, why=(*explanation.why, wait_words(wait, now)))
    about = (wait_words(wait, now), *projector_words(followers, now))
    see = "trellis followers\tsee how far the projector has come"
    return replace(explanation, why=(*explanation.why, *about), you_can=(*explanation.you_can, see))


def wait_words(wait: UpstreamWait, now: datetime) -> str:
    """Says since when and for what the run waits, and that it continues by itself."""
    since = f"{wait.since:%Y-%m-%d %H:%M:%S} UTC ({duration(wait.lasted_s(now))})"
    return f"It waits since {since}: {wait.reason.rstrip('.')}. That takes nothing from its time, and then it goes on."


def projector_words(followers: Iterable[SubscriberRecord], now: datetime) -> Iterator[str]:
    """Says whether a projector runs, and since when it has events to publish."""
    seen = next((one for one in followers if one.name == PROJECTOR), None)
    if seen is None:
        yield "No projector has ever been at work here: start `trellis up --roles projector`."
        return
    if seen.until <= now:
        yield (
            f"No projector is at work: {seen.actor} was the last, until {_moment(seen.until, now)};"
            " start `trellis up --roles projector`."
        )
    if seen.unread_since is not None:
        yield f"The projector has still to publish or record what happened since {_moment(seen.unread_since, now)}."
    elif seen.until > now:
        yield f"The projector {seen.actor} is at work, and nothing is unread."


def _moment(at: datetime, now: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC, {duration((now - at).total_seconds())} ago"


# Explains why a job does not continue while its agent is stopped: who stopped the agent, when and why.

REQUEUE = "trellis job requeue "


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppedAgent:
    """An agent that may not run: its status, or `missing` or `malformed`, and the known reason."""

    slug: str
    status: str
    why: str


async def stopped_agent(catalog: Catalog, ledger: Ledger, slug: str) -> StoppedAgent | None:
    """Returns the agent if its runs and jobs may not continue now; None if it is active."""
    try:
        agent = await catalog.load(slug)
    except AgentError as error:
        return StoppedAgent(slug=slug, status="missing", why=str(error))
    if isinstance(agent, AgentMissing):
        return StoppedAgent(slug=slug, status="missing", why=str(agent))
    if isinstance(agent, AgentMalformed):
        return StoppedAgent(slug=slug, status="malformed", why=str(agent))
    if agent.may_run:
        return None
    return StoppedAgent(slug=slug, status=agent.status.value, why=await _why(ledger, slug, agent.status))


async def _why(ledger: Ledger, slug: str, status: AgentStatus) -> str:
    """Returns who set the agent's status, when and why, as far as recorded."""
    now, act = await ledger.now(), await last_act_on(ledger, slug)
    if act is not None and act.target == status.value:
        return (
            f"{act.actor} did that {_stopped_moment(act.at, now)}: {(act.cause or 'no reason was given').rstrip('.')}"
        )
    if status is AgentStatus.ERROR and (failure := await last_failure(ledger, slug)) is not None:
        return f"{FAILURES_MAX} runs in a row failed, the last, {failure.run_id}, with {failure.error.rstrip('.')}"
    return "its file says so"


def with_stopped_agent(explanation: JobExplanation, stopped: StoppedAgent) -> JobExplanation:
    """Adds to a job's explanation why its agent is stopped and how to resume it.

    The job can be requeued only after that.
    """
    why = f"Agent {stopped.slug} is {stopped.status}, and only an active agent runs: {stopped.why}."
    first = _remedy(stopped)
    later = [f"{one}, once the agent is active" if one.startswith(REQUEUE) else one for one in explanation.you_can]
    return replace(explanation, why=(*explanation.why, why), you_can=(first, *later))


def _remedy(stopped: StoppedAgent) -> str:
    match stopped.status:
        case AgentStatus.PAUSED:
            return f"trellis agents resume {stopped.slug}\tlet the agent run again"
        case AgentStatus.DRAFT | AgentStatus.ERROR:
            return f"trellis agents activate {stopped.slug}\tlet the agent run"
        case _:
            return "trellis agents\tsee which agents there are, and what is to be corrected"


def _stopped_moment(at: datetime, now: datetime) -> str:
    return f"at {at:%Y-%m-%d %H:%M:%S} UTC ({duration((now - at).total_seconds())} ago)"
