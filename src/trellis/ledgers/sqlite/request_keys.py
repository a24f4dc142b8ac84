"""Idempotency keys of changes in an SQLite ledger. They are written in the transaction of the change."""

from collections.abc import Callable

from trellis.engine.jobs import RequestKey
from trellis.engine.request_keys import KEY_S_MIN, AnswerT, StoredAnswers, StoredRequest, check_same_request
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import US
from trellis.ledgers.sqlite.steps import rows_changed

_REQUEST_KEY_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/request_keys.sql")


def find(tx: Transaction, key: RequestKey) -> StoredRequest | None:
    rows = tx.db.execute(_REQUEST_KEY_QUERIES.find, (key.scope, key.key)).fetchall()
    if not rows:
        return None
    fingerprint, about, answer = rows[0]
    return check_same_request(key, StoredRequest(fingerprint=fingerprint, about=about, answer=answer))


def take(tx: Transaction, key: RequestKey) -> StoredRequest | None:
    """Store a new key, or return what the same request stored. Raises IdempotencyMismatch."""
    earlier = find(tx, key)
    if earlier is None:
        tx.db.execute(_REQUEST_KEY_QUERIES.add, (key.scope, key.key, tx.now, key.fingerprint, key.about))
    return earlier


def store_answer(tx: Transaction, key: RequestKey, answer: bytes) -> None:
    tx.db.execute(_REQUEST_KEY_QUERIES.store_answer, (answer, key.scope, key.key))


def answer_once(
    tx: Transaction, key: RequestKey | None, answers: StoredAnswers[AnswerT], change: Callable[[], AnswerT]
) -> AnswerT:
    """The stored answer of an earlier request with this key, else the answer of `change`, stored if it has to be."""
    if key is None:
        return change()
    before = take(tx, key)
    if before is not None and before.answer is not None:
        return answers.decode(before.answer)
    answer = change()
    kept = answers.encode(key, answer)
    if kept is not None:
        store_answer(tx, key, kept)
    return answer


def drop_old(tx: Transaction, limit: int) -> int:
    """Remove keys that are old enough, oldest first. Returns how many."""
    tx.db.execute(_REQUEST_KEY_QUERIES.drop_old, (tx.now - int(KEY_S_MIN * US), limit))
    return rows_changed(tx)
