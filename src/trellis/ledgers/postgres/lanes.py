"""Lanes: one connection each, one call at a time, with retries after lost answers.

Every verb function of the database may be called again with the same ids. It returns what the first call did, or does
it now. So a lost answer is resolved by repeating the same call for a bounded time, never by a call with new ids.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from trellis.engine.errors import (
    ConcurrencyKeyMissing,
    IdempotencyMismatch,
    IdReserved,
    InputError,
    InvalidTransition,
    JobNotFound,
    LedgerDamaged,
    LedgerFull,
    LedgerLoginRefused,
    LedgerNotMigrated,
    LedgerReadOnly,
    LedgerUnavailable,
    LoginNotAllowed,
    NotAllowed,
    OutcomeUnknown,
    PoolerUnfit,
    QueueFull,
    Refused,
    TrellisError,
    UniqueConflict,
)
from trellis.engine.outage_log import Failures
from trellis.engine.uniqueness import rule_refused
from trellis.ledgers.postgres.connection import (
    APPLICATION_NAME,
    CONFLICT_ERRORS,
    CONNECTION_LOST_ERRORS,
    DAMAGED_ERRORS,
    STOPPED_ERRORS,
    PostgresConnection,
    PostgresError,
    ReadOnly,
    UniqueViolation,
    connect,
)
from trellis.ledgers.refusals import ledger_closed

Answer = TypeVar("Answer")

RETRIED_ERRORS: tuple[type[Exception], ...] = (
    *CONFLICT_ERRORS,
    *STOPPED_ERRORS,
    *CONNECTION_LOST_ERRORS,
    LedgerUnavailable,
)
WITHOUT_EFFECT: tuple[type[Exception], ...] = (*CONFLICT_ERRORS, *STOPPED_ERRORS)
STOPS_MAX = 3
"""How often a call that the server stops is made. Others wait for the lane meanwhile."""
BACKOFF_S_FIRST = 0.02
BACKOFF_S_MAX = 1.0
COLLISIONS_MAX = 3
CONNECTIONS_MAX = 12
"""Connections that one open ledger has at most: one for each of ten lanes, one to send hints and one to receive them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneOptions:
    """Time-outs and names of a lane."""

    call_timeout_s: float = 30.0
    """An answer that takes longer counts as lost."""
    outcome_window_s: float = 30.0
    """How long a call is repeated after a lost answer before the caller gets OutcomeUnknown."""
    connect_timeout_s: float = 10.0
    application_name: str = APPLICATION_NAME
    """The name of this process in `pg_stat_activity`."""
    node: str | None = None
    """The machine named in audit records; this machine by default."""


class PostgresLane:
    """One connection, opened on first use and again when lost."""

    def __init__(self, url: str, options: LaneOptions, failures: Failures | None = None) -> None:
        self._url = url
        self._failures = failures or Failures(APPLICATION_NAME)
        self._options = options
        self._lock = asyncio.Lock()
        self._connection: PostgresConnection | None = None
        self._closed = False
        self.waiting = 0
        """Calls in progress or queued."""
        self.was_let_in = False
        """Whether the ledger was opened: then this login was let in, and a refusal may pass, as an outage does."""
        self._has_failed = False
        """Whether the outage that is logged is this lane's, too. Where connections are left for some lanes only, the
        success of another lane is not its end."""

    async def call(
        self,
        verb: str,
        request: str,
        ask: Callable[[PostgresConnection, bool], Awaitable[Answer]],
        *,
        window_s: float | None = None,
    ) -> Answer:
        """Make a call and repeat it after a lost answer. Raises LedgerUnavailable after `close`.

        `ask` is told whether an earlier try may have had its effect.
        """
        if self._closed:
            raise ledger_closed()
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
            sent, collisions, stops, pause_s = False, 0, 0, BACKOFF_S_FIRST
            while True:
                sent_before = sent
                try:
                    connection = await self._connected()
                    sent = True
                    answer = await self._answered(connection, ask, sent_before=sent_before)
                except UniqueViolation as error:
                    # A repeat can collide with its own first try: ours, still in progress when checked, or that of a
                    # caller that repeats after an unknown outcome. Sent as a repeat, the call is answered with what
                    # exists.
                    collisions += 1
                    if collisions > COLLISIONS_MAX:
                        raise to_trellis_error(error) from error
                    lost: Exception = error
                except (*RETRIED_ERRORS, PostgresError) as error:
                    if not _may_pass(error):
                        raise self._refused(verb, request, error, sent_before=sent_before) from error
                    lost = error
                    sent = sent_before or (sent and not isinstance(error, WITHOUT_EFFECT))
                    stops += isinstance(error, STOPPED_ERRORS)
                    self._note_outage(verb, error, loop.time())
                else:
                    if self._has_failed:
                        self._has_failed = False
                        self._failures.succeeded(now=loop.time())
                    return answer
                if isinstance(lost, CONNECTION_LOST_ERRORS):
                    self.drop()
                if loop.time() + pause_s > end or stops >= STOPS_MAX:
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
        """The answer, within the time-out.

        A cancelled caller drops the connection, because the answer may still arrive on it.
        """
        try:
            async with asyncio.timeout(self._options.call_timeout_s):
                return await ask(connection, sent_before)
        except asyncio.CancelledError:
            self.drop()
            raise

    def _note_outage(self, verb: str, error: Exception, now: float) -> None:
        """Log a server that is unreachable or silent. A connection that is replaced at once is not logged.

        Who opens a ledger hears the error itself.
        """
        if not self.was_let_in:
            return
        if isinstance(error, LedgerUnavailable):
            outage = error
        elif isinstance(error, STOPPED_ERRORS):
            outage = LedgerUnavailable(reason=str(error))
        elif isinstance(error, TimeoutError):
            outage = LedgerUnavailable(reason=f"no answer to {verb} for {self._options.call_timeout_s:g} s")
        else:
            return
        self._has_failed = True
        self._failures.failed(outage, now=now)

    def _refused(self, verb: str, request: str, error: Exception, *, sent_before: bool) -> TrellisError:
        """The error for a call that is not repeated."""
        if isinstance(error, ReadOnly):
            self.drop()  # after a failover another server may answer, and a session keeps the settings it began with
        refusal = to_trellis_error(error)
        if sent_before and isinstance(refusal, OF_SERVER):
            return OutcomeUnknown(verb=verb, request=request)  # the server may have done it before it came to this
        return refusal

    def _given_up(self, verb: str, request: str, lost: Exception, *, sent: bool) -> TrellisError:
        if sent:
            return OutcomeUnknown(verb=verb, request=request)
        return lost if isinstance(lost, LedgerUnavailable) else LedgerUnavailable(reason=str(lost))

    async def _connected(self) -> PostgresConnection:
        if self._connection is None or self._connection.is_closed():
            options = self._options
            try:
                self._connection = await connect(
                    self._url, timeout_s=options.connect_timeout_s, application_name=options.application_name
                )
            except LedgerLoginRefused as error:
                if not self.was_let_in:
                    raise
                raise LedgerUnavailable(reason=f"it lets this login in no more: {error.data['reason']}") from error
        return self._connection

    def drop(self) -> None:
        """Drop the connection without waiting for it."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Finish the calls that were made before, and close the connection. Later calls are refused."""
        self._closed = True
        async with self._lock:
            if self._connection is not None:
                try:
                    await self._connection.close(timeout=2)
                except CONNECTION_LOST_ERRORS:
                    self.drop()
                self._connection = None


def _may_pass(error: Exception) -> bool:
    """Whether the same call may be answered when it is repeated soon."""
    return isinstance(error, RETRIED_ERRORS) and not isinstance(error, DAMAGED_ERRORS)


_ACTS_AS = re.compile(r"database role \S+ may not act as (\S+)")


def _not_allowed(message: str) -> TrellisError:
    role = _ACTS_AS.search(message)
    if role is None:
        return NotAllowed(role="of this connection", action="do this", reason=message)
    missing = f"the role {role[1]} (`migrate(url, grants=[…])` gives it one), or to be a member of trellis_app"
    return LoginNotAllowed(reason=message, missing=missing)


def _no_privilege(message: str) -> TrellisError:
    return LoginNotAllowed(reason=message, missing="to be a member of trellis_app: GRANT trellis_app TO the login")


def _not_migrated(_: str) -> TrellisError:
    return LedgerNotMigrated(found="none or older", needed="current")


def _without_session(message: str) -> TrellisError:
    return PoolerUnfit(reason=f"it gives one connection several sessions: {message}")


BY_STATE: dict[str, Callable[[str], TrellisError]] = {
    "TR002": _not_allowed,
    "42501": _no_privilege,
    "TR004": lambda message: InputError(detail=message),
    "23514": lambda message: InputError(detail=message),
    "22003": lambda message: InputError(detail=message),
    "53100": lambda _: LedgerFull(),
    "XX001": lambda message: LedgerDamaged(reason=message),
    "XX002": lambda message: LedgerDamaged(reason=message),
    "25006": lambda message: LedgerReadOnly(
        reason=f"{message}: it is a standby, or default_transaction_read_only is on"
    ),
    "42883": _not_migrated,
    "42P01": _not_migrated,
    "3F000": _not_migrated,
    "26000": _without_session,
    "42P05": _without_session,
}


SERVER_STATES = frozenset({"08", "53", "57", "58"})
"""Classes of errors that say nothing of the call: the connection, the server's resources, its operator, its system."""
OF_SERVER = (LedgerReadOnly, LedgerFull, LedgerDamaged, LedgerUnavailable)
"""Errors that say nothing of the call."""
BY_STATE_AND_DETAIL: dict[str, Callable[[str], TrellisError]] = {
    "TR005": lambda detail: InvalidTransition(**json.loads(detail)),  # only the database knows the artifact's state
    "TR006": lambda detail: QueueFull(**json.loads(detail)),
    "TR007": lambda detail: IdReserved(job_id=detail),
    "TR008": lambda detail: ConcurrencyKeyMissing(type=detail),
    "TR010": lambda detail: IdempotencyMismatch(**json.loads(detail)),
    "TR011": lambda detail: JobNotFound(job_id=detail),
    "TR012": lambda detail: rule_refused(**json.loads(detail)),
    "TR014": lambda detail: UniqueConflict(**json.loads(detail)),
}
"""Refusals whose data is in the detail of the database's error."""


def to_trellis_error(error: Exception) -> TrellisError:
    """The TrellisError for a refusal by the database."""
    state = str(getattr(error, "sqlstate", ""))
    if state in BY_STATE_AND_DETAIL:
        return BY_STATE_AND_DETAIL[state](str(getattr(error, "detail", "")))
    if state not in BY_STATE and state[:2] in SERVER_STATES:
        return LedgerUnavailable(reason=str(error))
    return BY_STATE.get(state, lambda message: Refused(detail=message))(str(error))
