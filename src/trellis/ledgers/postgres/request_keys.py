"""Idempotency keys of requests on PostgreSQL. The functions of the verbs store them, in the transaction of the change."""

from collections.abc import Awaitable, Callable, Sequence

from trellis.engine.jobs import RequestKey
from trellis.engine.request_keys import AnswerT, StoredAnswers, StoredRequest, check_same_request
from trellis.ledgers.postgres.connection import PostgresConnection, PostgresRow

FIND = "select * from find_request_key($1, $2)"
STORE_ANSWER = "select store_request_answer($1, $2, $3)"


def stored_request(key: RequestKey, rows: Sequence[PostgresRow]) -> StoredRequest | None:
    """What the database stores under the key; None for no row. Raises IdempotencyMismatch."""
    return check_same_request(key, StoredRequest(**dict(rows[0]))) if rows else None


def key_argument(key: RequestKey | None) -> list[str] | None:
    """The argument with which a function stores the key of its request."""
    return None if key is None else [key.scope, key.key, key.fingerprint.hex(), key.about, key.given]


async def store_answer(connection: PostgresConnection, key: RequestKey, answer: bytes) -> None:
    """Store the answer with the key. The first answer stays."""
    await connection.execute(STORE_ANSWER, key.scope, key.key, answer)


async def answer_once(
    connection: PostgresConnection,
    key: RequestKey | None,
    answers: StoredAnswers[AnswerT],
    change: Callable[[], Awaitable[AnswerT | None]],
) -> AnswerT:
    """The answer of `change`, stored with the key if it has to be.

    `change` stores the key. It returns None when the key has an answer, which is then returned.
    """
    if key is None:
        answer = await change()
        assert answer is not None, "only a key has a stored answer"
        return answer
    async with connection.transaction():
        answer = await change()
        if answer is None:
            before = stored_request(key, await connection.fetch(FIND, key.scope, key.key))
            assert before is not None
            assert before.answer is not None
            return answers.decode(before.answer)
        kept = answers.encode(key, answer)
        if kept is not None:
            await store_answer(connection, key, kept)
        return answer
