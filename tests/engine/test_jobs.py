"""Steps and new jobs as values."""

from trellis.engine.jobs import Advance, Epoch, JobId, JobKey, Lease, completion
from trellis.lifecycles import Trigger


def test_a_completion_that_is_built_at_once_is_the_step_that_is_built_by_name():
    """The wrong line it catches: a new field of a step, or another order, that the short way does not follow."""
    lease = Lease(key=JobKey(1), epoch=Epoch(2), job_id=JobId("j"), lifecycle="leased-job")
    named = Advance(lease, "running", Trigger.COMPLETE, data=b"d", result=b"r", result_ttl_s=5.0)
    built = completion(lease, "running", b"d", b"r", 5.0)
    assert (built, len(built)) == (named, len(Advance._fields))
