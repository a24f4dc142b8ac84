"""CAP packets: every message goes out as the SDK wants it and comes back as it was; everything else is refused by its code."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cap.packet_boundary import parse_packet
from cap.validate import validate_bus_packet
from hypothesis import given
from hypothesis import strategies as st

from trellis.bus.messages import (
    SUBMIT,
    AlertSeverity,
    BusAlert,
    Dispatch,
    ErrorCode,
    Handshake,
    JobCancel,
    JobOrder,
    JobProgress,
    JobResult,
    Packet,
    PacketBody,
    PacketRefused,
    PacketWrong,
    Status,
    WorkerHeartbeat,
)
from trellis.bus.requests import JobRequest, ResourceRef
from trellis.bus.wire.cap import ACTOR_TYPES, FIELDS_MAX, PACKET_BYTES_MAX, PRIORITIES, decode, encode
from trellis.bus.wire.signatures import PacketDelivery, PacketKeys

AT = datetime(2026, 3, 4, 5, 6, 7, 891011, tzinfo=UTC)
PLAIN = PacketKeys()
REF: dict[str, Any] = {
    "resolver_id": "store-1",
    "uri": "objects://ctx/one",
    "sha256": "0f" * 32,
    "media_type": "application/json",
    "size_bytes": 2**63,
    "expires_at": "2030-01-02T03:04:05.000000006Z",
    "purpose": "input",
}
FULL: dict[str, Any] = {
    "job_id": "job-1",
    "topic": "job.code.review",
    "priority": "critical",
    "context_ptr": "redis://ctx:job-1",
    "adapter_id": "adapter",
    "env": {"a": "1", "b": "zwei"},
    "parent_job_id": "job-0",
    "workflow_id": "flow",
    "step_index": 7,
    "memory_id": "memory",
    "context_hints": {"max_input_tokens": 5, "allow_summarization": True, "allow_retrieval": True, "tags": ["t"]},
    "budget": {"max_input_tokens": 1, "max_output_tokens": 2, "max_total_tokens": 3, "deadline_ms": 4},
    "tenant_id": "acme",
    "principal_id": "ann",
    "labels": {"worker.zone": "eu"},
    "meta": {
        "tenant_id": "acme",
        "actor_id": "bot",
        "actor_type": "service",
        "idempotency_key": "key",
        "capability": "review",
        "risk_tags": ["write"],
        "requires": ["gpu"],
        "pack_id": "pack",
        "labels": {"x": "y"},
    },
    "compensation": {
        "topic": "job.code.undo",
        "context_ptr": "redis://ctx:undo",
        "priority": "batch",
        "adapter_id": "other",
        "env": {"c": "3"},
        "memory_id": "m2",
        "context_hints": {},
        "budget": {"deadline_ms": 9},
        "labels": {"l": "m"},
        "meta": {"actor_type": "human"},
        "context_ref": {"uri": "objects://ctx/undo", "purpose": "undo"},
    },
    "identity": {"tenant_id": "acme", "principal_id": "ann", "actor_id": "bot", "delegation_id": "d-1"},
    "context_ref": REF,
}
DISPATCH = Dispatch(dispatch_id="d-1", attempt=3, worker_id="w-1")
BODIES: dict[str, PacketBody] = {
    "request": JobRequest.checked(FULL),
    "order": JobOrder(request=JobRequest.checked({**FULL, "job_id": "job-1@3"}), dispatch=DISPATCH),
    "result": JobResult(
        job_id="job-1@3",
        status=Status.FAILED_RETRYABLE,
        worker_id="w-1",
        result_ptr="redis://res:1",
        execution_ms=12,
        error_code="RATE_LIMITED",
        error_message="slow down",
        artifact_ptrs=("a://1", "a://2"),
        error_code_enum=201,
        dispatch=DISPATCH,
        result_ref=ResourceRef.model_validate(REF),
        artifact_refs=(ResourceRef.model_validate({"uri": "a://1"}), ResourceRef.model_validate(REF)),
    ),
    "progress": JobProgress(
        job_id="job-1@3", step_id="start", percent=40, message="on it", result_ptr="p", dispatch=DISPATCH
    ),
    "cancel": JobCancel(job_id="job-1@3", reason="no more", requested_by="ann", dispatch=DISPATCH),
    "heartbeat": WorkerHeartbeat(
        worker_id="w-1",
        pool="code",
        region="eu",
        type="cpu",
        cpu_load=12.5,
        gpu_utilization=0.5,
        memory_load=99.0,
        active_jobs=2,
        max_parallel_jobs=4,
        capabilities=("gpu",),
        labels={"zone": "eu"},
    ),
    "handshake": Handshake(
        component_id="w-1",
        role="worker",
        supported_versions=(1, 2),
        capabilities={"cancel": True, "progress": False},
        sdk_version="1.2",
        ready_topics=("job.a", "job.b"),
    ),
    "alert": BusAlert(
        message="look", code=ErrorCode.DUPLICATE, severity=AlertSeverity.WARNING, details={"job_id": "job-1"}
    ),
}


def packet_of(body: PacketBody, sender_id: str = "w-1") -> Packet:
    return Packet(trace_id="trace-1", sender_id=sender_id, created_at=AT, body=body)


def wire(packet: Packet) -> Any:
    return parse_packet(encode(packet, PLAIN))


def changed(packet: Packet, change: Any) -> bytes:
    message = wire(packet)
    change(message)
    return message.SerializeToString()


@pytest.mark.requirement("BUS-2")
@pytest.mark.parametrize("name", BODIES)
def test_every_message_passes_the_sdks_validator_and_comes_back_as_it_was(name):
    packet = packet_of(BODIES[name])
    assert validate_bus_packet(wire(packet)) == []
    assert decode(encode(packet, PLAIN), PLAIN) == packet


@pytest.mark.requirement("BUS-2")
def test_every_field_of_a_request_is_on_the_wire_under_caps_own_name():
    sent = wire(packet_of(BODIES["order"])).job_request
    assert {field.name for field, _ in sent.ListFields()} == {*FULL, "dispatch"}
    assert {field.name for field, _ in sent.meta.ListFields()} == set(FULL["meta"])
    assert {field.name for field, _ in sent.compensation.ListFields()} == set(FULL["compensation"])


@pytest.mark.parametrize(
    "body", [JobProgress(job_id="j"), JobResult(job_id="j", status=Status.SUCCEEDED, worker_id="w-1")]
)
def test_encoded_packet_decodes_to_the_same_body(body):
    assert decode(encode(packet_of(body), PLAIN), PLAIN).body == body


@pytest.mark.parametrize("status", [status for status in Status if status])
def test_every_status_has_its_number_on_the_wire(status):
    body = JobResult(job_id="j", status=status, worker_id="w-1")
    assert wire(packet_of(body)).job_result.status == int(status)


names = st.text(max_size=12)
pairs = st.dictionaries(names, names, max_size=3)
tokens = st.integers(0, 10_000_000_000)
budgets = st.fixed_dictionaries(
    {}, optional={"max_input_tokens": tokens, "max_output_tokens": tokens, "deadline_ms": st.integers(0, 10_000_000)}
)
hints = st.fixed_dictionaries(
    {},
    optional={
        "max_input_tokens": st.integers(0, 2**31 - 1),
        "allow_retrieval": st.booleans(),
        "tags": st.lists(names, max_size=3),
    },
)
metas = st.fixed_dictionaries(
    {},
    optional={
        "tenant_id": names,
        "actor_type": st.sampled_from(sorted(ACTOR_TYPES)),
        "requires": st.lists(names, max_size=3),
        "risk_tags": st.lists(names, max_size=3),
        "labels": pairs,
    },
)
parts = {
    "priority": st.sampled_from(list(PRIORITIES)),
    "context_ptr": names,
    "env": pairs,
    "context_hints": hints,
    "budget": budgets,
    "labels": pairs,
    "meta": metas,
}
requests = st.fixed_dictionaries(
    {"job_id": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,20}", fullmatch=True), "topic": st.just("job.a")},
    optional={
        **parts,
        "parent_job_id": names,
        "workflow_id": names,
        "step_index": st.integers(0, 2**31 - 1),
        "tenant_id": names,
        "compensation": st.fixed_dictionaries({}, optional=parts),
    },
)


@pytest.mark.requirement("BUS-2")
@given(requests)
def test_any_request_comes_back_as_it_was(said):
    body = JobRequest.read(json.dumps(said).encode())
    packet = packet_of(body)
    assert decode(encode(packet, PLAIN), PLAIN) == packet


@given(st.sampled_from(sorted(BODIES)), st.integers(0, 2000), st.binary(min_size=1, max_size=8))
def test_a_packet_with_other_bytes_in_it_is_a_packet_or_refused(name, at, other):
    good = encode(packet_of(BODIES[name]), PLAIN)
    at %= len(good)
    try:
        read = decode(good[:at] + other + good[at + len(other) :], PLAIN)
    except PacketRefused as error:
        read = error
    assert isinstance(read, Packet | PacketRefused)


def _set(**fields: Any) -> Any:
    def change(message: Any) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return change


def _request(**fields: Any) -> Any:
    def change(message: Any) -> None:
        for name, value in fields.items():
            setattr(message.job_request, name, value)

    return change


def _no_payload(message: Any) -> None:
    message.ClearField("job_request")


def _far_future(message: Any) -> None:
    message.created_at.seconds = 2**60


REFUSED = {
    "another version": (_set(protocol_version=2), ErrorCode.VERSION_MISMATCH),
    "no version": (_set(protocol_version=0), ErrorCode.VERSION_MISMATCH),
    "no payload": (_no_payload, ErrorCode.MALFORMED_PACKET),
    "no trace": (_set(trace_id=""), ErrorCode.MALFORMED_PACKET),
    "no sender": (_set(sender_id=""), ErrorCode.MALFORMED_PACKET),
    "a long sender": (_set(sender_id="x" * 257), ErrorCode.MALFORMED_PACKET),
    "no time": (lambda message: message.ClearField("created_at"), ErrorCode.MALFORMED_PACKET),
    "a time after all times": (_far_future, ErrorCode.MALFORMED_PACKET),
    "no job id": (_request(job_id=""), ErrorCode.INVALID_INPUT),
    "a job id with a space": (_request(job_id="a b"), ErrorCode.INVALID_INPUT),
    "a topic with a wildcard": (_request(topic="job.>"), ErrorCode.INVALID_INPUT),
    "a priority that is none": (_request(priority=9), ErrorCode.INVALID_INPUT),
    "a negative step": (_request(step_index=-1), ErrorCode.INVALID_INPUT),
}


@pytest.mark.requirement("BUS-2")
@pytest.mark.parametrize("name", REFUSED)
def test_packet_that_breaks_the_protocol_is_refused_with_its_code(name):
    change, code = REFUSED[name]
    data = changed(packet_of(BODIES["request"]), change)
    with pytest.raises(PacketRefused) as refused:
        decode(data, PLAIN, SUBMIT)
    assert refused.value.error_code is code


def test_bytes_that_are_no_packet_are_malformed():
    with pytest.raises(PacketRefused) as refused:
        decode(b"\xff\xff not protobuf", PLAIN)
    assert refused.value.error_code is ErrorCode.MALFORMED_PACKET


def test_a_payload_that_only_newer_versions_know_is_unknown():
    message = wire(packet_of(BODIES["cancel"]))
    message.ClearField("job_cancel")
    newer = message.SerializeToString() + b"\xa2\x3f\x00"  # field 1012, empty
    with pytest.raises(PacketRefused) as refused:
        decode(newer, PLAIN)
    assert refused.value.error_code is ErrorCode.UNKNOWN_PAYLOAD


def test_fields_in_another_order_and_with_default_values_are_taken_and_too_many_are_not():
    data = encode(packet_of(BODIES["cancel"]), PLAIN)
    empty_auth_token, unknown = b"\x92\x01\x00", b"\xf2\x06\x00"
    assert decode(empty_auth_token + data + unknown, PLAIN) == packet_of(BODIES["cancel"])
    with pytest.raises(PacketRefused, match="more than 50000 fields"):
        decode(data + unknown * FIELDS_MAX, PLAIN)
    for cut in (b"\x08", b"\x0a\x05a", b"\x0b", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01"):
        with pytest.raises(PacketRefused) as found:
            decode(data + cut, PLAIN)
        assert found.value.error_code is ErrorCode.MALFORMED_PACKET


def test_a_packet_beyond_the_limit_is_neither_read_nor_sent():
    with pytest.raises(PacketRefused) as refused:
        decode(bytes(PACKET_BYTES_MAX + 1), PLAIN)
    assert refused.value.error_code is ErrorCode.MALFORMED_PACKET
    request = JobRequest.checked({**FULL, "env": {str(n): "x" * 2000 for n in range(600)}})
    with pytest.raises(PacketWrong, match="store the data and send a pointer"):
        encode(packet_of(request), PLAIN)


def test_refused_request_still_names_its_principal_and_topic():
    data = changed(packet_of(BODIES["request"], "client-1"), _request(topic="no topic"))
    with pytest.raises(PacketRefused) as refused:
        decode(data, PLAIN, SUBMIT)
    told = refused.value
    assert (told.job_id, told.trace_id, told.sender_id) == ("job-1", "trace-1", "client-1")
    assert "topic" in told.detail


def test_a_client_cannot_set_labels_of_the_control_plane_but_an_order_has_them():
    request = JobRequest.read(json.dumps({**FULL, "labels": {"trellis.parent": "x"}}).encode())
    data = encode(packet_of(request), PLAIN)
    assert decode(data, PLAIN, "job.code.review").body == request
    with pytest.raises(PacketRefused, match="set by the control plane"):
        decode(data, PLAIN, SUBMIT)


def test_submitted_packet_is_a_request_even_with_dispatch_fields():
    data = encode(packet_of(BODIES["order"]), PLAIN)
    assert isinstance(decode(data, PLAIN, SUBMIT).body, JobRequest)
    assert isinstance(decode(data, PLAIN, "job.code.review").body, JobOrder)


@pytest.mark.parametrize(
    "body",
    [
        JobResult(job_id="j", status=Status.SUCCEEDED, worker_id="somebody else"),
        JobResult(job_id="j", status=Status.UNSPECIFIED, worker_id="w-1"),
        JobResult(job_id="", status=Status.SUCCEEDED, worker_id="w-1"),
        JobResult(job_id="j", status=Status.SUCCEEDED, worker_id="w-1", execution_ms=-1),
        JobResult(job_id="j", status=Status.SUCCEEDED, worker_id="w-1", execution_ms=2**70),
        JobProgress(job_id="j", percent=101),
        JobCancel(job_id="j", requested_by=""),
        WorkerHeartbeat(worker_id="somebody else"),
        Handshake(component_id="somebody else"),
        BusAlert(message="", code=ErrorCode.TIMEOUT, severity=AlertSeverity.INFO),
        BusAlert(message="look", code=ErrorCode.UNSPECIFIED, severity=AlertSeverity.INFO),
    ],
)
def test_packet_that_receivers_would_drop_is_not_sent(body):
    with pytest.raises(PacketWrong):
        encode(packet_of(body), PLAIN)


@pytest.mark.parametrize("trace_id, sender_id", [("", "w-1"), ("t", ""), ("t" * 257, "w-1")])
def test_an_envelope_that_receivers_would_drop_is_not_sent(trace_id, sender_id):
    packet = Packet(trace_id=trace_id, sender_id=sender_id, created_at=AT, body=JobProgress(job_id="j"))
    with pytest.raises(PacketWrong):
        encode(packet, PLAIN)


def test_a_heartbeat_whose_load_is_no_number_is_refused():
    def change(message: Any) -> None:
        message.heartbeat.cpu_load = float("nan")

    with pytest.raises(PacketRefused, match="cpu_load"):
        decode(changed(packet_of(BODIES["heartbeat"]), change), PLAIN)


@pytest.mark.parametrize("name", ["heartbeat", "handshake"])
def test_stored_data_of_a_worker_is_bounded(name: str):
    def change(message: Any) -> None:
        body = getattr(message, name)
        body.labels.update(a="x" * 40_000) if name == "heartbeat" else body.ready_topics.append("x" * 40_000)

    with pytest.raises(PacketRefused, match="introduces a worker") as refused:
        decode(changed(packet_of(BODIES[name]), change), PLAIN)
    assert refused.value.error_code is ErrorCode.MALFORMED_PACKET


def test_a_heartbeat_with_negative_counts_is_refused():
    def change(message: Any) -> None:
        message.heartbeat.active_jobs = -1

    with pytest.raises(PacketRefused, match="active_jobs"):
        decode(changed(packet_of(BODIES["heartbeat"]), change), PLAIN)


def test_unknown_status_in_a_packet_is_refused():
    data = changed(packet_of(BODIES["result"]), lambda message: setattr(message.job_result, "status", 77))
    with pytest.raises(PacketRefused) as refused:
        decode(data, PLAIN)
    assert refused.value.error_code is ErrorCode.MALFORMED_PACKET


def test_an_alert_of_the_old_shape_is_understood():
    message = wire(packet_of(BODIES["alert"]))
    message.alert.Clear()
    message.alert.level, message.alert.message = "critical", "help"
    message.alert.component, message.alert.code = "w-1", "OOPS"
    alert = decode(message.SerializeToString(), PLAIN).body
    assert alert == BusAlert(message="help", code=ErrorCode.UNSPECIFIED, severity=AlertSeverity.CRITICAL)


def test_unknown_role_in_a_packet_is_ignored():
    data = changed(packet_of(BODIES["handshake"]), lambda message: setattr(message.handshake, "role", 42))
    body = decode(data, PLAIN).body
    assert isinstance(body, Handshake)
    assert body.role == ""


def test_packet_fields_without_a_meaning_for_us_are_ignored():
    def change(message: Any) -> None:
        message.auth_token = "token"
        message.identity.tenant_id = "acme"

    assert decode(changed(packet_of(BODIES["request"]), change), PLAIN) == packet_of(BODIES["request"])


def test_bytes_that_were_read_before_are_checked_for_their_own_delivery():
    data = encode(packet_of(BODIES["heartbeat"]), PLAIN)
    in_time, late = (PacketDelivery(subject="sys.heartbeat", at=AT + timedelta(seconds=n)) for n in (1, 100))
    assert decode(data, PLAIN, delivery=in_time) == decode(data, PLAIN, delivery=in_time)
    with pytest.raises(PacketRefused, match="100 s old"):
        decode(data, PLAIN, delivery=late)
    with pytest.raises(PacketRefused, match="must sign"):
        decode(data, PacketKeys(required=True), delivery=in_time)


def test_a_request_that_was_read_as_an_order_is_checked_as_a_request_on_the_submit_subject():
    reserved = JobRequest.read(json.dumps({"job_id": "j", "topic": "sys.job", "labels": {}}).encode())
    data = encode(packet_of(reserved), PLAIN)
    assert decode(data, PLAIN).body == reserved
    with pytest.raises(PacketRefused, match="subject of the bus itself"):
        decode(data, PLAIN, SUBMIT)
