"""The four steps of a run (PIPE-4 to PIPE-8).

`load-context` takes a snapshot of everything the agent may see. `execute-agent` works from that snapshot alone, so
executing it again gives the same drafts. `persist-results` turns drafts into proposals and sets their kind and priority
itself. `finalize` only reports the result.
"""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from trellis.agents.catalog import Catalog, agent_key
from trellis.agents.definition import AgentDefinition, AgentMalformed, SafeOutput, read_definition
from trellis.agents.errors import AgentRunError
from trellis.agents.run_io import AgentContext, AgentOutput, DeepMemoryPage, ModelOptions, RunLimits, ToolServices
from trellis.agents.run_io import ProposalDraft as AgentDraft
from trellis.agents.runtime import run_agent
from trellis.agents.sources import ANNOTATION_KINDS, AgentSource, Annotation, read_annotations
from trellis.artifacts.rows import artifacts_of_run
from trellis.documents.errors import AgentStopped, AgentTimeout, NlmDown, StepError, StepHopeless, UpstreamUnavailable
from trellis.engine.call_times import CallKind
from trellis.engine.clock import Clock
from trellis.engine.errors import TrellisError
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.nlm.provider import NlmError
from trellis.nlm.retrying_provider import RetryingProvider
from trellis.proposals import proposal
from trellis.proposals.apply import ApplyEngine, apply_until_settled
from trellis.runs.memory_readers import MemoryReader, MemoryRefused
from trellis.runs.orchestrator import RunStep, StepContext, StepResult
from trellis.storage.memory import markdown
from trellis.storage.memory.errors import MemoryOverLimit, RepositoryError
from trellis.storage.memory.layout import DeepPart, ReadMode, TokenCounter, count_tokens
from trellis.storage.memory.updates import Operation
from trellis.storage.objects.canonical_json import encode, sha256
from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import ObjectStore

PRIORITY = "normal"
"""The priority of a run's proposals. A person can set another one; a model cannot."""
APPLY_PATIENCE_S = 60.0
"""How long a step waits for its memory update. Longer than the lease of an apply engine that died during it."""
KEPT_PROPOSALS = "proposals"
"""Journal entry with the bodies of a run's proposals, so that a repeated step stores the same ones."""
STORED = "proposals/stored"
"""Journal entry with the proposals that were not stored, each with the equal proposal that made it unnecessary."""

_log = log_of("trellis.runs")


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """The four steps, and the services they use."""

    ledger: Ledger
    orchestrator: Actor
    gateway: Actor
    objects: ObjectStore
    memory: MemoryReader
    asking: RetryingProvider
    models: ModelOptions
    apply_engine: ApplyEngine | None
    """Applies what is approved. None: the engines of other processes do."""
    clock: Clock
    limits: RunLimits
    counter: TokenCounter = count_tokens
    """Counts the tokens of sources (D50)."""

    def steps(self) -> dict[str, RunStep]:
        """The four steps, by name."""
        return {
            "load-context": self.load_context,
            "execute-agent": self.execute_agent,
            "persist-results": self.persist_results,
            "finalize": self.finalize,
        }

    # --- step 1: load-context ----------------------------------------------------------------------------------------

    async def load_context(self, context: StepContext) -> StepResult:
        """Load the agent's file, sources and memory as they are now."""
        slug = context.request.agent_slug
        stored = await self.objects.get(agent_key(slug))
        if stored is None:
            raise StepHopeless(detail=f"there is no agent {slug}")
        definition = _runnable(stored.body, slug)
        with context.calls.timed("sources", CallKind.STORE):
            sources = await Catalog(self.objects, counter=self.counter).sources(slug, definition)
        with context.calls.timed("memory.read", CallKind.MEMORY):
            view = await self._memory(slug, definition.context.mode)
        notes = await read_annotations(self.objects, slug)
        logic = await self.objects.get(object_key("agents", slug, proposal.LOGIC_FILE))
        return StepResult(
            result={
                "agent": {"slug": slug, "version": definition.version, "sha256": definition.sha256},
                "definition": stored.body.decode(),
                "logic": None if logic is None else logic.body.decode(errors="replace"),
                "sources": [{"ref": one.ref, "sha256": one.sha256, "text": one.text} for one in sources.items],
                "annotations": [asdict(one) for one in notes],
                "left_out": [{"ref": one.ref, "reason": one.reason.value} for one in sources.left_out],
                "memory": view,
            }
        )

    async def _memory(self, slug: str, mode: ReadMode) -> dict[str, Any]:
        try:
            with _memory_awaited():
                view = await self.memory.read(slug, mode)
        except TrellisError as error:
            raise StepHopeless(detail=str(error)) from error
        return {
            "mode": view.mode.value,
            "version": view.version,
            "commit": view.commit,
            "token_count": view.token_count,
            "content": dict(view.content),
        }

    # --- step 2: execute-agent ---------------------------------------------------------------------------------------

    async def execute_agent(self, context: StepContext) -> StepResult:
        """Run the agent. Every model request and tool call is journaled."""
        loaded = context.before["load-context"]
        slug = context.request.agent_slug
        definition = _with_logic(_runnable(loaded["definition"].encode(), slug), loaded["logic"])
        seen = AgentContext(
            run_id=context.run_id,
            sources=tuple(AgentSource(**one) for one in loaded["sources"]),
            annotations=tuple(Annotation(**one) for one in loaded.get("annotations", ())),
            memory=loaded["memory"]["content"],
            params=context.request.params,
        )
        try:
            output = await run_agent(
                definition,
                seen,
                services=self._services(slug),
                once=context.once,
                limits=self.limits,
                left_s=context.left_s,
                models=self.models,
                times=context.calls,
            )
        except NlmError as error:
            raise NlmDown(detail=str(error)) from error
        except AgentRunError as error:
            raise _failed(error) from error
        refused = [one for one in output.refused if not one.approved_before]
        return StepResult(result=output.to_dict(), event_data=_if_any("refused_actions", len(refused)))

    def _services(self, slug: str) -> ToolServices:
        async def deep(part: DeepPart, before: str | None, limit: int) -> DeepMemoryPage:
            with _memory_awaited():
                return await self.memory.read_deep(slug, part, before=before, limit=limit)

        async def read(mode: ReadMode) -> Mapping[str, str]:
            with _memory_awaited():
                return (await self.memory.read(slug, mode)).content

        return ToolServices(
            ask=lambda question, deadline_s: self.asking.ask(question, agent=slug, deadline_s=deadline_s),
            read_memory=read,
            read_memory_deep=deep,
        )

    # --- step 3: persist-results -------------------------------------------------------------------------------------

    async def persist_results(self, context: StepContext) -> StepResult:
        """Turn drafts into proposals. A memory update of normal priority is applied at once.

        A draft is not proposed again if an equal proposal waits, if it was rejected and rests on unchanged sources, or
        if its file already has this content. Such drafts are reported with the status of the equal proposal.
        """
        loaded, output = context.before["load-context"], AgentOutput.from_dict(context.before["execute-agent"])
        bodies: list[dict[str, Any]] = json.loads(
            await context.once(KEPT_PROPOSALS, lambda: self._bodies(context, loaded, output.proposals))
        )
        equals: dict[str, dict[str, str]] = json.loads(
            await context.once(STORED, lambda: self._stored(context, loaded, bodies))
        )
        new_bodies = [body for body in bodies if body["id"] not in equals]
        created = [
            {
                "id": body["id"],
                "action": body["action"],
                "target": body["target"],
                "status": await self._settle(context, body),
            }
            for body in new_bodies
        ]
        already = [
            {**equals[body["id"]], "action": body["action"], "target": body["target"]}
            for body in bodies
            if body["id"] in equals
        ] + [
            {"id": "", "status": "applied", "action": one.action or "", "target": one.target or ""}
            for one in output.refused
            if one.approved_before
        ]
        return StepResult(
            result={"proposals": created, **_if_any("already_proposed", already)},
            event_data={
                "proposals_created": [body["id"] for body in new_bodies],
                **_if_any("already_proposed", already),
            },
            output=encode({"proposals": new_bodies, "summary": output.summary}),
        )

    async def _bodies(self, context: StepContext, loaded: Mapping[str, Any], drafts: Sequence[AgentDraft]) -> bytes:
        """The bodies of the run's proposals."""
        slug, sources = context.request.agent_slug, {one["ref"]: one["sha256"] for one in loaded["sources"]}
        bodies = [
            proposal.make_proposal(context.run_id, slug, number, draft, priority=PRIORITY, sources=sources)
            for number, draft in enumerate(await self._drafts(slug, loaded, drafts), 1)
        ]
        return json.dumps([json.loads(one.body) for one in bodies], ensure_ascii=False).encode()

    async def _stored(
        self, context: StepContext, loaded: Mapping[str, Any], bodies: Sequence[Mapping[str, Any]]
    ) -> bytes:
        """Store the proposals. Returns, by id, the equal proposal of each one that was not stored."""
        new = [proposal.Proposal(id=body["id"], run_id=context.run_id, body=encode(dict(body))) for body in bodies]
        updates = any(body["action"] == proposal.MEMORY_UPDATE for body in bodies)
        memory: Mapping[str, str] = await self._remembered(context.request.agent_slug) if updates else {}
        texts = {one["ref"]: one["text"] for one in loaded["sources"]} | {proposal.LOGIC_FILE: loaded["logic"] or ""}
        texts |= await self._texts_of([body for body in bodies if body["target"] not in texts])
        settled = [body for body in bodies if _is_done(body, texts) or _is_remembered(body, memory)]
        done = {body["id"]: await proposal.find_applied_equal(self.ledger, body) for body in settled}
        new = [one for one in new if one.id not in done]
        answers = await proposal.store_proposals(
            self.ledger, self.orchestrator, new, correlation_id=context.correlation_id
        )
        answered = {one.id: answer for one, answer in zip(new, answers, strict=True)} | done
        equals = {
            id_: {"id": answer.id, "status": answer.status}
            for id_, answer in answered.items()
            if isinstance(answer, proposal.EqualProposal)
        }
        return json.dumps(equals).encode()

    async def _texts_of(self, bodies: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """The files that these proposals append to, by target, as they are now: the run itself did not load them."""
        changes = {body["target"]: proposal.file_change(body["agent_slug"], body) for body in bodies if _is_edit(body)}
        stored = {target: await self.objects.get(one.key) for target, one in changes.items() if one.kind == "append"}
        return {target: one.body.decode("utf-8", "replace") for target, one in stored.items() if one is not None}

    async def _settle(self, context: StepContext, body: Mapping[str, Any]) -> str:
        if not await proposal.auto_approve(self.ledger, self.gateway, body["id"], body):
            return "pending"
        with context.calls.timed("memory.apply", CallKind.MEMORY):
            settling = apply_until_settled(self.ledger, self.apply_engine, self.clock, body["id"], APPLY_PATIENCE_S)
            state = await settling
        return "auto_applied" if state == "applied" else state

    async def _drafts(
        self, slug: str, loaded: Mapping[str, Any], drafts: Sequence[AgentDraft]
    ) -> list[proposal.ProposalContent]:
        """One proposal for each draft about a file, and one for all memory updates together."""
        seen = {one["ref"]: one["sha256"] for one in loaded["sources"]}
        contents: list[proposal.ProposalContent] = []
        updates = await self._new_updates(slug, [one for one in drafts if one.action is SafeOutput.MEMORY_UPDATE])
        for draft in drafts:
            if draft.action is not SafeOutput.MEMORY_UPDATE:
                target = _target(draft)
                known = seen.get(target) or await self._digest(slug, target)
                content = {
                    "summary": draft.summary,
                    "change": {"type": draft.change.value, "text": draft.text},
                    **_grounds(draft),
                }
                contents.append(
                    proposal.ProposalContent(
                        action=draft.action.value, target=target, content=content, target_hash=known
                    )
                )
        if updates:
            contents.append(_memory_draft(updates, loaded["memory"]["version"]))
        return contents

    async def _new_updates(self, slug: str, drafts: Sequence[AgentDraft]) -> Sequence[AgentDraft]:
        """The memory updates without those whose text the memory has; all of them if it has the text of each."""
        if not drafts:
            return ()
        memory = await self._remembered(slug)
        new = [one for one in drafts if not _has_text(memory.get(one.target, ""), _update(one))]
        return new or drafts

    async def _remembered(self, slug: str) -> Mapping[str, str]:
        """The files of the agent's memory, so that nothing is added twice; none if one of them is over its limit."""
        try:
            return (await self._memory(slug, ReadMode.WIDE))["content"]
        except StepHopeless as error:
            if isinstance(error.__cause__, MemoryOverLimit):
                _log.warning("memory_not_compared", agent=slug, reason=str(error))
                return {}
            raise

    async def _digest(self, slug: str, target: str) -> str | None:
        stored = await self.objects.get(object_key("agents", slug, *target.split("/")))
        return None if stored is None else sha256(stored.body)

    # --- step 4: finalize --------------------------------------------------------------------------------------------

    async def finalize(self, context: StepContext) -> StepResult:
        """Report what the run produced.

        Everything is stored already; the manifest and the final status follow from it.
        """
        persisted = context.before["persist-results"]["proposals"]
        artifacts = await artifacts_of_run(self.ledger, context.run_id, context.request.agent_slug)
        return StepResult(
            result={"proposals": len(persisted), "summary": context.before["execute-agent"]["summary"]},
            event_data={"artifacts": artifacts} if artifacts else {},
        )


@contextmanager
def _memory_awaited() -> Generator[None]:
    """A memory that is away fails the step, which is tried again. One that refuses this process fails the run."""
    try:
        yield
    except RepositoryError as error:
        raise UpstreamUnavailable(detail=str(error)) from error
    except MemoryRefused as error:
        raise StepHopeless(detail=str(error)) from error


def _is_done(body: Mapping[str, Any], texts: Mapping[str, str]) -> bool:
    """Whether the target file already has the proposed content. `texts` are the files to append to, by target."""
    if not _is_edit(body):
        return False
    change = proposal.file_change(body["agent_slug"], body)
    return proposal.changes_nothing(change, body["target_hash"], texts.get(body["target"], ""))


def _is_edit(body: Mapping[str, Any]) -> bool:
    """Whether a proposal changes the target file itself, which a memory update, a comment and a tag do not."""
    return body["action"] != proposal.MEMORY_UPDATE and body["action"] not in ANNOTATION_KINDS


def _is_remembered(body: Mapping[str, Any], memory: Mapping[str, str]) -> bool:
    """Whether the memory has all that a memory update would append."""
    if body["action"] != proposal.MEMORY_UPDATE:
        return False
    return all(_has_text(memory.get(one["file"] or "", ""), one) for one in body["content"]["updates"])


def _has_text(text: str, update: Mapping[str, Any]) -> bool:
    """Whether a file of the memory, or the section to append to, has the lines that an update would append."""
    if update["operation"] != Operation.APPEND:
        return False
    if update["section"]:
        sections = markdown.sections(text, update["section"])
        lines = "\n".join(text.split("\n")[sections[0].line + 1 :]) if len(sections) == 1 else ""
        text = re.split(r"(?m)^#{1,6} ", lines)[0]
    return proposal.has_lines(text, update["content"] or "")


def _if_any(name: str, value: Any) -> dict[str, Any]:
    """A dict with this one field; empty if the value is empty."""
    return {name: value} if value else {}


def _runnable(body: bytes, slug: str) -> AgentDefinition:
    definition = read_definition(body, slug=slug)
    if isinstance(definition, AgentMalformed):
        raise StepHopeless(detail=f"agent {slug} is malformed: {definition}")
    if not definition.may_run:
        raise AgentStopped(slug=slug, status=definition.status.value)
    return definition


def _with_logic(definition: AgentDefinition, logic: str | None) -> AgentDefinition:
    """Append the approved logic to the agent's instructions."""
    return definition if not logic else replace(definition, instructions=f"{definition.instructions}\n\n{logic}")


def _failed(error: AgentRunError) -> Exception:
    refused = [asdict(one) for one in error.refused]
    if error.code == "AGENT_TIMEOUT":
        return AgentTimeout(detail=str(error), refused=refused)
    if error.code == "UPSTREAM_UNAVAILABLE" and error.retries:
        return UpstreamUnavailable(detail=str(error), refused=refused)
    return (StepError if error.retries else StepHopeless)(detail=str(error), refused=refused)


def _target(draft: AgentDraft) -> str:
    """The file that a draft changes.

    A logic update always goes to LOGIC_FILE: only the owner edits the agent's definition.
    """
    if draft.action is SafeOutput.LOGIC_UPDATE:
        return proposal.LOGIC_FILE
    return proposal.checked_target(draft.action.value, draft.target)


def _grounds(draft: AgentDraft) -> dict[str, Any]:
    fields = draft.to_dict()
    return {
        name: fields[name] for name in ("reasoning", "citations", "flags", "not_found", "not_read") if name in fields
    }


def _update(draft: AgentDraft) -> dict[str, Any]:
    return asdict(draft.update())


def _memory_draft(drafts: Sequence[AgentDraft], version: int) -> proposal.ProposalContent:
    updates = [_update(draft) for draft in drafts]
    summary = "; ".join(dict.fromkeys(draft.summary for draft in drafts))[:1_000]
    content = {
        "summary": summary,
        "updates": updates,
        "expected_version": proposal.version_needed(
            [update["operation"] for update in updates], priority=PRIORITY, seen=version
        ),
        "grounds": [_grounds(draft) for draft in drafts],
    }
    files = "+".join(sorted({update["file"] for update in updates if update["file"]}))
    return proposal.ProposalContent(action=proposal.MEMORY_UPDATE, target=files, content=content)
