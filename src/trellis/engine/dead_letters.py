"""Dead-lettering by an operator, the same for Python, HTTP and the command line (DJ-18).

A queued, assigned or running job ends at once, without a retry. Later writes of its holder are refused. The dead letter
says who ended the job, for which of these reasons, and at which stage it was.
"""

from functools import partial
from typing import TYPE_CHECKING

from trellis.engine.errors import JobNotFound, OptionInvalid
from trellis.engine.jobs import (
    ERROR_CHARS_MAX,
    Actor,
    DeadLetterReason,
    JobId,
    Move,
    Moved,
    NotMoved,
    ReasonCode,
    RequestId,
    RequestKey,
)
from trellis.engine.records import Job
from trellis.engine.retry_policy import stage_in
from trellis.engine.text import storable
from trellis.lifecycles import LIFECYCLES, Trigger

if TYPE_CHECKING:  # its records are loaded with a ledger
    from trellis.engine.ledger import Ledger

OPERATOR_REASON_CODES = (
    ReasonCode.POLICY_VIOLATION,
    ReasonCode.INFRASTRUCTURE_FAILURE,
    ReasonCode.DEPENDENCY_UNAVAILABLE,
    ReasonCode.VALIDATION_FAILED,
    ReasonCode.PARSE_ERROR,
)
"""The reasons that an operator may give. The engine itself determines the others."""
LOOKS_MAX = 5
"""How often the job is read and moved before giving up, when it changes between the two."""
CAUSE_CHARS_MAX = 200


def operator_reason_code(code: str) -> ReasonCode:
    """The reason for this code. Raises OptionInvalid."""
    if code not in OPERATOR_REASON_CODES:
        raise OptionInvalid(
            option="reason_code", value=code, expected=f"choose one of {', '.join(OPERATOR_REASON_CODES)}"
        )
    return ReasonCode(code)


async def dead_letter(
    ledger: "Ledger",
    actor: Actor,
    job_id: JobId,
    request_id: RequestId,
    *,
    reason_code: ReasonCode,
    reason: str,
    key: RequestKey | None = None,
) -> Moved | NotMoved:
    """End a job with a dead letter.

    Repeating the request id returns the same answer. Raises JobNotFound, OptionInvalid, IdempotencyMismatch.
    """
    text = (storable(reason) or "").strip()[:ERROR_CHARS_MAX]
    if not text:
        raise OptionInvalid(option="reason", value=reason, expected="say why the job is dead-lettered")
    job = await _get_job(ledger, job_id)
    request = partial(_request_dead_letter, ledger, actor, request_id=request_id, code=reason_code, text=text, key=key)
    answer = await request(job)
    for _ in range(LOOKS_MAX - 1):
        now = await _get_job(ledger, job_id) if isinstance(answer, NotMoved) else job
        if now.version == job.version:
            break
        job, answer = now, await request(now)
    return answer


async def _request_dead_letter(
    ledger: "Ledger",
    actor: Actor,
    job: Job,
    *,
    request_id: RequestId,
    code: ReasonCode,
    text: str,
    key: RequestKey | None,
) -> Moved | NotMoved:
    lifecycle = LIFECYCLES[job.lifecycle]
    targets = {one.target for one in lifecycle.transitions if one.trigger == Trigger.DEAD_LETTER}
    if not targets:
        refusal = f"nobody dead-letters a {job.lifecycle}; it can be cancelled"
        return NotMoved(job_id=job.job_id, state=job.state, target="dead_lettered", reason=refusal)
    stage = stage_in(lifecycle.by_name[job.state])
    move = Move(
        job_id=job.job_id,
        target=min(targets),
        request_id=request_id,
        version=job.version,
        cause=text[:CAUSE_CHARS_MAX],
        death=DeadLetterReason(reason_code=code, stage=stage, last_error=text),
        key=key,
    )
    return await ledger.move(actor, move)


async def _get_job(ledger: "Ledger", job_id: JobId) -> Job:
    job = await ledger.job(job_id)
    if job is None:
        raise JobNotFound(job_id=job_id)
    return job
