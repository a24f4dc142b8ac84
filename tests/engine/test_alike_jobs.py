"""New jobs that differ only in id and payload: held as lists, and built as jobs only for who reads them one by one."""

from trellis.engine.jobs import SUBMIT_MAX, AlikeJobs, JobId, NewJob, different_ones, ids_of, payloads_of, submit_parts
from trellis.ledgers.alike_jobs import are_alike, join_alike
from trellis.ledgers.postgres.submit import joined

PLAIN = NewJob(job_id=JobId(""), type="mail.send", correlation_id="c1")


def alike(*names: str, common: NewJob = PLAIN) -> AlikeJobs:
    return AlikeJobs(common, [JobId(name) for name in names], [f'"{name}"'.encode() for name in names])


def test_each_job_has_its_own_id_and_payload_and_what_all_have_in_common():
    jobs = alike("a", "b", "c")
    assert [(job.job_id, job.payload) for job in jobs] == [("a", b'"a"'), ("b", b'"b"'), ("c", b'"c"')]
    assert {(job.type, job.correlation_id) for job in jobs} == {("mail.send", "c1")}
    assert len(jobs) == 3
    assert jobs[2].job_id == "c"


def test_a_job_that_is_read_twice_is_the_same_object():
    jobs = alike("a", "b")
    assert [id(job) for job in jobs] == [id(job) for job in jobs]
    assert jobs[1] is list(jobs)[1]


def test_a_slice_has_the_same_jobs_before_and_after_they_were_built():
    jobs = alike("a", "b", "c")
    assert ids_of(jobs[1:]) == ["b", "c"]
    assert [job.payload for job in jobs[1:]] == [b'"b"', b'"c"']
    assert list(jobs)[1:] == list(jobs[1:])


def test_lists_without_jobs_have_no_kind_of_job():
    assert list(different_ones(alike())) == []
    assert not are_alike(alike())


def test_jobs_with_a_key_are_not_written_as_lists():
    keyed = NewJob(job_id=JobId(""), type="mail.send", concurrency_key="user:1")
    assert are_alike(alike("a", "b"))
    assert not are_alike(alike("a", "b", common=keyed))
    assert joined([(1, alike("a", common=keyed))]) is None


def test_calls_that_one_actor_made_alike_are_joined_in_their_order():
    whole = joined([(1, alike("a", "b")), (1, alike("c"))])
    assert whole is not None
    assert [(job.job_id, job.payload) for job in whole] == [("a", b'"a"'), ("b", b'"b"'), ("c", b'"c"')]


def test_calls_whose_common_part_is_equal_are_joined_and_single_jobs_are_not():
    twin = NewJob(job_id=JobId(""), type="mail.send", correlation_id="c1")
    whole = join_alike([alike("a"), alike("b", common=twin)])
    assert whole is not None
    assert ids_of(whole) == ["a", "b"]
    assert payloads_of(whole) == payloads_of(list(whole)) == [b'"a"', b'"b"']
    assert join_alike([list(alike("a")), alike("b")]) is None


def test_jobs_are_submitted_in_parts_of_at_most_the_limit():
    names = [str(number) for number in range(2 * SUBMIT_MAX + 1)]
    assert [ids_of(part) for part in submit_parts(alike(*names))] == [
        names[:SUBMIT_MAX],
        names[SUBMIT_MAX : 2 * SUBMIT_MAX],
        names[2 * SUBMIT_MAX :],
    ]
    few = alike(*names[:SUBMIT_MAX])
    assert submit_parts(few) == (few,)
    assert list(submit_parts(alike())) == []


def test_calls_of_another_actor_or_of_another_kind_are_not_joined():
    other = NewJob(job_id=JobId(""), type="mail.read", correlation_id="c1")
    assert joined([(1, alike("a")), (2, alike("b"))]) is None
    assert joined([(1, alike("a")), (1, alike("b", common=other))]) is None
    assert joined([(1, alike("a")), (1, tuple(alike("b")))]) is None
