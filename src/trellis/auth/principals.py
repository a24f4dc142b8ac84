"""Principals: the callers of Trellis, their names, and the roles they may act in.

The ledger checks every transition against its lifecycle. This module decides which roles a caller has, and which roles
may administer the ledger.
"""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from trellis.engine.errors import NotAllowed, OptionInvalid
from trellis.engine.jobs import Actor
from trellis.engine.text import is_storable
from trellis.lifecycles import Role

LOCAL_ROLES = frozenset({Role.WORKER, Role.SUBMITTER})
"""The roles of whoever can open the file of a ledger."""

Verb = Literal[
    "pause",
    "limit_rate",
    "limit_held",
    "limit_key",
    "declare_types",
    "save_schedule",
    "remove_schedule",
    "advance_schedule",
    "sweep",
    "retain",
    "follow",
    "leave_behind",
    "set_home_issuer",
    "replace_home_issuer",
    "restore",
    "remark",
    "send_signal",
    "record_act",
    "publish_acts",
    "observe_alerts",
    "seal",
]
"""The ledger's administrative verbs. `pause` also covers resuming."""

ISSUER_CHARS_MAX = 500

ADMINISTRATION: Mapping[Verb, frozenset[Role]] = MappingProxyType(
    {
        "pause": frozenset({Role.CONTROL_PLANE}),
        # A worker announces the rate limits that its handlers declare.
        "limit_rate": frozenset({Role.CONTROL_PLANE, Role.WORKER, Role.ORCHESTRATOR}),
        "limit_key": frozenset({Role.CONTROL_PLANE, Role.ORCHESTRATOR}),
        "limit_held": frozenset({Role.CONTROL_PLANE, Role.ORCHESTRATOR}),
        # A worker declares the options of the types it serves.
        "declare_types": frozenset({Role.CONTROL_PLANE, Role.WORKER}),
        # A worker declares the schedules of its application. Workers and orchestrators fire what is due.
        "save_schedule": frozenset({Role.OWNER, Role.CONTROL_PLANE, Role.WORKER}),
        "remove_schedule": frozenset({Role.OWNER, Role.CONTROL_PLANE}),
        "advance_schedule": frozenset({Role.WORKER, Role.ORCHESTRATOR}),
        "sweep": frozenset({Role.SWEEPER, Role.CONTROL_PLANE}),
        "retain": frozenset({Role.SWEEPER, Role.CONTROL_PLANE}),
        "follow": frozenset({Role.PROJECTOR, Role.CONTROL_PLANE}),
        "leave_behind": frozenset({Role.CONTROL_PLANE}),
        # The first gateway records its token issuer. Replacing the issuer is an operator's act.
        "set_home_issuer": frozenset({Role.CONTROL_PLANE, Role.GATEWAY}),
        "replace_home_issuer": frozenset({Role.CONTROL_PLANE}),
        "restore": frozenset({Role.OWNER, Role.CONTROL_PLANE}),
        # A gateway records requests it refuses, under the caller's name.
        "record_act": frozenset({Role.OWNER, Role.CONTROL_PLANE, Role.GATEWAY}),
        "publish_acts": frozenset({Role.OWNER, Role.PROJECTOR, Role.CONTROL_PLANE}),
        "observe_alerts": frozenset({Role.CONTROL_PLANE}),
        # The projector seals what it has published. A rebuild, which an operator starts, continues the chain.
        "seal": frozenset({Role.OWNER, Role.PROJECTOR, Role.CONTROL_PLANE}),
        # Listeners on the bus record what was refused there, under their own name or the worker's.
        # The rule jobs.signal says to which jobs each of them may.
        "send_signal": frozenset({Role.OWNER, Role.CONTROL_PLANE, Role.SUBMITTER, Role.WORKER, Role.ORCHESTRATOR}),
        "remark": frozenset({Role.SCHEDULER, Role.RECONCILER, Role.WORKER, Role.GATEWAY, Role.CONTROL_PLANE}),
    }
)
"""Which roles may use each verb.

Every ledger calls `require` first. PostgreSQL is loaded with this table, for callers that bypass Python.
"""

ACTIONS: Mapping[Verb, str] = MappingProxyType(
    {
        "pause": "pause or resume a type",
        "limit_rate": "limit the rate of a type",
        "limit_key": "limit a concurrency key",
        "limit_held": "limit how many of a type are held",
        "declare_types": "declare the options of a type",
        "save_schedule": "add or change a schedule",
        "remove_schedule": "remove a schedule",
        "advance_schedule": "fire a schedule",
        "sweep": "sweep",
        "retain": "remove finished work",
        "follow": "follow the feed under a name",
        "leave_behind": "let retention go on without a follower",
        "set_home_issuer": "record whose tokens the plain names of a ledger are from",
        "replace_home_issuer": "replace the issuer",
        "restore": "put lost jobs back",
        "remark": "say something about a job",
        "send_signal": "send a signal to a job",
        "record_act": "record an administrative act",
        "publish_acts": "publish administrative acts",
        "observe_alerts": "raise and resolve alerts",
        "seal": "seal audit records",
    }
)


def require(actor: Actor, verb: Verb) -> None:
    """Raise NotAllowed unless the actor's role may use this verb."""
    roles = ADMINISTRATION[verb]
    if actor.role not in roles:
        needed = " or ".join(sorted(role.value for role in roles))
        raise NotAllowed(role=actor.role.value, action=ACTIONS[verb], reason=f"it needs {needed}")


def require_home_issuer(actor: Actor, issuer: str, replaces: str | None) -> None:
    """Check that the actor may record this issuer in place of `replaces`. Raises NotAllowed, OptionInvalid."""
    require(actor, "set_home_issuer" if replaces is None else "replace_home_issuer")
    if not 1 <= len(issuer) <= ISSUER_CHARS_MAX:
        raise OptionInvalid(option="issuer", value=issuer[:50], expected=f"1 to {ISSUER_CHARS_MAX} characters")


def check_held_limit(limit: int | None) -> None:
    """Check the range of a limit. Raises OptionInvalid."""
    if limit is not None and limit < 1:
        raise OptionInvalid(
            option="limit", value=limit, expected="1 or more, or None for no limit; pause the type to stop it"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """A name that people recognise, and the roles it may act in."""

    name: str
    roles: frozenset[Role]
    because: str = ""
    """Where the roles come from, for the message of a refusal."""
    until: float | None = None
    """When the roles expire, in the process's monotonic time; None never."""
    by_token: bool = False
    """Whether a token identifies the principal.

    Without one the store decides: who may open the file, or what the database role may do.
    """
    job_id: str | None = None
    """The only job its token is for."""
    tenant: str | None = None
    """The only tenant whose jobs its token reaches."""
    agent: str | None = None
    """The only agent its token acts for."""

    def acting(self, *candidates: Role, action: str) -> Actor:
        """This principal in the first of these roles it has.

        Raises NotAllowed, also for a token bound to a tenant or an agent.
        """
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


# Principal names: which texts are valid, and how the ledger records an actor.
#
# An owner is an issuer and a subject, and a tenant where the token binds one (D62). The ledger records an owner as one
# text, the actor of an event. A subject of the instance's own issuer is recorded unchanged. Anything else gets a prefix
# in angle brackets:
#
# iryna                                                 of the instance's own issuer
# <tenant=acme>iryna                                    bound to a tenant
# <iss=https://tokens.example>iryna                     of another issuer
# <iss=https://tokens.example tenant=acme>iryna         both
# <bus>sender-1                                         a sender on the bus
# db:reports:iryna                                      through the limited PostgreSQL login `reports`
#
# No subject begins with an angle bracket or with `db:`, and neither issuer nor tenant contains a space or a bracket. So
# two owners never share a text.

NAME_CHARS_MAX = 200
TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
BUS = "<bus>"

_QUALIFIED = re.compile(r"<(?:iss=(?P<issuer>[^ <>]+))?(?: ?tenant=(?P<tenant>[^ <>]+))?>.+", re.DOTALL)
_UNSAFE_IN_ISSUER = re.compile(r"[ <>%]")
_IGNORABLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Characters that count as printable but are invisible: fillers, joiners of marks and variation selectors."""
_EAST_ASIAN = frozenset({"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC"})
"""Scripts that are written together, and with Latin letters."""


def name_fault(name: str) -> str | None:
    """Why a text cannot be a principal's name, for people; None if it can.

    Two names that look alike would be two owners. So invisible characters, and letters of scripts that are not written
    together, are refused. They are never repaired, so that a name is the same wherever it is compared.
    """
    scripts = _scripts(name)
    unseen = not is_storable(name) or not name.isprintable() or _IGNORABLE.search(name) is not None
    mixed = len(scripts) > 1 and not scripts <= {"LATIN", "EAST ASIAN"}
    faults = (
        (not 1 <= len(name) <= NAME_CHARS_MAX, f"it must be text of 1 to {NAME_CHARS_MAX} characters"),
        (unseen, "it holds a character that cannot be seen; leave it out"),
        (name != name.strip(), "it begins or ends with a space; leave that out"),
        (unicodedata.normalize("NFKC", name) != name, "it is not in Unicode's normal form NFKC; write it in that"),
        (name.startswith("<"), "it begins with '<', which marks names of other issuers and tenants"),
        (name.startswith("db:"), "it begins with 'db:', which marks names of database logins"),
        (mixed, f"it mixes {' and '.join(sorted(scripts))} letters, which look alike; use one script"),
    )
    return next((text for is_so, text in faults if is_so), None)


def _scripts(name: str) -> set[str]:
    """The scripts of the name's letters and digits. ASCII digits and marks belong to every script."""
    scripts: set[str] = set()
    for char in name:
        category = unicodedata.category(char)
        if category[0] in "LN" and category != "Lm" and not (char.isascii() and char.isdigit()):
            script = unicodedata.name(char, "UNNAMED").split(maxsplit=1)[0]
            scripts.add("EAST ASIAN" if script in _EAST_ASIAN else script)
    return scripts


def recorded_name(subject: str, *, issuer: str | None = None, tenant: str | None = None) -> str:
    """The name under which the ledger records this owner. `issuer` is None for the instance's own."""
    marks = [] if issuer is None else [f"iss={_UNSAFE_IN_ISSUER.sub(_escaped, issuer)}"]
    marks += [] if tenant is None else [f"tenant={tenant}"]
    return f"<{' '.join(marks)}>{subject}" if marks else subject


def sender_name(sender_id: str) -> str:
    """The name under which the ledger records a sender on the bus. A sender id is not a token's subject."""
    return f"{BUS}{sender_id}"


def bus_sender(sender_id: str) -> Principal:
    """A sender on the bus as a principal. Its packets carry no token: every sender is a submitter and nothing else."""
    roles = frozenset({Role.SUBMITTER})
    return Principal(name=sender_name(sender_id), roles=roles, because="every sender on the bus is a submitter")


def party_of(name: str) -> str:
    """The group that shares workflows with the owner of this recorded name: its tenant, else the owner alone."""
    match = _QUALIFIED.fullmatch(name)
    if match is None or match["tenant"] is None:
        return name
    return recorded_name("", issuer=match["issuer"], tenant=match["tenant"])


def _escaped(match: re.Match[str]) -> str:
    return f"%{ord(match[0]):02X}"
