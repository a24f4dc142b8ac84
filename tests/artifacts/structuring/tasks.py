"""Tasks about an archive with notes in two languages and about the demo garden, and the way of one task from question to draft."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trellis.agents.garden import memory_seed, objects_of
from trellis.artifacts.content import ArtifactDraft, JobType
from trellis.artifacts.drafts import draft
from trellis.artifacts.drafts.task import StoredAnswer, StructuringPrompt, StructuringTask, ask_provider, build_prompt
from trellis.artifacts.payloads import Snapshot
from trellis.nlm.extractive import ExtractiveProvider
from trellis.nlm.provider import NlmProvider
from trellis.nlm.scripted import ProviderScript, ScriptedProvider
from trellis.storage.memory.layout import FACTS
from trellis.testing import FakeClock

VIOLIN = "archivist-violin"
GUARDIAN = "architect-guardian"
BILINGUAL = Path(__file__).resolve().parents[2] / "agents" / "bilingual"
"""The violin archive as it was written first, in Ukrainian and English."""
ENTITIES: tuple[dict[str, Any], ...] = (
    {"slug": "ts-02", "name": "TS-02", "aliases": ["the «Stainer»"], "ref": "sources/05-provenance.md"},
    {"slug": "ts-03", "name": "Скрипка Петрика", "aliases": ["TS-03"]},
    {"slug": "onufriy-petryk", "name": "Онуфрій Петрик", "aliases": ["пан Петрик"]},
)


def snapshot(
    slug: str = VIOLIN,
    *,
    entities: Sequence[Mapping[str, Any]] = ENTITIES,
    sources: Mapping[str, str] | None = None,
) -> Snapshot:
    """The archive's sources in two languages, or the garden's, with the garden's memory; or these sources."""
    shipped = bilingual() if slug == VIOLIN else garden(slug)
    memory = [{"ref": f"memory/{name}", "text": text} for name, text in memory_seed(slug).items() if name != FACTS]
    return Snapshot.of(
        job_id="6f1e6b0a-94d5-4a38-8a3c-2f4d93b21a11",
        epoch=1,
        agent_slug=slug,
        memory={"version": "1", "files": memory if sources is None else []},
        entities=[dict(entity) for entity in entities],
        sources=[{"ref": ref, "text": text} for ref, text in (shipped if sources is None else sources).items()],
    )


def bilingual() -> dict[str, str]:
    return {f"sources/{file.name}": file.read_text("utf-8") for file in sorted((BILINGUAL / "sources").iterdir())}


def garden(slug: str) -> dict[str, str]:
    found = {key.removeprefix(f"agents/{slug}/"): body.decode() for key, body in objects_of(slug).items()}
    return {ref: text for ref, text in found.items() if ref.startswith("sources/")}


def task(job_type: JobType, payload: Mapping[str, Any], made: Snapshot | None = None) -> StructuringTask:
    made = made or snapshot()
    return StructuringTask(job_type=job_type, payload=payload, snapshot=made)


async def drafted(made: StructuringTask, provider: NlmProvider | None = None) -> ArtifactDraft:
    """All the way, through the bytes that are kept between the stages."""
    prompt = build_prompt(made)
    answered = await ask_provider(provider or ExtractiveProvider(), prompt, deadline_s=30.0)
    return draft(made, StructuringPrompt.read(prompt.to_bytes()), StoredAnswer.read(answered.to_bytes()))


async def research(
    query: str, made: Snapshot | None = None, provider: NlmProvider | None = None, **more: Any
) -> ArtifactDraft:
    return await drafted(task(JobType.RESEARCH, {"query": query, **more}, made), provider)


class _SkippingClock(FakeClock):
    """Time that is over as soon as somebody waits for it."""

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


def scripted(*steps: dict[str, Any]) -> ScriptedProvider:
    return ScriptedProvider(ProviderScript.model_validate({"steps": list(steps)}), clock=_SkippingClock())


def says(text: str, *citations: tuple[str, str]) -> dict[str, Any]:
    """A step in which a model says this and cites that."""
    return {"answer": {"answer": text, "citations": [{"ref": ref, "excerpt": one} for ref, one in citations]}}
