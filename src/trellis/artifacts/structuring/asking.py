"""The one question of a task, and the one call that asks it.

A question holds the words of the payload, framed by stop words at most: a word that nobody asked about would weigh in every ranking.
What comes back has been verified here, whoever the provider is.
"""

import asyncio

from trellis.agents.offline.wording import language_of
from trellis.artifacts.payloads import BriefPayload, PreprocessPayload, QueuePayload, ResearchPayload
from trellis.artifacts.snapshot import SourceText
from trellis.artifacts.structuring.entities import with_unknown
from trellis.artifacts.structuring.fields import texts_of
from trellis.artifacts.structuring.task import StoredAnswer, StructuringPrompt, StructuringTask
from trellis.artifacts.structuring.wording import clipped, filled_sentence
from trellis.nlm.citations import verify
from trellis.nlm.errors import NlmError, NlmGarbage, NlmTimeout
from trellis.nlm.provider import QUESTION_CHARS_MAX, AnswerFlag, Language, NlmProvider

PASSAGES = 8
GIST_CHARS_MAX = 300
NAMES_MAX = 10


def build_prompt(task: StructuringTask) -> StructuringPrompt:
    """The question, and the sources it is asked of; raises PayloadInvalid."""
    payload = task.asked()
    question = _question(task, payload)
    return StructuringPrompt(
        question=clipped(question, QUESTION_CHARS_MAX),
        sources=tuple(sorted(_sources(task, payload), key=lambda source: source.ref)),
        language=_language(payload),
        max_passages=PASSAGES,
    )


async def ask_provider(provider: NlmProvider, prompt: StructuringPrompt, *, deadline_s: float) -> StoredAnswer:
    """Ask once, within `deadline_s`; raises NlmError. `is_transient` says whether a later execution is worth it."""
    if deadline_s <= 0.0:
        raise NlmTimeout(provider=provider.name, reason="no time was left to ask")
    question = prompt.to_question()
    try:
        async with asyncio.timeout(deadline_s):
            prepared = await provider.prepare(question.sources)
            try:
                answer = await provider.query(prepared, question, deadline_s=deadline_s)
            finally:
                await provider.release(prepared)
    except TimeoutError:
        raise NlmTimeout(provider=provider.name, reason=f"{deadline_s:g} s were not enough") from None
    answer = verify(answer, prepared.sources)
    if not answer.text.strip() and AnswerFlag.NO_ANSWER not in answer.flags:
        raise NlmGarbage(provider=provider.name, reason="the answer is empty")
    return StoredAnswer.from_answer(answer)


def is_transient(error: NlmError) -> bool:
    """Whether the same job may succeed later. A job has another execution where an agent's tool has no time left."""
    return error.retries or isinstance(error, NlmTimeout)


def _question(task: StructuringTask, payload: QueuePayload) -> str:
    match payload:
        case ResearchPayload():
            return "\n".join((payload.query, *payload.constraints.focus))
        case BriefPayload():
            entities = with_unknown(task.snapshot.entities, payload.entity_refs)
            named = [entity.name for entity in entities if entity.slug in payload.entity_refs][:NAMES_MAX]
            about = clipped(payload.vision_text, GIST_CHARS_MAX)
            return (
                f"{filled_sentence(_language(payload), 'describe', names=', '.join(named))} {about}" if named else about
            )
        case PreprocessPayload():
            said = " ".join(texts_of(payload.proposal_draft).values()) or "?"
            return filled_sentence(_language(payload), "look_up", text=clipped(said, GIST_CHARS_MAX))


def _language(payload: QueuePayload) -> Language:
    match payload:
        case ResearchPayload():
            return payload.constraints.language or language_of(payload.query)
        case BriefPayload():
            return payload.style_guide.language or language_of(payload.vision_text)
        case PreprocessPayload():
            return language_of(" ".join(texts_of(payload.proposal_draft).values()))


def _sources(task: StructuringTask, payload: QueuePayload) -> tuple[SourceText, ...]:
    if isinstance(payload, ResearchPayload) and payload.sources:
        return tuple(source for source in task.snapshot.sources if source.ref in payload.sources)
    return task.snapshot.sources
