"""What can go wrong with artifacts.

InputError
├── ContentInvalid        the content is not what its type says (in `content`)
├── ArtifactIdInvalid
├── ArtifactTooLarge
├── TypeNotYielded        a job of this kind makes another type of artifact
└── TooYoung              a cleanup of what is kept longer
Refused
├── ArtifactNotFound      also of a staged one: no reader sees it
├── NothingExpected       the job is in no state that takes an artifact
├── ArtifactGone          the attempt's artifact was discarded, or its bytes never came
├── ArtifactKept          an operator may not discard it: it is final, or its job waits for it
└── ArtifactFinal         the job has a finalized artifact with other content
StoreError
└── ArtifactLost          no copy of the bytes has the recorded hash
"""

from trellis.engine.errors import InputError, Refused
from trellis.storage.objects import StoreError


class ArtifactIdInvalid(InputError):
    """{artifact!r} is no artifact id: it looks like art-7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d."""


class ArtifactNotFound(Refused):
    """There is no artifact {artifact!r}; `trellis artifacts` lists them."""

    code = "NOT_FOUND"


class ArtifactTooLarge(InputError):
    """The artifact has {size} bytes as it would be stored and the limit is {limit}; shorten its texts or leave sources out."""

    code = "PAYLOAD_TOO_LARGE"


class TypeNotYielded(InputError):
    """Job {job_id} is a {job_type} and yields a {expected}, not a {type}."""


class TooYoung(InputError):
    """Artifacts are kept for {days} days here and a cleanup of those older than {asked} was asked for; ask for {days} or more, or change TRELLIS_ARTIFACT_DAYS."""


class NothingExpected(Refused):
    """Job {job_id} expects no artifact: {reason}."""

    code = "INVALID_TRANSITION"


class ArtifactGone(Refused):
    """Artifact {artifact} of job {job_id} (epoch {epoch}) cannot be staged again: {reason}; the job's next attempt makes a new one."""


class ArtifactKept(Refused):
    """Artifact {artifact} cannot be discarded: {reason}."""

    code = "INVALID_TRANSITION"


class ArtifactFinal(Refused):
    """Job {job_id} is complete with artifact {artifact}, which has other content and never changes; submit a new job for another one."""


class ArtifactLost(StoreError):
    """No copy of artifact {artifact} has the bytes that were recorded; bring {key} back from a copy, or run `trellis rebuild --from ledger`."""

    shown = None
