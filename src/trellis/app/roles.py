"""Which role of `trellis up` each background service belongs to."""

HELPERS = {
    "run-heartbeat": "orchestrator",
    "run-report": "orchestrator",
    "agent-gate": "orchestrator",
    "temporal-worker": "orchestrator",
    "queue-orchestrator": "orchestrator",
    "queue-heartbeat": "orchestrator",
    "queue-report": "orchestrator",
    "schedule-registrar": "schedules",
    "job-schedules": "schedules",
    "event-triggers": "schedules",
    "source-changes": "schedules",
    "bus-collector": "retention",
    "memory-collector": "retention",
    "alert-reports": "alerts",
}
"""Services that belong to a role with another name, and that role."""


def role_of(service: str) -> str:
    """Returns the role of the platform that this service belongs to."""
    return HELPERS.get(service, service)
