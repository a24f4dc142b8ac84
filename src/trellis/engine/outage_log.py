"""Logs failures that last: the first at once, then a count per minute, then the recovery with its duration.

An outage belongs to the process, not to the loop that met it. When the ledger is away, one line says so, not one line
for each of a dozen services. An outage is over when every loop that met it has succeeded again or has ended.
"""

import re
from weakref import WeakKeyDictionary

from trellis.engine.errors import LedgerError, TrellisError
from trellis.engine.logs import Log, log_of

SUMMARY_S = 60.0
STALE_S = 3 * SUMMARY_S
"""A loop whose last failure is older than this no longer keeps an outage open."""
TRACEBACKS_MAX = 100
"""How many distinct errors get a traceback; further ones get none."""
RECOVERED = "recovered"

_log = log_of("trellis.outage")


class Outage:
    """One unavailable dependency, shared by all loops of this process that need it."""

    def __init__(self, event: str, log: Log = _log) -> None:
        self._event, self._log = event, log
        self._failing: WeakKeyDictionary[Failures, str] = WeakKeyDictionary()
        self._began = self._logged = self._last = 0.0
        self._failures = 0
        self._kind: type[BaseException] | None = None

    def failed(self, source: "Failures", error: BaseException, *, name: str, now: float) -> None:
        """Record a failure of the loop `name`.

        Logged when it is the first, has another error class, or a minute has passed.
        """
        if not 0 <= now - self._last <= STALE_S:
            self._failing.clear()
        first = not self._failing
        if first:
            self._began, self._failures = now, 0
        self._last = now
        self._failing[source] = name
        self._failures += 1
        if first or type(error) is not self._kind:
            self._log.warning(self._event, service=name, error=str(error))
        elif now - self._logged >= SUMMARY_S:
            services = sorted(set(self._failing.values()))
            for_s = round(now - self._began, 1)
            self._log.warning(self._event, error=str(error), failures=self._failures, for_s=for_s, services=services)
        else:
            return
        self._kind, self._logged = type(error), now

    def succeeded(self, source: "Failures", *, now: float) -> None:
        """Record that a loop which had failed has succeeded."""
        if self._failing.pop(source, None) is not None and not self._failing:
            for_s = round(max(now - self._began, 0.0), 1)
            self._log.info(RECOVERED, after=self._event, for_s=for_s, failures=self._failures)

    def left(self, source: "Failures") -> None:
        """Record that a loop which had failed has ended."""
        self._failing.pop(source, None)


LEDGER = Outage("ledger_unavailable")
_outages: dict[str, Outage] = {}


def outage_of(error: BaseException) -> Outage | None:
    """The outage that this error belongs to; None when the error is a fault of the code."""
    if isinstance(error, LedgerError):
        return LEDGER
    if not isinstance(error, TrellisError) or error.code != "UPSTREAM_UNAVAILABLE":
        return None
    event = re.sub(r"(?<=.)([A-Z])", r"_\1", type(error).__name__).lower()
    return _outages.setdefault(event, Outage(event))


class Failures:
    """The consecutive failures of one loop. Outages are shared with the process; a fault is the loop's own.

    A fault is logged with its traceback once for each distinct error. Repeated faults are counted like an outage.
    """

    def __init__(self, name: str, log: Log = _log, event: str = "pass_failed") -> None:
        self._name, self._log = name, log
        self._fault = Outage(event, log)
        self._open: Outage | None = None
        self._shown: set[tuple[type[BaseException], str]] = set()
        self.count = 0
        """Consecutive failures so far."""

    def failed(self, error: BaseException, *, now: float) -> None:
        """Record one more failure."""
        self.count += 1
        outage = outage_of(error) or self._fault
        if self._open is not None and self._open is not outage:
            self._open.succeeded(self, now=now)
        self._open = outage
        if outage is self._fault and self._is_new(error):
            self._log.error("traceback", service=self._name, error=repr(error), exc_info=error)
        outage.failed(self, error, name=self._name, now=now)

    def succeeded(self, *, now: float) -> None:
        """Record a success: the count starts again from 0."""
        self.count = 0
        if self._open is not None:
            self._open.succeeded(self, now=now)
            self._open = None

    def left(self) -> None:
        """Record that the loop has ended: it can no longer report a recovery."""
        if self._open is not None:
            self._open.left(self)
            self._open = None

    def _is_new(self, error: BaseException) -> bool:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        if (type(error), place) in self._shown or len(self._shown) >= TRACEBACKS_MAX:
            return False
        self._shown.add((type(error), place))
        return True
