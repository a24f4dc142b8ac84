"""Alerts on `sys.alert`: their content, their rate limits, and sending them."""

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
"""Burst of alerts of one code about one sender, and the interval between alerts after that, in seconds."""
ALL_AT_ONCE = 50
ALL_EVERY_S = 1.0
"""The same for all senders together.

So a sender that invents a new name for each packet cannot flood the readers of alerts.
"""
SENDERS_MAX = 1_000
"""Number of senders tracked; the least recently seen is dropped first."""
TEXT_CHARS_MAX = 500
SEVERITIES = {
    ErrorCode.SIGNATURE_INVALID: AlertSeverity.CRITICAL,
    ErrorCode.SIGNATURE_MISSING: AlertSeverity.CRITICAL,
    ErrorCode.VERSION_MISMATCH: AlertSeverity.ERROR,
    ErrorCode.MALFORMED_PACKET: AlertSeverity.ERROR,
}
"""Severities as CAP defines them; every other code is a warning."""

_log = log_of("trellis.bus")


@dataclass(slots=True)
class _TokenBucket:
    full_at: float = 0.0
    left_out: int = 0

    def takes(self, now: float, at_once: int, every_s: float) -> bool:
        """Whether one more alert fits now."""
        return max(self.full_at, now) + every_s - now <= at_once * every_s

    def take(self, now: float, every_s: float) -> None:
        self.full_at = max(self.full_at, now) + every_s


@dataclass(kw_only=True, slots=True)
class _AlertsOfCode:
    """The rate limits of one error code: by sender, and for all senders together."""

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
    """Rate limits of one error code: burst and interval, for one sender and for all together."""

    at_once: int = ALERTS_AT_ONCE
    every_s: float = ALERT_EVERY_S
    all_at_once: int = ALL_AT_ONCE
    all_every_s: float = ALL_EVERY_S


class AlertLimit:
    """Rate limit for alerts, by code and sender: a burst, then one per interval.

    A noisy sender does not mute others.
    """

    def __init__(self, clock: Clock, rates: AlertRates | None = None) -> None:
        self._clock, self._rates = clock, rates or AlertRates()
        self._codes: dict[ErrorCode, _AlertsOfCode] = {}

    def left_out(self, code: ErrorCode, sender_id: str = "") -> int | None:
        """How many alerts of this code and sender were suppressed since the last.

        None when this one is suppressed too.
        """
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
    details = {"subject": subject, "sender_id": error.sender_id, "job_id": error.job_id}
    return _alert(error.error_code, f"a packet on {subject} was dropped: {error.detail}", details, left_out)


def _alert(code: ErrorCode, message: str, details: Mapping[str, str], left_out: int) -> BusAlert:
    shown = {**details, "left_out": str(left_out)} if left_out else details
    return BusAlert(
        message=message,
        code=code,
        severity=SEVERITIES.get(code, AlertSeverity.WARNING),
        details={name: text[:TEXT_CHARS_MAX] for name, text in shown.items() if text},
    )


class _AlertBus(Protocol):
    async def publish(self, subject: str, body: PacketBody, *, trace_id: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertSender:
    """Sends the alerts of one component of the control plane. An alert that the bus does not take is only logged."""

    bus: _AlertBus
    limit: AlertLimit

    async def send(
        self, code: ErrorCode, message: str, *, about: str, trace_id: str, details: Mapping[str, str] | None = None
    ) -> None:
        """Send an alert about the sender or worker `about`, unless the rate limit suppresses it."""
        left_out = self.limit.left_out(code, about)
        if left_out is None:
            return
        alert = _alert(code, message[:TEXT_CHARS_MAX], {"sender_id": about, **(details or {})}, left_out)
        _log.warning("alert", code=code.name, message=message, **alert.details)
        try:
            await self.bus.publish(ALERT, alert, trace_id=trace_id)
        except BusError as error:
            _log.warning("alert_not_sent", error=str(error))
