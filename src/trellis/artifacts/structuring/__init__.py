"""From a task to the draft of its artifact: `build` makes the one question, `ask` asks it once, `draft` makes the content.

Only `ask` leaves the process; the other two are functions of what they are given, and the same input gives the same bytes. Sources are
material: whatever they say changes which sentences are quoted and nothing else.
"""

from trellis.artifacts.content import Draft
from trellis.artifacts.payloads import BriefPayload, PreprocessPayload, ResearchPayload
from trellis.artifacts.structuring.asking import ask, build, transient
from trellis.artifacts.structuring.brief import brief
from trellis.artifacts.structuring.grounding import ground
from trellis.artifacts.structuring.proposal import preprocess
from trellis.artifacts.structuring.research import research
from trellis.artifacts.structuring.task import Answered, Prompt, Task

__all__ = ["Answered", "Prompt", "Task", "ask", "build", "draft", "transient"]


def draft(task: Task, prompt: Prompt, answered: Answered) -> Draft:
    """The artifact's content with what it rests on; raises PayloadInvalid. It takes processor time: call it in a thread."""
    grounded = ground(answered.to_answer(), prompt.corpus())
    match task.asked():
        case ResearchPayload() as payload:
            return research(task, payload, prompt, grounded)
        case BriefPayload() as payload:
            return brief(task, payload, prompt, grounded)
        case PreprocessPayload() as payload:
            return preprocess(task, payload, prompt, grounded)
