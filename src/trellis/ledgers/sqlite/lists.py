"""Lists of jobs and of dead letters on SQLite: each is one statement, which reads what its page needs by an index."""

import json
from typing import LiteralString

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import JobId
from trellis.engine.records import DeadLetter, JobFilter, JobPage
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import state_pairs
from trellis.ledgers.sqlite import rows
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import lifecycle_code, place_code
from trellis.ledgers.sqlite.reads import key_of, page_size

LAST = 2**62
OPEN_ONLY = "a filter by a state that is no end, without parent and reason"

_LIST_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/lists.sql")

OLDEST = _LIST_QUERIES.page.replace("{ids}", _LIST_QUERIES.oldest) + " ORDER BY j.id"
IDS: dict[str, LiteralString] = {
    "all_jobs": _LIST_QUERIES.all_jobs,
    "of_parent": _LIST_QUERIES.of_parent,
    "correlated": _LIST_QUERIES.correlated,
    "of_key": _LIST_QUERIES.of_key,
    "in_states": _LIST_QUERIES.in_states,
    "with_letters": _LIST_QUERIES.with_letters,
}
"""The queries that find the ids of a page, newest first."""
PAGES = {name: _LIST_QUERIES.page.replace("{ids}", ids) + " ORDER BY j.id DESC" for name, ids in IDS.items()}
LETTERS = {name: _LIST_QUERIES.letters.replace("{ids}", ids) + " ORDER BY j.id DESC" for name, ids in IDS.items()}


def jobs(
    tx: Transaction, where: JobFilter, *, limit: int, cursor: str | None = None, oldest_first: bool = False
) -> JobPage:
    """One page, newest first. The cursor is the last key read, so that pages neither repeat nor skip jobs."""
    if oldest_first:
        return _oldest_jobs(tx, where, limit, cursor)
    buried = where.reason_code is not None
    values = _filter(where, buried=buried) | {"before": _cursor(cursor), "limit": page_size(limit) + 1}
    return _page(tx.db.execute(PAGES[index_for(where, buried=buried)], values).fetchall(), limit)


def _oldest_jobs(tx: Transaction, where: JobFilter, limit: int, cursor: str | None) -> JobPage:
    if not where.of_open_state:
        raise OptionInvalid(option="oldest_first", value=True, expected=OPEN_ONLY)
    after = 0 if cursor is None else _cursor(cursor)
    values = _filter(where, buried=False) | {"after": after, "limit": page_size(limit) + 1}
    return _page(tx.db.execute(OLDEST, values).fetchall(), limit)


def dead_letters(tx: Transaction, where: JobFilter, *, limit: int, cursor: str | None = None) -> list[DeadLetter]:
    before = LAST if cursor is None else key_of(tx, JobId(cursor))
    if before is None:
        raise OptionInvalid(option="cursor", value=cursor, expected="the id of a job of this ledger")
    values = _filter(where, buried=True) | {"before": before, "limit": page_size(limit)}
    letters = tx.db.execute(LETTERS[index_for(where, buried=True)], values)
    return [rows.dead_letter(row) for row in letters]


def index_for(where: JobFilter, *, buried: bool) -> str:
    """The query of IDS whose index fits the filter best. `buried`: only jobs with a dead letter."""
    if where.parent_id is not None:
        return "of_parent"
    if where.correlation_id is not None:
        return "correlated"
    if where.concurrency_key is not None:
        return "of_key"
    if buried:
        return "with_letters"
    named = (where.type, where.lifecycle, where.state, where.place)
    return "all_jobs" if named == (None, None, None, None) else "in_states"


def _filter(where: JobFilter, *, buried: bool) -> dict[str, str | int | None]:
    pairs = state_pairs(where)
    return {
        "lifecycle": lifecycle_code(where.lifecycle),
        "type": where.type,
        "states": None if pairs is None else json.dumps([lc.code * 16 + code for lc, code in pairs]),
        "correlation": where.correlation_id,
        "key": where.concurrency_key,
        "reason": None if where.reason_code is None else where.reason_code.value,
        "parent": where.parent_id,
        "place": place_code(where.place),
        "buried": int(buried),
        "narrowed": int(any(one is not None for one in (where.type, where.lifecycle, where.state))),
    }


def _page(listed: list[rows.SqliteRow], limit: int) -> JobPage:
    page = listed[:limit]
    more = len(listed) > limit
    return JobPage(jobs=tuple(map(rows.job, page)), cursor=str(page[-1][27]) if more and page else None)


def _cursor(text: str | None) -> int:
    if text is None:
        return LAST
    if not text.isascii() or not text.isdigit():
        raise OptionInvalid(option="cursor", value=text, expected="the cursor of an earlier page")
    return int(text)
