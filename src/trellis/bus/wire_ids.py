"""The ids under which workers know jobs: `<job id>@<epoch>`, another one for each handing-out (D29).

No job's own id ends in `@` and a number (`trellis.engine.reserved_ids`), so a wire id names exactly one job.
"""

from trellis.engine.jobs import Epoch, JobId


def wire_id(job_id: JobId, epoch: Epoch) -> str:
    """How a worker sees one handing-out of a job."""
    return f"{job_id}@{epoch}"


def read_wire_id(text: str) -> tuple[JobId, Epoch] | None:
    """Which job and which epoch a worker means; None when this is no wire id."""
    job_id, at, epoch = text.rpartition("@")
    if not at or not job_id or not (epoch.isascii() and epoch.isdigit()) or len(epoch) > 18:
        return None
    return JobId(job_id), Epoch(int(epoch))


def job_id_of(text: str) -> str:
    """The id of the job that is meant by its own id or by one of its wire ids."""
    found = read_wire_id(text)
    return text if found is None else found[0]
