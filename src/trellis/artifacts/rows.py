"""Artifacts in the ledger and the object store: ids, keys, errors, rows, bytes, and the artifacts of a run."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import pydantic

from trellis.artifacts.content import ArtifactDraft, ArtifactType
from trellis.engine.errors import InputError, Refused
from trellis.engine.jobs import Epoch, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job, JobFilter
from trellis.lifecycles.artifact import ARTIFACT
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.storage.objects.address import object_url
from trellis.storage.objects.canonical_json import encode, sha256, timestamp
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


# The row of an artifact, and the bytes of its content (D15, ART-1, ART-6).
#
# The row is a job of lifecycle `artifact`: which attempt of which job it belongs to, and the hash and size of its
# bytes. The bytes are built from the row's fields and the content, and are always the same. The row also stores the
# project id, so that a renamed project still finds its artifacts.

STAGED, FINALIZED, DISCARDED, REMOVED = (state.name for state in ARTIFACT.states)
ENDED_STATES = frozenset({DISCARDED, REMOVED})
"""Final states: an artifact in one of them never becomes available again."""
STORED_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of a stored artifact: the largest body that a gateway accepts, encoded, with reserve."""
VERSION = 1
"""The version of every artifact, because a finalized one never changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactPayload:
    """The payload of an artifact's job: what the registry records about its bytes."""

    job_id: JobId
    epoch: Epoch
    run_id: str
    type: ArtifactType
    agent_slug: str
    created_at: str
    entity_refs: tuple[str, ...]
    tags: tuple[str, ...]
    sha256: str
    size: int
    cid: str


_PAYLOAD = pydantic.TypeAdapter(ArtifactPayload)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactRow(ArtifactPayload):
    """One artifact in the registry."""

    artifact_id: JobId
    state: str
    changed_at: datetime
    """When it entered its state; for a finalized one, when its job completed."""

    @classmethod
    def read(cls, job: Job) -> "ArtifactRow | None":
        """Reads the row from the artifact's job; None if the registry did not create the job."""
        return cls.of_payload(job.job_id, job.payload or b"", job.state, job.updated_at)

    @classmethod
    def of_payload(cls, artifact_id: JobId, payload: bytes, state: str, changed_at: datetime) -> "ArtifactRow | None":
        """Reads the row from a recorded payload; None if the registry did not create it: it then has no bytes."""
        try:
            recorded = _PAYLOAD.validate_json(payload)
            artifact_key(recorded.cid, artifact_id)
        except (pydantic.ValidationError, ArtifactIdInvalid):
            return None
        return cls(artifact_id=artifact_id, state=state, changed_at=changed_at, **asdict(recorded))

    @property
    def key(self) -> str:
        """The key of the published bytes, once it is finalized."""
        return artifact_key(self.cid, self.artifact_id)

    @property
    def staged_key(self) -> str:
        return staged_key(self.cid, self.artifact_id)

    def is_of(self, body: bytes) -> bool:
        """Whether these are the recorded bytes."""
        return len(body) == self.size and sha256(body) == self.sha256

    def fields(self, store: str) -> dict[str, Any]:
        """Returns the registry's fields (schema 3.1 without content and sources). `store` is the object store's URL."""
        final = self.state == FINALIZED
        return {
            "artifact_id": self.artifact_id,
            "job_id": self.job_id,
            "run_id": self.run_id,
            "type": self.type.value,
            "agent_slug": self.agent_slug,
            "created_at": self.created_at,
            "finalized": final,
            "finalized_at": timestamp(self.changed_at) if final else None,
            "version": VERSION if final else None,
            "url": object_url(store, self.key) if final else None,
            "entity_refs": list(self.entity_refs),
            "tags": list(self.tags),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class NewArtifact:
    """An artifact to stage: everything its bytes are built from."""

    job_id: JobId
    epoch: Epoch
    run_id: str
    agent_slug: str
    draft: ArtifactDraft
    content: Mapping[str, Any]
    """The checked content of the draft."""

    def fingerprint(self) -> bytes:
        """Hashes the artifact without its id and time, to recognise the same artifact."""
        return bytes.fromhex(sha256(self.body("", "")))

    def body(self, artifact_id: str, created_at: str) -> bytes:
        """Builds the bytes for this id and time. Raises ArtifactTooLarge."""
        draft = self.draft.model_dump(mode="json")
        body = encode(
            {
                "artifact_id": artifact_id,
                "job_id": self.job_id,
                "run_id": self.run_id,
                "type": draft["type"],
                "agent_slug": self.agent_slug,
                "created_at": created_at,
                "entity_refs": draft["entity_refs"],
                "tags": draft["tags"],
                "content": self.content,
                "sources": draft["sources"],
            }
        )
        if len(body) > STORED_BYTES_MAX:
            raise ArtifactTooLarge(size=len(body), limit=STORED_BYTES_MAX)
        return body

    def payload(self, cid: str, created_at: str, body: bytes) -> bytes:
        """Builds the payload that the registry records about these bytes."""
        artifact_payload = ArtifactPayload(
            job_id=self.job_id,
            epoch=self.epoch,
            run_id=self.run_id,
            type=self.draft.type,
            agent_slug=self.agent_slug,
            created_at=created_at,
            entity_refs=self.draft.entity_refs,
            tags=self.draft.tags,
            sha256=sha256(body),
            size=len(body),
            cid=cid,
        )
        return encode(_PAYLOAD.dump_python(artifact_payload, mode="json"))


# The artifacts of a run (PIPE-15).
#
# A queue job may be submitted for a run of its agent, and a requeued job gets a new run (D20). Its artifact names the
# run it was made for.

COMPLETE = next(state.name for state in QUEUE_JOB.states if state.success)
PAGE = 100
JOBS_MAX = 500
"""Maximum number of the agent's completed jobs to check, newest first."""


async def artifacts_of_run(ledger: Ledger, run_id: str, agent_slug: str) -> list[str]:
    """Returns the ids of final artifacts made for this run, oldest first; at most one per job of the last JOBS_MAX."""
    run = await ledger.job(JobId(run_id))
    if run is None:
        return []
    where = JobFilter(lifecycle=QUEUE_JOB.name, state=COMPLETE, concurrency_key=f"{QUEUE_JOB.name}:{agent_slug}")
    cursor, looked, artifact_ids = None, 0, list[str]()
    while looked < JOBS_MAX:
        page = await ledger.jobs(where, limit=PAGE, cursor=cursor)
        ended_since = [job for job in page.jobs if job.updated_at >= run.created_at]
        artifact_ids += [
            artifact_id
            for job in ended_since
            if (artifact_id := await _artifact_made_for(ledger, job, run_id)) is not None
        ]
        looked, cursor = looked + len(page.jobs), page.cursor
        if cursor is None or not ended_since:
            break
    return artifact_ids[::-1]


async def _artifact_made_for(ledger: Ledger, job: Job, run_id: str) -> str | None:
    """Returns the final artifact of a job if it was made for this run."""
    where = JobFilter(lifecycle=ARTIFACT.name, state=FINALIZED, parent_id=job.job_id)
    for listed in (await ledger.jobs(where, limit=PAGE)).jobs:
        whole = await ledger.job(listed.job_id)
        row = None if whole is None else ArtifactRow.read(whole)
        if row is not None and row.run_id == run_id:
            return row.artifact_id
    return None
