"""Every error of agent memory. Each is part of the tree in `trellis.engine.errors`; the docstring is the message.

InputError
├── AgentIdInvalid
├── UpdatesRefused              carries every problem found, not only the first
└── MemoryVersionNotFound
Refused
├── MemoryOverLimit
└── ProposalReused
TrellisError
└── RepositoryError             the repository itself
    ├── MemoryMissing
    ├── MemoryOfAnother
    ├── MemoryMoved
    ├── ImportRefused
    ├── ExportRefused
    ├── MemoryDamaged
    ├── MemoryUnavailable
    └── MemoryBusy
"""

from trellis.engine.errors import InputError, Refused, TrellisError


class AgentIdInvalid(InputError):
    """{agent_id!r} is no agent id: use 1 to 63 lower-case letters, digits and hyphens, the first not a hyphen."""


class UpdatesRefused(InputError):
    """The memory of {agent_id} cannot be updated by {proposal_id}: {detail}"""


class MemoryVersionNotFound(InputError):
    """The memory of {agent_id} has no version {version}; the newest is {newest}."""

    code = "NOT_FOUND"


class MemoryOverLimit(Refused):
    """{what} of {agent_id} has {tokens} tokens and the limit is {limit}; shorten it by a proposal, nothing is cut here."""


class ProposalReused(Refused):
    """Proposal {proposal_id} was applied to the memory of {agent_id} before, with other updates; use a new proposal id."""

    code = "IDEMPOTENCY_MISMATCH"


class RepositoryError(TrellisError):
    """{detail}"""

    code = "UPSTREAM_UNAVAILABLE"


class MemoryMissing(RepositoryError):
    """There is no memory repository at {path}: {reason}."""


class MemoryOfAnother(RepositoryError):
    """The memory repository at {path} is not the one of this instance: set TRELLIS_MEMORY to where its other processes have it. If that one is lost for good, remove {key} from the object store to go on with this one."""

    code = "CONFLICT"


class MemoryMoved(RepositoryError):
    """The memory repository at {path} was imported to {place} and goes on there: set TRELLIS_MEMORY to that in every process."""

    code = "CONFLICT"


class ImportRefused(RepositoryError):
    """The repository {path} cannot be imported to {place}: {reason}."""

    code = "CONFLICT"


class ExportRefused(RepositoryError):
    """The memory cannot be exported to {path}: {reason}."""

    code = "CONFLICT"


class MemoryDamaged(RepositoryError):
    """The memory repository cannot be trusted at {where}: {reason}. Restore it from a clone or a backup."""


class MemoryUnavailable(RepositoryError):
    """The memory repository could not be used: {reason}. Nothing of this call is acknowledged; ask again with the same ids."""


class MemoryBusy(RepositoryError):
    """The memory repository is held by another writer: {reason}. Nothing was written; ask again."""
