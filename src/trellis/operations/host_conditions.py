"""The conditions of alerts that only this machine knows: free space on its disks, and certificates that end.

The subject of such an alert begins with the name of the machine, so that no other machine resolves it.
"""

import asyncio
import base64
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from trellis.engine.alerts import SUBJECT_CHARS_MAX, AlertScope
from trellis.engine.disk_room import existing_above
from trellis.engine.errors import TrellisError
from trellis.engine.logs import log_of
from trellis.engine.text import duration
from trellis.operations.alerts import DISK_LOW, EXPIRY, AlertThresholds, Check, Checked, ConditionMet, decides

DAY_S = 24 * 3600.0
GIB = 1024.0**3
AUTHORITIES = "_ca_file"
"""How the name of a setting ends that lists the certificates of authorities."""

ReadT = TypeVar("ReadT")

_log = log_of("trellis.alerts")


@dataclass(frozen=True, kw_only=True)
class HostConditions:
    """Looks at this machine."""

    node: str
    thresholds: AlertThresholds
    folders: tuple[Path, ...] = ()
    """Folders whose disks must have room: those of the ledger, the objects and the memory."""
    certificates: Mapping[str, Path] | None = None
    """Certificate files, by the setting that names them."""
    token: Callable[[], str | None] = lambda: None
    """Returns the token that this process acts with."""
    usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage
    """Returns the total, used and free bytes of the disk that holds a folder."""

    def checks(self) -> tuple[Check, ...]:
        """Every check, in the order in which they run."""
        return (self.disks, self.ends)

    @property
    def _prefix(self) -> str:
        return f"{self.node}:"

    @decides(DISK_LOW)
    async def disks(self, now: datetime) -> Checked:  # noqa: ARG002 - the shape of a check
        """Disks with too little room."""
        return await asyncio.to_thread(self._low_disks)

    def _low_disks(self) -> Checked:
        met: list[ConditionMet] = []
        free_of = _each(DISK_LOW, {str(folder): partial(self._free, folder) for folder in self.folders})
        for folder, (total, free) in free_of.items():
            percent = 100.0 * free / total if total else 100.0
            if percent < self.thresholds.disk_percent:
                text = f"The disk of {folder} on {self.node} has {free / GIB:.1f} GiB left, {percent:.1f} % of it."
                met.append(ConditionMet(subject=f"{self._prefix}{folder}", value=percent, text=text))
        return self._checked(DISK_LOW, met, free_of, {str(folder) for folder in self.folders} - {*free_of})

    def _free(self, folder: Path) -> tuple[int, int]:
        total, _, free = self.usage(existing_above(folder))
        return total, free

    def _checked(self, name: str, met: list[ConditionMet], looked_at: Iterable[str], unread: Iterable[str]) -> Checked:
        """What a check read. Another process of this machine may look at other folders and settings."""
        subjects = tuple(f"{self._prefix}{one}" for one in looked_at)
        missing = tuple(AlertScope(name=name, subject=f"{self._prefix}{one}"[:SUBJECT_CHARS_MAX]) for one in unread)
        return Checked(met={name: met}, subjects=subjects, unread=missing)

    @decides(EXPIRY)
    async def ends(self, now: datetime) -> Checked:
        """Certificates and tokens that end soon, or have ended."""
        ends, unread = await asyncio.to_thread(self._ends)
        met: list[ConditionMet] = []
        for setting, end in ends.items():
            if end is None:
                continue
            left_s = (end - now).total_seconds()
            if left_s < self.thresholds.expiry_days * DAY_S:
                when = f"ends in {duration(left_s)}" if left_s > 0 else f"ended {duration(left_s)} ago"
                text = f"What TRELLIS_{setting.upper()} names on {self.node} {when}."
                met.append(ConditionMet(subject=f"{self._prefix}{setting}", value=left_s / DAY_S, text=text))
        return self._checked(EXPIRY, met, ends, unread)

    def _ends(self) -> tuple[dict[str, datetime | None], set[str]]:
        """When what each setting names ends; and the settings of which that could not be read."""
        files = self.certificates or {}
        ends = _each(EXPIRY, {setting: partial(_certificate_end, setting, path) for setting, path in files.items()})
        tokens = _each(EXPIRY, {"token": self.token})
        unread = {*files, "token"} - {*ends, *tokens}
        return ends | {name: _token_end(token) for name, token in tokens.items() if token is not None}, unread


def _each(alert: str, reads: Mapping[str, Callable[[], ReadT]]) -> dict[str, ReadT]:
    """What each read gives, without those that fail: one missing file must not hide the others."""
    values: dict[str, ReadT] = {}
    for name, read in reads.items():
        try:
            values[name] = read()
        except (OSError, TrellisError) as error:
            _log.warning("condition_unknown", alert=alert, subject=name, error=str(error))
    return values


def _certificate_end(setting: str, path: Path) -> datetime | None:
    """When a file of certificates stops to serve its setting. None for a file without a certificate.

    A list of authorities serves until the last of them ends: an old one may stay in it while its successor is there. Of
    any other file the first certificate is the process's own.
    """
    from cryptography import x509  # slow to import, and few instances name a certificate

    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        return None
    ends = [one.not_valid_after_utc for one in certificates]
    return max(ends) if setting.endswith(AUTHORITIES) else ends[0]


def _token_end(token: str) -> datetime | None:
    """When a token ends, by its own claim. None for text that is no token."""
    try:
        body = token.split(".")[1]
        read: Any = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        end = cast("dict[str, Any]", read).get("exp") if isinstance(read, dict) else None
        return None if end is None else datetime.fromtimestamp(float(end), tz=UTC)
    except (IndexError, ValueError, OverflowError, TypeError):
        return None
