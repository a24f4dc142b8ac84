"""The three authority matrices of document 000 (4.1 to 4.3) and the rules beyond them, as one table.

The data are columns (actions) and one row per role (what that role may do). A row refuses what it does not name. A role
without a row raises at import, so that a new role cannot be granted or refused by being forgotten. HTTP, the Python API
and the intake of the bus call `permit`; a sender on the bus is a submitter. A refusal names the rule that refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

from trellis.auth.principals import Principal
from trellis.engine.errors import NotAllowed, TrellisError
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role


class Grant(StrEnum):
    """How far a role's right goes."""

    NO = "no"
    OWN = "own"
    """Only the job it was given or submitted itself."""
    YES = "yes"


@dataclass(frozen=True, kw_only=True)
class AuthorityRule:
    """One column of a matrix: an action on a kind of object, and each role's right to it."""

    name: str
    action: str
    source: str
    grants: Mapping[Role, Grant]

    @cached_property
    def holders(self) -> tuple[Role, ...]:
        """The roles with this right, at least for their own objects."""
        return tuple(role for role in Role if self.grants[role] is not Grant.NO)


class MatrixIncomplete(TrellisError):
    """The authority data has {problem}: {names}; give every role of `Role` a row, and name rules only that are declared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixColumn:
    """One action on a kind of object, without grants."""

    name: str
    action: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixRow:
    """What one role may do: to all objects (`yes`), or to its own only (`own`). Everything else is refused."""

    yes: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()

    def grant(self, rule: str) -> Grant:
        """How far this role's right under a rule goes."""
        if rule in self.yes:
            return Grant.YES
        return Grant.OWN if rule in self.own else Grant.NO


def _columns(source: str, actions: Mapping[str, str]) -> tuple[MatrixColumn, ...]:
    """The columns that one document or decision requires: each rule with its description."""
    return tuple(MatrixColumn(name=name, action=action, source=source) for name, action in actions.items())


def _row(yes: str, *, own: str = "") -> MatrixRow:
    return MatrixRow(yes=frozenset(yes.split()), own=frozenset(own.split()))


COLUMNS: tuple[MatrixColumn, ...] = (
    *_columns(
        "document 000, 4.1",
        {
            "jobs.create": "submit jobs",
            "jobs.read": "read jobs",
            "jobs.update": "change the status of jobs",
            "jobs.delete": "delete jobs",
        },
    ),
    *_columns("D43", {"jobs.cancel": "cancel jobs"}),
    *_columns("D67", {"jobs.signal": "send a signal to jobs"}),
    *_columns("D9", {"jobs.requeue": "requeue jobs"}),
    *_columns("DJ-18", {"jobs.dead-letter": "dead-letter jobs"}),
    *_columns(
        "decision 0041",
        {
            "jobs.discard": "discard failed and dead-lettered jobs",
            "jobs.run-now": "end the delay of jobs",
            "jobs.prioritize": "give jobs another priority",
        },
    ),
    *_columns("D45", {"jobs.approve": "decide about a job that the safety kernel held"}),
    *_columns(
        "document 000, 4.2",
        {
            "artifacts.write": "write new artifacts",
            "artifacts.read": "read artifacts",
            "artifacts.modify": "modify artifacts",
            "artifacts.registry": "write registry metadata of artifacts",
            "artifacts.cleanup": "clean up old artifacts",
        },
    ),
    *_columns(
        "document 000, 4.3",
        {
            "memory.read": "read layer 1 of a memory",
            "memory.read-deep": "read layer 2 of a memory",
            "memory.propose": "propose a change of memory or logic",
            "memory.commit": "commit to a memory",
        },
    ),
    # Beyond the matrices: runs, agents, proposals, the inbox, and what operators need.
    *_columns("PIPE-1", {"runs.trigger": "begin a run"}),
    *_columns("RUN-4", {"runs.read": "read runs"}),
    *_columns("D43", {"runs.cancel": "cancel a run"}),
    *_columns("D24", {"agents.read": "read agents", "agents.status": "change the status of an agent"}),
    *_columns("RUN-4", {"proposals.read": "read proposals"}),
    *_columns(
        "D22", {"proposals.decide": "decide about a proposal", "proposals.apply": "have an approved proposal applied"}
    ),
    *_columns("D51", {"inbox.submit": "put an entry into the inbox"}),
    *_columns("RUN-4", {"inbox.read": "read the inbox"}),
    *_columns("RUN-5", {"events.read": "follow live events"}),
    *_columns("DJ-12", {"dead-letters.read": "read dead letters"}),
    *_columns("NLM-1", {"nlm.process": "give jobs to the NLM backend"}),
    *_columns("D42", {"nlm.read": "read jobs of the NLM backend"}),
    *_columns("NLM-7", {"nlm.query": "ask the NLM backend"}),
    *_columns("BUS-4", {"safety.explain": "ask what the safety policy says", "safety.simulate": "try a safety policy"}),
    *_columns("OBS-5", {"system.read": "see how the system is"}),
    *_columns("D35", {"queues.pause": "pause or resume a job type"}),
    *_columns(
        "RUN-9",
        {"schedules.read": "read schedules", "schedules.manage": "add, change, run or remove a schedule of jobs"},
    ),
    *_columns("AUTH-7", {"rules.read": "read lifecycles and this table"}),
)

ROWS: Mapping[Role, MatrixRow] = MappingProxyType(
    {
        # A person. D44: the owner may read the agents' memory; a frontend alone may not.
        Role.OWNER: _row(
            "jobs.create jobs.read jobs.signal jobs.approve artifacts.read memory.read memory.read-deep runs.trigger runs.read "
            "runs.cancel agents.read agents.status proposals.read proposals.decide proposals.apply inbox.submit "
            "inbox.read events.read dead-letters.read nlm.read nlm.query safety.explain safety.simulate system.read "
            "schedules.read schedules.manage rules.read",
            own="jobs.cancel",
        ),
        Role.FRONTEND: _row(
            "jobs.read artifacts.read runs.read agents.read proposals.read inbox.read events.read schedules.read "
            "rules.read"
        ),
        Role.GATEWAY: _row(
            "jobs.create jobs.read artifacts.read runs.read agents.read proposals.read inbox.submit inbox.read "
            "events.read nlm.read system.read schedules.read rules.read"
        ),
        Role.ORCHESTRATOR: _row(
            "jobs.create jobs.read jobs.update jobs.signal artifacts.read memory.read memory.propose runs.read agents.read "
            "events.read nlm.process nlm.read nlm.query schedules.read rules.read"
        ),
        Role.NLM_BACKEND: _row(
            "artifacts.write artifacts.read memory.read rules.read", own="jobs.read jobs.update events.read"
        ),
        Role.AGENT_RUNTIME: _row(
            "memory.read memory.read-deep memory.propose inbox.submit nlm.query rules.read",
        ),
        # An operator.
        Role.CONTROL_PLANE: _row(
            "jobs.read jobs.update jobs.cancel jobs.signal jobs.requeue jobs.dead-letter jobs.discard jobs.run-now "
            "jobs.prioritize jobs.approve artifacts.read "
            "artifacts.registry "
            "artifacts.cleanup runs.read runs.cancel agents.read agents.status proposals.read inbox.read events.read "
            "dead-letters.read nlm.process nlm.read safety.explain safety.simulate system.read queues.pause "
            "schedules.read schedules.manage rules.read"
        ),
        Role.MEMORY: _row("artifacts.read rules.read"),
        Role.APPLY_ENGINE: _row(
            "memory.read memory.read-deep memory.commit proposals.read proposals.apply events.read rules.read"
        ),
        # Engine jobs (003, 004): submitters, workers, and the services of ledger and bus.
        Role.WORKER: _row("jobs.create jobs.read jobs.signal events.read rules.read", own="jobs.update"),
        Role.SUBMITTER: _row("jobs.create rules.read", own="jobs.read jobs.cancel jobs.signal events.read"),
        Role.SCHEDULER: _row("jobs.read jobs.update events.read safety.explain rules.read"),
        Role.SAFETY_KERNEL: _row("jobs.read jobs.update events.read safety.explain safety.simulate rules.read"),
        Role.RECONCILER: _row("jobs.read jobs.update events.read rules.read"),
        Role.PROJECTOR: _row("jobs.read runs.read events.read rules.read"),
        Role.SWEEPER: _row("jobs.read jobs.update events.read rules.read"),
    }
)

WITHOUT_ENTRANCE: Mapping[str, str] = MappingProxyType(
    {
        "jobs.delete": "nobody deletes a job: retention removes ended ones by setting, and no request can ask for it",
        "artifacts.modify": "nobody modifies an artifact: what is final never changes, and what is staged is replaced",
    }
)
"""Rules that no request can concern, because no route, command or call does this. Each with its reason."""


def table(columns: Sequence[MatrixColumn], rows: Mapping[Role, MatrixRow]) -> Mapping[str, AuthorityRule]:
    """The rules by name, each with a grant for every role. Raises MatrixIncomplete, which fails the import."""
    names = {column.name for column in columns}
    missing = [role.value for role in Role if role not in rows]
    if missing:
        raise MatrixIncomplete(problem="no row for a role", names=", ".join(missing))
    granted = frozenset[str]().union(*(row.yes | row.own for row in rows.values()))
    for problem, wrong_names in {
        "a grant of a rule that is not declared": granted - names,
        "a rule that is granted to nobody and has an entrance": names - granted - set(WITHOUT_ENTRANCE),
        "a role with both kinds of grant of a rule": {name for row in rows.values() for name in row.yes & row.own},
    }.items():
        if wrong_names:
            raise MatrixIncomplete(problem=problem, names=", ".join(sorted(wrong_names)))
    return MappingProxyType(
        {
            column.name: AuthorityRule(
                name=column.name,
                action=column.action,
                source=column.source,
                grants=MappingProxyType({role: rows[role].grant(column.name) for role in Role}),
            )
            for column in columns
        }
    )


RULES: Mapping[str, AuthorityRule] = table(COLUMNS, ROWS)

OF_TENANTS = frozenset({"jobs.create", "jobs.read", "jobs.cancel", "jobs.signal", "events.read", "rules.read"})
"""The rules about objects that belong to a tenant. A token bound to a tenant is refused everything else (D62)."""
OF_AGENTS = OF_TENANTS | {
    *("memory.read", "memory.read-deep", "memory.propose", "inbox.submit", "nlm.query"),
    *("artifacts.read", "artifacts.write"),
}
"""The rules about objects that belong to an agent: its memory and logic, its artifacts, and jobs."""


def permit(principal: Principal, rule: str, *, own: bool | None = None, among: Sequence[Role] | None = None) -> Actor:
    """The principal as an actor in its first role that has the right.

    Raises NotAllowed. `among` limits and orders the roles considered.

    `own` says whether the object is the principal's own. None only asks whether the principal may do this to any
    object; a role limited to its own objects is checked again once the object is known. For a token bound to a tenant
    or an agent, every right is limited to its own objects.
    """
    authority_rule = RULES[rule]
    bound = principal.tenant is not None or principal.agent is not None
    holders = (
        authority_rule.holders if among is None else tuple(role for role in among if role in authority_rule.holders)
    )
    for role in holders:
        whole = authority_rule.grants[role] is Grant.YES and not bound
        if role in principal.roles and (whole or own is not False):
            _refuse_beyond(principal, authority_rule)
            return Actor(role=role, name=principal.name)
    held = ", ".join(sorted(role.value for role in principal.roles)) or "no role"
    needed = " or ".join(role.value for role in holders) or "no role at all"
    limited = any(role in principal.roles for role in holders)
    reason = f"rule {authority_rule.name} gives it " + ("for its own only" if limited else f"to {needed}")
    because = f"; {principal.because}" if principal.because else ""
    raise NotAllowed(role=held, action=authority_rule.action, reason=reason + because, rule=authority_rule.name)


def permit_actor(actor: Actor, rule: str) -> None:
    """Raise NotAllowed unless a rule gives an actor's role the right. For components that act without a token."""
    permit(Principal(name=actor.name, roles=frozenset({actor.role})), rule)


def _refuse_beyond(principal: Principal, rule: AuthorityRule) -> None:
    """Raise NotAllowed when a token is bound to a tenant or agent that this rule cannot take into account."""
    for word, value, rules in (("tenant", principal.tenant, OF_TENANTS), ("agent", principal.agent, OF_AGENTS)):
        if value is not None and rule.name not in rules:
            held = ", ".join(sorted(role.value for role in principal.roles)) or "no role"
            reason = f"its token is bound to {word} {value}, and rule {rule.name} ({rule.source}) reaches beyond that"
            raise NotAllowed(role=held, action=rule.action, reason=reason, rule=rule.name)
