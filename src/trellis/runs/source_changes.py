"""Changed sources begin runs: agents whose files name `source.changed` in `triggers.events` (RUN-9, D71).

Nothing reports that somebody changed a file of the object store. So each process compares, from time to time, the
sources that such an agent reads with those it last knew. Invariants:

- What was last known is one object `source-changes/{slug}.json`, written by compare-and-set on the version that was
  read. So of any number of processes one records a change.
- A change is recorded first, and its run has the idempotency key `event:{id of the change}`. A process
  that dies in between leaves a change without a result, and the next pass of any process begins its run.
- The first look at an agent, and a look after its `context` changed, only remembers the sources.
- A change that the agent's own runs caused, through applied proposals, begins nothing. It leaves the administrative act
  `trigger.skipped` with the reason.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trellis.agents.catalog import Catalog
from trellis.agents.definition import AgentDefinition, ContextOptions, TriggerEvent, checked_slug
from trellis.agents.errors import AgentError
from trellis.documents.errors import RunError
from trellis.engine.admin_acts import NewAct
from trellis.engine.errors import InputError
from trellis.engine.jobs import Actor, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import JobFilter
from trellis.lifecycles.proposal import PROPOSAL
from trellis.proposals.apply import INTENT
from trellis.runs.event_triggers import SKIPPED
from trellis.runs.orchestration import EVENT_KEY, OrchestrationLayer, TriggerKind
from trellis.runs.timetable import Moment
from trellis.runs.trigger_chain import TriggerOrigin, origin_of
from trellis.storage.objects.canonical_json import encode, sha256
from trellis.storage.objects.store import CREATE, ObjectStore, PutStored, StoreUnavailable, if_match

FOLDER = "source-changes/"
PROPOSALS_MAX = 1_000
"""The most proposals that were applied, or that failed, since the last look and are compared with a change."""
APPLYING_MAX = 100
"""The most proposals that are being applied and are compared with a change."""
PAYLOADS_AT_ONCE = 50
"""The most proposals that are read in one call."""
LOOK_S_DEFAULT = 30.0
NOTED_AGAIN_S = 3_600.0
"""After this time without a change the time of the look is stored anew, so that few proposals came since."""

_log = log_of("trellis.source_changes")


class SourceChange(BaseModel):
    """A change of an agent's sources: when it was seen, the files, the runs that led to it, and its result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """Unique: made of the change before, the time and the files."""
    at: Moment
    files: tuple[str, ...]
    """The files that are new, different or gone."""
    chain: tuple[str, ...] = ()
    depth: int = 0
    run_id: str | None = None
    skipped: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether its run has yet to begin."""
        return self.run_id is None and self.skipped is None


class KnownSources(BaseModel):
    """The sources of an agent as they were last known: the hash of each file that it reads, and the last change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent_slug: str
    folder: str
    max_sources: int
    seen_at: Moment
    files: dict[str, str]
    last: SourceChange | None = None

    def fits(self, context: ContextOptions) -> bool:
        """Whether they were read as the agent's file says now."""
        return (self.folder, self.max_sources) == (context.folder, context.max_sources)

    def to_bytes(self) -> bytes:
        return encode(self.model_dump())


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceChangeReport:
    """Result of one pass: the runs that began, and how many changes were skipped."""

    runs: tuple[str, ...] = ()
    skipped: int = 0


@dataclass(kw_only=True)
class SourceChanges:
    """The service: looks for changed sources and begins the runs of the agents that read them."""

    ledger: Ledger
    actor: Actor
    objects: ObjectStore
    catalog: Catalog
    layer: OrchestrationLayer
    look_s: float = LOOK_S_DEFAULT
    name: str = "source-changes"
    _looked: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """What the listing of an agent's sources showed when they were last equal to the known ones, after their etag."""

    async def run_once(self) -> SourceChangeReport:
        """Look at every agent that names `source.changed`. One that cannot be looked at does not stop the others."""
        handled: list[SourceChange] = []
        looked: dict[str, tuple[str, ...]] = {}
        for agent in (await self.catalog.list()).agents:
            if not isinstance(agent, AgentDefinition) or not _names_it(agent):
                continue
            try:
                change = await self._look(agent)
            except StoreUnavailable as error:  # the next pass looks again
                _log.warning("sources_not_compared", agent=agent.slug, error=str(error))
                continue
            if agent.slug in self._looked:
                looked[agent.slug] = self._looked[agent.slug]
            handled += [] if change is None else [change]
        self._looked = looked
        runs = tuple(one.run_id for one in handled if one.run_id is not None)
        return SourceChangeReport(runs=runs, skipped=len(handled) - len(runs))

    def pause_s(self, report: SourceChangeReport) -> float:  # noqa: ARG002 - every service is asked with its report
        """The same pause after every pass: the next look reads the listings of the object store."""
        return self.look_s

    async def _look(self, agent: AgentDefinition) -> SourceChange | None:
        """Record a change of an agent's sources and begin its run; None if nothing changed or another process did it."""
        key = known_key(agent.slug)
        there = await self.objects.get(key)
        known = None if there is None else _read(key, there.body)
        if there is not None and known is not None and known.last is not None and known.last.is_open:
            return await self._handle(agent.slug, known, known.last, there.etag)
        same = known if known is not None and known.fits(agent.context) else None
        now, listing = await self.ledger.now(), (there.etag if there else "", *await self._listing(agent))
        is_recent = same is not None and (now - same.seen_at).total_seconds() < NOTED_AGAIN_S
        if is_recent and self._looked.get(agent.slug) == listing:
            return None
        hashes = {one.ref: one.sha256 for one in (await self.catalog.sources(agent.slug, agent)).items}
        files = () if same is None else _difference(same.files, hashes)
        if not files and is_recent:
            self._looked[agent.slug] = listing
            return None
        change = None
        if same is not None and files:
            origin = await self._origin(agent.slug, same, {name: hashes.get(name) for name in files})
            id_ = _change_id(agent.slug, same, now, hashes)
            change = SourceChange(id=id_, at=now, files=files, chain=origin.agents, depth=origin.depth)
        sources = KnownSources(
            agent_slug=agent.slug,
            folder=agent.context.folder,
            max_sources=agent.context.max_sources,
            seen_at=now,
            files=hashes,
            last=change or (None if known is None else known.last),
        )
        stored = await self.objects.put(key, sources.to_bytes(), when=CREATE if there is None else if_match(there.etag))
        if not isinstance(stored, PutStored) or change is None:
            return None
        return await self._handle(agent.slug, sources, change, stored.etag)

    async def _listing(self, agent: AgentDefinition) -> tuple[str, ...]:
        """The names and etags of the files in the folder of an agent's sources."""
        page = await self.objects.list(f"agents/{agent.slug}/{agent.context.folder}/")
        return tuple(f"{info.key} {info.etag}" for info in page.items)

    async def _handle(self, slug: str, known: KnownSources, change: SourceChange, etag: str) -> SourceChange:
        """Begin the run of a recorded change, or record why not, and store the result."""
        event_id = change.id
        origin = TriggerOrigin(change.chain, change.depth)
        params: dict[str, Any] = {"event": TriggerEvent.SOURCE_CHANGED.value, "event_id": event_id}
        params |= {"files": list(change.files), **origin.params}
        reason = origin.refusal(slug)
        run_id: str | None = None
        if reason is None:
            try:
                key = f"{EVENT_KEY}{event_id}"
                run_id = (await self.layer.trigger(slug, params, kind=TriggerKind.EVENT, key=key)).job_id
            except (AgentError, RunError, InputError) as error:
                reason = str(error)
        if run_id is None:
            act = NewAct(event=SKIPPED, subject=slug, cause=reason, id=f"{event_id}-agent")
            await self.ledger.record_act(self.actor, act)
            _log.warning("source_change_skipped", agent=slug, event_id=event_id, reason=reason)
        else:
            _log.info("source_change_triggered", agent=slug, event_id=event_id, run_id=run_id)
        result = change.model_copy(update={"run_id": run_id, "skipped": reason})
        body = known.model_copy(update={"last": result}).to_bytes()
        await self.objects.put(known_key(slug), body, when=if_match(etag))
        return result

    async def _origin(self, slug: str, known: KnownSources, changed: dict[str, str | None]) -> TriggerOrigin:
        """The runs that led to a change. A change in which somebody else had a part counts as that one's alone.

        If there are more proposals than are compared, the change counts as the agent's own: it begins no run.
        """
        proposals = await self._proposals(known.seen_at)
        if proposals is None:
            _log.warning("source_change_origin_unknown", agent=slug, proposals=PROPOSALS_MAX, applying=APPLYING_MAX)
            return TriggerOrigin((slug,))
        origins: list[TriggerOrigin] = []
        left = set(changed.items())
        for start in range(0, len(proposals), PAYLOADS_AT_ONCE):
            payloads = await self.ledger.payloads(proposals[start : start + PAYLOADS_AT_ONCE])
            for proposal, payload in payloads.items():
                body = json.loads(payload or b"{}")
                if body.get("agent_slug") != slug or body["target"] not in changed:
                    continue
                intent = (await self.ledger.read_journal(proposal)).get(INTENT)
                wrote = (body["target"], None if intent is None else intent.decode())
                if intent is not None and changed[wrote[0]] == wrote[1]:
                    left.discard(wrote)
                    origins.append(await origin_of(self.ledger, await self.ledger.job(proposal)))
        if left or any(not origin.agents for origin in origins):
            return TriggerOrigin()
        agents = dict.fromkeys(agent for origin in origins for agent in origin.agents)
        return TriggerOrigin(tuple(agents), max((origin.depth for origin in origins), default=0))

    async def _proposals(self, since: datetime) -> list[JobId] | None:
        """The proposals that may have written since then; None if there are more than are compared.

        One that failed may have written before. It is looked for by its event: as a job it stays `failed` for long.
        """
        # Those at work first: one that ends between the reads is then in both.
        where = JobFilter(lifecycle=PROPOSAL.name, state="applying")
        applying = (await self.ledger.jobs(where, limit=APPLYING_MAX)).jobs
        proposals = [job.job_id for job in applying]
        is_complete = len(applying) < APPLYING_MAX
        for type_ in ("proposal.applied", "proposal.failed"):
            events = await self.ledger.find_events(type_=type_, correlation_id=None, since=since, limit=PROPOSALS_MAX)
            proposals += [event.job_id for event in events]
            is_complete = is_complete and len(events) < PROPOSALS_MAX
        return list(dict.fromkeys(proposals)) if is_complete else None


def known_key(slug: str) -> str:
    """The key of the object with an agent's known sources; raises SlugInvalid."""
    return f"{FOLDER}{checked_slug(slug)}.json"


def _change_id(slug: str, before: KnownSources, at: datetime, files: dict[str, str]) -> str:
    earlier = None if before.last is None else before.last.id
    return f"source-{slug}-{sha256(encode({'after': earlier, 'at': at.isoformat(), 'files': files}))[:32]}"


def _names_it(agent: AgentDefinition) -> bool:
    return any(one.event is TriggerEvent.SOURCE_CHANGED for one in agent.triggers.events)


def _difference(before: dict[str, str], now: dict[str, str]) -> tuple[str, ...]:
    """The files that are new, different or gone."""
    names: Iterable[str] = before.keys() | now.keys()
    return tuple(sorted(name for name in names if before.get(name) != now.get(name)))


def _read(key: str, body: bytes) -> KnownSources | None:
    """The known sources; None for bytes that are none. They are then remembered anew."""
    try:
        return KnownSources.model_validate_json(body)
    except ValidationError as error:
        _log.warning("known_sources_unreadable", key=key, error=str(error.errors(include_url=False)[0]["msg"]))
        return None
