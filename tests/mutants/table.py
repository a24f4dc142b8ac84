"""The mutants of all families: first one for each requirement, in their order, then further ones of both ledgers
and of what an instance joins.

A name is the requirement, for a further mutant with the ledger and what is changed: "DJ-12 postgres stage".
"""

from tests.mutants.artifacts import ARTIFACTS
from tests.mutants.authority import AUTHORITY
from tests.mutants.bus_jobs import BUS_JOBS
from tests.mutants.distributed_jobs import DISTRIBUTED_JOBS
from tests.mutants.job_queue import JOB_QUEUE
from tests.mutants.mutant import Mutant
from tests.mutants.postgres import POSTGRES
from tests.mutants.records import RECORDS, RULES
from tests.mutants.wiring import WIRING

FAMILIES = ("JQ", "ART", "AUTH", "DJ", "BUS")
FIRST: dict[str, Mutant] = {**JOB_QUEUE, **ARTIFACTS, **AUTHORITY, **DISTRIBUTED_JOBS, **BUS_JOBS}
"""One for each requirement."""
MUTANTS: dict[str, Mutant] = {**FIRST, **RULES, **POSTGRES, **RECORDS, **WIRING}


def twin(name: str) -> str:
    """The name of the mutant that makes PostgreSQL's ledger wrong in the way in which this one makes SQLite's wrong."""
    return name.replace(" sqlite", " postgres") if " sqlite" in name else f"{name} postgres"
