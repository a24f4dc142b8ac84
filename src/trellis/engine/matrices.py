"""Who may do what: the three authority matrices of document 000 (4.1 to 4.3) and the rows beyond them, as one table.

What no rule grants is refused. Every rule has a row for every role, so that a new role cannot get in by being forgotten.
HTTP, the Python API and the bus all ask `permit`; a refusal names the rule that refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from trellis.engine.authority import Principal
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role


class Grant(StrEnum):
    """How far a role's right reaches."""

    NO = "no"
    OWN = "own"
    """Only the job it was given, or submitted itself."""
    YES = "yes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One column of a matrix: an act on a kind of thing, and each role's right to it."""

    name: str
    action: str
    source: str
    grants: Mapping[Role, Grant]

    @property
    def holders(self) -> tuple[Role, ...]:
        """The roles that may, at least for what is their own."""
        return tuple(role for role in Role if self.grants[role] is not Grant.NO)


def _rule(name: str, action: str, source: str, *roles: Role, own: tuple[Role, ...] = ()) -> Rule:
    given = dict.fromkeys(Role, Grant.NO) | dict.fromkeys(own, Grant.OWN) | dict.fromkeys(roles, Grant.YES)
    return Rule(name=name, action=action, source=source, grants=MappingProxyType(given))


_BUS = (Role.SCHEDULER, Role.SAFETY_KERNEL, Role.RECONCILER)
_PEOPLE = (Role.OWNER, Role.CONTROL_PLANE)
_JOBS, _ARTIFACTS, _MEMORY = "document 000, 4.1", "document 000, 4.2", "document 000, 4.3"

_RULES = (
    # 4.1 Job queue. Engine jobs (leased-job, bus-job) add submitter, worker and the roles of the bus.
    _rule(
        "jobs.create", "submit jobs", _JOBS, *(Role.OWNER, Role.GATEWAY, Role.ORCHESTRATOR, Role.SUBMITTER, Role.WORKER)
    ),
    _rule(
        "jobs.read",
        "read jobs",
        _JOBS,
        *(Role.OWNER, Role.GATEWAY, Role.ORCHESTRATOR, Role.CONTROL_PLANE, Role.FRONTEND),
        *(Role.WORKER, Role.PROJECTOR, Role.SWEEPER, *_BUS),
        own=(Role.NLM_BACKEND, Role.SUBMITTER),
    ),
    _rule(
        "jobs.update",
        "change the status of jobs",
        _JOBS,
        *(Role.ORCHESTRATOR, Role.CONTROL_PLANE, Role.SWEEPER, *_BUS),
        own=(Role.NLM_BACKEND, Role.WORKER),
    ),
    _rule("jobs.delete", "delete jobs", _JOBS),
    _rule("jobs.cancel", "cancel jobs", "D43", Role.CONTROL_PLANE, own=(Role.SUBMITTER,)),
    _rule("jobs.requeue", "requeue jobs", "D9", Role.CONTROL_PLANE),
    _rule("jobs.dead-letter", "dead-letter jobs", "DJ-18", Role.CONTROL_PLANE),
    _rule("jobs.approve", "decide about a job that the safety kernel held", "D45", *_PEOPLE),
    # 4.2 Artifact store.
    _rule("artifacts.write", "write new artifacts", _ARTIFACTS, Role.NLM_BACKEND),
    _rule(
        "artifacts.read",
        "read artifacts",
        _ARTIFACTS,
        *(Role.NLM_BACKEND, Role.ORCHESTRATOR, Role.MEMORY, Role.CONTROL_PLANE, Role.FRONTEND, Role.GATEWAY),
        Role.OWNER,
    ),
    _rule("artifacts.modify", "modify artifacts", _ARTIFACTS),
    _rule("artifacts.registry", "write registry metadata of artifacts", _ARTIFACTS, Role.CONTROL_PLANE),
    _rule("artifacts.cleanup", "clean up old artifacts", _ARTIFACTS, Role.CONTROL_PLANE),
    # 4.3 Memory. D44: the owner is a person and reads what the agents remember; a frontend alone does not.
    _rule(
        "memory.read",
        "read layer 1 of a memory",
        _MEMORY,
        *(Role.ORCHESTRATOR, Role.AGENT_RUNTIME, Role.NLM_BACKEND, Role.APPLY_ENGINE, Role.OWNER),
    ),
    _rule("memory.read-deep", "read layer 2 of a memory", _MEMORY, Role.AGENT_RUNTIME, Role.APPLY_ENGINE, Role.OWNER),
    _rule("memory.propose", "propose a change of memory or logic", _MEMORY, Role.ORCHESTRATOR, Role.AGENT_RUNTIME),
    _rule("memory.commit", "commit to a memory", _MEMORY, Role.APPLY_ENGINE),
    # Beyond the matrices: runs, agents, proposals, the inbox, and what operators need.
    _rule("runs.trigger", "begin a run", "PIPE-1", Role.OWNER),
    _rule(
        "runs.read", "read runs", "RUN-4", *(*_PEOPLE, Role.FRONTEND, Role.GATEWAY, Role.ORCHESTRATOR, Role.PROJECTOR)
    ),
    _rule("runs.cancel", "cancel a run", "D43", *_PEOPLE),
    _rule("agents.read", "read agents", "D24", *(*_PEOPLE, Role.FRONTEND, Role.GATEWAY, Role.ORCHESTRATOR)),
    _rule("agents.status", "change the status of an agent", "D24", *_PEOPLE),
    _rule("proposals.read", "read proposals", "RUN-4", *(*_PEOPLE, Role.FRONTEND, Role.GATEWAY, Role.APPLY_ENGINE)),
    _rule("proposals.decide", "decide about a proposal", "D22", Role.OWNER),
    _rule("proposals.apply", "have an approved proposal applied", "D22", Role.OWNER, Role.APPLY_ENGINE),
    _rule("inbox.submit", "put an entry into the inbox", "D51", Role.OWNER, Role.GATEWAY, Role.AGENT_RUNTIME),
    _rule("inbox.read", "read the inbox", "RUN-4", *(*_PEOPLE, Role.FRONTEND, Role.GATEWAY)),
    _rule(
        "events.read",
        "follow live events",
        "RUN-5",
        *(*_PEOPLE, Role.FRONTEND, Role.GATEWAY, Role.ORCHESTRATOR, Role.PROJECTOR, Role.APPLY_ENGINE),
        *(Role.WORKER, Role.SWEEPER, *_BUS),
        own=(Role.NLM_BACKEND, Role.SUBMITTER),
    ),
    _rule("dead-letters.read", "read dead letters", "DJ-12", *_PEOPLE),
    _rule("nlm.process", "give jobs to the NLM backend", "NLM-1", Role.ORCHESTRATOR, Role.CONTROL_PLANE),
    _rule("nlm.query", "ask the NLM backend", "NLM-7", Role.AGENT_RUNTIME, Role.ORCHESTRATOR, Role.OWNER),
    _rule(
        "safety.explain", "ask what the safety policy says", "BUS-4", *(*_PEOPLE, Role.SCHEDULER, Role.SAFETY_KERNEL)
    ),
    _rule("safety.simulate", "try a safety policy", "BUS-4", *(*_PEOPLE, Role.SAFETY_KERNEL)),
    _rule("system.read", "see how the system is", "OBS-5", *(*_PEOPLE, Role.GATEWAY)),
    _rule("rules.read", "read lifecycles and this table", "AUTH-7", *Role),
)

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _RULES})

OF_TENANTS = frozenset({"jobs.create", "jobs.read", "jobs.cancel", "events.read", "rules.read"})
"""The rules about what a tenant can have of its own. A token that is bound to a tenant is refused everything else (D62)."""
OF_AGENTS = OF_TENANTS | {
    *("memory.read", "memory.read-deep", "memory.propose", "inbox.submit", "nlm.query"),
    *("artifacts.read", "artifacts.write"),
}
"""The same of an agent: its memory and logic, its artifacts, and jobs."""


def permit(principal: Principal, rule: str, *, own: bool | None = None, among: Sequence[Role] | None = None) -> Actor:
    """The principal in the first of its roles that may; raises NotAllowed. `among` says which roles to look at, and in which order.

    `own` says whether the thing is the principal's own. None asks only whether it may do this to anything at all: what a role with
    rights to its own things may see is decided when the thing is known. To a token that is bound to a tenant or an agent every right is one
    to its own things.
    """
    asked = RULES[rule]
    bound = principal.tenant is not None or principal.agent is not None
    holders = asked.holders if among is None else tuple(role for role in among if role in asked.holders)
    for role in holders:
        whole = asked.grants[role] is Grant.YES and not bound
        if role in principal.roles and (whole or own is not False):
            _refuse_beyond(principal, asked)
            return Actor(role=role, name=principal.name)
    held = ", ".join(sorted(role.value for role in principal.roles)) or "no role"
    needed = " or ".join(role.value for role in holders) or "no role at all"
    limited = any(role in principal.roles for role in holders)
    reason = f"rule {asked.name} ({asked.source}) gives it " + ("for its own only" if limited else f"to {needed}")
    because = f"; {principal.because}" if principal.because else ""
    raise NotAllowed(role=held, action=asked.action, reason=reason + because, rule=asked.name)


def _refuse_beyond(principal: Principal, rule: Rule) -> None:
    """Raise NotAllowed when a token is bound to what this rule knows nothing of: then nothing would hold it there."""
    for word, value, rules in (("tenant", principal.tenant, OF_TENANTS), ("agent", principal.agent, OF_AGENTS)):
        if value is not None and rule.name not in rules:
            held = ", ".join(sorted(role.value for role in principal.roles)) or "no role"
            reason = f"its token is bound to {word} {value}, and rule {rule.name} ({rule.source}) reaches beyond that"
            raise NotAllowed(role=held, action=rule.action, reason=reason, rule=rule.name)
