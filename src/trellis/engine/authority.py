"""On whose behalf a process acts. The ledger checks every transition against its lifecycle; this decides which roles a
caller may claim to have in the first place, and which may do what is no transition of a job: administer the ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from trellis.engine.errors import NotAllowed, OptionInvalid
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role

Verb = Literal[
    "pause",
    "limit_rate",
    "limit_held",
    "limit_key",
    "declare_types",
    "sweep",
    "retain",
    "follow",
    "leave_behind",
    "set_home_issuer",
    "replace_home_issuer",
    "restore",
    "remark",
    "record_act",
    "publish_acts",
]
"""The ledger's verbs that are no step of a job; a pause is also its end."""

ISSUER_CHARS_MAX = 500

ADMINISTRATION: Mapping[Verb, frozenset[Role]] = MappingProxyType(
    {
        "pause": frozenset({Role.CONTROL_PLANE}),
        # A worker announces the rate that its handlers declare.
        "limit_rate": frozenset({Role.CONTROL_PLANE, Role.WORKER, Role.ORCHESTRATOR}),
        "limit_key": frozenset({Role.CONTROL_PLANE, Role.ORCHESTRATOR}),
        "limit_held": frozenset({Role.CONTROL_PLANE, Role.ORCHESTRATOR}),
        # A worker declares the options of the types that it serves.
        "declare_types": frozenset({Role.CONTROL_PLANE, Role.WORKER}),
        "sweep": frozenset({Role.SWEEPER, Role.CONTROL_PLANE}),
        "retain": frozenset({Role.SWEEPER, Role.CONTROL_PLANE}),
        "follow": frozenset({Role.PROJECTOR, Role.CONTROL_PLANE}),
        "leave_behind": frozenset({Role.CONTROL_PLANE}),
        # A gateway records whose tokens it takes first; another issuer instead is an operator's act.
        "set_home_issuer": frozenset({Role.CONTROL_PLANE, Role.GATEWAY}),
        "replace_home_issuer": frozenset({Role.CONTROL_PLANE}),
        "restore": frozenset({Role.OWNER, Role.CONTROL_PLANE}),
        # A gateway records the requests that it refuses, in the name of whoever asked.
        "record_act": frozenset({Role.OWNER, Role.CONTROL_PLANE, Role.GATEWAY}),
        "publish_acts": frozenset({Role.OWNER, Role.PROJECTOR, Role.CONTROL_PLANE}),
        # Whoever hears the bus writes down what it refused, in its own name or in the worker's.
        "remark": frozenset({Role.SCHEDULER, Role.RECONCILER, Role.WORKER, Role.GATEWAY, Role.CONTROL_PLANE}),
    }
)
"""Which roles may. Every ledger asks `require` first; PostgreSQL is loaded with this table
for callers that bypass us."""

ACTIONS: Mapping[Verb, str] = MappingProxyType(
    {
        "pause": "pause or resume a type",
        "limit_rate": "limit the rate of a type",
        "limit_key": "limit a concurrency key",
        "limit_held": "limit how many of a type are held",
        "declare_types": "declare the options of a type",
        "sweep": "sweep",
        "retain": "remove finished work",
        "follow": "follow the feed under a name",
        "leave_behind": "let retention go on without a follower",
        "set_home_issuer": "record whose tokens the plain names of a ledger are from",
        "replace_home_issuer": "replace the issuer",
        "restore": "put lost jobs back",
        "remark": "say something about a job",
        "record_act": "record an administrative act",
        "publish_acts": "publish administrative acts",
    }
)


def require(actor: Actor, verb: Verb) -> None:
    """Nothing, when the actor's role may; raises NotAllowed."""
    roles = ADMINISTRATION[verb]
    if actor.role not in roles:
        needed = " or ".join(sorted(role.value for role in roles))
        raise NotAllowed(role=actor.role.value, action=ACTIONS[verb], reason=f"it needs {needed}")


def require_home_issuer(actor: Actor, issuer: str, replaces: str | None) -> None:
    """Nothing, when the actor may record this issuer, in place of `replaces`; raises NotAllowed, OptionInvalid."""
    require(actor, "set_home_issuer" if replaces is None else "replace_home_issuer")
    if not 1 <= len(issuer) <= ISSUER_CHARS_MAX:
        raise OptionInvalid(option="issuer", value=issuer[:50], expected=f"1 to {ISSUER_CHARS_MAX} characters")


def check_held_limit(limit: int | None) -> None:
    """Nothing for a limit that can be; raises OptionInvalid."""
    if limit is not None and limit < 1:
        raise OptionInvalid(
            option="limit", value=limit, expected="1 or more, or None for no limit; pause the type to stop it"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """A name people recognise and the roles it may act in."""

    name: str
    roles: frozenset[Role]
    because: str = ""
    """Where the roles come from, for the message of a refusal."""
    until: float | None = None
    """When the roles end, as a reading of the process's monotonic clock; None has no end."""
    by_token: bool = False
    """Whether a token says who this is. Without one the store decides: who may open the file, or what the database role may do."""
    job_id: str | None = None
    """The one job that its token is for."""
    tenant: str | None = None
    """The one tenant whose jobs its token reaches."""
    agent: str | None = None
    """The one agent that its token acts for."""

    def acting(self, *candidates: Role, action: str) -> Actor:
        """This principal in the first of these roles it has; raises NotAllowed, to a token that is bound to a part of the whole."""
        for word, value in (("tenant", self.tenant), ("agent", self.agent)):
            if value is not None:
                held = ", ".join(sorted(role.value for role in self.roles))
                raise NotAllowed(role=held, action=action, reason=f"its token is bound to {word} {value}")
        for role in candidates:
            if role in self.roles:
                return Actor(role=role, name=self.name)
        held = ", ".join(sorted(role.value for role in self.roles)) or "no role"
        needed = " or ".join(role.value for role in candidates)
        reason = f"it needs {needed}" + (f"; {self.because}" if self.because else "")
        raise NotAllowed(role=held, action=action, reason=reason)
