"""Where a command works: on a ledger or through a gateway; and commands as they can be typed for the same place."""

import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

PROGRAM = "trellis"
PLACE_OPTIONS = frozenset({"--data", "--ledger", "--gateway"})
_QUOTED_COMMAND = re.compile(rf"`{PROGRAM} ([a-z][^`]*)`")


class OnThisMachine(NamedTuple):
    """A command that takes no --gateway."""

    because: str
    """What the command does that no gateway can do for it, as a sentence without its subject."""
    instead: str = "Leave --gateway out."
    """What to do instead of naming a gateway."""


_OF_THE_LEDGER = OnThisMachine(
    "works on the ledger and its stores, not through a gateway",
    "Run it on the machine of the ledger, or name the ledger with --ledger URL or --data DIR.",
)
_OF_A_KEY = OnThisMachine(
    "reads or makes a key that stays on this machine", "Run it on the machine that has the key, without --gateway."
)

ON_THIS_MACHINE: Mapping[str, OnThisMachine] = MappingProxyType(
    {
        **dict.fromkeys(("init", "demo"), OnThisMachine("makes an instance in a folder of this machine")),
        **dict.fromkeys(
            ("up", "worker"),
            OnThisMachine(
                "is a process that works on the ledger or the bus",
                "Name the ledger with --ledger URL or --data DIR, and the bus with TRELLIS_BUS.",
            ),
        ),
        **dict.fromkeys(("migrate", "verify", "sweep", "rebuild", "backup", "restore", "move"), _OF_THE_LEDGER),
        **dict.fromkeys(("memory export", "memory import"), _OF_THE_LEDGER),
        **dict.fromkeys(("followers list", "followers leave-behind"), _OF_THE_LEDGER),
        **dict.fromkeys(("audit verify", "audit head", "retention plan", "retention apply"), _OF_THE_LEDGER),
        "doctor": OnThisMachine(
            "checks this machine: its settings, and the ledger and the gateway that they name",
            "Set TRELLIS_GATEWAY, and the doctor also asks that gateway; --ledger URL or --data DIR names a ledger.",
        ),
        "health": OnThisMachine(
            "asks a process of this machine at its health address",
            "`trellis wait --gateway URL` waits for a gateway elsewhere.",
        ),
        **dict.fromkeys(("token issue", "token key", "token issuer"), _OF_A_KEY),
        "agents create": OnThisMachine(
            "writes an agent's file into the object store",
            "Run it on the machine of the ledger, or name the ledger with --ledger URL or --data DIR.",
        ),
        "alerts runbook": OnThisMachine(
            "prints a page that comes with the program", "GET /runbooks/NAME of the gateway has the same page."
        ),
        "policy check": OnThisMachine("reads a file of this machine"),
        **dict.fromkeys(("version", "lifecycles", "completion"), OnThisMachine("prints what this program knows")),
    }
)
"""Commands that take no --gateway, each with the reason. Every other command works through a gateway too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandPlace:
    """The options of a command that name its ledger or gateway, as they were given."""

    ledger: str | None
    """Without a password."""
    data: Path | None
    gateway: str | None

    def add_to(self, words: str) -> str:
        """The words of another command with the same options; unchanged if they name a place."""
        option, value = "--data", None if self.data is None else str(self.data)
        if self.ledger is not None:
            option, value = "--ledger", self.ledger
        if self.gateway is not None and not _is_local(words):
            option, value = "--gateway", self.gateway
        if value is None or any(word.partition("=")[0] in PLACE_OPTIONS for word in words.split()):
            return words
        return f"{words} {option} {shlex.quote(value)}"

    def add_in(self, text: str) -> str:
        """A text with the same options, and the name of the program, at each command in backticks."""
        return _QUOTED_COMMAND.sub(lambda match: f"`{program_name()} {self.add_to(match[1])}`", text)


def program_name() -> str:
    """The command that runs this program from any folder, as a shell reads it."""
    called = Path(sys.argv[0])
    path = shutil.which(PROGRAM)
    if path is not None and (called.name != PROGRAM or Path(path).resolve() == called.resolve()):
        return PROGRAM
    if called.name == PROGRAM:
        return shlex.quote(str(called.absolute()))
    return f"{shlex.quote(sys.executable)} -m {PROGRAM}"


def _is_local(words: str) -> bool:
    """Whether a command takes no --gateway."""
    first, second = [*words.split(), "", ""][:2]
    return first in ON_THIS_MACHINE or f"{first} {second}" in ON_THIS_MACHINE
