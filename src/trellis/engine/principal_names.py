"""The names of principals: which texts may be one, and how the ledger records who acted.

An owner is an issuer and a subject, and a tenant where the token binds one (D62). The ledger records an owner as one text, the actor of
an event. A subject of the instance's own issuer is recorded as it is; anything else is written in front of it, in angle brackets:

    iryna                                                 of the instance's own issuer
    <tenant=acme>iryna                                    bound to a tenant
    <iss=https://tokens.example>iryna                     of another issuer
    <iss=https://tokens.example tenant=acme>iryna         both
    <bus>sender-1                                         a sender on the bus
    db:reports:iryna                                      through the limited PostgreSQL login `reports`

No subject begins with an angle bracket or with `db:`, and neither issuer nor tenant holds a space or a bracket, so two owners never share
a text.
"""

import re
import unicodedata

from trellis.engine.text import is_storable

NAME_CHARS_MAX = 200
TENANT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
BUS = "<bus>"

_QUALIFIED = re.compile(r"<(?:iss=(?P<issuer>[^ <>]+))?(?: ?tenant=(?P<tenant>[^ <>]+))?>.+", re.DOTALL)
_UNSAFE_IN_ISSUER = re.compile(r"[ <>%]")
_IGNORABLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Characters that count as printable and yet show nothing: fillers, joiners of marks and variation selectors."""
_EAST_ASIAN = frozenset({"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC"})
"""Scripts that are written together, and with Latin letters."""


def name_fault(name: str) -> str | None:
    """What keeps a text from being a principal's name, for people; None when nothing does.

    Two names that look the same to a person would be two owners: what cannot be seen, and letters of scripts that are not written
    together, are refused and never repaired, so that a name is the same wherever it is compared.
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
    """The scripts of its letters and digits; ASCII digits and marks belong to every script."""
    found: set[str] = set()
    for char in name:
        category = unicodedata.category(char)
        if category[0] in "LN" and category != "Lm" and not (char.isascii() and char.isdigit()):
            script = unicodedata.name(char, "UNNAMED").split(maxsplit=1)[0]
            found.add("EAST ASIAN" if script in _EAST_ASIAN else script)
    return found


def recorded_name(subject: str, *, issuer: str | None = None, tenant: str | None = None) -> str:
    """How the ledger names this owner; `issuer` is None for the instance's own."""
    marks = [] if issuer is None else [f"iss={_UNSAFE_IN_ISSUER.sub(_escaped, issuer)}"]
    marks += [] if tenant is None else [f"tenant={tenant}"]
    return f"<{' '.join(marks)}>{subject}" if marks else subject


def sender_name(sender_id: str) -> str:
    """How the ledger names a sender on the bus: its id is no subject of a token."""
    return f"{BUS}{sender_id}"


def party_of(name: str) -> str:
    """Who shares workflows with the owner of this recorded name: everybody of its tenant, else the owner alone."""
    found = _QUALIFIED.fullmatch(name)
    if found is None or found["tenant"] is None:
        return name
    return recorded_name("", issuer=found["issuer"], tenant=found["tenant"])


def _escaped(found: re.Match[str]) -> str:
    return f"%{ord(found[0]):02X}"
