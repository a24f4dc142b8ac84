"""Conversion of safety checks and decisions to and from CAP's messages.

CAP's check request has no adapter and no hash of the job: both are sent in `effective_config`, which other kernels may
ignore. Data meant only for the worker (its env, its context) is not sent. CAP's response has no field for the hash of
the job or the delay of a throttle, and cannot express a constraint that is zero, false or an empty list. Our own kernel
sends these as metadata of the call.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import pydantic

from trellis.bus.errors import BusRequestInvalid
from trellis.bus.requests import Budget, JobMeta, JobRequest, ResourceRef
from trellis.bus.safety.policy import (
    DELAY_S_DEFAULT,
    DELAY_S_MAX,
    DecisionKind,
    KernelRefuses,
    PolicyConstraints,
    SafetyDecision,
)
from trellis.bus.wire.cap import ACTOR_TYPES, PRIORITIES, fields_of, message_fields
from trellis.engine.extras import Extra, extra_needed

SERVICE = "cordum.agent.v1.SafetyKernel"
HASH_METADATA = "trellis-job-hash"
DELAY_METADATA = "trellis-delay-s"
NOTHING_METADATA = "trellis-nothing"
"""Names of constraints whose value is zero, false or empty: CAP cannot tell these from unset ones."""
OURS = "trellis"
"""Our key in `effective_config`."""
REASON_CHARS_MAX = 2_000
SNAPSHOT_CHARS_MAX = 200

_KINDS = {
    DecisionKind.ALLOW: 1,
    DecisionKind.DENY: 2,
    DecisionKind.REQUIRE_HUMAN: 3,
    DecisionKind.THROTTLE: 4,
    DecisionKind.ALLOW_WITH_CONSTRAINTS: 5,
}
_KIND_OF = {number: kind for kind, number in _KINDS.items()}
_ALLOWING_KINDS = frozenset({DecisionKind.ALLOW, DecisionKind.ALLOW_WITH_CONSTRAINTS, DecisionKind.REQUIRE_HUMAN})
"""Decisions after which a job may be dispatched, at once or after a person's approval."""
_CONSTRAINED_KINDS = frozenset({DecisionKind.ALLOW_WITH_CONSTRAINTS, DecisionKind.REQUIRE_HUMAN})
"""Decisions after which a job may be dispatched within constraints; for the second, after a person's approval."""
_QUARANTINE, _REDACT = 6, 7
"""CAP's decisions that we do not have.

Quarantine is not supported; redact means allow with another context in place of the request's.
"""
_EMPTY_REF: Mapping[str, Any] = ResourceRef.model_validate({}).model_dump()
_PARTS: Mapping[str, tuple[str, ...]] = {
    "budgets": ("max_runtime_ms", "max_retries", "max_artifact_bytes", "max_concurrent_jobs"),
    "sandbox": ("isolated", "network_allowlist", "fs_read_only", "fs_read_write"),
    "toolchain": ("allowed_tools", "allowed_commands"),
    "diff": ("max_files", "max_lines", "deny_path_globs"),
}
"""The CAP message that holds each constraint."""
_EMPTY_CONSTRAINTS: Mapping[str, Any] = {
    **dict.fromkeys(("max_retries", "max_artifact_bytes", "max_files", "max_lines"), 0),
    **dict.fromkeys(("network_allowlist", "fs_read_only", "fs_read_write"), ()),
    **dict.fromkeys(("allowed_tools", "allowed_commands", "deny_path_globs"), ()),
    "isolated": False,
}


@dataclass(frozen=True, slots=True)
class CapModules:
    """The modules of the packages for CAP over gRPC."""

    grpc: Any
    safety: Any
    job: Any


def load_cap_modules() -> CapModules:
    """Import the modules; raises ExtraMissing when they are not installed."""
    with extra_needed(Extra.BUS, "A safety kernel in another process"):
        return CapModules(
            import_module("grpc"),
            import_module("cap.pb.cordum.agent.v1.safety_pb2"),
            import_module("cap.pb.cordum.agent.v1.job_pb2"),
        )


def to_bytes(message: Any) -> bytes:
    return message.SerializeToString()


# --- request ----------------------------------------------------------------------------------------------------------


def policy_check_request(cap: CapModules, request: JobRequest) -> Any:
    ours = {"adapter_id": request.adapter_id, "job_hash": request.hash}
    parts = request.model_dump(include={"budget", "identity", "meta"}, exclude_none=True)
    return cap.safety.PolicyCheckRequest(
        job_id=request.job_id,
        topic=request.topic,
        tenant=request.tenant,
        priority=PRIORITIES[request.priority],
        principal_id=request.principal_id,
        labels=dict(request.labels),
        memory_id=request.memory_id,
        effective_config=json.dumps({OURS: ours}, ensure_ascii=False).encode(),
        **fields_of(parts),
    )


def read_policy_check_request(check: Any) -> tuple[JobRequest, str]:
    """The job request as far as a check request contains it, and the hash given by the caller.

    Raises BusRequestInvalid.
    """
    ours = _own_config(check.effective_config)
    request: dict[str, Any] = {
        "job_id": check.job_id,
        "topic": check.topic,
        "tenant_id": check.tenant,
        "priority": _known_name(PRIORITIES, check.priority, "priority"),
        "principal_id": check.principal_id,
        "labels": dict(check.labels),
        "memory_id": check.memory_id,
        "adapter_id": ours.get("adapter_id", ""),
    }
    if check.HasField("budget"):
        request["budget"] = message_fields(check.budget, Budget)
    if check.HasField("meta"):
        _known_name(ACTOR_TYPES, check.meta.actor_type, "meta.actor_type")
        request["meta"] = message_fields(check.meta, JobMeta)
    job_hash = ours.get("job_hash", "")
    return JobRequest.read(json.dumps(request).encode()), job_hash if isinstance(job_hash, str) else ""


def _own_config(config: bytes) -> Mapping[str, Any]:
    try:
        read: Any = json.loads(config) if config else {}
    except (ValueError, RecursionError):
        return {}
    ours: Any = cast("dict[str, Any]", read).get(OURS) if isinstance(read, dict) else None
    return cast("dict[str, Any]", ours) if isinstance(ours, dict) else {}


def _known_name(numbers: Mapping[Any, int], number: int, field: str) -> Any:
    """The name of one of CAP's numbers; raises BusRequestInvalid for an unknown one."""
    names = {known: name for name, known in numbers.items()}
    if number not in names:
        raise BusRequestInvalid(detail=f"{field}: {number} is none of {', '.join(map(str, names))}")
    return names[number]


# --- response ---------------------------------------------------------------------------------------------------------


def policy_check_response(cap: CapModules, decision: SafetyDecision, *, reason: str | None = None) -> Any:
    response = cap.safety.PolicyCheckResponse(
        decision=_KINDS[decision.kind],
        reason=(reason or decision.reason),
        policy_snapshot=decision.policy_hash,
        rule_id=decision.rule,
        approval_required=decision.kind is DecisionKind.REQUIRE_HUMAN,
    )
    if decision.constraints:
        constraints = dict(decision.constraints)
        parts: dict[str, Any] = {
            part: {name: constraints[name] for name in names if name in constraints} for part, names in _PARTS.items()
        }
        response.constraints.CopyFrom(
            cap.safety.PolicyConstraints(
                redaction_level=constraints.get("redaction_level", ""),
                **{part: given for part, given in parts.items() if given},
            )
        )
    return response


def response_metadata(decision: SafetyDecision, job_hash: str) -> tuple[tuple[str, str], ...]:
    nothing = ",".join(name for name, value in decision.constraints.items() if not value)
    metadata = ((HASH_METADATA, job_hash), (DELAY_METADATA, f"{decision.delay_s:g}"))
    return (*metadata, (NOTHING_METADATA, nothing)) if nothing else metadata


def read_policy_check_response(response: Any, beside: Mapping[str, str], request: JobRequest) -> SafetyDecision:
    """Parse a kernel's response to this request.

    Raises KernelRefuses when it is not a decision, or about another job.
    """
    echoed = beside.get(HASH_METADATA, request.hash)
    if echoed != request.hash:
        raise KernelRefuses(detail=f"it answers about a job with the hash {echoed[:64]!r}, and not {request.hash}")
    tenant = response.identity.tenant_id
    if tenant and tenant != request.tenant:
        raise KernelRefuses(detail=f"it answers about tenant {tenant[:200]!r}, and not {request.tenant!r}")
    redacted = _redacted(response)
    kind, why = _kind(response, redacted)
    snapshot = response.policy_snapshot[:SNAPSHOT_CHARS_MAX]
    if kind is DecisionKind.REQUIRE_HUMAN and not snapshot:
        raise KernelRefuses(detail="it requires a person and does not say under which policy (policy_snapshot)")
    return SafetyDecision(
        kind=kind,
        rule=response.rule_id[:SNAPSHOT_CHARS_MAX] or "unnamed",
        reason=(why or response.reason)[:REASON_CHARS_MAX],
        policy_hash=snapshot,
        job_hash=request.hash,
        delay_s=_delay_s(beside.get(DELAY_METADATA)) if kind is DecisionKind.THROTTLE else 0.0,
        constraints=_constraints(response.constraints, beside) if kind in _CONSTRAINED_KINDS else {},
        redacted=redacted if kind in _ALLOWING_KINDS else {},
    )


def _kind(response: Any, redacted: Mapping[str, Any]) -> tuple[DecisionKind, str]:
    """Our kind of the decision, and a reason if it differs from the kernel's own.

    In doubt, the job is not dispatched.
    """
    number = response.decision
    if number == _QUARANTINE:
        return DecisionKind.DENY, f"the kernel answers QUARANTINE, which cannot be carried out here: {response.reason}"
    if number == _REDACT and not redacted:
        return DecisionKind.DENY, f"the kernel answers REDACT and names no redacted context: {response.reason}"
    kind = DecisionKind.ALLOW if number == _REDACT else _KIND_OF.get(number)
    if kind is None:
        raise KernelRefuses(detail=f"it answers {number}, which is no decision")
    if kind in {DecisionKind.ALLOW, DecisionKind.ALLOW_WITH_CONSTRAINTS} and response.approval_required:
        return DecisionKind.REQUIRE_HUMAN, ""
    if kind is DecisionKind.ALLOW and response.HasField("constraints"):
        return DecisionKind.ALLOW_WITH_CONSTRAINTS, ""
    return kind, ""


def _redacted(response: Any) -> dict[str, Any]:
    """The context to send in place of the request's own; raises KernelRefuses for an invalid one."""
    redacted: dict[str, Any] = {}
    if response.redacted_context_ptr:
        redacted["context_ptr"] = response.redacted_context_ptr
    if response.HasField("redacted_context_ref"):
        redacted["context_ref"] = {**_EMPTY_REF, **message_fields(response.redacted_context_ref, ResourceRef)}
    try:
        JobRequest.model_validate({"job_id": "redacted", "topic": "job.redacted", **redacted})
    except pydantic.ValidationError as error:
        raise KernelRefuses(detail=f"its redacted context does not fit: {error.errors()[0]['msg']}") from None
    return redacted


def _constraints(message: Any, beside: Mapping[str, str]) -> dict[str, Any]:
    nothing = [name for name in beside.get(NOTHING_METADATA, "").split(",") if name in _EMPTY_CONSTRAINTS]
    constraints: dict[str, Any] = {name: _EMPTY_CONSTRAINTS[name] for name in nothing}
    for part, names in _PARTS.items():
        if message.HasField(part):
            values = ((field.name, value) for field, value in getattr(message, part).ListFields())
            constraints |= {
                name: value if isinstance(value, int) else list(value) for name, value in values if name in names
            }
    if message.redaction_level:
        constraints["redaction_level"] = message.redaction_level
    try:
        return PolicyConstraints.model_validate(constraints).to_dict()
    except pydantic.ValidationError as error:
        raise KernelRefuses(
            detail=f"its constraints do not fit: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None


def _delay_s(text: str | None) -> float:
    try:
        delay_s = DELAY_S_DEFAULT if text is None else float(text)
    except ValueError:
        return DELAY_S_DEFAULT
    return min(delay_s, DELAY_S_MAX) if 0 < delay_s < float("inf") else DELAY_S_DEFAULT
