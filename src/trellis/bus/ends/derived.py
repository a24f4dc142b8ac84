"""Jobs that follow from other jobs: their ids say from which, and the same job follows however often it is made (BUS-7, D36)."""

import hashlib
import re
from collections.abc import Iterable

from trellis.bus.errors import BusRequestInvalid
from trellis.bus.requests import JobRequest
from trellis.engine.errors import InputError, Refused
from trellis.engine.jobs import Actor, JobId, NewJob, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of

ID_CHARS_MAX = 180
"""Shorter than an id may be: the wire id of such a job must fit too."""
DIGEST_CHARS = 16
ALTERNATIVE_IDS_MAX = 3
"""How many further ids there are for what follows from a job when its first id is taken."""
RETRY_ID = re.compile(r"\.(r[0-9]+|q-[0-9a-f]+)$")
"""How the ids of jobs end that do another again; others may, too. Of many children only such are read."""

_log = log_of("trellis.bus.ends.derived")


def derived_ids(base: str, suffix: str) -> tuple[JobId, ...]:
    """The id of what follows from a job, and those to take when that one is too long or another job's.

    Such ids are reserved now (`trellis.engine.reserved_ids`), but a ledger may hold jobs that took one before they were.
    """
    room = ID_CHARS_MAX - len(suffix) - DIGEST_CHARS - 1
    others = tuple(JobId(f"{base[:room]}.{_digest(base, number)}{suffix}") for number in range(ALTERNATIVE_IDS_MAX))
    plain = JobId(f"{base}{suffix}")
    return (plain, *others) if len(plain) <= ID_CHARS_MAX else others


def _digest(base: str, number: int) -> str:
    return hashlib.sha256(f"{base} {number}".encode() if number else base.encode()).hexdigest()[:DIGEST_CHARS]


def is_storable_request(request: JobRequest) -> bool:
    """Whether a request that was made here can be stored and read again: labels that were added may be too many."""
    try:
        JobRequest.read(request.body)
    except BusRequestInvalid as error:
        _log.error("cannot_follow", job_id=request.job_id, error=str(error))
        return False
    return True


async def submit_under_free_id(ledger: Ledger, actor: Actor, candidates: Iterable[NewJob]) -> Submitted | None:
    """Submit the job under the first of its ids that no other job has. Again is the same job again."""
    for job in candidates:
        try:
            answer = (await ledger.submit(actor, [job]))[0]
        except (InputError, Refused) as error:
            _log.error("cannot_follow", job_id=job.job_id, error=str(error))
            return None
        if isinstance(answer, Submitted) and (answer.created or await _is_submitted(ledger, job)):
            return answer
        _log.error("derived_id_is_taken", job_id=job.job_id, parent_id=job.parent_id)
    _log.error("cannot_follow", error="all of its ids are other jobs")
    return None


async def _is_submitted(ledger: Ledger, job: NewJob) -> bool:
    """Whether the job with this id is this one, and not another that was submitted with the same fingerprint."""
    there = await ledger.job(job.job_id)
    if there is None or there.parent_id != job.parent_id or there.compensates != job.compensates:
        return False
    return (there.lifecycle, there.type, there.payload) == (job.lifecycle, job.type, job.payload)
