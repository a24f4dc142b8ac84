"""The mutants of all families, in the order of the requirements."""

from tests.mutants.artifacts import ARTIFACTS
from tests.mutants.authority import AUTHORITY
from tests.mutants.bus_jobs import BUS_JOBS
from tests.mutants.distributed_jobs import DISTRIBUTED_JOBS
from tests.mutants.job_queue import JOB_QUEUE
from tests.mutants.mutant import Mutant

FAMILIES = ("JQ", "ART", "AUTH", "DJ", "BUS")
MUTANTS: dict[str, Mutant] = {**JOB_QUEUE, **ARTIFACTS, **AUTHORITY, **DISTRIBUTED_JOBS, **BUS_JOBS}
