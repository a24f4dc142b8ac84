"""Finding the dead letter of one job: the ledger lists them by what they are about."""

from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import DeadLetter, Job, JobFilter
from trellis.lifecycles import LIFECYCLES, Phase

LETTERS_PAGE = 100


async def letter_of(ledger: Ledger, job: Job) -> DeadLetter | None:
    """The dead letter of an ended job, if it has one that nobody requeued."""
    if LIFECYCLES[job.lifecycle].by_name[job.state].phase is not Phase.ENDED:
        return None
    where = JobFilter(type=job.type, correlation_id=job.correlation_id)
    cursor: JobId | None = None
    while letters := await ledger.dead_letters(where, limit=LETTERS_PAGE, cursor=cursor):
        for letter in letters:
            if letter.job_id == job.job_id:
                return letter
        cursor = letters[-1].job_id
    return None
