"""Which agent a token reaches: the one that it is bound to, or the one whose job it is for (D62, AUTH-3)."""

import json
from typing import Any

from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.ownership import refused, within_agent
from trellis.gateway.callers import Caller
from trellis.instance import Instance
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


async def agent_within_reach(instance: Instance, caller: Caller, rule: str) -> str | None:
    """The one agent that this caller reaches by this rule; None when it reaches all. Raises NotAllowed when it reaches none."""
    principal = caller.principal
    if principal.job_id is None:
        return principal.agent
    agent = await agent_of(instance.ledger, principal.job_id)
    if agent is None:
        raise refused(principal, rule, "for the agent of its token's job only")
    within_agent(principal, rule, agent)
    return agent


async def within_job_agent(instance: Instance, caller: Caller, rule: str, job_id: str) -> None:
    """Raise NotAllowed when the token is bound to an agent and this job works for another, or for none."""
    if caller.principal.agent is not None:
        within_agent(caller.principal, rule, await agent_of(instance.ledger, job_id) or "")


async def within_reach(instance: Instance, caller: Caller, rule: str, agent: str | None) -> None:
    """Raise NotAllowed for what belongs to an agent that this caller does not reach; `agent` is None for what is not there."""
    only = await agent_within_reach(instance, caller, rule)
    if only is not None and only != agent:
        limit = f"for agent {only} only"
        raise refused(caller.principal, rule, limit)
