"""An audit record holds all that the ledger knows of an event: read back, it says the same, to the byte where bytes matter."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from tests.runs.conftest import GATEWAY, Stand
from trellis.documents import audit
from trellis.documents.errors import RecordInvalid
from trellis.engine.event_data import cancel_request_in
from trellis.engine.jobs import (
    Actor,
    Advance,
    CancelMode,
    Claim,
    ClaimId,
    DeadLetterReason,
    JobId,
    NewJob,
    Priority,
    ReasonCode,
    RequestId,
    Stage,
    Turn,
    TypeClaim,
)
from trellis.engine.records import RecordedEvent
from trellis.engine.uniqueness import UniqueRule
from trellis.lifecycles import Role
from trellis.storage.objects.canonical_json import encode

SUBMITTER = Actor(role=Role.SUBMITTER, name="someone@host")
WORKER = Actor(role=Role.WORKER, name="worker@host:1")

PAYLOADS = {
    "null": b"null",
    "compact": b'{"a":[1,2.5,"\xc3\xa4"]}',
    "spaced": b'{"a": [1, 2.5, "\xc3\xa4"]}',
    "document": encode({"a": [1, 2.5, "ä"]}),
    "other white space": b'{ "a":1 }\n',
    "escaped": b'{"a":"\\u00e4"}',
    "twice the same name": b'{"a":1,"a":2}',
    "not JSON": b"\x80\x00\xff",
    "nothing": b"",
    "no number": b'{"a":NaN}',
    "too great a number": b"[1e999]",
    "half a character": b'["\\ud800"]',
    "many digits": b"1" * 5_000,
    "deep": b"[" * 400 + b"]" * 400,
    "too deep for a reader": b"[" * 200_000,
    "line ends": b'["a\\nb","\xe2\x80\xa8"]',
}


async def records_of(stand: Stand, job_id: JobId) -> list[RecordedEvent]:
    return await stand.ledger.recorded(await stand.ledger.events(job_id))


@pytest.mark.requirement("OBS-1", "D14")
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
async def test_audit_record_restores_any_payload_byte_for_byte(stand: Stand, payload: bytes):
    job = NewJob(job_id=JobId("j"), type="work", payload=payload)
    await stand.ledger.submit(SUBMITTER, [job])
    (record,) = await records_of(stand, job.job_id)
    for written in (audit.to_bytes(record), audit.to_line(record)):
        assert audit.read_record(json.loads(written)) == record
    assert b"\n" not in audit.to_line(record)
    assert json.loads(audit.to_bytes(record)) == json.loads(audit.to_line(record))


@pytest.mark.parametrize("data", PAYLOADS.values(), ids=PAYLOADS)
async def test_the_data_of_an_event_means_the_same_and_gives_the_same_record(stand: Stand, data: bytes):
    await stand.ledger.submit(GATEWAY, [NewJob(job_id=JobId("j"), type="work")])
    (record,) = await records_of(stand, JobId("j"))
    record = replace(record, event=replace(record.event, data=data))
    back = audit.read_record(json.loads(audit.to_bytes(record)))
    assert audit.to_bytes(back) == audit.to_bytes(record)
    assert audit.to_bytes(audit.read_record(json.loads(audit.to_line(back)))) == audit.to_bytes(record)


@pytest.mark.requirement("OBS-1", "D14")
async def test_audit_record_has_every_request_and_the_dead_letter(stand: Stand):
    original = NewJob(job_id=JobId("first"), type="work")
    job = NewJob(
        job_id=JobId("second"),
        type="undo",
        payload=b'{"n": 1}',
        priority=Priority.CRITICAL,
        deadline_s=0.1 + 0.2,
        max_attempts=3,
        max_deaths=1,
        concurrency_key="key",
        concurrency_limit=4,
        idempotency_key="once",
        idempotency_scope="here",
        id_is_given=True,
        fingerprint=b"\x00\x01\xfe",
        correlation_id="all",
        trace="00-aa-bb-01",
        parent_id=JobId("parent"),
        compensates=JobId("first"),
        delay_s=1.5,
        unique=UniqueRule(key="k", window_s=60.0),
        unique_scope="acme",
    )
    await stand.ledger.submit(SUBMITTER, [original])
    await stand.ledger.submit(SUBMITTER, [job])
    stand.clock.advance(2.0)
    await stand.lose_leases()
    (first, *_) = known = await records_of(stand, job.job_id)
    asked = first.submission
    assert asked is not None
    assert (asked.priority, asked.max_attempts, asked.max_deaths, asked.payload) == (
        Priority.CRITICAL,
        3,
        1,
        b'{"n": 1}',
    )
    assert (asked.concurrency_key, asked.concurrency_limit, asked.deadline_us) == ("key", 4, 300_000)
    assert (asked.trace, asked.parent_id, asked.compensates) == ("00-aa-bb-01", "parent", "first")
    assert [(key.scope, key.key, key.fingerprint) for key in asked.keys] == [
        ("job_id", "second", b"\x00\x01\xfe"),
        ("key:here", "once", b"\x00\x01\xfe"),
    ]
    unique = asked.unique
    assert unique is not None
    assert (unique.scope, unique.key, unique.unfinished, unique.first_at) == ("acme", "key:k", True, first.event.ts)
    assert unique.until == first.event.ts + timedelta(seconds=60)
    assert first.due_at is not None
    assert known[-1].dead_letter is not None, "the deadline had passed"
    assert [audit.read_record(json.loads(audit.to_line(one))) for one in known] == known


@pytest.mark.requirement("OBS-1")
async def test_a_dead_letter_with_its_last_holder_comes_back(stand: Stand):
    await stand.ledger.submit(SUBMITTER, [NewJob(job_id=JobId("j"), type="work")])
    claim = Claim(claim_id=ClaimId("c"), types=(TypeClaim(type="work"),))
    (held,) = (await stand.ledger.turn(Turn(actor=WORKER, claim=claim))).claimed
    death = DeadLetterReason(reason_code=ReasonCode.PARSE_ERROR, stage=Stage.INPUT, last_error="not for me\x00\ud800")
    reject = Advance(held.lease, "running", "reject", death=death, data=b'{"error": 1}', cause="because")
    await stand.ledger.turn(Turn(actor=WORKER, advances=(reject,)))
    known = await records_of(stand, JobId("j"))
    letter = known[-1].dead_letter
    assert letter is not None
    assert (letter.last_owner, letter.attempts) == (WORKER.name, 1)
    back = [audit.read_record(json.loads(audit.to_bytes(one))) for one in known]
    assert [replace(one, event=replace(one.event, data=None)) for one in back] == [
        replace(one, event=replace(one.event, data=None)) for one in known
    ]


@pytest.mark.requirement("OBS-1", "DJ-15")
async def test_the_record_of_a_success_names_who_had_asked_the_job_to_stop(stand: Stand):
    await stand.ledger.submit(SUBMITTER, [NewJob(job_id=JobId("j"), type="work")])
    claim = Claim(claim_id=ClaimId("c"), types=(TypeClaim(type="work"),))
    (held,) = (await stand.ledger.turn(Turn(actor=WORKER, claim=claim))).claimed
    olga = Actor(role=Role.CONTROL_PLANE, name="olga")
    await stand.ledger.cancel(olga, JobId("j"), CancelMode.SOFT, RequestId("r"), grace_s=60.0, cause="wrong customer")
    await stand.ledger.turn(Turn(actor=WORKER, advances=(Advance(held.lease, "running", "complete"),)))
    known = await records_of(stand, JobId("j"))
    asked = audit.document(known[-1])["data"]["cancel_requested"]
    assert (asked["actor"], asked["role"], asked["cause"]) == ("olga", "control-plane", "wrong customer")
    back = audit.read_record(json.loads(audit.to_line(known[-1]))).event
    assert cancel_request_in(back.data) == cancel_request_in(known[-1].event.data)


@pytest.mark.parametrize(
    "broken",
    [
        {"ts": "yesterday"},
        {"ts": "2026-01-01T00:00:00"},
        {"role": "stranger"},
        {"version": "x"},
        {"data_base64": "%"},
        {"job": {}},
        {"dead_letter": {"reason_code": "none"}},
    ],
    ids=lambda broken: next(iter(broken)),
)
async def test_a_record_that_says_nothing_is_named(stand: Stand, broken: dict[str, object]):
    await stand.ledger.submit(SUBMITTER, [NewJob(job_id=JobId("j"), type="work")])
    (record,) = await records_of(stand, JobId("j"))
    made = {**audit.document(record), **broken}
    with pytest.raises(RecordInvalid, match="j-1"):
        audit.read_record(made)
