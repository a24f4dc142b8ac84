"""What was answered to a wish to cancel that moved nothing yet, so that asking again gets the same answer (D27, DJ-11).

A soft cancel of a held job only asks its holder, and where nothing moved the ledger keeps no request id. So its answer lies in the
object store, under the day and the digest of its key, for 24 hours and more. It is written after the ledger took the wish: a gateway
that dies between the two leaves a wish without an answer, and asking again is then a wish of its own.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from trellis.engine.jobs import JobId
from trellis.gateway.idempotency import Asked
from trellis.instance import Instance
from trellis.storage.objects import CREATE

FOLDER = "cancel-wishes"
DAY = timedelta(days=1)
REMOVED_AT_ONCE = 20


async def answer_before(instance: Instance, asked: Asked, job_id: JobId) -> dict[str, Any] | None:
    """What this request was answered when it came before; raises IdempotencyMismatch."""
    if asked.key is None:
        return None
    now = await instance.ledger.now()
    for day in (now, now - DAY):
        found = await instance.objects.get(_key(asked, day))
        if found is not None:
            told = json.loads(found.body)
            if told["fingerprint"] != asked.fingerprint.hex():
                raise asked.mismatch(job_id)
            return told["answer"]
    return None


async def keep(instance: Instance, asked: Asked, answer: Mapping[str, Any]) -> None:
    """Keep the answer to a request that has a key. Takes away a few that are too old, so that they do not gather."""
    if asked.key is None:
        return
    now = await instance.ledger.now()
    body = json.dumps({"fingerprint": asked.fingerprint.hex(), "answer": answer}).encode()
    await instance.objects.put(_key(asked, now), body, when=CREATE)  # refused: the same request came at the same moment
    oldest = await instance.objects.list(f"{FOLDER}/", limit=REMOVED_AT_ONCE)
    for info in oldest.items:
        if info.key < f"{FOLDER}/{_day(now - DAY)}/":
            await instance.objects.delete(info.key)


def _key(asked: Asked, at: datetime) -> str:
    assert asked.key is not None
    return f"{FOLDER}/{_day(at)}/{hashlib.sha256(f'{asked.key.scope} {asked.key.key}'.encode()).hexdigest()}"


def _day(at: datetime) -> str:
    return at.astimezone(UTC).date().isoformat()
