"""Tickets: how a browser's EventSource, which can send no header, shows who it is without a token in the address.

A ticket is random text that is good for one stream and for half a minute. What it stands for lies in the object store, under its
digest: any replica can take it, and of those that try at once exactly one gets it, because the store replaces one etag only once.
Nobody needs a key that signs, and who reads the store or a log can use nothing of it. It is worth no more than the token that got it:
once that token's key is not trusted any more, neither is the ticket.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trellis.engine.errors import Refused
from trellis.identity import Identity, TrustedKey, is_trusted
from trellis.lifecycles import Role
from trellis.storage.objects import CREATE, ObjectStore, PutStored, if_match

FOLDER = "tickets"
TTL_S = 30
KEPT_S = 60
"""How much longer the object stays: nothing is taken away that somebody may just be using."""
REMOVED_AT_ONCE = 20
TICKET_CHARS_MAX = 100

_FORM = re.compile(r"(\d{10})\.[0-9a-f]{64}")


class TicketRefused(Refused):
    """The ticket is refused: {problem}; get another one with POST /events/tickets."""

    code = "AUTH_REQUIRED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tickets:
    """Gives tickets out and takes them back."""

    objects: ObjectStore
    keys: Sequence[TrustedKey]
    now: Callable[[], float]
    new_id: Callable[[], str]

    async def issue(self, identity: Identity) -> str:
        """A ticket for whom this token names. Takes away a few that are over, so that they do not gather."""
        await self.clean()
        expires_at = math.floor(self.now()) + TTL_S
        ticket = f"{expires_at:010d}.{(self.new_id() + self.new_id()).replace('-', '')[:64]}"
        body = {
            "name": identity.name,
            "roles": sorted(identity.roles),
            "issuer": identity.issuer,
            "expires_at": identity.expires_at,
            "job_id": identity.job_id,
            "key_id": identity.key_id,
            "tenant": identity.tenant,
            "agent": identity.agent,
        }
        answer = await self.objects.put(_key(ticket), json.dumps(body).encode(), when=CREATE)
        assert isinstance(answer, PutStored), "random text came twice"
        return ticket

    async def take(self, ticket: str) -> Identity:
        """Whom it stands for, once; raises TicketRefused."""
        if len(ticket) > TICKET_CHARS_MAX or (form := _FORM.fullmatch(ticket)) is None:
            raise TicketRefused(problem="it does not look like one")
        if int(form.group(1)) <= self.now():
            raise TicketRefused(problem=f"it was good for {TTL_S} s")
        there = await self.objects.get(_key(ticket))
        if there is None:
            raise TicketRefused(problem="nobody gave it out here")
        told = json.loads(there.body)
        if not told or not isinstance(await self.objects.put(there.key, b"{}", when=if_match(there.etag)), PutStored):
            raise TicketRefused(problem="it has been used")
        identity = _identity(told)
        if not is_trusted(identity, self.keys):
            raise TicketRefused(problem="the key of the token that got it is not trusted any more")
        return identity

    async def clean(self) -> int:
        """Take away some that are over, oldest first; how many."""
        found = await self.objects.list(f"{FOLDER}/", limit=REMOVED_AT_ONCE)
        over = [info.key for info in found.items if _ends(info.key) + KEPT_S <= self.now()]
        for key in over:
            await self.objects.delete(key)
        return len(over)


def _identity(told: dict[str, Any]) -> Identity:
    rest = {name: value for name, value in told.items() if name != "roles"}
    return Identity(roles=frozenset(Role(role) for role in told["roles"]), **rest)


def _key(ticket: str) -> str:
    """By the second in which it ends, so that the oldest are listed first."""
    digest = hashlib.sha256(ticket.encode()).hexdigest()
    return f"{FOLDER}/{ticket.partition('.')[0]}-{digest}"


def _ends(key: str) -> int:
    return int(key.removeprefix(f"{FOLDER}/").partition("-")[0])
