"""From a task to the draft of its artifact: `build_prompt` makes the one question, `ask_provider` asks it once, `draft` makes the content.

Only `ask_provider` leaves the process; the other two are functions of what they are given, and the same input gives the same bytes. Sources are
material: whatever they say changes which sentences are quoted and nothing else.
"""

from trellis.artifacts.content import ArtifactDraft
from trellis.artifacts.drafts.brief import build_brief
from trellis.artifacts.drafts.grounding import ground_answer
from trellis.artifacts.drafts.proposal import preprocess_proposal
from trellis.artifacts.drafts.research import build_research_brief
from trellis.artifacts.drafts.task import (
    StoredAnswer,
    StructuringPrompt,
    StructuringTask,
    ask_provider,
    build_prompt,
    is_transient,
)
from trellis.artifacts.payloads import BriefPayload, PreprocessPayload, ResearchPayload

__all__ = [
    "StoredAnswer",
    "StructuringPrompt",
    "StructuringTask",
    "ask_provider",
    "build_prompt",
    "draft",
    "is_transient",
]


def draft(task: StructuringTask, prompt: StructuringPrompt, answered: StoredAnswer) -> ArtifactDraft:
    """The artifact's content with what it rests on; raises PayloadInvalid. It takes processor time: call it in a thread."""
    grounded = ground_answer(answered.to_answer(), prompt.corpus())
    match task.asked():
        case ResearchPayload() as payload:
            return build_research_brief(task, payload, prompt, grounded)
        case BriefPayload() as payload:
            return build_brief(task, payload, prompt, grounded)
        case PreprocessPayload() as payload:
            return preprocess_proposal(task, payload, prompt, grounded)
