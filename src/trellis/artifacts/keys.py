"""Ids and keys of artifacts, and what can go wrong with artifacts."""

import hashlib
import re

from trellis.engine.errors import InputError, Refused
from trellis.engine.jobs import JobId
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import StoreError

# What can go wrong with artifacts.
#
# InputError
# ├── ContentInvalid        the content is not what its type says (in `content`)
# ├── ArtifactIdInvalid
# ├── ArtifactTooLarge
# ├── TypeNotYielded        a job of this kind makes another type of artifact
# └── TooYoung              a cleanup of what is kept longer
# Refused
# ├── ArtifactNotFound      also of a staged one: no reader sees it
# ├── NothingExpected       the job is in no state that takes an artifact
# ├── ArtifactGone          the attempt's artifact was discarded, or its bytes never came
# ├── ArtifactKept          an operator may not discard it: it is final, or its job waits for it
# └── ArtifactFinal         the job has a finalized artifact with other content
# StoreError
# └── ArtifactLost          no copy of the bytes has the recorded hash


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


# Names: artifact ids, and where in the object store an artifact's bytes lie (D15, ART-6, ART-7). The only place that builds them.
#
# An id that is no artifact id has no key: nothing a caller sends can name anything else than an artifact's own object.

_UUID4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
ARTIFACT_ID_PATTERN = f"^art-{_UUID4}$"
PROJECTS = "projects"
PROJECT_DIGITS = 16

_ARTIFACT_ID = re.compile(f"art-{_UUID4}")
_PROJECT = re.compile(f"[0-9a-f]{{{PROJECT_DIGITS}}}")


def project_id(project: str) -> str:
    """What stands for a project in keys: the `cid` of the documents."""
    return hashlib.sha256(project.encode()).hexdigest()[:PROJECT_DIGITS]


def make_artifact_id(uuid4: str) -> JobId:
    """`art-<uuid4>`; raises ArtifactIdInvalid for another text."""
    return JobId(_checked(f"art-{uuid4}"))


def is_artifact_id(text: str) -> bool:
    """Whether it can be one."""
    return _ARTIFACT_ID.fullmatch(text) is not None


def staged_folder(cid: str) -> str:
    """Where staged blobs are; a `/` follows."""
    return object_key(PROJECTS, _checked_project(cid), "staged")


def staged_key(cid: str, artifact_id: str) -> str:
    """The bytes of an artifact that no reader sees yet."""
    return f"{staged_folder(cid)}/{_checked(artifact_id)}.json"


def artifact_key(cid: str, artifact_id: str) -> str:
    """The bytes of a finalized artifact, for everybody."""
    return f"{object_key(PROJECTS, _checked_project(cid), 'artifacts')}/{_checked(artifact_id)}.json"


def staged_id(key: str) -> JobId | None:
    """The artifact of a staged blob's key; None for what nobody staged."""
    name = key.rpartition("/")[2].removesuffix(".json")
    return JobId(name) if is_artifact_id(name) else None


def journal_entry(artifact_id: str) -> str:
    """The entry of its job's journal that holds the artifact's bytes."""
    return f"artifact:{_checked(artifact_id)}"


def stage_key(job_id: str, created_at: str, epoch: int) -> str:
    """What makes staging once for each attempt of a job: its idempotency key. A job that had the id before was created earlier."""
    return f"{job_id}@{created_at}@{epoch}"


def _checked(artifact_id: str) -> str:
    if not is_artifact_id(artifact_id):
        raise ArtifactIdInvalid(artifact=artifact_id[:100])
    return artifact_id


def _checked_project(cid: str) -> str:
    if _PROJECT.fullmatch(cid) is None:
        raise ArtifactIdInvalid(artifact=cid[:100])
    return cid
