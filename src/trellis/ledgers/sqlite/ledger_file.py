"""The file of an open ledger, which somebody may move away or replace: what is written then is lost with the old one."""

import time
from collections.abc import Callable
from pathlib import Path

from trellis.engine.errors import LedgerUnavailable

CHECK_S = 0.25
"""How long after a check writers rely on it that the file is still the one they have open."""


class LedgerFile:
    """The file that the connections of a ledger have open."""

    def __init__(self, path: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path.absolute()  # a handler may change the folder of the process
        self._monotonic = monotonic
        self._identity = _identity(self._path)
        self._checked_at = float("-inf")

    def check(self) -> None:
        """Raise LedgerUnavailable if the file is not where it was, or is another one."""
        try:
            is_open = _identity(self._path) == self._identity
        except FileNotFoundError:
            raise LedgerUnavailable(reason=f"there is no file {self._path} any more") from None
        except OSError as error:
            raise LedgerUnavailable(reason=f"{self._path} cannot be found: {error.strerror}") from error
        if not is_open:
            raise LedgerUnavailable(
                reason=f"{self._path} was replaced by another file while this process used it; restart every process"
                " of this ledger"
            )

    def problem(self) -> LedgerUnavailable | None:
        """What `check` raises, asked at most once in CHECK_S while there is nothing wrong."""
        now = self._monotonic()
        if now - self._checked_at < CHECK_S:
            return None
        try:
            self.check()
        except LedgerUnavailable as error:
            return error
        self._checked_at = now
        return None


def _identity(path: Path) -> tuple[int, int]:
    """What tells a file from another one that takes its place."""
    status = path.stat()
    return status.st_dev, status.st_ino
