"""Job ids that the engine derives from the ids of other jobs: retries (`.r1`), compensations (`.c`), jobs that an operator runs again
(`.q-…`) and the names of single attempts (`@1`).

Nobody else may give a job such an id. Job ids are unique over all lifecycles: whoever took one first would keep the engine from making
what follows from somebody else's job. Every ledger asks here before it takes in a new job; PostgreSQL holds the same rule for callers
that bypass us.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from trellis.engine.errors import IdReserved
from trellis.lifecycles import Role
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.nlm_job import NLM_JOB

RESERVED_ID_PATTERN = r"(\.(c|r[0-9]+|q-[0-9a-f]+)|@[0-9]+)\Z"
"""How derived ids end. Python and PostgreSQL read it alike."""
DERIVING_ROLES: Mapping[str, Role] = MappingProxyType({BUS_JOB.name: Role.RECONCILER, NLM_JOB.name: Role.NLM_BACKEND})
"""By lifecycle: the one role that makes jobs with derived ids."""

_reserved = re.compile(RESERVED_ID_PATTERN)


def check_new_id(job_id: str, lifecycle: str, role: Role) -> None:
    """Nothing, when this role may give a new job this id; raises IdReserved."""
    if _reserved.search(job_id) and DERIVING_ROLES.get(lifecycle) is not role:
        raise IdReserved(job_id=job_id)
