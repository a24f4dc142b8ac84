"""Turns a queue job's task into the draft of its artifact.

`build_prompt` makes the one question, `ask_provider` asks it once, and `draft` builds the content. Only `ask_provider`
leaves the process. The other two are pure functions: equal input gives equal bytes. Sources are treated as data: their
text decides which sentences are quoted, and nothing else.
"""

from trellis.artifacts.content import ArtifactDraft
from trellis.artifacts.drafts.brief import build_brief
from trellis.artifacts.drafts.proposal import preprocess_proposal
from trellis.artifacts.drafts.research import build_research_brief
from trellis.artifacts.drafts.task import StoredAnswer, StructuringPrompt, StructuringTask, ground_answer
from trellis.artifacts.payloads import BriefPayload, PreprocessPayload, ResearchPayload


def draft(task: StructuringTask, prompt: StructuringPrompt, answered: StoredAnswer) -> ArtifactDraft:
    """Builds the artifact's content and its sources. Raises PayloadInvalid. CPU-bound: call it in a thread."""
    grounded = ground_answer(answered.to_answer(), prompt.corpus())
    match task.asked():
        case ResearchPayload() as payload:
            return build_research_brief(task, payload, prompt, grounded)
        case BriefPayload() as payload:
            return build_brief(task, payload, prompt, grounded)
        case PreprocessPayload() as payload:
            return preprocess_proposal(task, payload, prompt, grounded)
