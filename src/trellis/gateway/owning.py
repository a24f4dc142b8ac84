"""What is a caller's own: the job it submitted, or the one job its token is for (document 000, 4.1)."""

from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.matrices import RULES, Grant
from trellis.engine.records import Job
from trellis.gateway.callers import Caller
from trellis.lifecycles import LIFECYCLES, Role, Trigger

LINKS_MAX = 2_000
"""More than retries of a job and of its undoing can be."""


async def is_own(caller: Caller, ledger: Ledger, job: Job) -> bool:
    """Whether this job was given to the caller by its token, or else submitted under its name."""
    given = caller.identity.job_id
    if given is not None or Role.NLM_BACKEND in caller.principal.roles:
        return job.job_id == given
    return await _submitter(ledger, job) == caller.principal.name


async def _submitter(ledger: Ledger, job: Job) -> str:
    """Who submitted a job; one that the reconciler made does another one again or undoes it, and belongs to whom that belongs."""
    for _ in range(LINKS_MAX):
        first = (await ledger.events(job.job_id))[0]
        before = await ledger.job(job.parent_id) if first.role is Role.RECONCILER and job.parent_id else None
        if before is None:
            return first.actor
        job = before
    return ""


def sees_all(caller: Caller, rule: str) -> bool:
    """Whether the rule gives one of the caller's roles everything."""
    return any(RULES[rule].grants[role] is Grant.YES for role in caller.principal.roles)


async def checked(caller: Caller, rule: str, ledger: Ledger, job: Job | None) -> Actor:
    """The caller in a role that may do this to the job; raises NotAllowed.

    Whoever has a right to its own alone is refused what is not there as it is refused what is another's.
    """
    if sees_all(caller, rule):
        return caller.permit(rule)
    return caller.permit(rule, own=job is not None and await is_own(caller, ledger, job))


def within_scope(caller: Caller, rule: str, job_id: str) -> None:
    """A token that is for one job gives no right to what is another's, and the NLM backend has no other (AUTH-3); raises NotAllowed."""
    given, others = caller.identity.job_id, caller.principal.roles - {Role.NLM_BACKEND}
    for_all = given is None and any(RULES[rule].grants[role] is Grant.YES for role in others)
    if not for_all and given != job_id:
        raise _refused(caller.actor, rule, "for the job of its token only")


def may_cancel(actor: Actor, lifecycle: str) -> None:
    """Whether the lifecycle lets this role cancel anything of it, in whatever state; raises NotAllowed (D43)."""
    declared = [one for one in LIFECYCLES[lifecycle].transitions if one.trigger == Trigger.CANCEL]
    if declared and not any(actor.role in one.actors for one in declared):
        raise _refused(actor, "jobs.cancel", f"for no {lifecycle}: an operator cancels that")


def _refused(actor: Actor, rule: str, limit: str) -> NotAllowed:
    asked = RULES[rule]
    reason = f"rule {rule} ({asked.source}) gives it {limit}"
    return NotAllowed(role=actor.role.value, action=asked.action, reason=reason, rule=rule)


def relayed(actor: Actor, lifecycle: str, trigger: str) -> Actor:
    """The actor itself where the lifecycle lets its role begin a job, else the gateway in its name: a person asks through it."""
    declared = LIFECYCLES[lifecycle].pull(None, trigger)
    known = declared is not None and actor.role in declared.actors
    return actor if known else Actor(role=Role.GATEWAY, name=actor.name)
