"""Lanes: one connection each, one call at a time, and what happens when an answer is lost.

Every verb function of the database may be called again with the same ids: it returns what the first call did, or does
it now. So a lost answer is resolved by asking the same thing again, for a bounded time, and never by asking anew.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from trellis.engine.errors import (
    ConcurrencyKeyMissing,
    IdReserved,
    InputError,
    InvalidTransition,
    LedgerFull,
    LedgerNotMigrated,
    LedgerReadOnly,
    LedgerUnavailable,
    NotAllowed,
    OutcomeUnknown,
    PoolerUnfit,
    QueueFull,
    Refused,
    TrellisError,
)
from trellis.engine.outage_log import Failures
from trellis.ledgers.postgres.connection import (
    APPLICATION_NAME,
    CONFLICT_ERRORS,
    CONNECTION_LOST_ERRORS,
    PostgresConnection,
    PostgresError,
    UniqueViolation,
    connect,
)

Answer = TypeVar("Answer")

RETRIED_ERRORS: tuple[type[Exception], ...] = (*CONFLICT_ERRORS, *CONNECTION_LOST_ERRORS, LedgerUnavailable)
BACKOFF_S_FIRST = 0.02
BACKOFF_S_MAX = 1.0
COLLISIONS_MAX = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneOptions:
    """How long a lane waits."""

    call_timeout_s: float = 30.0
    """An answer that takes longer is taken for lost."""
    outcome_window_s: float = 30.0
    """How long a lost answer is asked for again before the caller is told that nobody knows."""
    connect_timeout_s: float = 10.0
    application_name: str = APPLICATION_NAME
    """What `pg_stat_activity` calls this process."""
    node: str | None = None
    """The machine that audit records name; by default this one."""


class PostgresLane:
    """One connection, opened when first used and again when lost."""

    def __init__(self, url: str, options: LaneOptions, failures: Failures | None = None) -> None:
        self._url = url
        self._failures = failures or Failures(APPLICATION_NAME)
        self._options = options
        self._lock = asyncio.Lock()
        self._connection: PostgresConnection | None = None
        self.waiting = 0
        """Calls under way or in line."""

    async def call(
        self,
        verb: str,
        request: str,
        ask: Callable[[PostgresConnection, bool], Awaitable[Answer]],
        *,
        window_s: float | None = None,
    ) -> Answer:
        """Ask, and after a lost answer ask again; `ask` is told whether an earlier try may have had its effect."""
        self.waiting += 1
        try:
            return await self._call(verb, request, ask, window_s)
        finally:
            self.waiting -= 1

    async def _call(
        self,
        verb: str,
        request: str,
        ask: Callable[[PostgresConnection, bool], Awaitable[Answer]],
        window_s: float | None,
    ) -> Answer:
        async with self._lock:
            loop = asyncio.get_running_loop()
            end = loop.time() + (self._options.outcome_window_s if window_s is None else window_s)
            sent, collisions, pause_s = False, 0, BACKOFF_S_FIRST
            while True:
                try:
                    connection = await self._connected()
                    sent_before, sent = sent, True
                    answer = await self._answered(connection, ask, sent_before=sent_before)
                except RETRIED_ERRORS as error:
                    lost: Exception = error
                    self._note_outage(verb, error, loop.time())
                except UniqueViolation as error:
                    # A repeat can meet its own first try: ours, still under way when we looked, or that of a caller who
                    # asks again after an unknown outcome. Asked as a repeat it is answered with what is there.
                    collisions += 1
                    if collisions > COLLISIONS_MAX:
                        raise to_trellis_error(error) from error
                    lost = error
                except PostgresError as error:
                    raise to_trellis_error(error) from error
                else:
                    if self._failures.count:
                        self._failures.succeeded(now=loop.time())
                    return answer
                if isinstance(lost, CONNECTION_LOST_ERRORS):
                    self.drop()
                if loop.time() + pause_s > end:
                    raise self._given_up(verb, request, lost, sent=sent) from lost
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, BACKOFF_S_MAX)

    async def _answered(
        self,
        connection: PostgresConnection,
        ask: Callable[[PostgresConnection, bool], Awaitable[Answer]],
        *,
        sent_before: bool,
    ) -> Answer:
        """The answer in time. Whoever stops waiting leaves a connection behind on which the answer may still come."""
        try:
            async with asyncio.timeout(self._options.call_timeout_s):
                return await ask(connection, sent_before)
        except asyncio.CancelledError:
            self.drop()
            raise

    def _note_outage(self, verb: str, error: Exception, now: float) -> None:
        """A server that cannot be reached, or falls silent, is logged; a connection that is replaced at once is not."""
        if isinstance(error, LedgerUnavailable):
            self._failures.failed(error, now=now)
        elif isinstance(error, TimeoutError):
            silence_s = self._options.call_timeout_s
            self._failures.failed(LedgerUnavailable(reason=f"no answer to {verb} for {silence_s:g} s"), now=now)

    def _given_up(self, verb: str, request: str, lost: Exception, *, sent: bool) -> TrellisError:
        if sent:
            return OutcomeUnknown(verb=verb, request=request)
        return lost if isinstance(lost, LedgerUnavailable) else LedgerUnavailable(reason=str(lost))

    async def _connected(self) -> PostgresConnection:
        if self._connection is None or self._connection.is_closed():
            options = self._options
            self._connection = await connect(
                self._url, timeout_s=options.connect_timeout_s, application_name=options.application_name
            )
        return self._connection

    def drop(self) -> None:
        """Forget the connection without waiting for it."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Finish the call under way and hang up."""
        async with self._lock:
            if self._connection is not None:
                try:
                    await self._connection.close(timeout=2)
                except CONNECTION_LOST_ERRORS:
                    self.drop()
                self._connection = None


def _not_allowed(message: str) -> TrellisError:
    return NotAllowed(role="of this connection", action="do this", reason=message)


def _not_migrated(_: str) -> TrellisError:
    return LedgerNotMigrated(found="none or older", needed="current", url="<url>")


def _without_session(message: str) -> TrellisError:
    return PoolerUnfit(reason=f"it gives one connection several sessions: {message}")


BY_STATE: dict[str, Callable[[str], TrellisError]] = {
    "TR002": _not_allowed,
    "42501": _not_allowed,
    "TR004": lambda message: InputError(detail=message),
    "23514": lambda message: InputError(detail=message),
    "22003": lambda message: InputError(detail=message),
    "53100": lambda _: LedgerFull(),
    "25006": lambda message: LedgerReadOnly(reason=message),
    "42883": _not_migrated,
    "42P01": _not_migrated,
    "3F000": _not_migrated,
    "26000": _without_session,
    "42P05": _without_session,
}


def to_trellis_error(error: Exception) -> TrellisError:
    """The database's no, as ours."""
    state = str(getattr(error, "sqlstate", ""))
    if state == "TR006":
        return QueueFull(**json.loads(str(getattr(error, "detail", "{}"))))
    if state == "TR007":
        return IdReserved(job_id=str(getattr(error, "detail", "")))
    if state == "TR008":
        return ConcurrencyKeyMissing(type=str(getattr(error, "detail", "")))
    if state == "TR005":  # the one refusal that only the database can word: what the artifact is that a job names
        return InvalidTransition(**json.loads(str(getattr(error, "detail", "{}"))))
    return BY_STATE.get(state, lambda message: Refused(detail=message))(str(error))
