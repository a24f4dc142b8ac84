"""Errors about artifacts, artifact ids, and their keys in the object store."""

import hashlib
import re

from trellis.engine.errors import InputError, Refused
from trellis.engine.jobs import JobId
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import StoreError

# Errors about artifacts.
#
#     InputError
#     ├── ContentInvalid        the content does not fit its type (in `content`)
#     ├── ArtifactIdInvalid
#     ├── ArtifactTooLarge
#     ├── TypeNotYielded        a job of this type produces another type of artifact
#     └── TooYoung              cleanup of artifacts that must be kept longer
#     Refused
#     ├── ArtifactNotFound      also for a staged artifact, which no reader sees
#     ├── NothingExpected       the job is in no state that accepts an artifact
#     ├── ArtifactGone          the attempt's artifact was discarded, or its bytes never arrived
#     ├── ArtifactKept          an operator may not discard it: it is final, or its job waits for it
#     └── ArtifactFinal         the job has a finalized artifact with other content
#     StoreError
#     └── ArtifactLost          no copy of the bytes has the recorded hash


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


# Artifact ids and object keys (D15, ART-6, ART-7). Only this module builds them.
#
# An invalid id has no key, so nothing a caller sends can name any object other than an artifact's own.

_UUID4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
ARTIFACT_ID_PATTERN = f"^art-{_UUID4}$"
PROJECTS = "projects"
PROJECT_DIGITS = 16

_ARTIFACT_ID = re.compile(f"art-{_UUID4}")
_PROJECT = re.compile(f"[0-9a-f]{{{PROJECT_DIGITS}}}")


def project_id(project: str) -> str:
    """Returns the id of a project in keys: the `cid` of the documents."""
    return hashlib.sha256(project.encode()).hexdigest()[:PROJECT_DIGITS]


def make_artifact_id(uuid4: str) -> JobId:
    """Returns `art-<uuid4>`. Raises ArtifactIdInvalid for any other text."""
    return JobId(_checked(f"art-{uuid4}"))


def is_artifact_id(text: str) -> bool:
    """Whether the text has the form of an artifact id."""
    return _ARTIFACT_ID.fullmatch(text) is not None


def staged_folder(cid: str) -> str:
    """Returns the folder of staged blobs, without the final `/`."""
    return object_key(PROJECTS, _checked_project(cid), "staged")


def staged_key(cid: str, artifact_id: str) -> str:
    """Returns the key of a staged artifact, which no reader sees yet."""
    return f"{staged_folder(cid)}/{_checked(artifact_id)}.json"


def artifact_key(cid: str, artifact_id: str) -> str:
    """Returns the key of a finalized artifact, which every reader may see."""
    return f"{object_key(PROJECTS, _checked_project(cid), 'artifacts')}/{_checked(artifact_id)}.json"


def staged_id(key: str) -> JobId | None:
    """Returns the artifact id in the key of a staged blob; None if the key has none."""
    name = key.rpartition("/")[2].removesuffix(".json")
    return JobId(name) if is_artifact_id(name) else None


def journal_entry(artifact_id: str) -> str:
    """Returns the name of the entry in the job's journal that holds the artifact's bytes."""
    return f"artifact:{_checked(artifact_id)}"


def stage_key(job_id: str, created_at: str, epoch: int) -> str:
    """Returns the idempotency key that limits staging to once per attempt of a job.

    It contains the creation time, because an earlier job may have had the same id.
    """
    return f"{job_id}@{created_at}@{epoch}"


def _checked(artifact_id: str) -> str:
    if not is_artifact_id(artifact_id):
        raise ArtifactIdInvalid(artifact=artifact_id[:100])
    return artifact_id


def _checked_project(cid: str) -> str:
    if _PROJECT.fullmatch(cid) is None:
        raise ArtifactIdInvalid(artifact=cid[:100])
    return cid
