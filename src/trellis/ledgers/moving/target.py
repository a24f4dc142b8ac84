"""The PostgreSQL ledger that a move fills: whether it may, what was written so far, and opening it.

Nothing is written before the database was judged: it is empty, or has the mark of the same move. From then until it is
open, triggers on every table refuse all writers but the move. The mark, one row of `meta`, decides once whether the
ledger is opened or the move undone: both are an update of a mark that says `copying`.
"""

import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from trellis.engine.admin_acts import NewAct
from trellis.engine.errors import LedgerError, LedgerUnavailable, LedgerUrlInvalid
from trellis.engine.jobs import Actor
from trellis.ledgers.migration import MigratedBy
from trellis.ledgers.moving.parts import TARGET, WRITE, LedgerPart, MovedRow
from trellis.ledgers.moving.source import MoveRefused
from trellis.ledgers.postgres.connection import CONNECTION_LOST_ERRORS, PostgresConnection, PostgresError, connect
from trellis.ledgers.postgres.migrate import check_version, migrate, record_as_owner, stored_version

APPLICATION = "trellis-move"
FINISHED = "finished"
"""The place of a part whose last row was written."""
SHOWN_PARAMETERS = frozenset({"host", "port", "dbname", "database", "user"})
"""Parameters of an address that say which database it is. All others are left out of marks and messages."""
PAGE_ROWS = 1_000


class TargetStage(StrEnum):
    """What the mark of a target says."""

    COPYING = "copying"
    OPEN = "open"
    UNDONE = "undone"


@dataclass(frozen=True, kw_only=True)
class TargetMark:
    id: str
    stage: TargetStage
    acts_before: int = 0
    feed_end: int | None = None
    """The last position of the source. Positions of the source up to it are positions of this feed."""


def public_address(url: str) -> str:
    """A PostgreSQL address without its password and without parameters that may hold secrets. Raises LedgerUrlInvalid.

    An address that cannot be taken apart surely is refused, and not repeated: the password could be anywhere in it.
    """
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2]
        known = parts.scheme in {"postgresql", "postgres"} and "@" not in f"{parts.path}{parts.query}{parts.fragment}"
        plain = known and re.fullmatch(r"[^:@/]*(:\d+)?(,[^:@/]*(:\d+)?)*|\[[0-9a-fA-F:.]+\](:\d+)?", hosts) is not None
        user = (parts.username or "") if plain else ""
        query = [(name, value) for name, value in parse_qsl(parts.query) if name in SHOWN_PARAMETERS]
    except ValueError:
        plain = False
        user, hosts, query = "", "", []
        parts = urlsplit("")
    if not plain or parts.fragment:
        reason = "it is none, or its password has characters that must be written as %40 (@), %2F (/), %3A (:), %3F (?) or %23 (#)"
        raise LedgerUrlInvalid(url="postgresql://…", reason=reason)
    login = f"{user}@" if user else ""
    shown = f"?{urlencode(query, quote_via=quote, safe='/')}" if query else ""
    return f"postgresql://{login}{hosts}{parts.path}{shown}"


class PostgresTarget:
    """A connection to the target in the name of one move."""

    def __init__(self, url: str, connection: PostgresConnection) -> None:
        self.url, self._connection = url, connection
        self.address = public_address(url)

    async def close(self) -> None:
        await self._connection.close()

    # --- judging -------------------------------------------------------------------------------------------------

    async def mark(self) -> TargetMark | None:
        """What the database says about a move into it. Writes nothing."""
        async with self._reported():
            if not await self._connection.fetchval(TARGET.is_made):
                return None
            text = await self._connection.fetchval(TARGET.mark)
        return None if text is None else _read(text)

    async def judge(self, move_id: str | None) -> TargetMark | None:
        """Its mark if it is of this move, None if the database is empty. Raises MoveRefused otherwise. Writes nothing."""
        mark = await self.mark()
        if mark is not None:
            if mark.id == move_id:
                return mark
            state = "was moved there" if mark.stage is TargetStage.OPEN else "is being moved there"
            raise MoveRefused(reason=f"another instance {state}: {self.address}; name an empty database")
        async with self._reported():
            if await self._connection.fetchval(TARGET.is_made):
                if await stored_version(self._connection):
                    await check_version(self._connection, self.address)
                used = [row[0] for row in await self._connection.fetch(TARGET.in_use)]
                if used:
                    reason = f"{self.address} is in use: it has {', '.join(used)}; name an empty database"
                    raise MoveRefused(reason=reason)
        return None

    async def prepare(self, move_id: str, by: MigratedBy) -> TargetMark:
        """Make the schema in a database that was judged, write the mark and keep all other writers away."""
        await migrate(self.url, by=by if await self._is_made() else None)
        async with self._writing(move_id):
            before = await self._connection.fetchval("select coalesce(max(no), 0) from act")
            mark = TargetMark(id=move_id, stage=TargetStage.COPYING, acts_before=before)
            await self._connection.execute("insert into meta (name, value) values ('move', $1)", _text(mark))
            await self._connection.execute("select _guard_move(true)")
        return mark

    async def _is_made(self) -> bool:
        async with self._reported():
            return bool(await self._connection.fetchval(TARGET.is_made))

    # --- writing -------------------------------------------------------------------------------------------------

    async def places(self) -> dict[str, Any]:
        """How far each part was copied: its last key, or FINISHED."""
        async with self._reported():
            rows = await self._connection.fetch(TARGET.places)
        return {row["name"].removeprefix("move:"): json.loads(row["value"]) for row in rows}

    async def write(self, move_id: str, part: LedgerPart, rows: Sequence[MovedRow], place: object) -> None:
        """Write a page of rows, and how far the part is, in one transaction."""
        async with self._writing(move_id):
            # A crash of the server loses the rows together with the place. The transaction that opens is synchronous.
            await self._connection.execute("set local synchronous_commit = off")
            if rows:
                columns = [list(column) for column in zip(*rows, strict=True)]
                if part.name == "events":
                    await self._connection.execute(WRITE.partitions, columns[1])
                written = await self._connection.fetchval(part.write, *columns)
                if written != len(rows):
                    reason = f"{written} of {len(rows)} rows of {part.name} could be written; `trellis verify` checks the source"
                    raise LedgerUnavailable(reason=reason)
            await self._put_place(part.name, place)

    async def note(self, move_id: str, name: str, place: object) -> None:
        """Store how far something outside of the ledger was copied."""
        async with self._writing(move_id):
            await self._put_place(name, place)

    async def _put_place(self, name: str, place: object) -> None:
        await self._connection.execute(
            "insert into meta (name, value) values ('move:' || $1, $2) on conflict (name) do update set value = excluded.value",
            name,
            json.dumps(place),
        )

    async def set_numbers(self, move_id: str, numbers: tuple[int, int, int, int, int]) -> None:
        """Let the ledger count on where the source stopped, and give the planner its statistics."""
        async with self._writing(move_id):
            await self._connection.execute(WRITE.numbers, *numbers)
            await self._connection.execute(WRITE.feed_end, numbers[1])
            await self._connection.execute("select _ensure_partitions()")
            await self._connection.execute(WRITE.summarize)
            await self._connection.execute(WRITE.statistics)

    # --- reading back --------------------------------------------------------------------------------------------

    async def page(self, part: LedgerPart, after: Sequence[Any]) -> list[MovedRow]:
        """The next rows of a part as they were written. The first columns are the key of PostgreSQL's order."""
        assert part.target is not None
        async with self._reported():
            return [tuple(row) for row in await self._connection.fetch(part.target, *after, PAGE_ROWS)]

    # --- the decision --------------------------------------------------------------------------------------------

    async def open(self, move_id: str, feed_end: int, actor: Actor, act: NewAct) -> bool:
        """Open the ledger for everybody, once, and record it as an act. False if the move was undone before."""
        mark = await self.mark()
        if mark is not None and mark.id == move_id and mark.stage is TargetStage.OPEN:
            return True
        before = 0 if mark is None else mark.acts_before
        opened = TargetMark(id=move_id, stage=TargetStage.OPEN, acts_before=before, feed_end=feed_end)
        async with self._writing(move_id):
            if not await self._decide(opened):
                return False
            await self._connection.execute("delete from meta where name like 'move:%'")
            await self._connection.execute("select _guard_move(false)")
            await record_as_owner(self._connection, MigratedBy(name=actor.name, cause=act.cause), act)
        return True

    async def undo(self, move_id: str) -> bool:
        """Decide that the ledger is never opened. False if it was opened before."""
        mark = await self.mark()
        if mark is None or mark.id != move_id or mark.stage is TargetStage.UNDONE:
            return True  # nothing of this move is there, or it was decided before
        async with self._writing(move_id):
            return await self._decide(TargetMark(id=move_id, stage=TargetStage.UNDONE, acts_before=mark.acts_before))

    async def _decide(self, mark: TargetMark) -> bool:
        """Replace a mark that says `copying`. Whoever comes second waits for the first and finds another mark."""
        await self._connection.execute("lock table meta in access exclusive mode")
        sql = "update meta set value = $1 where name = 'move' and value::jsonb ->> 'id' = $2 and value::jsonb ->> 'stage' = $3 returning 1"
        return bool(await self._connection.fetchval(sql, _text(mark), mark.id, TargetStage.COPYING.value))

    async def clear(self, move_id: str) -> None:
        """Remove everything that an undone move wrote, and its mark last."""
        mark = await self.mark()
        if mark is None or mark.id != move_id:
            return
        async with self._writing(move_id):
            await self._connection.execute("select _clear_moved(), _guard_move(false)")
            await self._connection.execute("delete from meta where name = 'move' or name like 'move:%'")

    @asynccontextmanager
    async def _writing(self, move_id: str) -> AsyncGenerator[None]:
        """A transaction of the tables' owner that the guards let pass."""
        async with self._reported(), self._connection.transaction():
            await self._connection.execute("set local role trellis_owner")
            await self._connection.execute("select set_config('trellis.move', $1, true)", move_id)
            yield

    @asynccontextmanager
    async def _reported(self) -> AsyncGenerator[None]:
        """Turn an error of the database into one of a ledger, without the address."""
        try:
            yield
        except CONNECTION_LOST_ERRORS as error:
            raise LedgerUnavailable(reason=f"{self.address}: {type(error).__name__}: {error}") from error
        except PostgresError as error:
            raise LedgerUnavailable(reason=f"{self.address} refused: {error}") from error


def _read(text: str) -> TargetMark:
    fields: dict[str, Any] = json.loads(text)
    fields["stage"] = TargetStage(fields["stage"])
    return TargetMark(**fields)


def _text(mark: TargetMark) -> str:
    return json.dumps(
        {"id": mark.id, "stage": mark.stage.value, "acts_before": mark.acts_before, "feed_end": mark.feed_end}
    )


async def open_target(url: str) -> PostgresTarget:
    """Connect to the target. Raises LedgerUrlInvalid and LedgerUnavailable, whose messages have no password."""
    address = public_address(url)
    try:
        return PostgresTarget(url, await connect(url, application_name=APPLICATION))
    except LedgerUrlInvalid as error:
        raise LedgerUrlInvalid(url=address, reason=error.data["reason"]) from None
    except LedgerError as error:
        raise type(error)(**{**error.data, "reason": f"{address}: {error.data.get('reason', error)}"}) from None
