"""When to leave a kernel alone that does not answer: after three failures in a row for 30 seconds, and then one question tries."""

from collections.abc import Callable
from dataclasses import dataclass

FAILURES_MAX = 3
OPEN_S = 30.0


@dataclass(slots=True)
class KernelCircuitBreaker:
    """Counts failures in a row, in this process. Whoever is admitted says how it went, or lets go."""

    monotonic: Callable[[], float]
    failures_max: int = FAILURES_MAX
    open_s: float = OPEN_S
    _failures: int = 0
    _open_until: float | None = None
    _trying: bool = False

    def refuses_for_s(self) -> float | None:
        """How long nobody is admitted; None when this question is, which is then the one that tries if there may be only one."""
        if self._open_until is None:
            return None
        left_s = self._open_until - self.monotonic()
        if left_s > 0 or self._trying:
            return max(left_s, 0.0)
        self._trying = True
        return None

    def answered(self) -> None:
        """It is there."""
        self._failures, self._open_until, self._trying = 0, None, False

    def failed(self) -> None:
        """It is not."""
        self._failures += 1
        if self._trying or self._failures >= self.failures_max:
            self._open_until = self.monotonic() + self.open_s
        self._trying = False

    def release(self) -> None:
        """The question ended without a word about the kernel: another may try."""
        self._trying = False
