"""Job ownership (D62): who owns a job, and which jobs and events of a ledger a principal may access.

HTTP, the command line, Python and the bus all use it. An owner is the submitter of a job under its recorded name
(`auth/principals.py`). Invariants:

- A right to own jobs covers jobs submitted under exactly this recorded name, or the one job that the token is for.
- A token bound to a tenant reaches no job of another tenant, whatever its roles.
- A job that repeats or undoes another job belongs to that job's owner.
- Only the owner of a job, or a member of its tenant, may link another job to it (as child, step or compensation).
- Without a token the store decides: who may open the SQLite file, or what the database role may do.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from trellis.auth.matrices import RULES, Grant, permit
from trellis.auth.principals import BUS, Principal, party_of, sender_name
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.engine.ledger import Ledger
from trellis.engine.recent_entries import LruCache
from trellis.engine.records import Event, FeedPage, Job, JobPlace
from trellis.lifecycles import LIFECYCLES, Role, Trigger
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB

LINKS_MAX = 2_000
"""More than the possible retries of a job and of its compensation."""
_PROCESS = re.compile(r"@[^@]*:\d+$")
"""The machine and process number at the end of a process's own name."""


# --- who owns a job ----------------------------------------------------------------------------------------------------


def owner_name(principal: Principal) -> str:
    """The owner name of jobs this principal submits.

    Processes of the same person share it; a token's name is used unchanged.
    """
    return principal.name if principal.by_token else owner_of_process(principal.name)


def owner_of_process(name: str) -> str:
    """The owner name of jobs that a process submits in its own name: without the machine and process number."""
    return _PROCESS.sub("", name)


async def submitter_of(ledger: Ledger, job: Job, events: Sequence[Event] | None = None) -> str:
    """The recorded owner of a job; empty when unknown. A job that the reconciler made belongs to its parent's owner.

    `events` are the job's own, if they were read before. Through a limited PostgreSQL login, the login's own callers
    appear without the login's prefix; all others keep theirs.
    """
    for _ in range(LINKS_MAX):
        if events is None:
            events = await ledger.events(job.job_id)
        if not events or events[0].version != 1:
            return ""
        before = await ledger.job(job.parent_id) if events[0].role is Role.RECONCILER and job.parent_id else None
        if before is None:
            return events[0].actor.removeprefix(ledger.name_prefix)
        job, events = before, None
    return ""


def sees_all(principal: Principal, rule: str) -> bool:
    """Whether the rule gives one of its roles all objects, with no tenant or agent to narrow that."""
    bound = principal.tenant is not None or principal.agent is not None
    return not bound and any(RULES[rule].grants[role] is Grant.YES for role in principal.roles)


def owns(principal: Principal, rule: str, job_id: str, submitter: str) -> bool:
    """Whether the principal owns a job with this submitter, for a rule that gives it less than all jobs."""
    if principal.job_id is not None or Role.NLM_BACKEND in principal.roles:
        return job_id == principal.job_id
    if not submitter:
        return False
    if not principal.by_token:
        return True  # a principal that can open the store
    whole = principal.tenant is not None and any(RULES[rule].grants[role] is Grant.YES for role in principal.roles)
    return submitter == principal.name or (whole and party_of(submitter) == party_of(principal.name))


async def is_own(
    principal: Principal, rule: str, ledger: Ledger, job: Job, events: Sequence[Event] | None = None
) -> bool:
    """`owns` for a job in the ledger. `events` are the job's, if they were read before."""
    by_token_alone = principal.job_id is not None or Role.NLM_BACKEND in principal.roles
    submitter = "" if by_token_alone else await submitter_of(ledger, job, events)
    return owns(principal, rule, job.job_id, submitter)


async def visible_among(principal: Principal, rule: str, ledger: Ledger, jobs: Sequence[Job]) -> list[Job]:
    """Those of the jobs that the principal may access under this rule.

    The ledger is asked once for all of them, and again for the parents of jobs that the reconciler made.
    """
    if sees_all(principal, rule) or not jobs:
        return list(jobs)
    histories = await ledger.events_of([job.job_id for job in jobs])
    return [job for job in jobs if await is_own(principal, rule, ledger, job, histories.get(job.job_id, []))]


async def permit_on_job(
    principal: Principal, rule: str, ledger: Ledger, job: Job | None, *, among: Sequence[Role] | None = None
) -> Actor:
    """The principal in a role that may do this to the job. Raises NotAllowed.

    A principal limited to its own jobs gets the same refusal for a missing job as for another owner's. One that may
    read all jobs knows which exist: for a missing job it is not refused, and the caller reports that there is none.
    """
    if sees_all(principal, rule) or (job is None and sees_all(principal, "jobs.read")):
        return permit(principal, rule, among=among)
    own = job is not None and await is_own(principal, rule, ledger, job)
    return permit(principal, rule, own=own, among=among)


# --- what a token is for -----------------------------------------------------------------------------------------------


def within_scope(principal: Principal, rule: str, job_id: str) -> None:
    """Raise NotAllowed when the token is for another job.

    The NLM backend has no right beyond its token's job (AUTH-3).
    """
    others = principal.roles - {Role.NLM_BACKEND}
    for_all = principal.job_id is None and any(RULES[rule].grants[role] is Grant.YES for role in others)
    if not for_all and principal.job_id != job_id:
        raise not_allowed_within(principal, rule, "for the job of its token only")


def bound_agent(principal: Principal, rule: str) -> str | None:
    """The agent that a token is bound to; None for all agents.

    Raises NotAllowed for an agent runtime's token that names no agent.
    """
    others = principal.roles - {Role.AGENT_RUNTIME}
    by_runtime = principal.roles != others and all(RULES[rule].grants[role] is Grant.NO for role in others)
    if principal.by_token and principal.agent is None and by_runtime:
        raise not_allowed_within(
            principal, rule, "for the agent of its token only, and it names none; issue one with --agent"
        )
    return principal.agent


def within_agent(principal: Principal, rule: str, agent: str) -> None:
    """Raise NotAllowed when the token is bound to another agent."""
    only = bound_agent(principal, rule)
    if only is not None and only != agent:
        raise not_allowed_within(principal, rule, f"for agent {principal.agent} of its token only")


def within_tenant(principal: Principal, rule: str, *tenants: str) -> str | None:
    """The tenant of the token, after checking the tenants that a request names (empty for none).

    Raises NotAllowed. None if the token has no tenant; then the request's own value counts.
    """
    if principal.tenant is None:
        return None
    if any(tenant not in {"", principal.tenant} for tenant in tenants):
        raise not_allowed_within(principal, rule, f"for tenant {principal.tenant} of its token only")
    return principal.tenant


def cancelling_roles(lifecycle: str) -> tuple[Role, ...]:
    """The roles of `jobs.cancel` that may cancel a job of this lifecycle.

    Roles limited to their own jobs come first (D43).
    """
    rule = RULES["jobs.cancel"]
    declared = [one for one in LIFECYCLES[lifecycle].transitions if one.trigger == Trigger.CANCEL]
    holders = sorted(rule.holders, key=lambda role: rule.grants[role] is Grant.YES)
    known = tuple(role for role in holders if any(_canceller(role) in one.actors for one in declared))
    return known or tuple(role for role in holders if rule.grants[role] is Grant.YES)


async def canceller(principal: Principal, ledger: Ledger, job: Job) -> Actor:
    """Who may cancel this job: the principal, in the role under which the ledger accepts its cancel (D43).

    Raises NotAllowed.
    """
    roles = cancelling_roles(job.lifecycle)
    own = await is_own(principal, "jobs.cancel", ledger, job)
    if not principal.roles.intersection(roles):
        actor = permit(principal, "jobs.cancel", own=own)
        raise _refusal(actor.role.value, "jobs.cancel", f"for no {job.lifecycle}: an operator cancels that")
    actor = permit(principal, "jobs.cancel", own=own, among=roles)
    return replace(actor, role=_canceller(actor.role))


def changing_actor(principal: Principal, rule: str) -> Actor:
    """The principal in the role in which it changes many jobs: one that reaches all jobs, if it has such a role.

    Raises NotAllowed.
    """
    authority_rule = RULES[rule]
    whole = [role for role in authority_rule.holders if authority_rule.grants[role] is Grant.YES]
    actor = permit(principal, rule, among=whole if principal.roles.intersection(whole) else None)
    return replace(actor, role=_canceller(actor.role))


def _canceller(role: Role) -> Role:
    """An owner cancels its own job in the role of submitter."""
    return Role.SUBMITTER if role is Role.OWNER else role


def acting_or_gateway(actor: Actor, lifecycle: str, trigger: str = Trigger.SUBMIT) -> Actor:
    """The actor if the lifecycle lets its role create a job, else the gateway under the actor's name."""
    declared = LIFECYCLES[lifecycle].pull(None, trigger)
    known = declared is not None and actor.role in declared.actors
    return actor if known else Actor(role=Role.GATEWAY, name=actor.name)


def not_allowed_within(principal: Principal, rule: str, limit: str) -> NotAllowed:
    """The refusal of a right that the rule gives only within a limit."""
    held = ", ".join(sorted(role.value for role in principal.roles)) or "no role"
    return _refusal(held, rule, limit)


def _refusal(role: str, rule: str, limit: str) -> NotAllowed:
    authority_rule = RULES[rule]
    return NotAllowed(role=role, action=authority_rule.action, reason=f"rule {rule} gives it {limit}", rule=rule)


# --- new jobs ----------------------------------------------------------------------------------------------------------


async def admitted_submission(principal: Principal, ledger: Ledger, job: NewJob) -> NewJob:
    """The job as this principal may submit it.

    It links to no other owner's job, and a tenant's concurrency keys are prefixed to keep them apart. The unique keys of a
    tenant are its own, and so are those of an owner that sees its own jobs only: no submit returns or replaces a job that
    its caller may not see. Raises NotAllowed.
    """
    if not principal.by_token:
        return job
    await _check_links(principal, ledger, job)
    if not sees_all(principal, "jobs.read"):
        job = replace(job, unique_scope=party_of(principal.name))
    key = job.concurrency_key
    if key is None or job.lifecycle != LEASED_JOB.name or principal.tenant is None:
        return job
    return replace(job, concurrency_key=f"{party_of(principal.name)}{key}")


async def _check_links(principal: Principal, ledger: Ledger, job: NewJob) -> None:
    free = job.lifecycle != BUS_JOB.name and sees_all(principal, "jobs.read")
    for link in (job.parent_id, job.compensates):
        other = None if link is None else await ledger.job(link)
        if other is None or free:
            continue
        if party_of(await submitter_of(ledger, other)) != party_of(principal.name):
            raise not_allowed_within(
                principal, "jobs.create", "below its own jobs only; leave the parent out, or name one of its own"
            )


async def may_link_on_bus(ledger: Ledger, sender_id: str, parent_id: JobId | None) -> bool:
    """Whether a sender on the bus may submit a child of this job.

    It may for its own job, one it works on, or one that does not exist.

    While a worker holds the parent, any sender may: the ledger may not know yet which worker it is.
    """
    parent = None if parent_id is None else await ledger.job(parent_id)
    if parent is None or parent.place is JobPlace.LEASED or await is_of_sender(ledger, parent, sender_id):
        return True
    return has_worked_on(await ledger.events(parent.job_id), sender_name(sender_id))


async def is_of_sender(ledger: Ledger, job: Job, sender_id: str) -> bool:
    """Whether this sender on the bus submitted the job."""
    return await submitter_of(ledger, job) == sender_name(sender_id)


def has_worked_on(events: Sequence[Event], name: str) -> bool:
    """Whether the owner of this recorded name was a worker of the job with these events."""
    return any(event.role is Role.WORKER and event.actor == name.removeprefix(BUS) for event in events)


def owner_scope(owner: str, scope: str) -> str:
    """The scope of an idempotency key that only this owner uses."""
    return f"{owner}\n{scope}"


async def scoped_key(ledger: Ledger, job: NewJob, owner: str) -> NewJob:
    """The job with its idempotency key scoped to its owner, so that equal keys of other owners stay apart.

    A key that the same owner used before keys were scoped keeps its meaning. Compensations are not scoped: each is made
    once, whichever permitted caller submits it.
    """
    if job.idempotency_key is None or job.compensates is not None:
        return job
    earlier = await ledger.find_by_idempotency_key(job.idempotency_scope, job.idempotency_key, job.fingerprint)
    there = None if earlier is None else await ledger.job(earlier.job_id)
    if there is not None:
        submitter = await submitter_of(ledger, there)
        if owner in {submitter, _PROCESS.sub("", submitter), sender_name(submitter)}:
            return job
    return replace(job, idempotency_scope=owner_scope(owner, job.idempotency_scope))


# Access of one principal to one ledger, for entrances that work on a ledger directly.

REMEMBERED_MAX = 10_000


@dataclass(kw_only=True)
class PrincipalReach:
    """Checks a principal's access to jobs and events. Caches ownership, which never changes."""

    principal: Principal
    ledger: Ledger
    _known: LruCache[tuple[str, JobId], None] = field(
        default_factory=lambda: LruCache[tuple[str, JobId], None](REMEMBERED_MAX)
    )

    async def check(self, rule: str, job_id: JobId, job: Job | None = None) -> None:
        """Raise NotAllowed unless the rule gives the principal this job. Pass `job` if it is already read."""
        permit(self.principal, rule)
        if sees_all(self.principal, rule) or (rule, job_id) in self._known:
            return
        await permit_on_job(self.principal, rule, self.ledger, job or await self.ledger.job(job_id))
        self._known[rule, job_id] = None

    async def events(self, rule: str, events: list[Event]) -> list[Event]:
        """The events that the rule lets the principal see."""
        permit(self.principal, rule)
        if sees_all(self.principal, rule):
            return events
        shown: list[Event] = []
        for event in events:
            with suppress(NotAllowed):
                await self.check(rule, event.job_id)
                shown.append(event)
        return shown

    async def page(self, rule: str, page: FeedPage) -> FeedPage:
        """A feed page with the events that the rule lets the principal see.

        Raises NotAllowed if it could see none on any page.
        """
        permit(self.principal, rule)
        if sees_all(self.principal, rule):
            return page
        shown = {event.id for event in await self.events(rule, list(page.events))}
        kept = [one for one in zip(page.events, page.positions, strict=True) if one[0].id in shown]
        return replace(page, events=tuple(event for event, _ in kept), positions=tuple(place for _, place in kept))
