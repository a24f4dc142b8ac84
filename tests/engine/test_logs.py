"""Events with fields, through the standard library's logging."""

import logging
from typing import Any

import pytest

from trellis.engine.logs import log_of
from trellis.worker.held import JobLogger, LogBuffer

LEVELS = ("debug", "info", "warning", "error")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "trellis.garden")
    return caplog


def said(record: Any) -> tuple[str, dict[str, Any]]:
    return record.event, record.fields


def test_a_record_has_the_event_and_its_fields_for_people_and_for_machines(told: pytest.LogCaptureFixture):
    log = log_of("trellis.garden").bind(bed=3)
    log.warning("watered", litres=0.5, by="50 % %s")
    (record,) = told.records
    assert record.getMessage() == "watered bed=3 litres=0.5 by='50 % %s'"
    assert said(record) == ("watered", {"bed": 3, "litres": 0.5, "by": "50 % %s"})
    assert (record.name, record.levelname, record.filename) == ("trellis.garden", "WARNING", "test_logs.py")


def test_binding_again_leaves_the_first_logger_as_it_was(told: pytest.LogCaptureFixture):
    garden = log_of("trellis.garden").bind(bed=3)
    garden.bind(bed=4, row=1).info("sown")
    garden.info("dug")
    assert [said(record) for record in told.records] == [("sown", {"bed": 4, "row": 1}), ("dug", {"bed": 3})]


def test_every_level_is_that_of_the_standard_library_and_what_is_below_it_costs_nothing(
    told: pytest.LogCaptureFixture,
):
    class Unprintable:
        def __repr__(self) -> str:
            raise AssertionError("nobody reads it")

    log = log_of("trellis.garden")
    for level in LEVELS:
        getattr(log, level)(level)
    assert [record.levelname.lower() for record in told.records] == list(LEVELS)
    told.set_level(logging.ERROR, "trellis.garden")
    log.warning("dry", bed=Unprintable())
    assert len(told.records) == len(LEVELS)


def test_an_exception_comes_with_its_traceback_and_not_as_a_field(told: pytest.LogCaptureFixture):
    log, error = log_of("trellis.garden"), ValueError("frost")
    try:
        raise error
    except ValueError:
        log.exception("lost", bed=3)
    log.error("lost", exc_info=error)
    log.warning("lost", exc_info=None)
    found = [record.exc_info[1] if record.exc_info else None for record in told.records]
    assert found == [error, error, None]
    assert [said(record)[1] for record in told.records] == [{"bed": 3}, {}, {}]


def test_a_handlers_event_may_be_any_object_and_its_fields_have_any_name(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "trellis.job")
    logger: Any = JobLogger(LogBuffer(), lambda: 0.0, job_id="j")
    logger.info(ValueError("frost"), name="n", message="m", args=(1,), level="l", fields="f")
    (record,) = caplog.records
    fields = {"job_id": "j", "name": "n", "message": "m", "args": (1,), "level": "l", "fields": "f"}
    assert said(record) == ("frost", fields)
