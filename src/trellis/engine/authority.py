"""On whose behalf a process acts. The ledger checks every transition against its lifecycle; this decides which roles a
caller may claim to have in the first place.
"""

from dataclasses import dataclass

from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import Actor
from trellis.lifecycles import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """A name people recognise and the roles it may act in."""

    name: str
    roles: frozenset[Role]
    because: str = ""
    """Where the roles come from, for the message of a refusal."""

    def acting(self, *candidates: Role, action: str) -> Actor:
        """This principal in the first of these roles it has; raises NotAllowed."""
        for role in candidates:
            if role in self.roles:
                return Actor(role=role, name=self.name)
        held = ", ".join(sorted(role.value for role in self.roles)) or "no role"
        needed = " or ".join(role.value for role in candidates)
        reason = f"it needs {needed}" + (f"; {self.because}" if self.because else "")
        raise NotAllowed(role=held, action=action, reason=reason)
