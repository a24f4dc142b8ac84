"""Which agent the caller of a route reaches; the rule itself is in `runs.agent_reach` (D62, AUTH-3)."""

from trellis.engine.ownership import within_agent
from trellis.gateway.callers import Caller
from trellis.instance import Instance
from trellis.runs.agent_reach import agent_of, check_reach, only_agent


async def agent_within_reach(instance: Instance, caller: Caller, rule: str) -> str | None:
    """The one agent that this caller reaches by this rule; None when it reaches all. Raises NotAllowed when it reaches none."""
    return await only_agent(instance.ledger, caller.principal, rule)


async def within_job_agent(instance: Instance, caller: Caller, rule: str, job_id: str) -> None:
    """Raise NotAllowed when the token is bound to an agent and this job works for another, or for none."""
    if caller.principal.agent is not None:
        within_agent(caller.principal, rule, await agent_of(instance.ledger, job_id) or "")


async def within_reach(instance: Instance, caller: Caller, rule: str, agent: str | None) -> None:
    """Raise NotAllowed for what belongs to an agent that this caller does not reach; `agent` is None for what is not there."""
    await check_reach(instance.ledger, caller.principal, rule, agent)
