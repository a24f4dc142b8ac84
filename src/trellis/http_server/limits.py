"""Rate limits of an HTTP server: requests per caller, recorded refusals per caller, and log lines caused by clients."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from fastapi import Request

from trellis.auth.principals import Principal
from trellis.engine.logs import Log
from trellis.http_server.problems import Problem

# Limits per caller: requests, by a token bucket that RateLimit headers report, and recorded refusals.
# Each process (replica) counts for itself.

BUCKETS_MAX = 10_000
REFUSALS_PER_MINUTE_MAX = 10
UNAUTHENTICATED_PER_MINUTE_MAX = 60
"""The most recorded refusals of all unauthenticated senders together, who may have any number of addresses."""
REFUSED_MAX = 1_000
MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class RateLimits:
    """Allows each caller `per_second` requests on average and `burst` at once. `name` identifies the policy."""

    def __init__(self, per_second: float, burst: int, monotonic: Callable[[], float], name: str = "default") -> None:
        self._per_second, self._burst, self._monotonic, self._name = per_second, burst, monotonic, name
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._policy = f'"{name}";q={burst};w={ceil(burst / per_second)}'
        self._policy_header = (b"ratelimit-policy", self._policy.encode())

    def take(self, request: Request, principal: Principal) -> None:
        """Count one request; raises Problem 429 with the time to wait. Leaves headers for the response in the scope."""
        now = self._monotonic()
        bucket = self._buckets.get(principal.name)
        if bucket is None:
            bucket = self._buckets[principal.name] = _Bucket(float(self._burst), now)
            if len(self._buckets) > BUCKETS_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(principal.name)
        bucket.left = min(float(self._burst), bucket.left + (now - bucket.at) * self._per_second)
        bucket.at = now
        wait_s = 0 if bucket.left >= 1.0 else ceil((1.0 - bucket.left) / self._per_second)
        left = f'"{self._name}";r={max(0, int(bucket.left) - 1)};t={max(1, wait_s)}'
        if bucket.left < 1.0:
            detail = f"{principal.name} asks faster than {self._per_second:g} times a second; wait {wait_s} s."
            headers = {"RateLimit-Policy": self._policy, "RateLimit": left, "Retry-After": str(max(1, wait_s))}
            raise Problem("RATE_LIMITED", detail, headers=headers)
        bucket.left -= 1.0
        request.scope["trellis.headers"] = [self._policy_header, (b"ratelimit", left.encode())]


@dataclass(slots=True)
class _Minute:
    began_at: float
    recorded: int = 0
    left_out: int = 0


class RefusalBounds:
    """Limits how many refusals per minute are recorded for each caller, and counts those left out.

    All unauthenticated senders together have a second limit.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._minutes: OrderedDict[str, _Minute] = OrderedDict()
        self._unauthenticated = _Minute(monotonic())

    def take(self, name: str, *, authenticated: bool = True) -> int | None:
        """How many refusals of this caller were left out before this one; None when this one is left out too.

        For an unauthenticated sender, the number includes those that the limit for all of them left out.
        """
        now = self._monotonic()
        minute = self._minutes[name] = _minute_at(now, self._minutes.pop(name, None) or _Minute(now))
        if len(self._minutes) > REFUSED_MAX:
            self._minutes.popitem(last=False)
        if authenticated or minute.recorded >= REFUSALS_PER_MINUTE_MAX:
            return _taken(minute, REFUSALS_PER_MINUTE_MAX)
        self._unauthenticated = _minute_at(now, self._unauthenticated)
        among_all = _taken(self._unauthenticated, UNAUTHENTICATED_PER_MINUTE_MAX)
        return None if among_all is None else among_all + (_taken(minute, REFUSALS_PER_MINUTE_MAX) or 0)


def _minute_at(now: float, minute: _Minute) -> _Minute:
    return _Minute(now, left_out=minute.left_out) if now - minute.began_at >= MINUTE_S else minute


def _taken(minute: _Minute, most: int) -> int | None:
    if minute.recorded >= most:
        minute.left_out += 1
        return None
    minute.recorded += 1
    left_out, minute.left_out = minute.left_out, 0
    return left_out


# Limits log lines: the first of many equal events is logged at once, the rest as one count.

EVERY_S = 60.0


class LogLimit:
    """Logs the warnings of one server, limited per event and `code`. `call_later` is the event loop's."""

    def __init__(self, log: Log, call_later: Callable[..., Any], *, every_s: float = EVERY_S) -> None:
        self._log, self._call_later, self._every_s = log, call_later, every_s
        self._counts: dict[tuple[str, str], int] = {}

    def warning(self, event: str, *, code: str, **fields: Any) -> None:
        """Log the first event of this name and code; count those that follow within the interval."""
        key = (event, code)
        if key in self._counts:
            self._counts[key] += 1
            return
        self._log.warning(event, code=code, **fields)
        self._watch(key)

    def flush(self) -> None:
        """Log the counts that no summary has reported yet."""
        for key in list(self._counts):
            self._summarize(key)

    def _watch(self, key: tuple[str, str]) -> None:
        self._counts[key] = 0
        self._call_later(self._every_s, self._look, key)

    def _look(self, key: tuple[str, str]) -> None:
        """Keep counting while events arrive.

        An interval without events ends it, so the next event is logged at once.
        """
        if self._summarize(key):
            self._watch(key)

    def _summarize(self, key: tuple[str, str]) -> bool:
        """Log one line for all events since the last one; returns whether there were any."""
        (event, code), count = key, self._counts.pop(key, 0)
        if count:
            self._log.warning(f"{event}_again", code=code, count=count, within_s=self._every_s)
        return count > 0
