"""Callbacks of the NLM backend: their content (D26), and where accepted ones are stored.

The gateway accepts a callback only for the attempt that waits for it, and stores it create-only. So whatever is stored
under a job's id with the epoch of an attempt was signed for that job, meant for that attempt, and never changes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pydantic

from trellis.engine.jobs import JOB_ID_PATTERN
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import ObjectStore

FOLDER = "callbacks"
PAGES_MAX = 10
"""Maximum pages of one job's callbacks. An attempt has one or two, so requeues never produce this many."""
EXAMPLE_JOB = "7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d"
EXAMPLE_ARTIFACT = "art-0f9d2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d"


class CallbackError(pydantic.BaseModel):
    """Why there is no artifact."""

    model_config = pydantic.ConfigDict(extra="forbid")

    code: str = pydantic.Field(min_length=1, max_length=100)
    message: str = pydantic.Field(max_length=2_000)


class Callback(pydantic.BaseModel):
    """How the NLM backend ended with a job."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "job_id": EXAMPLE_JOB,
                    "epoch": 3,
                    "status": "COMPLETE",
                    "artifact_id": EXAMPLE_ARTIFACT,
                    "artifact_url": f"https://gateway.example/artifacts/{EXAMPLE_ARTIFACT}",
                    "sha256": "0" * 64,
                    "size": 2_048,
                    "error": None,
                }
            ]
        },
    )

    job_id: str = pydantic.Field(pattern=JOB_ID_PATTERN)
    epoch: int = pydantic.Field(ge=0, lt=2**53)
    status: Literal["COMPLETE", "FAILED"]
    artifact_id: str | None = pydantic.Field(None, max_length=200)
    artifact_url: str | None = pydantic.Field(None, max_length=2_048)
    sha256: str | None = pydantic.Field(None, pattern=r"^[0-9a-f]{64}$")
    size: int | None = pydantic.Field(None, ge=0, lt=2**53)
    error: CallbackError | None = None

    @pydantic.model_validator(mode="after")
    def _says_one_thing(self) -> "Callback":
        if self.status == "COMPLETE" and (self.artifact_id is None or self.sha256 is None or self.size is None):
            raise ValueError("COMPLETE comes with artifact_id, sha256 and size")
        if self.status == "FAILED" and self.error is None:
            raise ValueError("FAILED comes with error")
        return self


def callback_key(job_id: str, webhook_id: str) -> str:
    """Returns the key of a stored callback."""
    return object_key(FOLDER, job_id, f"{webhook_id}.json")


@dataclass(frozen=True, kw_only=True)
class KeptCallbacks:
    """The stored callbacks of one attempt of a job."""

    objects: ObjectStore
    job_id: str
    epoch: int

    async def first(self, seen: set[str]) -> Callback | None:
        """Returns the first callback for this attempt; None if there is none. Keys in `seen` are not read again."""
        found: list[tuple[str, str, Callback]] = []
        for key in await self._keys():
            there = None if key in seen else await self.objects.get(key)
            if there is None:
                continue
            kept: Mapping[str, Any] = json.loads(there.body)
            callback = Callback.model_validate(kept["callback"])
            if callback.epoch == self.epoch and callback.job_id == self.job_id:
                found.append((str(kept["received_at"]), key, callback))
            else:
                seen.add(key)
        return min(found, key=lambda one: one[:2])[2] if found else None

    async def _keys(self) -> list[str]:
        keys: list[str] = []
        for _ in range(PAGES_MAX):
            after = keys[-1] if keys else None
            page = await self.objects.list(f"{object_key(FOLDER, self.job_id)}/", after=after)
            keys += [info.key for info in page.items]
            if not page.more:
                break
        return keys
