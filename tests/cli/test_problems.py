"""What a person is told goes wrong, in the words of the command line."""

import pytest

from trellis.artifacts.content import JobType
from trellis.artifacts.payloads import EXAMPLES, read_payload
from trellis.cli.problems import message_for_person, remedy_for
from trellis.engine.errors import ExtraMissing, IdempotencyMismatch, KeyUnusable, PayloadInvalid
from trellis.http.errors import GatewayUnavailable


@pytest.mark.parametrize(
    "request_, says", [("POST /jobs", "submit again with --key k-1"), ("POST /runs", "look before")]
)
def test_a_lost_answer_is_asked_for_with_an_option(request_: str, says: str):
    lost = GatewayUnavailable(
        url="http://a",
        request=request_,
        timeout_s=1.0,
        attempts=2,
        reason="refused",
        then="; ask again with idempotency_key='k-1'",
        idempotency_key="k-1",
    )
    assert says in message_for_person(lost)
    assert "idempotency_key" not in message_for_person(lost)


def test_a_key_that_must_be_set_is_not_made_by_migrating():
    assert "trellis migrate" in remedy_for(KeyUnusable(reason="the key a.key cannot be read"))
    assert remedy_for(KeyUnusable(reason="others can reach 0.0.0.0; set TRELLIS_TOKEN_KEY_FILE")) == ""


@pytest.mark.parametrize("job_type", JobType)
def test_a_payload_that_does_not_fit_is_answered_with_an_example_of_its_type(job_type: JobType):
    read_payload(job_type, EXAMPLES[job_type])
    assert f"trellis submit {job_type.value} '{{" in remedy_for(PayloadInvalid(type=job_type.value, detail="no."))
    broken = PayloadInvalid(type="my.type", detail="it is not JSON: Expecting value at line 1, column 1")
    assert "Give JSON as text" in remedy_for(broken)
    assert "trellis submit my.type" in remedy_for(broken)
    assert remedy_for(PayloadInvalid(type="my.type", detail="title: Field required")) == "", "it was JSON"


def test_a_missing_package_is_installed_and_no_setting_corrected():
    missing = ExtraMissing(feature="A PostgreSQL ledger", package="asyncpg", extra="postgres")
    assert (remedy_for(missing), "pip install" in str(missing)) == ("", True)


def test_an_id_that_is_taken_is_called_an_id():
    told = message_for_person(IdempotencyMismatch(key="st2", job_id="st2"))
    assert told == "Job st2 was submitted before with another request; choose another --id, or send the same request."
    assert "Key 'k'" in message_for_person(IdempotencyMismatch(key="k", job_id="st2"))
