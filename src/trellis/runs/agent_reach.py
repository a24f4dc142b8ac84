"""Which agent a principal reaches: the one that its token is bound to, or the one whose job it is for (D62, AUTH-3).

Every entrance asks here: HTTP and the command line.
"""

import json
from typing import Any

from trellis.engine.authority import Principal
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.ownership import bound_agent, not_allowed_within, within_agent
from trellis.lifecycles.queue_job import QUEUE_JOB


async def agent_of(ledger: Ledger, job_id: str) -> str | None:
    """The agent that a job of the job queue works for; None for any other job."""
    job = await ledger.job(JobId(job_id))
    if job is None or job.lifecycle != QUEUE_JOB.name:
        return None
    try:
        stored: Any = json.loads(job.payload or b"{}")
        return str(stored["agent_slug"])
    except (KeyError, ValueError, TypeError):
        return None


async def only_agent(ledger: Ledger, principal: Principal, rule: str) -> str | None:
    """The one agent that this principal reaches by this rule; None when it reaches all. Raises NotAllowed when it reaches none."""
    if principal.job_id is None:
        return bound_agent(principal, rule)
    agent = await agent_of(ledger, principal.job_id)
    if agent is None:
        raise not_allowed_within(principal, rule, "for the agent of its token's job only")
    within_agent(principal, rule, agent)
    return agent


async def check_reach(ledger: Ledger, principal: Principal, rule: str, agent: str | None) -> None:
    """Raise NotAllowed for what belongs to an agent that this principal does not reach; `agent` is None for what is not there."""
    only = await only_agent(ledger, principal, rule)
    if only is not None and only != agent:
        raise not_allowed_within(principal, rule, f"for agent {only} only")
