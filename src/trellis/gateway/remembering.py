"""What never changes about a job, so that it need not be asked for again. It is bounded: the job asked about longest ago is forgotten."""

from collections import OrderedDict
from typing import Generic, TypeVar

from trellis.engine.jobs import JobId

REMEMBERED_MAX = 20_000

ValueT = TypeVar("ValueT")


class Remembered(Generic[ValueT]):
    """One fact of each of the last jobs."""

    def __init__(self, most: int = REMEMBERED_MAX) -> None:
        self._values: OrderedDict[JobId, ValueT] = OrderedDict()
        self._most = most

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._values

    def __getitem__(self, job_id: JobId) -> ValueT:
        self._values.move_to_end(job_id)
        return self._values[job_id]

    def __setitem__(self, job_id: JobId, value: ValueT) -> None:
        self._values[job_id] = value
        self._values.move_to_end(job_id)
        if len(self._values) > self._most:
            self._values.popitem(last=False)
