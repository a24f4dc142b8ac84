"""Typed options for submitting a job on a topic from Python."""

from collections.abc import Mapping
from typing import Any, TypedDict


class TopicSubmitOptions(TypedDict, total=False):
    """What can be said about a new job on a topic beside its payload (document 004)."""

    job_id: str
    """Choose the id: the same id and request again is the same job, another request is refused."""
    priority: str
    """`critical`, `interactive` or `batch`."""
    context_ptr: str
    """Where the payload is, instead of giving it."""
    adapter_id: str
    """Which adapter its worker shall use, in the worker's own words."""
    env: Mapping[str, str]
    """What its worker is told beside the payload."""
    parent_job_id: str
    """The job whose step it is."""
    workflow_id: str
    """Steps of one workflow and parent go in the order of `step_index`."""
    step_index: int
    """Its place among the steps, from 0."""
    memory_id: str
    """The memory that its worker may use."""
    context_hints: Mapping[str, Any]
    """`max_input_tokens`, `allow_summarization`, `allow_retrieval`, `tags`."""
    budget: Mapping[str, int]
    """`deadline_ms` from now, and how many tokens it may use."""
    tenant_id: str
    """Whom it is for; how many of a tenant's jobs may run at the same time can be limited."""
    labels: Mapping[str, str]
    """`worker.<name>` must be the same label of its worker."""
    meta: Mapping[str, Any]
    """`requires`, `risk_tags`, `capability` and who asks."""
    compensation: Mapping[str, Any]
    """How it is undone when a later step of its workflow fails."""
    identity: Mapping[str, str]
    """For whom it acts: `tenant_id`, `principal_id`, `actor_id`, `delegation_id`; the same as other fields say."""
    context_ref: Mapping[str, Any]
    """Where the payload is, and what it must be: `uri`, `sha256`, `size_bytes`, `media_type` and more of CAP's ResourceRef."""
