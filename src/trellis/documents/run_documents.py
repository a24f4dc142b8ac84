"""The documents of a run, as pure functions of what the ledger recorded (D14, RUN-3, PIPE-15, OBS-1).

Every document of a run at version v follows from the run's request and its events 1 to v. The bytes of step files are
in the ledger. So a lost object is recreated byte for byte, and two projectors can only write the same bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trellis.documents import ids
from trellis.engine.event_data import data_of
from trellis.engine.recent_entries import LruCache
from trellis.engine.records import Event, Job, SampledEvent
from trellis.lifecycles import Phase
from trellis.lifecycles.events import Cause
from trellis.lifecycles.run import RUN
from trellis.storage.objects.canonical_json import encode, timestamp

STARTED = "run.started"
STEP_DONE = "run.step.completed"
COMPLETED = "run.completed"
FAILED = "run.failed"
CANCELLED = "CANCELLED"
"""The code of the error of a run that somebody cancelled."""
STEP_ENTRY = "step/{number:02}"
"""Journal entry with the bytes of a step's file."""
OUTPUT_ENTRY = "output"
"""Journal entry with the bytes of output/proposal.json."""
EXTRA_FIELDS = ("already_proposed", "refused_actions", "refused")
"""Fields about what the agent wanted and did not get, in the events of steps and of a run that failed."""
REFUSED_MAX = 10
"""Refused calls that the event of a failed run has; equal ones count as one."""
NLM_MS = "nlm_ms"
"""Field of the event of a counted step: how long each answered call of the NLM in it took, in milliseconds."""
PARSED_MAX, PARSED_BYTES_MAX = 1_000, 4_096
"""How many different data of events are kept parsed, and up to which size."""
PERSIST_STEP = ids.STEPS.index("persist-results") + 1

_parsed = LruCache[bytes, Mapping[str, Any]](PARSED_MAX)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The request for a run; the payload of its job."""

    agent_slug: str
    trigger: str
    params: dict[str, Any]
    retry_of: str | None = None
    """The run that this one repeats, because one of its jobs was requeued after it ended (D20)."""

    @classmethod
    def read(cls, payload: bytes) -> "RunRequest":
        """Parse the job's payload."""
        data = json.loads(payload)
        return cls(data["agent_slug"], data["trigger"], data["params"], data.get("retry_of"))

    def to_bytes(self) -> bytes:
        """The job's payload."""
        fields = {"agent_slug": self.agent_slug, "trigger": self.trigger, "params": self.params}
        return encode(fields | self.repeats)

    @property
    def repeats(self) -> dict[str, str]:
        """The `retry_of` field of documents; empty for a run that repeats none."""
        return {} if self.retry_of is None else {"retry_of": self.retry_of}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the ledger has of one run: its request and its events, oldest first."""

    run_id: str
    request: RunRequest
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Publication:
    """One object to write.

    With `version` None it is written once and never changes; otherwise a higher version replaces it.
    """

    key: str
    body: bytes
    version: int | None = None
    merged: int = 0
    """How many versions directly before this one are published with it: readers need not see each of them."""

    @property
    def first_version(self) -> int:
        """The earliest version that is published with this object; 0 for an object without versions."""
        return (self.version or 0) - self.merged


def status(facts: RunFacts) -> bytes:
    """The bytes of status.json after the last of these events."""
    last = facts.events[-1]
    done = _steps(facts)
    begun = any(event.type == STARTED for event in facts.events)
    return encode(
        {
            "run_id": facts.run_id,
            "agent_slug": facts.request.agent_slug,
            "status": last.target,
            "trigger": facts.request.trigger,
            "started_at": timestamp(facts.events[0].ts),
            "finished_at": timestamp(last.ts) if has_ended(last) else None,
            "current_step": ids.STEPS[min(len(done), len(ids.STEPS) - 1)] if begun else None,
            "steps_total": len(ids.STEPS),
            "steps_completed": len(done),
            "proposals_created": _proposals(done),
            "error": _error(last),
            "version": last.version,
            **_extra_fields(facts.events),
        }
    )


def manifest(facts: RunFacts) -> bytes:
    """The bytes of manifest.json of a run that ended."""
    last, done = facts.events[-1], _steps(facts)
    end = data_of(last)
    return encode(
        {
            "run_id": facts.run_id,
            "agent_slug": facts.request.agent_slug,
            "trigger": facts.request.trigger,
            "status": last.target,
            "started_at": timestamp(facts.events[0].ts),
            "finished_at": timestamp(last.ts),
            "steps": [
                {key: step[key] for key in ("name", "file", "sha256", "started_at", "finished_at")} for step in done
            ],
            "proposals_created": _proposals(done),
            "artifacts": _artifacts(done, end),
            "summary": end.get("summary"),
            "error": _error(last),
            **facts.request.repeats,
            **_extra_fields(facts.events),
        }
    )


def step_entries(events: Sequence[Event]) -> list[str]:
    """The journal entries with the files that the last of these events counts. Empty if it counts none."""
    if not events or events[-1].type != STEP_DONE:
        return []
    number = sum(event.type == STEP_DONE for event in events)
    step = STEP_ENTRY.format(number=number)
    return [OUTPUT_ENTRY, step] if number == PERSIST_STEP else [step]


def step_publications(facts: RunFacts, journal: Mapping[str, bytes]) -> list[Publication]:
    """The step file that the last event counts.

    Written before its audit record, so that everything recorded is readable.
    """
    slug, run_id = facts.request.agent_slug, facts.run_id
    number = sum(event.type == STEP_DONE for event in facts.events)
    return [
        Publication(
            ids.output_key(slug, run_id) if entry == OUTPUT_ENTRY else ids.step_key(slug, run_id, number),
            journal[entry],
        )
        for entry in step_entries(facts.events)
    ]


def state_publications(facts: RunFacts, merged: int | None = 0) -> list[Publication]:
    """The run's state after the last event. Written after its audit record, so that everything shown is recorded.

    `merged` says how many versions of status.json before this one are published with it; with None it is left out,
    because a later version is published with it.
    """
    last, slug, run_id = facts.events[-1], facts.request.agent_slug, facts.run_id
    puts = [Publication(ids.manifest_key(slug, run_id), manifest(facts))] if has_ended(last) else []
    if merged is None:
        return puts
    return [*puts, Publication(ids.status_key(slug, run_id), status(facts), last.version, merged)]


def has_ended(event: Event) -> bool:
    """Whether this event ended the run."""
    return is_archived(event.target)


def is_archived(state: str) -> bool:
    """Whether a run in this state is archived (document 002, 1.3).

    An archived run has ended, so it no longer changes and need not be polled.
    """
    return RUN.by_name[state].phase is Phase.ENDED


def _steps(facts: RunFacts) -> list[Mapping[str, Any]]:
    return [_data(event) for event in facts.events if event.type == STEP_DONE]


def _data(event: Event) -> Mapping[str, Any]:
    """The data of an event. Each state of a run is made from all events before it, so what is small is parsed once."""
    if event.data is None or len(event.data) > PARSED_BYTES_MAX:
        return data_of(event)
    data = _parsed.get(event.data)
    if data is None:
        data = _parsed[event.data] = data_of(event)
    return data


def proposals_created(events: Sequence[Event]) -> list[str]:
    """The proposals created by the counted steps of a run, in order."""
    return _proposals([data_of(event) for event in events if event.type == STEP_DONE])


def _proposals(done: Sequence[Mapping[str, Any]]) -> list[str]:
    return [proposal for step in done for proposal in step.get("proposals_created", ())]


def refused_fields(refused: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of a failed run's event about the calls that were refused to its model: how many, and which.

    The step of such a run has no file that could have them. Empty if there were none.
    """
    if not refused:
        return {}
    known = [{name: value for name, value in one.items() if value is not None} for one in refused]
    each = [one for number, one in enumerate(known) if one not in known[:number]]
    return {"refused_actions": len(refused), "refused": each[:REFUSED_MAX]}


def refused_calls(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The calls that were refused to the model of a run that failed."""
    return list(_extra_fields(events).get("refused", ()))


def _extra_fields(events: Sequence[Event]) -> dict[str, Any]:
    """What the agent wanted without a new proposal: already proposed, or refused. Empty for runs without either."""
    extra: dict[str, Any] = {}
    for event in events:
        if event.type in {STEP_DONE, FAILED}:
            data = _data(event)
            extra.update({name: data[name] for name in EXTRA_FIELDS if name in data})
    return extra


def listing_document(job: Job, events: Sequence[Event]) -> dict[str, Any]:
    """A run in a listing: its state, the number of its proposals, and of wanted changes without a proposal."""
    done = [data_of(event) for event in events if event.type == STEP_DONE]
    extra = _extra_fields(events)
    return {
        "run_id": job.job_id,
        "agent_slug": (job.concurrency_key or "").removeprefix("run:"),
        "status": job.state,
        "trigger": None if job.payload is None else RunRequest.read(job.payload).trigger,
        "archived": is_archived(job.state),
        "created_at": timestamp(job.created_at),
        "updated_at": timestamp(job.updated_at),
        "proposals": len(_proposals(done)),
        "already_proposed": len(extra.get("already_proposed", ())),
        "refused_actions": int(extra.get("refused_actions", 0)),
    }


def _artifacts(done: Sequence[Mapping[str, Any]], end: Mapping[str, Any]) -> list[str]:
    """The artifacts that jobs of the run had made when its last step was counted, or when it failed (PIPE-15)."""
    return list(dict.fromkeys([artifact_id for one in (*done, end) for artifact_id in one.get("artifacts", ())]))


def was_cancelled(event: Event | SampledEvent) -> bool:
    """Whether this event ended a run because somebody cancelled it."""
    return (_error(event) or "").startswith(f"{CANCELLED}:")


def _error(event: Event | SampledEvent) -> str | None:
    """The error as `CODE: message` (RUN-7). A run that the engine ended was cancelled or passed its deadline."""
    if event.type != FAILED:
        return None
    data = data_of(event)
    if "error_text" in data:
        return data["error_text"]
    if event.cause == Cause.DEADLINE_PASSED:
        return "AGENT_TIMEOUT: the run's deadline passed"
    return f"{CANCELLED}: {data.get('reason') or event.cause or 'no reason given'}"
