"""Creating an agent and changing its status, each recorded as one administrative act (OBS-1, D24)."""

from collections.abc import Mapping, Sequence

from trellis.agents.catalog import AgentMissing, Catalog, StatusChanged
from trellis.agents.creation import NewAgent, create_agent
from trellis.agents.definition import AgentDefinition, AgentMalformed, AgentStatus
from trellis.agents.errors import AgentExists, AgentNotFound, DefinitionMalformed
from trellis.engine.admin_acts import ACTS_MAX, AdminAct, NewAct
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.storage.objects.store import ObjectStore

CHANGED = "agent.status.changed"
CREATED = "agent.created"
NOT_CREATED = "agent.create.refused"
"""Event names of the administrative acts on an agent."""
ACT_PAGES_MAX = 20
"""Pages of acts that are searched for the last one on an agent. With more pages than that, none is returned."""


async def recorded_creation(
    objects: ObjectStore,
    ledger: Ledger,
    actor: Actor,
    agent: NewAgent,
    sources: Mapping[str, bytes],
    *,
    reason: str | None,
) -> tuple[AgentDefinition, Sequence[str]]:
    """Create an agent. The act is recorded before the agent's file is written, so no agent exists without an act.

    A crash between the act and the file leaves an act without an agent; creating the agent again records another act.
    If another file was written first, a second act says that this creation was refused. Raises what `create_agent`
    raises.
    """

    async def record() -> None:
        await ledger.record_act(actor, NewAct(event=CREATED, subject=agent.slug, target="active", cause=reason))

    try:
        return await create_agent(objects, agent, sources, at=await ledger.now(), before_file=record)
    except AgentExists as error:
        if error.data.get("recorded"):
            await ledger.record_act(actor, NewAct(event=NOT_CREATED, subject=agent.slug, cause=str(error)))
        raise


async def set_status(
    catalog: Catalog,
    ledger: Ledger,
    actor: Actor,
    slug: str,
    status: AgentStatus,
    *,
    reason: str | None,
    correlation_id: str | None = None,
) -> StatusChanged:
    """Change an agent's status on a person's behalf, and record it as an administrative act.

    The file is changed before the act is recorded. If a process died in between, the next call finds the file changed
    already and the last act with another status, and records the act then.

    Raises AgentNotFound, DefinitionMalformed, StatusChangeRefused, DefinitionContended.
    """
    changed = await catalog.change_status(slug, status, at=await ledger.now())
    match changed:
        case AgentMissing():
            raise AgentNotFound(slug=slug)
        case AgentMalformed():
            raise DefinitionMalformed(problems=changed)
        case StatusChanged():
            source: str | None = changed.previous.value
            if changed.previous is changed.agent.status:
                source = await _recorded_status(ledger, slug)
                if source is None or source == changed.agent.status.value:
                    return changed
            act = NewAct(
                event=CHANGED,
                subject=slug,
                source=source,
                target=changed.agent.status.value,
                cause=reason,
                correlation_id=correlation_id,
            )
            await ledger.record_act(actor, act)
            await catalog.index()
            return changed


async def _recorded_status(ledger: Ledger, slug: str) -> str | None:
    """The status that the last administrative act on an agent set; None if there is none."""
    act = await last_act_on(ledger, slug)
    return None if act is None else act.target


async def last_act_on(ledger: Ledger, slug: str) -> AdminAct | None:
    """The last administrative act on an agent; None if there is none, or if there are too many acts to search."""
    found, after = None, 0
    for _ in range(ACT_PAGES_MAX):
        page = await ledger.acts(after=after)
        for act in page:
            after = act.no
            if act.subject == slug and act.event in {CREATED, CHANGED}:
                found = act
        if len(page) < ACTS_MAX:
            return found
    return None
