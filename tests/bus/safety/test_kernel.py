"""Kernels: one that reads a file, one behind gRPC. Whatever goes wrong with either, nothing is let go."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.bus.rig import quiet
from tests.bus.safety.policies import policy, request, rule
from tests.net.listening import make_certificates
from trellis.bus.errors import KernelUnavailable
from trellis.bus.requests import JobRequest
from trellis.bus.safety import cap_kernel
from trellis.bus.safety.evaluation import DecisionExplanation
from trellis.bus.safety.kernel import (
    FAILURES_MAX,
    FILE_CHECK_S,
    OPEN_S,
    FileKernel,
    PolicyKernel,
    RemoteKernel,
    ServingOptions,
    kernel_address,
    open_kernel,
    serve_kernel,
)
from trellis.bus.safety.policy import ALLOW_ALL_POLICY, DELAY_S_DEFAULT, DecisionKind, KernelRefuses, SafetyDecision
from trellis.engine.errors import OptionInvalid
from trellis.testing import FakeClock

ALLOW = '[[rules]]\nid = "a"\ndecision = "allow"\nmatch = { topics = [">"] }\n'
DENY = ALLOW.replace("allow", "deny")


# --- a file ------------------------------------------------------------------------------------------------------------


def write(file: Path, text: str | None) -> None:
    """None takes it away."""
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_text(text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "policy.toml").write_text(ALLOW)
    return tmp_path / "policy.toml"


@pytest.mark.requirement("BUS-4")
async def test_changed_policy_file_applies_after_two_equal_reads_and_no_job_is_dispatched_before(file: Path):
    clock = FakeClock()
    kernel = FileKernel(file, monotonic=clock.monotonic)
    assert (await kernel.check(request())).kind is DecisionKind.ALLOW
    before = await kernel.snapshot()
    write(file, DENY)
    clock.advance(FILE_CHECK_S * 0.9)
    assert (await kernel.check(request())).kind is DecisionKind.ALLOW
    clock.advance(FILE_CHECK_S * 0.1)
    with pytest.raises(KernelUnavailable, match="has changed just now"):
        await kernel.check(request())
    clock.advance(FILE_CHECK_S)
    found = await asyncio.gather(*(kernel.check(request()) for _ in range(20)))
    assert {one.kind for one in found} == {DecisionKind.DENY}
    assert await kernel.snapshot() not in {before, ""}


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("broken", ["", ALLOW[:-8], ALLOW + ALLOW, None])
async def test_a_broken_policy_file_allows_no_dispatch_until_it_is_mended(file: Path, broken: str | None):
    clock = FakeClock()
    kernel = FileKernel(file, monotonic=clock.monotonic)
    assert (await kernel.check(request())).lets_go
    write(file, broken)
    for _ in range(3):
        clock.advance(FILE_CHECK_S)
        for ask in (kernel.check, kernel.explain):
            with pytest.raises(KernelUnavailable, match=r"policy\.toml does not fit: "):
                await ask(request())
    write(file, ALLOW)
    clock.advance(FILE_CHECK_S)
    with pytest.raises(KernelUnavailable, match="has changed just now"):
        await kernel.check(request())
    clock.advance(FILE_CHECK_S)
    assert (await kernel.check(request())).lets_go


@pytest.mark.requirement("BUS-4")
async def test_half_of_a_policy_that_is_being_written_lets_nothing_go_although_it_fits(file: Path):
    """Without its last line the rule is for every tenant."""
    rule_of_acme = '[[rules]]\nid = "a"\ndecision = "allow"\n[rules.match]\ntopics = ["job.>"]\n'
    clock = FakeClock()
    write(file, DENY)
    kernel = FileKernel(file, monotonic=clock.monotonic)
    assert not (await kernel.check(request(tenant_id="beta"))).lets_go
    for written in (rule_of_acme, rule_of_acme + 'tenants = ["acme"]\n'):
        write(file, written)
        clock.advance(FILE_CHECK_S)
        with pytest.raises(KernelUnavailable):
            await kernel.check(request(tenant_id="beta"))
    clock.advance(FILE_CHECK_S)
    assert not (await kernel.check(request(tenant_id="beta"))).lets_go
    assert (await kernel.check(request(tenant_id="acme"))).lets_go


async def test_a_disk_that_hangs_takes_one_thread_however_many_ask(tmp_path: Path):
    """Nobody reads a pipe before somebody writes, and nobody writes before somebody reads."""
    pipe = tmp_path / "policy.toml"
    os.mkfifo(pipe)
    kernel = FileKernel(pipe, monotonic=FakeClock().monotonic)
    look, looks = kernel._look, list[str]()

    def noted() -> None:
        looks.append(threading.current_thread().name)
        look()

    kernel._look = noted
    for _ in range(5):
        asked = asyncio.ensure_future(kernel.check(request()))
        await quiet()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    with pipe.open("wb", buffering=0) as writer:  # waits for the reader
        taken = list(looks)
        writer.write(ALLOW.encode())
    assert (await kernel.check(request())).lets_go
    assert len(taken) == 1


def test_settings_choose_the_safety_kernel(tmp_path: Path):
    def opened(text: str | None) -> Any:
        return open_kernel(text, monotonic=FakeClock().monotonic)

    assert isinstance(opened(str(tmp_path / "policy.toml")), FileKernel)
    assert isinstance(opened("grpc://localhost:50051"), RemoteKernel)
    assert opened(None).policy is ALLOW_ALL_POLICY


# --- over gRPC -----------------------------------------------------------------------------------------------------------

RICH = policy(
    rule("human", "require_human", {"risk_tags": ["destructive"]}, reason="look first"),
    rule("slow", "throttle", {"adapters": ["browser"]}, delay_s=7),
    rule(
        "bounded",
        "allow_with_constraints",
        {"tenants": ["acme"], "labels": {"env": "prod"}, "actor_types": ["service"], "packs": ["p"]},
        constraints={
            "max_runtime_ms": 5000,
            "max_retries": 0,
            "network_allowlist": [],
            "allowed_tools": ["git"],
            "isolated": True,
            "deny_path_globs": ["/etc/*"],
            "redaction_level": "strict",
        },
    ),
    rule("people", "allow", {"principals": ["iryna"], "priorities": ["interactive"], "capabilities": ["read"]}),
)
ASKED = [
    request(meta={"risk_tags": ["destructive"]}),
    request(adapter_id="browser", env={"SECRET": "x"}),
    request(tenant_id="acme", labels={"env": "prod"}, meta={"actor_type": "service", "pack_id": "p"}),
    request(principal_id="iryna", priority="interactive", meta={"capability": "read"}, budget={"deadline_ms": 5}),
    request("job.other", labels={"ключ": "значення"}),
    request(labels={"a": "1"}, meta={"labels": {"a": "2"}}),
]


@asynccontextmanager
async def asking(kernel: Any, clock: FakeClock | None = None) -> AsyncGenerator[RemoteKernel]:
    async with serve_kernel(kernel, ServingOptions()) as port:
        address = kernel_address(f"grpc://127.0.0.1:{port}")
        remote = RemoteKernel(address, monotonic=(clock or FakeClock()).monotonic, timeout_s=10)
        try:
            yield remote
        finally:
            await remote.close()


@pytest.mark.requirement("BUS-4")
async def test_kernel_over_grpc_returns_the_same_decisions_as_in_process():
    local = PolicyKernel(RICH)
    async with asking(local) as remote:
        for asked in ASKED:
            assert await remote.check(asked) == await local.check(asked)
        kinds = [(await remote.check(asked)).kind for asked in ASKED]
        assert await remote.snapshot() == RICH.hash
        told = (await remote.explain(ASKED[3])).decision.reason
    assert kinds == [
        DecisionKind.REQUIRE_HUMAN,
        DecisionKind.THROTTLE,
        DecisionKind.ALLOW_WITH_CONSTRAINTS,
        DecisionKind.ALLOW,
        DecisionKind.DENY,
        DecisionKind.DENY,
    ]
    assert told.splitlines()[-1] == "fits: people (allow): capabilities, principals, priorities fit"


async def test_values_for_the_worker_alone_are_not_sent_to_the_safety_kernel():
    sent = cap_kernel.policy_check_request(
        cap_kernel.load_cap_modules(), request(env={"TOKEN": "s3cret"}, context_ptr="redis://s3cret")
    )
    assert b"s3cret" not in sent.SerializeToString()


@pytest.mark.requirement("BUS-4")
async def test_evaluation_without_our_extension_fields_is_decided_on_the_rest():
    """As the SDK asks, without anything of ours."""
    cap = cap_kernel.load_cap_modules()
    async with (
        serve_kernel(PolicyKernel(RICH), ServingOptions()) as port,
        cap.grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        for method in ("Check", "Evaluate", "Simulate", "Explain"):
            ask = channel.unary_unary(
                f"/{cap_kernel.SERVICE}/{method}",
                request_serializer=cap_kernel.to_bytes,
                response_deserializer=cap.safety.PolicyCheckResponse.FromString,
            )
            question = cap.safety.PolicyCheckRequest(
                job_id="j", topic="job.x", meta=cap.job.JobMetadata(risk_tags=["destructive"])
            )
            found = await ask(question)
            assert (found.decision, found.rule_id, found.approval_required) == (3, "human", True)
            for bad in (cap.safety.PolicyCheckRequest(), cap.safety.PolicyCheckRequest(job_id="j", topic="a b")):
                with pytest.raises(cap.grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
                    await ask(bad)


class Scripted:
    """A kernel that answers what a test says."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.odd: str | None = None
        """A job that it breaks at."""
        self.asked = 0

    async def explain(self, asked: JobRequest) -> DecisionExplanation:
        self.asked += 1
        if self.error is not None:
            raise self.error
        if asked.job_id == self.odd:
            raise ValueError(asked.job_id)
        return await PolicyKernel().explain(asked)

    async def check(self, asked: JobRequest) -> SafetyDecision:
        return (await self.explain(asked)).decision

    async def snapshot(self) -> str:
        return ""

    async def close(self) -> None:
        pass


@pytest.mark.requirement("BUS-4")
async def test_after_three_failures_a_kernel_is_left_alone_and_then_one_question_tries():
    clock, kernel = FakeClock(), Scripted()
    kernel.error = KernelUnavailable(detail="the file is broken")
    async with asking(kernel, clock) as remote:
        for _ in range(FAILURES_MAX):
            with pytest.raises(KernelUnavailable, match="the file is broken"):
                await remote.check(request())
        for _ in range(5):
            with pytest.raises(KernelUnavailable, match="failed 3 times in a row"):
                await remote.check(request())
        assert kernel.asked == FAILURES_MAX
        clock.advance(OPEN_S)
        answers = await asyncio.gather(*(remote.check(request()) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(answer, KernelUnavailable) for answer in answers)
        assert kernel.asked == FAILURES_MAX + 1
        kernel.error = None
        with pytest.raises(KernelUnavailable):
            await remote.check(request())
        clock.advance(OPEN_S)
        assert (await remote.check(request())).lets_go
        assert (await remote.check(request())).lets_go


@pytest.mark.requirement("BUS-4")
async def test_a_kernel_that_is_not_there_or_hangs_is_unavailable_in_bounded_time():
    async with serve_kernel(PolicyKernel(), ServingOptions()) as port:
        pass
    gone = RemoteKernel(kernel_address(f"grpc://127.0.0.1:{port}"), monotonic=FakeClock().monotonic)
    with pytest.raises(KernelUnavailable, match="UNAVAILABLE"):
        await gone.check(request())
    await gone.close()

    with socket.create_server(("127.0.0.1", 0)) as hangs:  # it is connected to, and never says a word
        address = kernel_address(f"grpc://127.0.0.1:{hangs.getsockname()[1]}")
        slow = RemoteKernel(address, monotonic=FakeClock().monotonic, timeout_s=0.2)
        with pytest.raises(KernelUnavailable):
            await slow.check(request())
        await slow.close()


async def test_a_cancelled_question_says_nothing_about_the_kernel():
    clock, kernel = FakeClock(), Scripted()
    kernel.error = KernelUnavailable(detail="down")
    async with asking(kernel, clock) as remote:
        for _ in range(FAILURES_MAX):
            with pytest.raises(KernelUnavailable):
                await remote.check(request())
        clock.advance(OPEN_S)
        kernel.error = None
        trying = asyncio.ensure_future(remote.check(request()))
        await asyncio.sleep(0)
        trying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trying
        assert (await remote.check(request())).lets_go


async def test_refused_job_ids_do_not_open_the_circuit_of_the_safety_kernel():
    """A job id that is none of ours would be refused by the server: three of them in a row open no circuit."""
    async with asking(PolicyKernel()) as remote:
        odd = request().model_copy(update={"topic": "not a topic"})
        for _ in range(FAILURES_MAX + 1):
            with pytest.raises(KernelRefuses, match="INVALID_ARGUMENT"):
                await remote.check(odd)
        assert (await remote.check(request())).lets_go


@pytest.mark.requirement("BUS-4")
async def test_job_that_crashes_the_kernel_does_not_block_other_evaluations():
    """Also when it is the one that tries whether the kernel is back."""
    clock, kernel = FakeClock(), Scripted()
    async with asking(kernel, clock) as remote:
        kernel.error = KernelUnavailable(detail="down")
        for _ in range(FAILURES_MAX):
            with pytest.raises(KernelUnavailable):
                await remote.check(request())
        clock.advance(OPEN_S)
        kernel.error, kernel.odd = None, "odd"
        for _ in range(FAILURES_MAX + 1):
            with pytest.raises(KernelRefuses, match="UNKNOWN"):
                await remote.check(request(job_id="odd"))
        assert (await remote.check(request(job_id="good"))).lets_go


@asynccontextmanager
async def answering(**methods: Any) -> AsyncGenerator[RemoteKernel]:
    """A server that knows these questions."""
    cap = cap_kernel.load_cap_modules()
    server = cap.grpc.aio.server()
    handlers = {name: cap.grpc.unary_unary_rpc_method_handler(answer) for name, answer in methods.items()}
    server.add_generic_rpc_handlers((cap.grpc.method_handlers_generic_handler(cap_kernel.SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    remote = RemoteKernel(kernel_address(f"grpc://127.0.0.1:{port}"), monotonic=FakeClock().monotonic, timeout_s=10)
    try:
        yield remote
    finally:
        await remote.close()
        await server.stop(None)


@pytest.mark.requirement("BUS-4")
async def test_kernel_without_methods_is_unavailable_and_one_that_fails_refuses_one_job():
    """Of the first, all jobs wait as they are; of the other, one that it breaks at has only itself wait."""

    async def breaks(_: bytes, __: Any) -> bytes:
        raise ValueError

    async with answering() as remote:
        for _ in range(FAILURES_MAX):
            with pytest.raises(KernelUnavailable, match="UNIMPLEMENTED") as away:
                await remote.check(request())
            assert not isinstance(away.value, KernelRefuses)
        with pytest.raises(KernelUnavailable, match="in a row"):
            await remote.check(request())
    async with answering(Check=breaks) as remote:
        for _ in range(FAILURES_MAX + 1):
            with pytest.raises(KernelRefuses, match="UNKNOWN"):
                await remote.check(request())


async def test_an_answer_that_is_no_message_is_no_answer():
    async def noise(_: bytes, __: Any) -> bytes:
        return b"\xff\xff\xff"

    async with answering(Check=noise) as remote:
        with pytest.raises(KernelUnavailable, match="no PolicyCheckResponse"):
            await remote.check(request())


# --- answers of other kernels --------------------------------------------------------------------------------------------

Response = Callable[[cap_kernel.CapModules], Any]


def judged(beside: dict[str, str] | None = None, **fields: Any) -> SafetyDecision:
    cap = cap_kernel.load_cap_modules()
    constraints = fields.pop("constraints", None)
    made = cap.safety.PolicyCheckResponse(**({"policy_snapshot": "v1", "rule_id": "r"} | fields))
    if constraints is not None:
        made.constraints.CopyFrom(cap.safety.PolicyConstraints(**constraints))
    return cap_kernel.read_policy_check_response(made, beside or {}, request(tenant_id="acme"))


@pytest.mark.requirement("BUS-4")
def test_answer_of_a_foreign_safety_kernel_is_never_read_as_more_than_it_says():
    assert judged(decision=1).kind is DecisionKind.ALLOW
    assert judged(decision=1, approval_required=True).kind is DecisionKind.REQUIRE_HUMAN
    assert judged(decision=5, approval_required=True).kind is DecisionKind.REQUIRE_HUMAN
    for number in (1, 3, 5):
        held = judged(decision=number, approval_required=True, constraints={"budgets": {"max_runtime_ms": 9}})
        assert (held.kind, held.constraints) == (DecisionKind.REQUIRE_HUMAN, {"max_runtime_ms": 9}), (
            "they hold when a person says yes"
        )
    limited = judged(decision=1, constraints={"budgets": {"max_runtime_ms": 9}})
    assert (limited.kind, limited.constraints) == (DecisionKind.ALLOW_WITH_CONSTRAINTS, {"max_runtime_ms": 9})
    assert judged(decision=4).delay_s == DELAY_S_DEFAULT
    for delay in ("-1", "nan", "inf", "soon", "0"):
        assert judged({cap_kernel.DELAY_METADATA: delay}, decision=4).delay_s == DELAY_S_DEFAULT
    beyonds: list[dict[str, Any]] = [
        {"decision": 6},
        {"decision": 7},
    ]
    for beyond in beyonds:
        found = judged(**beyond)
        assert (found.kind, found.redacted) == (DecisionKind.DENY, {})
    for number in (1, 5, 7):
        cleaned = judged(decision=number, redacted_context_ptr="redis://x")
        assert (cleaned.lets_go, cleaned.redacted) == (True, {"context_ptr": "redis://x"})
    by_reference = judged(decision=7, redacted_context_ref={"uri": "redis://x", "sha256": b"\x0f" * 32})
    assert by_reference.redacted["context_ref"]["sha256"] == "0f" * 32
    with pytest.raises(KernelRefuses, match="redacted context does not fit"):
        judged(decision=7, redacted_context_ref={"uri": "redis://x", "sha256": b"short"})
    useless: list[dict[str, Any]] = [{}, {"decision": 0}, {"decision": 99}, {"decision": 3, "policy_snapshot": ""}]
    for answer in useless:
        with pytest.raises(KernelRefuses):
            judged(**answer)


@pytest.mark.requirement("BUS-4", "D45")
def test_an_answer_about_another_job_or_tenant_is_none():
    asked = request(tenant_id="acme")
    assert judged({cap_kernel.HASH_METADATA: asked.hash}, decision=1).job_hash == asked.hash
    with pytest.raises(KernelRefuses, match="about a job with the hash"):
        judged({cap_kernel.HASH_METADATA: request().hash}, decision=1)
    with pytest.raises(KernelRefuses, match="about tenant 'beta'"):
        judged(decision=1, identity={"tenant_id": "beta"})


def test_constraints_that_nobody_could_keep_are_no_answer():
    with pytest.raises(KernelRefuses, match="constraints do not fit"):
        judged(decision=5, constraints={"budgets": {"max_runtime_ms": -4}})


# --- addresses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, says",
    [
        ("grpc://kernel.example:50051", "without encryption"),
        ("grpc://10.0.0.1:50051", "without encryption"),
        ("grpc://localhost", "write grpcs://host:port"),
        ("grpcs://user@host:1", "write grpcs://host:port"),
        ("grpcs://host:1/path", "write grpcs://host:port"),
        ("grpc://localhost:99999", "Port out of range"),
        ("http://localhost:1", "write grpcs://host:port"),
    ],
)
def test_invalid_address_of_a_safety_kernel_is_refused(text: str, says: str):
    with pytest.raises(OptionInvalid, match=says):
        kernel_address(text)


def test_kernel_addresses_are_parsed():
    assert kernel_address("grpcs://kernel.example:50051").target == "kernel.example:50051"
    assert kernel_address("grpc://[::1]:50051").target == "[::1]:50051"


async def test_a_kernel_that_others_can_reach_needs_a_certificate():
    with pytest.raises(OptionInvalid, match="needs a certificate"):
        async with serve_kernel(PolicyKernel(), ServingOptions(host="0.0.0.0")):
            pass


@pytest.mark.requirement("BUS-4")
async def test_a_kernel_is_believed_only_with_a_certificate_that_is_trusted(tmp_path: Path):
    made = make_certificates(tmp_path, "localhost", "127.0.0.1")
    options = ServingOptions(cert_file=made.chain, key_file=made.key)
    async with serve_kernel(PolicyKernel(), options) as port:
        address = kernel_address(f"grpcs://localhost:{port}")
        for trusted, believed in ((made.authority, True), (None, False), (tmp_path / "none.pem", False)):
            kernel = RemoteKernel(address, monotonic=FakeClock().monotonic, ca_file=trusted)
            if believed:
                assert (await kernel.check(request())).lets_go
            else:
                with pytest.raises(KernelUnavailable):
                    await kernel.check(request())
            await kernel.close()
