"""Alerts on `sys.alert`: what they say, how often one may be sent, and the sending."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trellis.bus.errors import BusError
from trellis.bus.messages import ALERT, AlertSeverity, BusAlert, ErrorCode, PacketBody, PacketRefused
from trellis.engine.clock import Clock
from trellis.engine.logs import log_of

ALERTS_AT_ONCE = 5
ALERT_EVERY_S = 10.0
"""How many alerts of one code about one sender go out at once, and how often one does after that."""
ALL_AT_ONCE = 50
ALL_EVERY_S = 1.0
"""The same for all senders together: whoever invents a new name for each packet must not flood those who read alerts."""
SENDERS_MAX = 1_000
"""How many senders are told apart; the one not heard of for longest is forgotten first."""
TEXT_CHARS_MAX = 500
SEVERITIES = {
    ErrorCode.SIGNATURE_INVALID: AlertSeverity.CRITICAL,
    ErrorCode.SIGNATURE_MISSING: AlertSeverity.CRITICAL,
    ErrorCode.VERSION_MISMATCH: AlertSeverity.ERROR,
    ErrorCode.MALFORMED_PACKET: AlertSeverity.ERROR,
}
"""As CAP has them; everything else is a warning."""

_log = log_of("trellis.bus")


@dataclass(slots=True)
class _TokenBucket:
    """A bucket of alerts that fills up again with time."""

    full_at: float = 0.0
    left_out: int = 0

    def takes(self, now: float, at_once: int, every_s: float) -> bool:
        """Whether one more fits now."""
        return max(self.full_at, now) + every_s - now <= at_once * every_s

    def take(self, now: float, every_s: float) -> None:
        self.full_at = max(self.full_at, now) + every_s


@dataclass(kw_only=True, slots=True)
class _AlertsOfCode:
    """What one error code may still say: about each sender, and about all of them together."""

    all: _TokenBucket = field(default_factory=_TokenBucket)
    by_sender: "OrderedDict[str, _TokenBucket]" = field(default_factory=OrderedDict[str, _TokenBucket])

    def of(self, sender_id: str) -> _TokenBucket:
        known = self.by_sender.setdefault(sender_id, _TokenBucket())
        self.by_sender.move_to_end(sender_id)
        if len(self.by_sender) > SENDERS_MAX:
            self.by_sender.popitem(last=False)
        return known


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertRates:
    """How many messages of one code go out at once and how often one does after that: for one sender, and for all together."""

    at_once: int = ALERTS_AT_ONCE
    every_s: float = ALERT_EVERY_S
    all_at_once: int = ALL_AT_ONCE
    all_every_s: float = ALL_EVERY_S


class AlertLimit:
    """Lets a few alerts of each code about each sender through at once and then one in a while, so that a noisy sender mutes nobody."""

    def __init__(self, clock: Clock, rates: AlertRates | None = None) -> None:
        self._clock, self._rates = clock, rates or AlertRates()
        self._codes: dict[ErrorCode, _AlertsOfCode] = {}

    def left_out(self, code: ErrorCode, sender_id: str = "") -> int | None:
        """How many alerts of this code about this sender were left out since the last; None when this one is left out too."""
        now, of_code = self._clock.monotonic(), self._codes.setdefault(code, _AlertsOfCode())
        own, rates = of_code.of(sender_id), self._rates
        fits = own.takes(now, rates.at_once, rates.every_s)
        if not fits or not of_code.all.takes(now, rates.all_at_once, rates.all_every_s):
            own.left_out += 1
            return None
        own.take(now, rates.every_s)
        of_code.all.take(now, rates.all_every_s)
        before, own.left_out = own.left_out, 0
        return before


def alert_of(subject: str, error: PacketRefused, left_out: int = 0) -> BusAlert:
    """What people are told about a packet that was refused."""
    details = {"subject": subject, "sender_id": error.sender_id, "job_id": error.job_id}
    if left_out:
        details["left_out"] = str(left_out)
    return BusAlert(
        message=f"a packet on {subject} was dropped: {error.detail}",
        code=error.error_code,
        severity=SEVERITIES.get(error.error_code, AlertSeverity.WARNING),
        details={name: said[:TEXT_CHARS_MAX] for name, said in details.items() if said},
    )


class _AlertBus(Protocol):
    async def publish(self, subject: str, body: PacketBody, *, trace_id: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertSender:
    """Sends the alerts of one part of the control plane. An alert that the bus does not take is only in the log."""

    bus: _AlertBus
    limit: AlertLimit

    async def send(
        self, code: ErrorCode, message: str, *, about: str, trace_id: str, details: Mapping[str, str] | None = None
    ) -> None:
        """One alert about what the sender or worker `about` did, unless there were too many of them lately."""
        left_out = self.limit.left_out(code, about)
        if left_out is None:
            return
        told = {"sender_id": about, **(details or {}), **({"left_out": str(left_out)} if left_out else {})}
        _log.warning("alert", code=code.name, message=message, **told)
        alert = BusAlert(
            message=message[:TEXT_CHARS_MAX],
            code=code,
            severity=SEVERITIES.get(code, AlertSeverity.WARNING),
            details={name: text[:TEXT_CHARS_MAX] for name, text in told.items() if text},
        )
        try:
            await self.bus.publish(ALERT, alert, trace_id=trace_id)
        except BusError as error:
            _log.warning("alert_not_sent", error=str(error))
