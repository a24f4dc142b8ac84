"""The last step of a job that has failed for good: out of its backoff into FAILED, where a person has a window to look (D8).

Whoever scheduled the backoff makes this step too, and may die in between. The backoff then lasts far longer than any other, so no timer
gives the job another attempt, and whoever looks next makes the step in its place. Twice is as once.
"""

import json
from collections.abc import Mapping
from typing import Any

from trellis.engine.jobs import Actor, JobId, Move, Moved, RequestId
from trellis.engine.ledger import Ledger

FAILED = "FAILED"
CAUSE_CHARS_MAX = 200


async def fail_for_good(
    ledger: Ledger, actor: Actor, job_id: JobId, version: int, facts: Mapping[str, Any], *, window_s: float
) -> str:
    """Move a job out of the backoff that has this version; the state it is in then."""
    error = facts["error"]
    move = Move(
        job_id=job_id,
        target=FAILED,
        request_id=RequestId(f"final:{job_id}:{version}"),
        version=version,
        delay_s=window_s,
        cause=f"{error['code']}: {error['message']}"[:CAUSE_CHARS_MAX],
        data=json.dumps(dict(facts), ensure_ascii=False).encode(),
    )
    answer = await ledger.move(actor, move)
    return answer.target if isinstance(answer, Moved) else answer.state
