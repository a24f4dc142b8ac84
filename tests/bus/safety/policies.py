"""Policies and requests for tests."""

from typing import Any

from trellis.bus.requests import JobRequest
from trellis.bus.safety.policy import SafetyPolicy

EVERYTHING = {"topics": [">"]}


def rule(id_: str, decision: str, match: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"id": id_, "decision": decision, "match": match or EVERYTHING, **more}


def policy(*rules: dict[str, Any]) -> SafetyPolicy:
    return SafetyPolicy.model_validate({"rules": list(rules)})


def request(topic: str = "job.code.lint", job_id: str = "job-1", **fields: Any) -> JobRequest:
    return JobRequest.model_validate({"job_id": job_id, "topic": topic, **fields})
