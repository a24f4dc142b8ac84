"""Access control for agents, their memory and their artifacts: which agent a principal may reach."""

import json
from typing import Any

from trellis.auth.ownership import bound_agent, not_allowed_within, within_agent
from trellis.auth.principals import Principal
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.lifecycles.queue_job import QUEUE_JOB

# Which agent a principal may reach: the one its token is bound to, or the one whose job the token is for (D62, AUTH-3).
#
# The HTTP gateway and the command line both check here.


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
    """The one agent that this rule lets the principal reach; None for all. Raises NotAllowed if it may reach none."""
    if principal.job_id is None:
        return bound_agent(principal, rule)
    agent = await agent_of(ledger, principal.job_id)
    if agent is None:
        raise not_allowed_within(principal, rule, "for the agent of its token's job only")
    within_agent(principal, rule, agent)
    return agent


async def check_reach(ledger: Ledger, principal: Principal, rule: str, agent: str | None) -> None:
    """Raise NotAllowed unless the principal may reach this agent. `agent` is None if the object does not exist."""
    only = await only_agent(ledger, principal, rule)
    if only is not None and only != agent:
        raise not_allowed_within(principal, rule, f"for agent {only} only")
