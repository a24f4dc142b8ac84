"""Administrative acts: each change leaves exactly one, with who, when, what and from which machine; nothing else leaves any."""

from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from tests.ledgers.conformance.rig import ADMIN, SUBMITTER, WORKER, Rig, actor
from trellis.engine.admin_acts import (
    LEDGER_EVENTS,
    NO_REASON,
    RESERVED_FIELDS,
    RETAINED,
    UNREADABLE_FACTS,
    NewAct,
    read_facts,
    this_node,
)
from trellis.engine.errors import NotAllowed, OptionInvalid
from trellis.engine.jobs import TypeOptions, options_text
from trellis.engine.records import RetentionOptions
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role

PROJECTOR = actor(Role.PROJECTOR)
DAY_S = 86_400.0
REGISTERED = f"trellis.register_actor('anna', {Role.CONTROL_PLANE.code}::smallint)"
NULLS = "null, null, null, null, null"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


BAD_FACTS: list[dict[str, Any]] = [
    *({"event": 1}, {"lifecycle": 1}, {"A b": 1}, {"x": "y" * 2**20}),
    *({"x": nested(40)}, {"x": nested(100_000)}, {"x": "\ud800"}, {"x": float("nan")}),
]


@pytest.mark.requirement("OBS-1", "D35")
async def test_every_administrative_act_is_recorded_once(rig: Rig):
    ledger = rig.ledger
    await ledger.subscribe(PROJECTOR, "reader", lease_s=60.0)
    for _ in range(2):  # the second time nothing changes, and nothing is recorded
        await ledger.pause(ADMIN, "work", paused=True)
    for _ in range(2):
        await ledger.pause(ADMIN, "work", paused=False)
    for _ in range(2):
        await ledger.limit_rate(WORKER, "work", 2.5, 3)
    for _ in range(2):
        await ledger.limit_held(ADMIN, "work", 4)
    await ledger.limit_held(ADMIN, "work", None)
    for _ in range(2):
        await ledger.limit_key(ADMIN, "tenant:acme", 2)
    await ledger.limit_key(ADMIN, "tenant:acme", 0)
    for _ in range(2):
        await ledger.release_retention(ADMIN, "reader")
    for attempts in (3, 3, 4):
        await ledger.declare_types(WORKER, [TypeOptions(type="work", max_attempts=attempts, deadline_s=30.0)])
    assert not await ledger.release_retention(ADMIN, "nobody")
    told = NewAct(
        event="agent.status.changed", subject="gardener", source="a", target="b", cause="x", correlation_id="c"
    )
    id_ = await ledger.record_act(ADMIN, told)
    acts = await ledger.acts()
    assert [(act.event, act.subject, act.source, act.target) for act in acts] == [
        ("type.paused", "work", "active", "paused"),
        ("type.resumed", "work", "paused", "active"),
        ("type.rate.changed", "work", None, "2.5/s, burst 3"),
        ("type.held_limit.changed", "work", None, "4"),
        ("type.held_limit.changed", "work", "4", None),
        ("key.limit.changed", "tenant:acme", None, "2"),
        ("key.limit.changed", "tenant:acme", "2", "0"),
        ("follower.left_behind", "reader", "waited for", "left behind"),
        ("type.options.changed", "work", None, options_text(TypeOptions(type="work", max_attempts=3, deadline_s=30))),
        (
            "type.options.changed",
            "work",
            "priority 2, max_attempts 3, max_deaths 3, deadline_s 30, concurrency_limit 1",
            options_text(TypeOptions(type="work", max_attempts=4, deadline_s=30)),
        ),
        ("agent.status.changed", "gardener", "a", "b"),
    ]
    assert {(act.role, act.actor) for act in acts} == {(Role.CONTROL_PLANE, ADMIN.name), (Role.WORKER, WORKER.name)}
    assert {(act.node, act.at) for act in acts} == {(this_node(), await ledger.now())}
    assert (acts[-1].id, acts[-1].cause, acts[-1].correlation_id) == (id_, "x", "c")
    assert len({act.id for act in acts}) == len(acts)


@pytest.mark.requirement("OBS-1", "D35")
async def test_every_administrative_act_records_its_reason_or_that_none_was_given(rig: Rig):
    ledger = rig.ledger
    await ledger.subscribe(PROJECTOR, "reader", lease_s=60.0)
    await ledger.pause(ADMIN, "work", paused=True, cause="a bad deploy")
    await ledger.limit_rate(ADMIN, "work", 2.0, cause="the supplier asks")
    await ledger.limit_held(ADMIN, "work", 4, cause="memory")
    await ledger.limit_key(ADMIN, "k", 2, cause="tenant asks")
    await ledger.release_retention(ADMIN, "reader", cause="retired")
    await ledger.pause(ADMIN, "work", paused=False)
    await ledger.record_act(ADMIN, NewAct(event="x", subject="y", cause=""))
    given = ["a bad deploy", "the supplier asks", "memory", "tenant asks", "retired"]
    assert [act.cause for act in await ledger.acts()] == [*given, NO_REASON, NO_REASON]


@pytest.mark.requirement("OBS-1")
async def test_an_act_with_an_id_of_its_own_is_recorded_once_with_its_job_and_facts(rig: Rig):
    facts = {"objects_written": ["a", "\0ä"], "left_out": 3, "error": None}
    act = NewAct(event="x", subject="y", cause="first", job_id="job-1", facts=facts, id="job-1-2-agent")
    assert await rig.ledger.record_act(ADMIN, act) == "job-1-2-agent"
    assert await rig.ledger.record_act(ADMIN, replace(act, cause="again")) == "job-1-2-agent"
    (found,) = await rig.ledger.acts()
    assert (found.id, found.cause, found.job_id, dict(found.facts)) == ("job-1-2-agent", "first", "job-1", facts)
    for bad in BAD_FACTS:
        with pytest.raises(OptionInvalid):
            await rig.ledger.record_act(ADMIN, replace(act, facts=bad))


@pytest.mark.requirement("OBS-1")
async def test_no_act_takes_the_id_of_an_event(rig: Rig):
    good = ("refused-1f-2a", "objects-rebuilt-1f", "ledger-rebuilt-1f", "job-1-2-agent", "refused-a-123456789012")
    for id_ in good:
        assert await rig.ledger.record_act(ADMIN, NewAct(event="x", subject="y", id=id_)) == id_
    for id_ in ("a/b", "job-1-2", "mine", "refused-job-1", "ledger-rebuilt-2147483647", "-agent", "refused-a-agent\n"):
        with pytest.raises(OptionInvalid):
            await rig.ledger.record_act(ADMIN, NewAct(event="x", subject="y", id=id_))
        if rig.admin_sql is not None:
            given = id_.replace("\n", "' || chr(10) || '")
            with pytest.raises(asyncpg.PostgresError, match="the id of an act"):
                await rig.admin_sql(f"select trellis.record_act({REGISTERED}, 'x', 'y', {NULLS}, null, '{given}')")
    assert [act.id for act in await rig.ledger.acts()] == list(good)


@pytest.mark.requirement("OBS-1")
async def test_only_the_ledger_records_the_events_of_its_own_acts(rig: Rig):
    """An act of retention that somebody else recorded would excuse the deletion of a job."""
    for event in sorted(LEDGER_EVENTS):
        with pytest.raises(OptionInvalid, match="the ledger records itself"):
            await rig.ledger.record_act(ADMIN, NewAct(event=event, subject="ledger", facts={"jobs": ["a"]}))
        if rig.admin_sql is not None:
            with pytest.raises(asyncpg.PostgresError, match="the ledger itself records") as refused:
                await rig.admin_sql(f"select trellis.record_act({REGISTERED}, '{event}', 'y', {NULLS})")
            assert getattr(refused.value, "sqlstate", "") == "TR004"
    assert await rig.ledger.acts() == []
    await rig.ledger.pause(ADMIN, "work", paused=True)
    assert [act.event for act in await rig.ledger.acts()] == ["type.paused"]


@pytest.mark.only("postgres")
@pytest.mark.parametrize(
    "facts",
    [
        *(f'{{"{name}": 1}}' for name in sorted(RESERVED_FIELDS)),
        *('{"A b": 1}', '{"": 1}', "[]", "1", "no json", '{"a": "\\ud800"}'),
        '{"a": ' + "[" * 40 + "]" * 40 + "}",
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=lambda facts: facts[:20],
)
async def test_facts_that_cannot_be_published_are_refused_in_plain_sql(rig: Rig, facts: str):
    assert rig.admin_sql is not None
    with pytest.raises(asyncpg.PostgresError, match="fact") as refused:
        await rig.admin_sql(f"select trellis.record_act({REGISTERED}, 'x', 'y', {NULLS}, '{facts}')")
    assert getattr(refused.value, "sqlstate", "") == "TR004"
    assert await rig.ledger.acts() == []


def test_facts_that_python_cannot_read_are_shown_as_text():
    for text in ("[" * 200_000, '{"a": ' + "9" * 5_000 + "}", "{"):
        assert read_facts(text) == {UNREADABLE_FACTS: text}


@pytest.mark.requirement("OBS-1")
async def test_acts_wait_until_they_are_published_and_then_for_retention(rig: Rig):
    ledger = rig.ledger
    for number in range(3):
        await ledger.record_act(ADMIN, NewAct(event="x", subject=str(number)))
    first, second, third = await ledger.acts()
    await ledger.acts_published(PROJECTOR, [first, third])
    assert await ledger.acts(unpublished=True) == [second]
    assert await ledger.acts(after=first.no, limit=1) == [second]
    await rig.advance(40 * DAY_S)
    await ledger.retain(RetentionOptions())
    left, removal = await ledger.acts()
    assert (left, removal.event, removal.facts["acts"]) == (second, RETAINED, 2)
    await ledger.acts_published(PROJECTOR, [removal])
    await rig.advance(100 * DAY_S)
    await ledger.retain(RetentionOptions())
    (again,) = await ledger.acts()
    await ledger.acts_published(PROJECTOR, [again])
    await rig.advance(40 * DAY_S)
    await ledger.retain(RetentionOptions())
    assert await ledger.acts() == [again], "its removal alone would lead to another act, and there would be no end"
    await ledger.record_act(ADMIN, NewAct(event="x", subject="z"))
    await ledger.acts_published(PROJECTOR, (await ledger.acts())[1:])
    await rig.advance(40 * DAY_S)
    assert (await ledger.retain(RetentionOptions())).acts == 2
    (newest,) = await ledger.acts()
    assert (newest.event, newest.facts["acts"]) == (RETAINED, 2)


async def test_an_act_that_cannot_be_stored_is_refused_and_a_long_reason_is_cut(rig: Rig):
    for bad in (NewAct(event="", subject="x"), NewAct(event="x" * 101, subject="x"), NewAct(event="x", subject="")):
        with pytest.raises(OptionInvalid):
            await rig.ledger.record_act(ADMIN, bad)
    await rig.ledger.record_act(ADMIN, NewAct(event="x", subject="y\0", cause="z" * 9_000))
    (act,) = await rig.ledger.acts()
    assert (act.subject, len(act.cause or "")) == ("y\ufffd", 2_000)


@pytest.mark.requirement("OBS-1", "D14")
async def test_lost_acts_come_back_as_they_were(rig: Rig):
    await rig.ledger.pause(ADMIN, "work", paused=True)
    await rig.ledger.limit_rate(WORKER, "work", 5.0)
    await rig.ledger.record_act(ADMIN, NewAct(event="x", subject="y", job_id="j", facts={"a": [1]}, id="refused-1f"))
    lost = await rig.ledger.acts()
    owner = await rig.lose()
    for _ in range(2):
        await owner.restore_acts(actor(Role.OWNER), [replace(act, no=0) for act in lost])
    assert [replace(act, no=0) for act in await owner.acts()] == [replace(act, no=0) for act in lost]
    assert await owner.acts(unpublished=True) == []


@pytest.mark.requirement("OBS-1")
async def test_an_event_says_from_which_machine_it_was_written(rig: Rig):
    there = await open_ledger(rig.app_url or rig.ledger.url, node="alpine")
    try:
        (here_id,) = await rig.submit(by=SUBMITTER)
        first = rig.new_job()
        await there.submit(SUBMITTER, [first])
        await there.pause(ADMIN, "work", paused=True)
    finally:
        await there.close()
    nodes = [(await rig.ledger.events(job_id))[0].node for job_id in (here_id, first.job_id)]
    assert nodes == [this_node(), "alpine"]
    assert [act.node for act in await rig.ledger.acts()] == ["alpine"]
    feed = await rig.ledger.feed(None, limit=10)
    assert [event.node for event in feed.events] == nodes


@pytest.mark.only("postgres")
@pytest.mark.requirement("OBS-1", "D35")
async def test_an_act_in_plain_sql_is_recorded_too(rig: Rig):
    assert rig.admin_sql is not None
    registered = f"trellis.register_actor('anna', {Role.CONTROL_PLANE.code}::smallint)"
    await rig.admin_sql(f"select trellis.set_paused({registered}, 'work', true)")
    (act,) = await rig.ledger.acts()
    assert (act.event, act.subject, act.actor, bool(act.node)) == ("type.paused", "work", "anna", True)


@pytest.mark.requirement("D62", "OBS-1")
async def test_the_issuer_of_plain_names_is_recorded_once_and_replaced_by_an_operator_alone(rig: Rig):
    ledger, gateway = rig.ledger, actor(Role.GATEWAY)
    assert [await ledger.set_home_issuer(gateway, one) for one in ("first", "second")] == ["first", "first"]
    with pytest.raises(NotAllowed):
        await ledger.set_home_issuer(gateway, "second", replaces="first")
    assert await ledger.set_home_issuer(ADMIN, "third", replaces="second") == "first"
    assert await ledger.acts() == []
    assert await ledger.set_home_issuer(ADMIN, "second", replaces="first") == "second"
    assert await ledger.home_issuer() == "second"
    assert [(act.event, act.source, act.target) for act in await ledger.acts()] == [
        ("issuer.changed", "first", "second")
    ]
