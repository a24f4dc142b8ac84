"""Error messages for people, with a remedy, and the exit codes for scripts.

0 done · 1 refused or failed · 2 the command was not understood, nothing was tried · 130 stopped by Ctrl-C
"""

import json
import re
from collections.abc import Callable
from types import UnionType
from urllib.parse import parse_qsl, urlsplit

from trellis.app.settings import PREFIX
from trellis.engine.errors import (
    DiskFull,
    ExtraMissing,
    IdempotencyMismatch,
    InputError,
    JobNotFound,
    KeyUnusable,
    LedgerDamaged,
    LedgerFull,
    LedgerReadOnly,
    LedgerTooOld,
    LedgerUnavailable,
    LedgerUrlInvalid,
    LoginNotAllowed,
    NotAllowed,
    OutcomeUnknown,
    PayloadInvalid,
    SettingsInvalid,
    TrellisError,
)
from trellis.engine.text import masked_url
from trellis.http.errors import Forbidden, GatewayRefused, GatewayUnavailable, TokenNotTaken

NOT_JSON = "it is not JSON"
"""How the detail of PayloadInvalid begins if the text of a payload cannot be parsed."""
REFUSED = 1
USAGE = 2
INTERRUPTED = 130

_FAILED_INPUT = (JobNotFound, IdempotencyMismatch)
"""Valid requests that fail because of the ledger's content."""

_ASK_FOR_RIGHTS = (
    "Whoever administers the gateway makes a token: `trellis token issue {}` on its machine."
    " Set TRELLIS_TOKEN or TRELLIS_TOKEN_FILE to it."
)
_KEEP_AND_RESTORE = (
    "Stop every process of this ledger and keep its files; then restore the last backup that is whole, or make the jobs"
    " again from the recorded objects (`trellis rebuild --from objects`)."
)
_MAKE_ROOM = (
    "Nothing was lost: what was acknowledged is stored. `trellis alerts runbook disk-low` says what may be removed."
)
_REMEDIES: tuple[tuple[type[TrellisError] | UnionType, str], ...] = (
    (GatewayUnavailable, "Check the address (--gateway, TRELLIS_GATEWAY) and that `trellis up` runs there."),
    (TokenNotTaken, _ASK_FOR_RIGHTS.format("--role ROLE")),
    (JobNotFound, "`trellis jobs` lists what is there; --ledger or --data names another ledger."),
    (LoginNotAllowed, "Whoever administers the database grants it; `trellis migrate` does not."),
    (
        NotAllowed,
        "On SQLite `trellis migrate` makes the operator's key; `trellis token issue` gives a role; on PostgreSQL connect as a role that may.",
    ),
    (
        KeyUnusable,
        "`trellis migrate` makes the key of an SQLite ledger; TRELLIS_TOKEN_KEY_FILE or TRELLIS_TOKEN_JWKS_FILE names another.",
    ),
    (SettingsInvalid, "Correct the setting or take it away."),
    (LedgerTooOld, "Install the newer version, or point --ledger at a server that has it."),
    (
        LedgerReadOnly,
        "On SQLite check the owner and mode of the file and its folder; on PostgreSQL ask whoever runs the server.",
    ),
    (LedgerDamaged, _KEEP_AND_RESTORE),
    (LedgerFull | DiskFull, _MAKE_ROOM),
    (OutcomeUnknown, "Look before you repeat: `trellis jobs`, or submit again with the same --key or --id."),
    (LedgerUnavailable, "Check that the address is right and the server runs."),
)
_DOCTOR_KNOWS: tuple[tuple[type[TrellisError], str], ...] = (
    (SettingsInvalid, "`trellis doctor --settings` shows the settings in force and where each comes from."),
    (LedgerUnavailable, "`trellis doctor` looks closer."),
    (LedgerDamaged, "`trellis doctor` looks closer."),
)


def exit_code(error: TrellisError) -> int:
    """The exit code of the process for this error."""
    if isinstance(error, _FAILED_INPUT):
        return REFUSED
    return USAGE if isinstance(error, InputError | LedgerUrlInvalid) else REFUSED


def with_source(error: TrellisError, source_of: Callable[[str], str]) -> TrellisError:
    """The error; one of a setting names where its value comes from. What raised it knows the setting's name alone."""
    if not isinstance(error, SettingsInvalid) or "source" not in error.data:
        return error
    names = re.compile(rf"\b{PREFIX}([A-Z0-9_]+)")
    source = names.sub(lambda name: source_of(name[1].lower()), str(error.data["source"]))
    return type(error)(**{**error.data, "source": source})


def message_for_person(error: TrellisError) -> str:
    """The message with command line options in place of API parameters."""
    facts = error.problem if isinstance(error, GatewayRefused) else error.data
    if isinstance(error, IdempotencyMismatch) and facts.get("key") == facts.get("job_id", ""):
        taken = f"Job {facts['job_id']} was submitted before with another request"
        return f"{taken}; choose another --id, or send the same request."
    key = error.data.get("idempotency_key") if isinstance(error, GatewayUnavailable) else None
    if key is None:
        return str(error)
    again = f"submit again with --key {key}" if error.data["request"] == "POST /jobs" else "look before you repeat it"
    return str(GatewayUnavailable(**{**error.data, "then": f"; {again} to learn what happened"}))


def remedy_for(error: TrellisError, *, in_doctor: bool = False) -> str:
    """What to do about the error; empty if its message says so. The doctor does not refer to itself."""
    if isinstance(error, KeyUnusable) and f"set {PREFIX}" in str(error):
        return ""
    ways = [next((text for kind, text in _REMEDIES if isinstance(error, kind)), "")]
    if isinstance(error, PayloadInvalid):
        ways = [_payload_remedy(str(error.data.get("type")), str(error.data.get("detail")))]
    if isinstance(error, Forbidden):
        ways = [_rights_remedy(error)]
    if isinstance(error, ExtraMissing):
        return ""
    if not in_doctor:
        ways += [text for kind, text in _DOCTOR_KNOWS if isinstance(error, kind)]
    return " ".join(way for way in ways if way)


def _rights_remedy(error: Forbidden) -> str:
    """What somebody can do whom a gateway refuses: get a token with a role that has the right."""
    from trellis.auth.matrices import RULES  # imported only for an error message

    rule = RULES.get(str(error.problem.get("rule")))
    roles = () if rule is None else rule.holders
    if "bound to" in str(error) or "for its own only" in str(error):
        return "The token reaches only what is its own; whoever administers the gateway can give you another one."
    return _ASK_FOR_RIGHTS.format(f"--role {roles[0] if len(roles) == 1 else 'ROLE'}")  # the error names all of them


def _payload_remedy(type_: str, detail: str) -> str:
    """How a payload is given if it was no JSON; an example of its fields for a type of the job queue."""
    from trellis.artifacts.content import JobType  # imported only for an error message

    if detail.startswith(NOT_JSON):
        return f"Give JSON as text, @file or - (standard input): `{_example(type_)}`"
    return f"For example: `{_example(type_)}`" if type_ in {kind.value for kind in JobType} else ""


def _example(type_: str) -> str:
    """A working submit command for this type. The payload fields are known only for types of the job queue."""
    from trellis.artifacts.content import JobType  # imported only for an error message
    from trellis.artifacts.payloads import EXAMPLES

    if type_.startswith("job."):
        return f"trellis submit --topic {type_} '{{\"n\": 1}}'"
    if type_ not in {kind.value for kind in JobType}:
        return f"trellis submit {type_} '{{\"n\": 1}}'"
    body = json.dumps(EXAMPLES[JobType(type_)], ensure_ascii=False)
    return f"trellis submit {type_} '{body}' --agent archivist-violin"


def without_password(text: str, url: str | None) -> str:
    """The text with the ledger's password masked, because errors end up in terminals, logs and tickets."""
    if url:
        text = text.replace(url, masked_url(url))
    try:
        parts = urlsplit(url or "")
        password, query = parts.password, dict(parse_qsl(parts.query))
    except ValueError:
        return text
    covered = text.replace(f":{password}@", ":***@") if password else text
    return re.sub(r"\b((?:ssl)?password=)[^&\s'\"]+", r"\1***", covered) if "password" in " ".join(query) else covered
