"""What the registry knows of an artifact, and the bytes that are its content (D15, ART-1, ART-6).

The row is a job of lifecycle `artifact`: who made it, for which attempt of which job, the hash and the size of its bytes. The bytes are
made once, from the row's fields and the content, and always come out the same. Where they lie stands in the row too, so that a project
that is given another name finds what it had.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pydantic

from trellis.artifacts import keys
from trellis.artifacts.content import ArtifactDraft, ArtifactType
from trellis.artifacts.errors import ArtifactIdInvalid, ArtifactTooLarge
from trellis.engine.jobs import Epoch, JobId
from trellis.engine.records import Job
from trellis.lifecycles.artifact import ARTIFACT
from trellis.storage.address import object_url
from trellis.storage.documents import encode, sha256, timestamp

STAGED, FINALIZED, DISCARDED, REMOVED = (state.name for state in ARTIFACT.states)
ENDED_STATES = frozenset({DISCARDED, REMOVED})
"""From which no artifact comes back."""
STORED_BYTES_MAX = 16 * 1024 * 1024
"""Of an artifact as it is stored: the largest body that a gateway takes, written out with room."""
VERSION = 1
"""Of every artifact: what is finalized never changes."""


class _Payload(pydantic.BaseModel):
    """What the artifact's job carries."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactRow:
    """One artifact as the registry has it."""

    artifact_id: JobId
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
    state: str
    changed_at: datetime
    """When it came into its state: of a finalized one, when its job was complete."""

    @classmethod
    def read(cls, job: Job) -> "ArtifactRow | None":
        """From the artifact's job; None for a job that is none of ours."""
        return cls.of_payload(job.job_id, job.payload or b"", job.state, job.updated_at)

    @classmethod
    def of_payload(cls, artifact_id: JobId, payload: bytes, state: str, changed_at: datetime) -> "ArtifactRow | None":
        """From what was recorded of it; None when the registry did not make it: then it has no bytes anywhere."""
        try:
            told = _Payload.model_validate_json(payload)
            keys.artifact_key(told.cid, artifact_id)
        except (pydantic.ValidationError, ArtifactIdInvalid):
            return None
        return cls(artifact_id=artifact_id, state=state, changed_at=changed_at, **dict(told))

    @property
    def key(self) -> str:
        """Where everybody finds the bytes, once it is finalized."""
        return keys.artifact_key(self.cid, self.artifact_id)

    @property
    def staged_key(self) -> str:
        """Where the bytes lie until then."""
        return keys.staged_key(self.cid, self.artifact_id)

    def is_of(self, body: bytes) -> bool:
        """Whether these are the recorded bytes."""
        return len(body) == self.size and sha256(body) == self.sha256

    def fields(self, store: str) -> dict[str, Any]:
        """What the registry tells of it (schema 3.1 without content and sources); `store` is the object store's address."""
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
    """An artifact that is to be staged: everything that its bytes are made of."""

    job_id: JobId
    epoch: Epoch
    run_id: str
    agent_slug: str
    draft: ArtifactDraft
    content: Mapping[str, Any]
    """The draft's, checked."""

    def fingerprint(self) -> bytes:
        """What "the same artifact" means: all of it but its name and its time."""
        return bytes.fromhex(sha256(self.body("", "")))

    def body(self, artifact_id: str, created_at: str) -> bytes:
        """The bytes under this name and of this time; raises ArtifactTooLarge."""
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
        """What the registry records about these bytes."""
        made = _Payload(
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
        return encode(made.model_dump(mode="json"))
