"""Alerts about packets that were refused: what they say, and how often one may be sent."""

from trellis.bus.envelope import PacketRefused
from trellis.bus.messages import Alert, ErrorCode, Severity
from trellis.engine.clock import Clock

ALERTS_AT_ONCE = 5
ALERT_EVERY_S = 10.0
SEVERITIES = {
    ErrorCode.SIGNATURE_INVALID: Severity.CRITICAL,
    ErrorCode.SIGNATURE_MISSING: Severity.CRITICAL,
    ErrorCode.VERSION_MISMATCH: Severity.ERROR,
    ErrorCode.MALFORMED_PACKET: Severity.ERROR,
}
"""As CAP has them; everything else is a warning."""


class AlertLimit:
    """Lets through a few alerts of each code at once, and then one in a while."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._full_at: dict[ErrorCode, float] = {}
        self._left_out: dict[ErrorCode, int] = {}

    def left_out(self, code: ErrorCode) -> int | None:
        """How many of this code were left out since the last; None when this one is left out too."""
        now = self._clock.monotonic()
        full_at = max(self._full_at.get(code, now), now) + ALERT_EVERY_S
        if full_at - now > ALERTS_AT_ONCE * ALERT_EVERY_S:
            self._left_out[code] = self._left_out.get(code, 0) + 1
            return None
        self._full_at[code] = full_at
        return self._left_out.pop(code, 0)


def alert_of(subject: str, error: PacketRefused, left_out: int = 0) -> Alert:
    """What people are told about a packet that was refused."""
    details = {"subject": subject, "sender_id": error.sender_id, "job_id": error.job_id}
    if left_out:
        details["left_out"] = str(left_out)
    return Alert(
        message=f"a packet on {subject} was dropped: {error.detail}",
        code=error.error_code,
        severity=SEVERITIES.get(error.error_code, Severity.WARNING),
        details={name: said for name, said in details.items() if said},
    )
