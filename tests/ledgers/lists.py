"""Filters of every kind, for tests that look at how much a list reads."""

from trellis.engine.jobs import JobId, ReasonCode
from trellis.engine.records import JobFilter, JobPlace

LISTS: dict[str, JobFilter] = {
    "all": JobFilter(),
    "a type": JobFilter(type="rare"),
    "a type that waits": JobFilter(type="rare", state="queued"),
    "a type that succeeded": JobFilter(type="rare", state="succeeded"),
    "a type and place": JobFilter(type="rare", place=JobPlace.ENDED),
    "a type that is ready": JobFilter(type="rare", place=JobPlace.READY),
    "an unknown type": JobFilter(type="unknown"),
    "a lifecycle": JobFilter(lifecycle="run"),
    "a lifecycle that has ended": JobFilter(lifecycle="run", place=JobPlace.ENDED),
    "a rare state": JobFilter(state="failed"),
    "a frequent state": JobFilter(state="cancelled"),
    "a state of rest": JobFilter(lifecycle="artifact", state="finalized"),
    "ended jobs": JobFilter(place=JobPlace.ENDED),
    "held jobs": JobFilter(place=JobPlace.LEASED),
    "blocked jobs": JobFilter(place=JobPlace.BLOCKED),
    "a key": JobFilter(concurrency_key="k"),
    "a correlation": JobFilter(correlation_id="c"),
    "a parent": JobFilter(parent_id=JobId("p")),
    "a parent's type": JobFilter(parent_id=JobId("p"), type="rare", state="queued"),
    "a reason": JobFilter(reason_code=ReasonCode.TIMEOUT),
    "a reason and a type": JobFilter(reason_code=ReasonCode.TIMEOUT, type="rare"),
}
