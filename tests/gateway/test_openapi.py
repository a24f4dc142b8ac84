"""What the OpenAPI description promises holds for whatever is sent: no crash, no undocumented answer, no ignored token."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.gateway.door import KEY, QUICK, token
from tests.gateway.serving import Served, serving
from trellis.app.settings import Settings
from trellis.auth.tokens import issue
from trellis.lifecycles import Role
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.nlm_job import NLM_JOB

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "ignored_auth",
)
EXAMPLES = 2
EXAMPLES_LONG = 25
ROLE_S_MAX = 900
"""One role takes a minute or two; a gateway that hangs must not keep the others from being asked."""
TIMEOUT_S = 60.0
FAILURE_CHARS = 1_500
OPEN = {"POST /sign-in", "GET /system/health", "GET /system/live", "GET /system/ready"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("openapi")
    with serving(f"sqlite:///{folder}/t.db", [KEY], settings=Settings.model_validate({}), options=QUICK) as made:
        asyncio.run_coroutine_threadsafe(made.instance.plant(), made.loop).result(TIMEOUT_S)
        yield made


def operations(served: Served) -> list[Any]:
    """Schemathesis is imported where it is used: the collection takes seconds less without it."""
    import schemathesis
    from schemathesis.core.result import Ok

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{served.port}/openapi.json")
    read = list(schema.get_all_operations())
    found = [one.ok() for one in read if isinstance(one, Ok)]
    assert len(found) == len(read), read
    assert len(found) >= 10
    return found


def check(served: Served, role: Role, examples: int) -> set[int]:
    """Send what fits and what does not to every operation; the statuses that came."""
    from schemathesis import GenerationMode, checks
    from schemathesis.core.failures import FailureGroup

    every_check = [getattr(checks, name) for name in CHECKS]
    headers = {"Authorization": f"Bearer {issue(KEY, name='iryna', roles=[role], ttl_s=3600, now=time.time())}"}
    seen, wrong = set[int](), list[str]()
    for operation in operations(served):
        for mode in GenerationMode:

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=[
                    HealthCheck.too_slow,
                    HealthCheck.filter_too_much,
                    HealthCheck.large_base_example,
                ],
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def holds(case: Any) -> None:
                if case.operation.path == "/events/stream":
                    case.query = {**(case.query or {}), "for_s": "0"}  # a stream has no end of its own
                if case.operation.label == "GET /jobs" and (case.query or {}).get("lifecycle") == NLM_JOB.name:
                    case.query = {**case.query, "lifecycle": LEASED_JOB.name}  # 502: there is no NLM backend to ask
                answer = case.call_and_validate(headers=headers, checks=every_check, timeout=TIMEOUT_S)
                seen.add(answer.status_code)

            try:
                holds()
            except Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE, operation.label  # it takes nothing that could be wrong
            except FailureGroup as found:
                wrong += [
                    f"{operation.label}: {failure.title}: {failure}"[:FAILURE_CHARS] for failure in found.exceptions
                ]
    assert not wrong, "\n\n".join(wrong)
    return seen


@pytest.mark.requirement("AUTH-5", "D27")
def test_the_description_holds_for_the_owner(served: Served):
    """Who may do less is in the long proof; that every role is refused what it may not do is tested route by route."""
    assert {200, 422} <= check(served, Role.OWNER, EXAMPLES)


@pytest.mark.prove
@pytest.mark.timeout(ROLE_S_MAX)
@pytest.mark.requirement("AUTH-5", "D27")
@pytest.mark.parametrize("role", Role)
def test_the_description_holds_for_every_role(served: Served, role: Role):
    seen = check(served, role, EXAMPLES_LONG)
    assert {200, 422} <= seen
    assert (403 in seen) or role is Role.OWNER


def test_every_operation_names_its_security_its_problems_and_an_example(served: Served):
    described = served.app.openapi()
    assert described["openapi"].startswith("3.1")
    schemas = described["components"]["schemas"]
    for path, operations_ in described["paths"].items():
        for method, operation in operations_.items():
            name = f"{method.upper()} {path}"
            assert operation.get("summary"), name
            assert operation.get("description"), name
            if name not in OPEN:
                assert operation.get("security"), name
                assert {"401", "429", "500"} <= set(operation["responses"]), name
            body = operation.get("requestBody")
            if body is not None:
                assert _has_example(body["content"]["application/json"], schemas), f"{name} shows no body"


def _has_example(media: dict[str, Any], schemas: dict[str, Any]) -> bool:
    """In the media type or in what its schema leads to."""
    text = json.dumps(media)
    named = [schema for name, schema in schemas.items() if f'"#/components/schemas/{name}"' in text]
    return any("example" in part for part in (media, media.get("schema", {}))) or any(
        "examples" in schema for schema in [media.get("schema", {}), *named]
    )


def test_the_description_itself_is_for_everybody_and_shows_no_secret(served: Served, tmp_path: Path):
    answer = httpx2.get(f"http://127.0.0.1:{served.port}/openapi.json", trust_env=False)
    assert answer.status_code == 200
    assert token() not in answer.text


def test_every_reference_of_the_description_leads_to_a_schema(served: Served):
    """A generator of clients refuses a description with a reference that leads nowhere."""
    described = served.app.openapi()
    schemas = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(described)))
    assert len(references) > 50
    assert references <= schemas
