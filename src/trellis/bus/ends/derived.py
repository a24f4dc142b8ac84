"""Jobs that follow from other jobs: their ids say from which, and the same job follows however often it is made (BUS-7, D36)."""

import hashlib
import re
from collections.abc import Iterable

from trellis.bus.errors import RequestInvalid
from trellis.bus.requests import JobRequest
from trellis.engine.errors import InputError, Refused
from trellis.engine.jobs import Actor, JobId, NewJob, Submitted
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of

ID_CHARS_MAX = 180
"""Shorter than an id may be: the wire id of such a job must fit too."""
DIGEST_CHARS = 16
RETRY_ID = re.compile(r"\.(r[0-9]+|q-[0-9a-f]+)$")
"""How the ids of jobs end that do another again; others may, too. Of many children only such are read."""

_log = log_of("trellis.bus.ends.derived")


def ids_after(base: str, suffix: str) -> tuple[JobId, ...]:
    """The id of what follows from a job, and the one to take when that one is too long or somebody else's."""
    digest = hashlib.sha256(base.encode()).hexdigest()[:DIGEST_CHARS]
    room = ID_CHARS_MAX - len(suffix) - len(digest) - 1
    plain, other = f"{base}{suffix}", f"{base[:room]}.{digest}{suffix}"
    return (JobId(plain), JobId(other)) if len(plain) <= ID_CHARS_MAX else (JobId(other),)


def is_whole(request: JobRequest) -> bool:
    """Whether a request that was made here can be stored and read again: labels that were added may be too many."""
    try:
        JobRequest.read(request.body)
    except RequestInvalid as error:
        _log.error("cannot_follow", job_id=request.job_id, error=str(error))
        return False
    return True


async def submit_first(ledger: Ledger, actor: Actor, candidates: Iterable[NewJob]) -> Submitted | None:
    """Submit the job under the first of its ids that is its own. Again is the same job again."""
    for job in candidates:
        try:
            answer = (await ledger.submit(actor, [job]))[0]
        except (InputError, Refused) as error:
            _log.error("cannot_follow", job_id=job.job_id, error=str(error))
            return None
        if isinstance(answer, Submitted):
            return answer
        _log.warning("id_is_taken", job_id=job.job_id)
    _log.error("cannot_follow", error="both ids are used by other requests")
    return None
