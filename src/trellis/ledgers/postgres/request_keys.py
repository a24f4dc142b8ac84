"""Idempotency keys of changes on PostgreSQL: the key's row and the change in one transaction."""

from collections.abc import Awaitable, Callable, Sequence

from trellis.engine.jobs import RequestKey
from trellis.engine.request_keys import AnswerT, StoredAnswers, StoredRequest, check_same_request
from trellis.ledgers.postgres.connection import PostgresConnection, PostgresRow

FIND = "select * from find_request_key($1, $2)"
TAKE = "select * from take_request_key($1, $2, $3, $4)"
STORE_ANSWER = "select store_request_answer($1, $2, $3)"


def stored_request(key: RequestKey, rows: Sequence[PostgresRow]) -> StoredRequest | None:
    """What the database stores under the key; None for no row. Raises IdempotencyMismatch."""
    return check_same_request(key, StoredRequest(**dict(rows[0]))) if rows else None


async def take(connection: PostgresConnection, key: RequestKey) -> StoredRequest | None:
    """Store a new key, or return what the same request stored. Raises IdempotencyMismatch."""
    return stored_request(key, await connection.fetch(TAKE, key.scope, key.key, key.fingerprint, key.about))


async def store_answer(connection: PostgresConnection, key: RequestKey, answer: bytes) -> None:
    """Store the answer with the key. The first answer stays."""
    await connection.execute(STORE_ANSWER, key.scope, key.key, answer)


async def answer_once(
    connection: PostgresConnection,
    key: RequestKey | None,
    answers: StoredAnswers[AnswerT],
    change: Callable[[], Awaitable[AnswerT]],
) -> AnswerT:
    """The stored answer of an earlier request with this key, else the answer of `change`, stored if it has to be."""
    if key is None:
        return await change()
    async with connection.transaction():
        before = await take(connection, key)
        if before is not None and before.answer is not None:
            return answers.decode(before.answer)
        answer = await change()
        kept = answers.encode(key, answer)
        if kept is not None:
            await store_answer(connection, key, kept)
        return answer
