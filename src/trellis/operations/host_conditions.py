"""The conditions of alerts that only this machine knows: free space on its disks, and certificates that end.

The subject of such an alert begins with the name of the machine, so that no other machine resolves it.
"""

import asyncio
import base64
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from trellis.operations.alerts import DISK_LOW, EXPIRY, AlertThresholds, Check, Checked, ConditionMet
from trellis.operations.explain import duration

DAY_S = 24 * 3600.0
GIB = 1024.0**3


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

    async def disks(self, now: datetime) -> Checked:  # noqa: ARG002 - the shape of a check
        """Disks with too little room."""
        met = await asyncio.to_thread(self._low_disks)
        return Checked(met={DISK_LOW: met}, prefix=self._prefix)

    def _low_disks(self) -> list[ConditionMet]:
        met: list[ConditionMet] = []
        for folder in self.folders:
            total, _, free = self.usage(_existing(folder))
            percent = 100.0 * free / total if total else 100.0
            if percent < self.thresholds.disk_percent:
                text = f"The disk of {folder} on {self.node} has {free / GIB:.1f} GiB left, {percent:.1f} % of it."
                met.append(ConditionMet(subject=f"{self._prefix}{folder}", value=percent, text=text))
        return met

    async def ends(self, now: datetime) -> Checked:
        """Certificates and tokens that end soon, or have ended."""
        ends = await asyncio.to_thread(self._ends)
        met: list[ConditionMet] = []
        for setting, end in ends.items():
            left_s = (end - now).total_seconds()
            if left_s < self.thresholds.expiry_days * DAY_S:
                when = f"ends in {duration(left_s)}" if left_s > 0 else f"ended {duration(left_s)} ago"
                text = f"What TRELLIS_{setting.upper()} names on {self.node} {when}."
                met.append(ConditionMet(subject=f"{self._prefix}{setting}", value=left_s / DAY_S, text=text))
        return Checked(met={EXPIRY: met}, prefix=self._prefix)

    def _ends(self) -> dict[str, datetime]:
        ends = {setting: _certificate_end(path) for setting, path in (self.certificates or {}).items()}
        token = self.token()
        ends["token"] = None if token is None else _token_end(token)
        return {setting: end for setting, end in ends.items() if end is not None}


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))


def _certificate_end(path: Path) -> datetime | None:
    """When the first certificate of a file ends. None for a file without one."""
    from cryptography import x509  # slow to import, and few instances name a certificate

    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        return None
    return min((one.not_valid_after_utc for one in found), default=None)


def _token_end(token: str) -> datetime | None:
    """When a token ends, by its own claim. None for text that is no token."""
    try:
        body = token.split(".")[1]
        read: Any = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        end = cast("dict[str, Any]", read).get("exp") if isinstance(read, dict) else None
        return None if end is None else datetime.fromtimestamp(float(end), tz=UTC)
    except (IndexError, ValueError, OverflowError, TypeError):
        return None
