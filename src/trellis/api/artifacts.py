"""Artifacts of queue jobs: list and read finalized ones, discard a staged one, remove old ones (ART-1 to ART-8)."""

from typing import Any

from trellis.api.context import LIMIT_DEFAULT, ApiPart
from trellis.artifacts.content import ArtifactType
from trellis.artifacts.registry import CLEANUP_MAX, ArtifactRegistry
from trellis.artifacts.rows import ArtifactNotFound
from trellis.http.pages import read_pages
from trellis.http.shapes import Artifact, ArtifactListed, CleanedUpShape, Page
from trellis.runs.memory_access import check_reach, only_agent

READ = "artifacts.read"
WHOLE = "of the old artifacts"
"""The subject of a cleanup, for the message of a refusal."""


class LocalArtifacts(ApiPart):
    """Artifacts on a ledger and its stores, with the calls of `client.artifacts`."""

    async def list(
        self,
        *,
        type_: str | None = None,
        job_id: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> Page[ArtifactListed]:
        """Finalized artifacts, newest first, without their content; those of other agents are left out."""
        return await read_pages(
            lambda size, after: self.page(type_=type_, job_id=job_id, limit=size, cursor=after), limit, cursor
        )

    async def page(
        self, *, type_: str | None, job_id: str | None, limit: int, cursor: str | None
    ) -> Page[ArtifactListed]:
        """One page, which may be short although another one follows, so that reading it takes a bounded time."""
        self._context.check_read(READ)
        only = await only_agent(self._context.ledger, self._context.reader, READ)
        registry = (await self._context.instance()).artifacts
        kind = None if type_ is None else ArtifactType(type_)
        artifact_page = await registry.page(limit=limit, cursor=cursor, type_=kind, job_id=job_id)
        rows = [row for row in artifact_page.rows if only in {None, row.agent_slug}]
        items = [ArtifactListed.model_validate(registry.fields(row)) for row in rows]
        return Page[ArtifactListed](items=items, next_cursor=artifact_page.cursor)

    async def get(self, artifact_id: str) -> Artifact:
        """One finalized artifact; raises ArtifactNotFound."""
        return Artifact.model_validate(await self.document(artifact_id))

    async def document(self, artifact_id: str) -> dict[str, Any]:
        """One finalized artifact as it is stored.

        Raises ArtifactNotFound, and NotAllowed for what the caller does not reach, whether it exists or not.
        """
        document = await (await self._registry_for(artifact_id)).read(artifact_id)
        if document is None:
            raise ArtifactNotFound(artifact=artifact_id)
        return document

    async def content(self, artifact_id: str) -> bytes:
        """The stored bytes of a finalized artifact: their SHA-256 is the one in the result of its job.

        Raises ArtifactNotFound, and NotAllowed for what the caller does not reach, whether it exists or not.
        """
        body = await (await self._registry_for(artifact_id)).content(artifact_id)
        if body is None:
            raise ArtifactNotFound(artifact=artifact_id)
        return body

    async def _registry_for(self, artifact_id: str) -> ArtifactRegistry:
        """The registry, if the caller may read this artifact; raises NotAllowed."""
        self._context.check_read(READ)
        registry = (await self._context.instance()).artifacts
        row = await registry.row(artifact_id)
        agent = None if row is None else row.agent_slug
        await check_reach(self._context.ledger, self._context.reader, READ, agent)
        return registry

    async def discard(self, artifact_id: str, *, reason: str | None = None) -> ArtifactListed:
        actor = self._context.permit("artifacts.registry")
        registry = (await self._context.instance()).artifacts
        row = await registry.give_up(actor, artifact_id, cause=reason or f"discarded by {actor.name}")
        return ArtifactListed.model_validate(registry.fields(row))

    async def cleanup(
        self,
        *,
        older_than_days: int | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        idempotency_key: str | None = None,
    ) -> CleanedUpShape:
        request, most = self._context.request_of(idempotency_key), limit or CLEANUP_MAX
        actor = self._context.permit("artifacts.cleanup")
        registry = (await self._context.instance()).artifacts
        done = await registry.cleanup(
            actor, older_than_days=older_than_days, limit=most, dry_run=dry_run, key=request.change(WHOLE)
        )
        items = [ArtifactListed.model_validate(registry.fields(row)) for row in done.rows]
        request.note(replayed=done.replayed)
        return CleanedUpShape(older_than_days=done.older_than_days, dry_run=done.dry_run, items=items, more=done.more)
