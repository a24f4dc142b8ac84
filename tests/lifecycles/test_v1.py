"""v1 is frozen: what was stored by it keeps its meaning, and a change may only add.

`v1.json` holds every stored number and every declared transition of v1; `v1_log.json` holds histories as v1 recorded
them. Neither file is ever made again: a test that fails here has found a change that breaks stored data.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trellis.lifecycles import EVENT_TYPES, LIFECYCLES, Role
from trellis.lifecycles.replay import RecordedStep, Replayed, replay

HERE = Path(__file__).parent
V1: dict[str, Any] = json.loads((HERE / "v1.json").read_text(encoding="utf-8"))
LOG: list[dict[str, Any]] = json.loads((HERE / "v1_log.json").read_text(encoding="utf-8"))


def current() -> dict[str, Any]:
    """Today's tables in the form of the frozen file."""
    return {
        "roles": [role.value for role in Role],
        "events": list(EVENT_TYPES),
        "lifecycles": {
            name: {
                "code": lifecycle.code,
                "swept_by": lifecycle.swept_by.value,
                "states": [[s.name, s.phase.value, s.rank] for s in lifecycle.states],
                "transitions": [
                    [t.source, t.target, t.trigger, sorted(t.actors), t.event, int(t.opens), t.fenced]
                    for t in lifecycle.transitions
                ],
            }
            for name, lifecycle in LIFECYCLES.items()
        },
    }


def losses(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a reader of `before` would miss or misread in `now`; an addition is no loss."""
    return [*_lists("roles", before, now), *_lists("events", before, now), *_lifecycles(before, now)]


def _lists(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    """The place in the list is the stored number, so the old list must be the beginning of the new one."""
    if now[name][: len(before[name])] != before[name]:
        yield f"{name} were renumbered or removed"


def _lifecycles(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    for name, old in before["lifecycles"].items():
        new = now["lifecycles"].get(name)
        if new is None:
            yield f"{name} is gone"
            continue
        if (new["code"], new["swept_by"]) != (old["code"], old["swept_by"]):
            yield f"{name} has another code or sweeper"
        yield from (f"{name}: {loss}" for loss in _lists("states", old, new))
        yield from (f"{name}: {loss}" for loss in _transitions(old["transitions"], new["transitions"]))


def _transitions(before: list[list[Any]], now: list[list[Any]]) -> Iterable[str]:
    found = {(source, trigger): rest for source, target, trigger, *rest in ([*t] for t in _keyed(now))}
    for source, target, trigger, actors, *facts in _keyed(before):
        new = found.get((source, trigger))
        if new is None:
            yield f"{source} --{trigger}--> {target} is gone"
        elif new[1:] != [*facts]:
            yield f"{source} --{trigger}--> {target} means something else"
        elif not set(actors) <= set(new[0]):
            yield f"{source} --{trigger}--> {target} is refused to a role that had it"


def _keyed(transitions: list[list[Any]]) -> Iterable[list[Any]]:
    """Each transition with its target repeated among the facts that must not change."""
    return (
        [source, target, trigger, actors, *facts, target] for source, target, trigger, actors, *facts in transitions
    )


@pytest.mark.requirement("DJ-22")
def test_lifecycles_keep_everything_of_v1():
    assert losses(V1, current()) == []


def test_v1_holds_six_lifecycles_with_all_their_parts():
    sizes = {n: (len(v["states"]), len(v["transitions"])) for n, v in V1["lifecycles"].items()}
    assert sizes == {
        "run": (5, 10),
        "queue-job": (9, 23),
        "nlm-job": (8, 24),
        "leased-job": (7, 29),
        "bus-job": (9, 19),
        "proposal": (8, 12),
    }
    assert (len(V1["roles"]), len(V1["events"])) == (16, 42)


def test_additions_to_a_lifecycle_are_no_loss():
    more = copy.deepcopy(V1)
    more["roles"].append("auditor")
    more["events"].append("job_paused")
    more["lifecycles"]["review"] = more["lifecycles"]["run"]
    leased = more["lifecycles"]["leased-job"]
    leased["states"].append(["paused", "waiting", 0])
    leased["transitions"].append(["queued", "paused", "pause", ["control-plane"], "job_paused", 0, False])
    leased["transitions"][1][3].append("orchestrator")
    assert losses(V1, more) == []


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda v: v["roles"].insert(0, "auditor"), "roles were renumbered or removed"),
        (lambda v: v["events"].remove("job_started"), "events were renumbered or removed"),
        (lambda v: v["lifecycles"].pop("proposal"), "proposal is gone"),
        (lambda v: v["lifecycles"]["run"].update(code=9), "run has another code or sweeper"),
        (lambda v: v["lifecycles"]["run"]["states"].reverse(), "run: states were renumbered or removed"),
        (lambda v: v["lifecycles"]["run"]["states"][2].__setitem__(2, 3), "run: states were renumbered or removed"),
        (lambda v: v["lifecycles"]["run"]["transitions"].pop(1), "run: requested --accept--> queued is gone"),
        (
            lambda v: v["lifecycles"]["run"]["transitions"][1].__setitem__(1, "running"),
            "run: requested --accept--> queued means something else",
        ),
        (
            lambda v: v["lifecycles"]["run"]["transitions"][1].__setitem__(4, "run.started"),
            "run: requested --accept--> queued means something else",
        ),
        (
            lambda v: v["lifecycles"]["run"]["transitions"][1].__setitem__(3, ["gateway"]),
            "run: requested --accept--> queued is refused to a role that had it",
        ),
    ],
)
def test_a_lost_part_of_a_lifecycle_is_found(change: Any, told: str):
    changed = copy.deepcopy(V1)
    change(changed)
    assert losses(V1, changed) == [told]


def parsed(event: Mapping[str, Any]) -> RecordedStep:
    """What a v1 reader takes from an event; fields it does not know are none of its business."""
    return RecordedStep(
        version=event["version"],
        source=event["payload"]["from"],
        target=event["payload"]["to"],
        role=Role(event["actor"]["role"]),
        event=event["type"],
        generation=event["payload"]["generation"],
        attempt=event["payload"]["attempt"],
    )


@pytest.mark.requirement("DJ-22")
@pytest.mark.parametrize("history", LOG, ids=[history["name"] for history in LOG])
def test_a_stored_v1_log_still_replays(history: dict[str, Any]):
    end = history["end"]
    assert replay(LIFECYCLES[history["lifecycle"]], map(parsed, history["events"])) == Replayed(
        state=end["state"], generation=end["generation"], attempt=end["attempt"], version=len(history["events"])
    )


@pytest.mark.requirement("DJ-22")
@pytest.mark.parametrize("history", LOG, ids=[history["name"] for history in LOG])
def test_a_v1_reader_still_reads_events_with_more_in_them(history: dict[str, Any]):
    newer = copy.deepcopy(history["events"])
    for event in newer:
        event["region"] = "north"
        event["payload"]["weight"] = {"grams": 12}
    assert [parsed(event) for event in newer] == [parsed(event) for event in history["events"]]


def test_the_log_has_every_lifecycle_and_the_nine_fields_of_an_event():
    assert {history["lifecycle"] for history in LOG} == set(V1["lifecycles"])
    fields = {"id", "job_id", "type", "ts", "actor", "correlation_id", "cause", "payload", "version"}
    assert {frozenset(event) for history in LOG for event in history["events"]} == {frozenset(fields)}
