"""Artifacts: what queue jobs left behind. They are read; only the NLM backend makes them, and only an operator's cleanup removes them."""

from collections.abc import Mapping, Sequence
from typing import Any

from trellis.http.calls import GatewayCalls, path_of
from trellis.http.listing import LIMIT_DEFAULT, listed
from trellis.http.shapes import Artifact, ArtifactListed, ArtifactStaged, CleanedUpShape, Page


class Artifacts:
    """What queue jobs left behind: `client.artifacts`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls

    async def list(
        self,
        *,
        type_: str | None = None,
        job_id: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> Page[ArtifactListed]:
        """Finalized artifacts, newest first, without their content."""
        return await listed(self._calls, ArtifactListed, "/artifacts", limit, cursor, type=type_, job_id=job_id)

    async def get(self, artifact_id: str) -> Artifact:
        """One finalized artifact."""
        return await self._calls.get(Artifact, path_of("artifacts", artifact_id))

    async def stage(
        self,
        job_id: str,
        type_: str,
        content: Mapping[str, Any],
        *,
        epoch: int | None = None,
        entity_refs: Sequence[str] = (),
        tags: Sequence[str] = (),
        sources: Sequence[Mapping[str, str]] = (),
        idempotency_key: str | None = None,
    ) -> ArtifactStaged:
        """Stage the artifact of a job that waits for it, as the NLM backend; the one that is there already is the answer."""
        body: dict[str, Any] = {
            "job_id": job_id,
            "epoch": epoch,
            "type": type_,
            "entity_refs": [*entity_refs],
            "tags": [*tags],
            "content": dict(content),
            "sources": [dict(source) for source in sources],
        }
        return await self._calls.post(ArtifactStaged, "/artifacts", body, key=idempotency_key)

    async def discard(self, artifact_id: str, *, reason: str | None = None) -> ArtifactListed:
        """Discard a staged artifact that no job waits for, as an operator."""
        return await self._calls.post(ArtifactListed, path_of("artifacts", artifact_id, "discard"), {"reason": reason})

    async def cleanup(
        self,
        *,
        older_than_days: int | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        idempotency_key: str | None = None,
    ) -> CleanedUpShape:
        """Remove artifacts that are old enough, as an operator; with `dry_run` only say which those are."""
        wish = {"older_than_days": older_than_days, "dry_run": dry_run, "limit": limit}
        given = {name: value for name, value in wish.items() if value is not None}
        return await self._calls.post(CleanedUpShape, "/artifacts/cleanup", given, key=idempotency_key)
