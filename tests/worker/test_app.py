"""Registering job types: bounds, handlers, payload types."""

import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pydantic
import pytest
from typing_extensions import TypedDict

from trellis.engine.errors import (
    OptionInvalid,
    PayloadInvalid,
    PayloadTooLarge,
    ResultInvalid,
    UnknownJobType,
    UnknownLifecycle,
)
from trellis.engine.jobs import PAYLOAD_BYTES_MAX, Priority, ReasonCode
from trellis.engine.schedules import SCHEDULE_SCOPE, Misfire, Overlap, ScheduleSpec
from trellis.worker.app import App, HandlerKind
from trellis.worker.context import Context, Item
from trellis.worker.payloads import Undo, UnreadablePayload, codec_for, read_as
from trellis.worker.requests import fingerprint, new_job


@dataclass
class Document:
    title: str
    pages: int = 1


@dataclass
class Sized:
    pages: list[float] | None = None


class Model(pydantic.BaseModel):
    name: str


class Row(TypedDict):
    n: int


async def anything(ctx: Context, payload: Any) -> None: ...


def made(app: App | None, type_: str = "t", payload: Any = None, **settings: Any):
    return new_job(type_, payload, settings, app=app, new_id=lambda: "made-id")  # type: ignore[arg-type]


def test_no_caller_can_use_the_idempotency_scope_of_scheduled_jobs():
    with pytest.raises(OptionInvalid, match="Trellis' own"):
        made(None, idempotency_scope=SCHEDULE_SCOPE)


def test_a_handler_declares_schedules_of_its_type_in_either_order_of_the_decorators():
    app = App()

    @app.periodic("0 3 * * *", tz="Europe/Kyiv", payload={"title": "x"}, overlap="queue")
    @app.job("Report.daily")
    async def report(ctx: Context, doc: Document) -> None: ...

    @app.job("index", concurrency_key=lambda row: f"k{row['n']}")
    @app.periodic("*/5 * * * *", name="index-seven", payload={"n": 7}, misfire="all", jitter_s=30)
    async def index(ctx: Context, row: Row) -> None: ...

    outer = App()
    outer.include(app)
    outer.check()
    daily, seven = outer.schedules()
    assert daily == ScheduleSpec(
        name="report.daily",
        cron="0 3 * * *",
        tz="Europe/Kyiv",
        type="Report.daily",
        payload={"title": "x", "pages": 1},
        overlap=Overlap.QUEUE,
    )
    assert (seven.name, seven.concurrency_key, seven.misfire, seven.jitter_s) == (
        "index-seven",
        "k7",
        Misfire.ALL,
        30.0,
    )


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"cron": "often"}, "five fields"),
        ({"cron": "0 3 * * *", "tz": "Mars"}, "tz database"),
        ({"cron": "0 3 * * *", "misfire": "maybe"}, "choose one of skip, once, all"),
        ({"cron": "0 3 * * *", "name": "Not a name"}, "name"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_where_it_is_declared(options: dict[str, Any], problem: str):
    with pytest.raises(OptionInvalid, match=problem):
        App().periodic(**options)


def test_a_schedule_whose_handler_payload_or_name_does_not_fit_is_refused_before_a_worker_claims():
    for payload, registered, problem in ((None, False, "@app.job registers"), ({"no": 1}, True, "title")):
        app = App()
        app.job("other")(anything)

        async def handler(ctx: Context, doc: Document) -> None: ...

        app.periodic("0 3 * * *", payload=payload)(handler)
        if registered:
            app.job("t")(handler)
        with pytest.raises((OptionInvalid, PayloadInvalid), match=problem):
            app.check()
    app = App()
    app.periodic("0 3 * * *")(app.periodic("0 4 * * *")(app.job("t")(anything)))
    with pytest.raises(OptionInvalid, match="its own name"):
        app.check()


@pytest.mark.requirement("DJ-6", "D4")
@pytest.mark.parametrize(
    "out_of_bounds",
    [
        {"lease_s": 29.9},
        {"lease_s": 120.1},
        {"lease_s": 120, "heartbeat_s": 9.9},
        {"lease_s": 120, "heartbeat_s": 30.1},
        {"lease_s": 60, "heartbeat_s": 21},
        {"lease_s": float("nan")},
        {"max_attempts": 0},
        {"max_attempts": 1_001},
        {"timeout_s": -1},
        {"rate": 0},
        {"batch": 501},
        {"concurrency_limit": 0},
        {"priority": "urgent"},
        {"on_exhausted": "explode"},
        {"leese_s": 60},
    ],
)
def test_options_out_of_bounds_are_refused(out_of_bounds: dict[str, Any]):
    with pytest.raises(OptionInvalid):
        App().job("t", **out_of_bounds)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"rate_per_key": 2, "burst_per_key": 1.5}, "burst_per_key is 1.5: it must be a whole number from 1 to 10000."),
        ({"rate": "2/s"}, "rate is '2/s': it must be a number of claims a second; 10 a minute is 10/60."),
        ({"rate": True}, "rate is True: it must be a number of claims a second; 10 a minute is 10/60."),
        ({"rate_per_key": "2"}, "rate_per_key is '2': it must be a number of claims a second; 10 a minute is 10/60."),
        ({"lease_s": "60"}, "lease_s is '60': it must be a number of seconds."),
        ({"debounce_s": "2s", "unique": "args"}, "debounce_s is '2s': it must be a number of seconds."),
        ({"window_s": "1h", "unique": "args"}, "window_s is '1h': it must be a number of seconds."),
        ({"deadline_s": "10"}, "deadline_s is '10': it must be a number of seconds."),
        ({"max_attempts": "3"}, "max_attempts is '3': it must be a whole number from 1 to 1000."),
        ({"dlq_on_fail": "no"}, "dlq_on_fail is 'no': it must be True or False."),
        ({"retry": 3}, "retry is 3: it must be a RetryPolicy; max_attempts says how often a job is tried."),
        ({"compensation": 3}, "compensation is 3: it must be the name of a job type."),
        ({"priority": 5}, "priority is 5: choose one of critical, interactive, batch."),
        ({"unique": True}, "unique is True: it must be a text: 'args' for the payload, or a key."),
        (
            {"concurrency_key": "customer"},
            "concurrency_key is 'customer': it must be a function of the payload, such as lambda order: order.customer.",
        ),
        (
            {"unique": "args", "debounce_s": 1, "while_": "unfinished"},
            "while_ is 'unfinished': only a waiting job is replaced, never a running one: leave it out, or say waiting.",
        ),
        (
            {"unique": "args", "debounce_s": 1, "on_conflict": "raise"},
            "on_conflict is 'raise': leave it out: a debounced job replaces the waiting one.",
        ),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_by_name_at_the_declaration(settings: dict[str, Any], says: str):
    with pytest.raises(OptionInvalid) as refused:
        App().job("t", **settings)(anything)
    assert str(refused.value) == says


@pytest.mark.parametrize(
    "option, says",
    [
        ("leese_s", r"there is no such option \(did you mean lease_s\?\)"),
        ("concurrency_kee", r"did you mean concurrency_key\?"),
        ("zzz", "choose of lease_s, heartbeat_s"),
    ],
)
def test_an_option_that_does_not_exist_is_answered_with_the_nearest(option: str, says: str):
    with pytest.raises(OptionInvalid, match=says):
        App().job("t", **{option: 60})  # type: ignore[arg-type]


@pytest.mark.requirement("DJ-6", "D4")
def test_the_bounds_themselves_are_accepted_and_a_test_may_go_below_them():
    App().job("t", lease_s=30, heartbeat_s=10)
    App().job("t", lease_s=120, heartbeat_s=30)
    App(testing=True).job("t", lease_s=0.3, heartbeat_s=0.1)
    for lease_s, heartbeat_s in ((29.9, 9.9), (120.1, 30)):
        with pytest.raises(OptionInvalid):
            App().job("t", lease_s=lease_s, heartbeat_s=heartbeat_s)


def test_an_application_with_real_bounds_refuses_to_include_test_leases():
    short = App(testing=True)
    short.job("t", lease_s=0.3, heartbeat_s=0.1)(anything)
    with pytest.raises(OptionInvalid):
        App().include(short)


def test_include_takes_over_every_type_and_a_type_has_one_handler():
    one, other = App(), App()
    one.job("a")(anything)
    other.job("b")(anything)
    one.include(other)
    assert [spec.type for spec in one] == ["a", "b"]
    with pytest.raises(OptionInvalid, match="one handler"):
        one.include(other)


def test_the_kind_of_a_handler_follows_from_its_signature():
    app = App()

    @app.job("async")
    async def _(ctx: Context) -> None: ...

    @app.job("sync")
    def _(ctx: Context, payload: int) -> None: ...

    @app.job("batch", batch=10)
    async def _(items: list[Item[Document]]) -> None: ...

    kinds = {spec.type: spec.kind for spec in app}
    assert kinds == {"async": HandlerKind.ASYNC, "sync": HandlerKind.SYNC, "batch": HandlerKind.BATCH}


def test_a_handler_that_cannot_be_called_is_refused():
    def batch(items: list[Any]) -> None: ...

    async def three(ctx: Any, payload: Any, more: Any) -> None: ...

    with pytest.raises(OptionInvalid, match="batch handler"):
        App().job("t", batch=2)(batch)
    with pytest.raises(OptionInvalid, match="ctx, payload"):
        App().job("t")(three)


def test_a_handler_that_is_no_function_or_yields_is_refused():
    async def add(base: int, ctx: Context, number: int) -> int:
        return base + number

    async def rows(ctx: Context, number: int) -> AsyncIterator[int]:
        yield number

    app = App()
    app.job("partial")(partial(add, 3))
    with pytest.raises(OptionInvalid, match="write it as a function"):
        app.check()
    with pytest.raises(OptionInvalid, match="has a `yield`"):
        App().job("rows")(rows)


def test_a_decorator_without_parentheses_is_refused_instead_of_losing_the_handler():
    with pytest.raises(OptionInvalid, match=r'^handler is \'anything\': write @app\.job\("anything"\)'):
        App().job(anything)  # type: ignore[arg-type]


@pytest.mark.parametrize("annotation", [int, dict[str, Any], "list[int]", Document, Model])
def test_a_handler_without_a_context_is_refused_where_its_annotation_shows_it(annotation: Any):
    def add(x: Any) -> None: ...

    add.__annotations__["x"] = annotation
    with pytest.raises(OptionInvalid, match=r"its first parameter is the context: write \(ctx, x: "):
        App().job("add")(add)


@pytest.mark.parametrize("annotation", [Any, Context, "Context", "int_like"])
def test_a_first_parameter_that_may_be_a_context_is_accepted(annotation: Any):
    def add(first: Any) -> None: ...

    add.__annotations__["first"] = annotation
    App().job("add")(add)


def test_a_handler_of_two_values_is_told_to_take_one_payload():
    async def add(ctx: Context, x: int, y: int) -> None: ...

    app = App()
    app.job("add")(add)
    with pytest.raises(OptionInvalid, match="takes one payload: put x and y into a dataclass"):
        app.check()


def test_a_worker_checks_every_reference_before_it_claims():
    app = App()
    app.job("t", compensation="undo.t")(anything)
    with pytest.raises(UnknownJobType, match=r"undo\.t"):
        app.check()
    with pytest.raises(OptionInvalid, match="at least one"):
        App().check()


@pytest.mark.parametrize(
    "kind,given,body,read",
    [
        (Document, Document("a", 2), b'{"title":"a","pages":2}', Document("a", 2)),
        (Document, {"title": "a"}, b'{"title":"a","pages":1}', Document("a", 1)),
        (Model, Model(name="x"), b'{"name":"x"}', Model(name="x")),
        (Row, {"n": 1}, b'{"n":1}', {"n": 1}),
        (int, 7, b"7", 7),
        (str | None, None, b"null", None),
        (list[int], [1, 2], b"[1,2]", [1, 2]),
        (
            Undo[Document, int],
            {"job_id": "j", "payload": {"title": "a"}, "result": 3},
            b'{"job_id":"j","payload":{"title":"a","pages":1},"result":3}',
            Undo(job_id="j", payload=Document("a"), result=3),  # type: ignore[arg-type]
        ),
    ],
)
def test_payloads_and_results_follow_the_annotations(kind: Any, given: Any, body: bytes, read: Any):
    app = App()

    async def handler(ctx, payload) -> None: ...

    handler.__annotations__["payload"] = kind
    app.job("t")(handler)
    assert made(app, payload=given).payload == body
    assert app.spec("t").codec.read_payload(body) == read


def test_a_payload_that_does_not_fit_is_refused_before_anything_is_written():
    app = App()

    @app.job("t")
    async def _(ctx: Context, doc: Document) -> None: ...

    @app.job("none")
    async def _(ctx: Context) -> None: ...

    with pytest.raises(PayloadInvalid, match="title"):
        made(app, payload={"pages": 1})
    with pytest.raises(PayloadInvalid, match="takes no payload"):
        made(app, "none", payload=1)


class Fancy(pydantic.BaseModel):
    """A field that JSON from elsewhere knows by another name."""

    foo: int = pydantic.Field(alias="fooBar")


@pytest.mark.parametrize("given", [Fancy(fooBar=3), {"fooBar": 3}])
def test_a_model_with_aliases_comes_to_the_handler_however_its_fields_are_named(given: Any):
    codec = codec_of(Fancy)
    value, body = codec.accept(given)
    assert value == Fancy(fooBar=3)
    for stored in (body, b'{"foo":3}', b'{"fooBar":3}'):
        assert codec.read_payload(stored) == Fancy(fooBar=3)
        assert pydantic.TypeAdapter(Fancy).dump_python(read_as(pydantic.TypeAdapter(Fancy), stored, "t")) == {"foo": 3}


class Login(pydantic.BaseModel):
    user: str
    password: pydantic.SecretStr


class Hidden(pydantic.BaseModel):
    needed: int = pydantic.Field(exclude=True)


@pytest.mark.parametrize(
    "kind, payload, says",
    [
        (float, float("nan"), "payload: NaN and infinity are no JSON numbers"),
        (Sized, Sized(pages=[1.0, float("inf")]), r"pages\.1: NaN and infinity"),
        (Any, {"a": None, "b": {"c": float("nan")}}, r"b\.c: NaN and infinity"),
        (dict[tuple[int, int], str], {(1, 2): "x"}, "its worker could not read what would be stored"),
        (Hidden, Hidden(needed=1), "its worker could not read what would be stored .needed: Field required"),
        (Login, {"user": "ada", "password": "sesame"}, "a SecretStr would be stored as asterisks"),
    ],
)
def test_a_payload_that_its_worker_would_not_get_back_is_refused_at_submit(kind: Any, payload: Any, says: str):
    with pytest.raises(PayloadInvalid, match=says):
        codec_of(kind).accept(payload)


@pytest.mark.parametrize("payload, place", [(float("nan"), "payload"), ({"a": [1, float("-inf")]}, r"a\.1")])
def test_a_number_that_json_does_not_have_is_refused_without_an_application(payload: Any, place: str):
    with pytest.raises(PayloadInvalid, match=f"does not fit: {place}: NaN and infinity are no JSON numbers"):
        made(None, payload=payload)
    assert made(None, payload="NaN and Infinity").payload == b'"NaN and Infinity"'


def test_a_secret_is_refused_without_an_application():
    with pytest.raises(PayloadInvalid, match=r"a\.0: a SecretStr would be stored as asterisks"):
        made(None, payload={"a": [pydantic.SecretStr("sesame")]})


class Named(pydantic.BaseModel):
    """Writes NaN as text, and reads it so."""

    model_config = pydantic.ConfigDict(ser_json_inf_nan="strings")
    amount: float
    note: str | None = None


class Lenient(pydantic.BaseModel):
    """Has null in JSON for what it knows as NaN."""

    amount: float
    note: str | None = None

    @pydantic.field_serializer("amount", when_used="json")
    def written(self, amount: float) -> float | None:
        return amount if math.isfinite(amount) else None


@pytest.mark.parametrize(
    "kind, payload",
    [
        (str, "*" * 10),
        (dict[str, float | None], {"null": None, "b": 1.5}),
        (Sized, Sized()),
        (Named, Named(amount=math.inf)),
        (Named, Named(amount=math.inf, note="n")),
    ],
)
def test_a_payload_that_only_looks_like_one_that_changes_is_accepted(kind: Any, payload: Any):
    codec = codec_of(kind)
    value, body = codec.accept(payload)
    assert codec.read_payload(body) == value == payload


@pytest.mark.parametrize(
    "kind, payload, body",
    [
        (Any, {"shown": "*" * 10, "pair": (1, 2)}, b'{"shown":"**********","pair":[1,2]}'),
        (Lenient, Lenient(amount=1.5), b'{"amount":1.5,"note":null}'),
    ],
)
def test_a_payload_that_json_writes_otherwise_is_accepted(kind: Any, payload: Any, body: bytes):
    assert codec_of(kind).accept(payload)[1] == body


def test_a_number_that_a_type_writes_as_null_itself_is_not_called_a_lost_one():
    codec = codec_of(Lenient)
    codec.accept(Lenient(amount=1.5))
    assert codec.accept(Lenient(amount=math.nan))[1] == b'{"amount":null,"note":null}'


class Crossed(pydantic.BaseModel):
    """An alias is the name of another field."""

    width: int = pydantic.Field(alias="size")
    size: int = pydantic.Field(0, alias="bytes")


def test_a_model_whose_alias_names_another_field_is_read_as_it_was_stored():
    codec, given = codec_of(Crossed), Crossed(size=5, bytes=6)
    assert codec.read_payload(codec.accept(given)[1]) == given
    assert codec.read_payload(b'{"size":5,"bytes":6}') == given


class Shelf(pydantic.BaseModel):
    documents: list[Document] = []


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    name: str = ""


class Careless(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore")
    inner: Open = Open()


class Around(pydantic.BaseModel):
    inner: Open = Open()


def codec_of(kind: Any):
    app = App()

    async def handler(ctx, payload) -> None: ...

    handler.__annotations__["payload"] = kind
    app.job("t")(handler)
    return app.spec("t").codec


@pytest.mark.parametrize(
    "kind, payload, says",
    [
        (Document, {"title": "a", "pagse": 2}, r"pagse: there is no such field \(did you mean pages\?\)"),
        (Model, {"name": "a", "q": 1}, "q: there is no such field"),
        (Row, {"n": 1, "m": 2}, "m: there is no such field"),
        (Shelf, {"documents": [{"title": "a", "tilte": "b"}]}, r"documents\.0\.tilte: .*did you mean title"),
        (Document | None, {"title": "a", "pagse": 2}, "no such field"),
    ],
)
def test_an_unknown_payload_field_is_refused_at_submit_and_ignored_by_a_worker(kind: Any, payload: Any, says: str):
    codec = codec_of(kind)
    with pytest.raises(PayloadInvalid, match=says):
        codec.accept(payload)
    assert not isinstance(codec.read_payload(json.dumps(payload).encode()), UnreadablePayload)


@pytest.mark.parametrize(
    "kind, payload, body",
    [
        (Open, {"more": 1}, b'{"name":"","more":1}'),
        (Around, {"inner": {"more": 1}}, b'{"inner":{"name":"","more":1}}'),
        (Careless, {"more": 1}, b'{"inner":{"name":""}}'),
        (
            Undo[Document, int],
            {"job_id": "j", "payload": {"title": "a", "more": 1}, "result": 1},
            b'{"job_id":"j","payload":{"title":"a","pages":1},"result":1}',
        ),
        (dict[str, int], {"any": 1}, b'{"any":1}'),
    ],
)
def test_a_type_may_say_itself_what_becomes_of_other_fields(kind: Any, payload: Any, body: bytes):
    assert codec_of(kind).accept(payload)[1] == body


@pytest.mark.requirement("DJ-18")
def test_invalid_stored_payload_is_reported_with_the_reason():
    app = App()

    @app.job("t")
    async def _(ctx: Context, doc: Document) -> None: ...

    codec = app.spec("t").codec
    broken, unfit = codec.read_payload(b"{"), codec.read_payload(b"{}")
    assert isinstance(broken, UnreadablePayload)
    assert isinstance(unfit, UnreadablePayload)
    assert (broken.reason_code, unfit.reason_code) == (ReasonCode.PARSE_ERROR, ReasonCode.VALIDATION_FAILED)


def test_payload_limit_is_one_mebibyte():
    fits = "x" * (PAYLOAD_BYTES_MAX - 2)
    assert len(made(None, payload=fits).payload) == PAYLOAD_BYTES_MAX
    with pytest.raises(PayloadTooLarge, match="1048577"):
        made(None, payload=fits + "x")


@pytest.mark.parametrize(
    "settings",
    [
        {"delay_s": -1},
        {"delay_s": float("inf")},
        {"deadline_s": -0.1},
        {"run_at": datetime(2030, 1, 1)},  # noqa: DTZ001
        {"run_at": datetime.fromisoformat("9999-12-31T23:59:59-12:00")},
        {"run_at": datetime.fromisoformat("0001-01-01T00:00:00+12:00")},
        {"run_at": datetime.fromisoformat("3000-01-01T00:00:00+00:00")},
        {"job_id": "has space"},
        {"idempotency_key": ""},
        {"max_attempts": 0},
        {"concurrency_limit": 0},
        {"priority": "soon"},
    ],
)
def test_a_submit_that_cannot_be_meant_is_refused(settings: dict[str, Any]):
    with pytest.raises(OptionInvalid):
        made(None, **settings)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"delay_s": "3"}, "delay_s is '3': it must be a number of seconds."),
        ({"deadline_s": "10"}, "deadline_s is '10': it must be a number of seconds."),
        ({"window_s": "1h"}, "window_s is '1h': it must be a number of seconds."),
        ({"max_attempts": "3"}, "max_attempts is '3': it must be a whole number from 1 to 1000."),
        (
            {"run_at": "2026-12-01"},
            "run_at is '2026-12-01': it must be a datetime with a time zone, such as datetime(2026, 12, 1, tzinfo=UTC).",
        ),
        ({"priority": 5}, "priority is 5: choose one of critical, interactive, batch."),
        ({"unique": 5}, "unique is 5: it must be a text: 'args' for the payload, or a key."),
        ({"concurrency_key": 3}, "concurrency_key is 3: it must be a text."),
        ({"concurrency_limit": 1.5}, "concurrency_limit is 1.5: it must be a whole number from 1 to 10000."),
        ({"idempotency_key": 7}, "idempotency_key is 7: it must be a text."),
        ({"idempotency_scope": 7}, "idempotency_scope is 7: it must be a text."),
        ({"job_id": 7}, "job_id is 7: it must be a text."),
        ({"lifecycle": ["leased-job"]}, "lifecycle is ['leased-job']: it must be a text."),
        ({"type_": 7}, "job type is 7: it must be a text."),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused_by_name(settings: dict[str, Any], says: str):
    with pytest.raises(OptionInvalid) as refused:
        made(None, **settings)
    assert str(refused.value) == says


def test_a_wished_moment_is_kept_in_utc():
    at = made(None, run_at=datetime.fromisoformat("2030-01-01T00:00:00-12:00")).run_at
    assert at is not None
    assert at.isoformat() == "2030-01-01T12:00:00+00:00"
    assert made(None, run_at=datetime.min.replace(tzinfo=UTC)).run_at == datetime.min.replace(tzinfo=UTC)


def test_unknown_types_lifecycles_and_names_are_refused():
    app = App()
    app.job("known.type")(anything)
    with pytest.raises(UnknownJobType, match=r"known\.type"):
        made(app, "unknown.type")
    assert made(None, "unknown.type").type == "unknown.type"
    with pytest.raises(OptionInvalid):
        made(None, "no spaces")
    with pytest.raises(UnknownLifecycle, match="leased-job"):
        made(None, lifecycle="other")


@pytest.mark.requirement("DJ-5")
def test_the_same_request_has_the_same_fingerprint_whatever_the_order_of_its_keys():
    first = made(None, payload={"a": 1, "b": 2}, idempotency_key="k")
    same = made(None, payload={"b": 2, "a": 1}, idempotency_key="k", correlation_id="other")
    other = made(None, payload={"a": 1, "b": 3}, idempotency_key="k")
    later = made(None, payload={"a": 1, "b": 2}, idempotency_key="k", delay_s=5)
    assert first.fingerprint == same.fingerprint == fingerprint(first)
    assert len({first.fingerprint, other.fingerprint, later.fingerprint}) == 3


def test_the_type_decides_what_the_caller_leaves_open():
    app = App()

    @app.job("t", priority="interactive", max_attempts=2, deadline_s=30, concurrency_key=lambda doc: doc.title)
    async def _(ctx: Context, doc: Document) -> None: ...

    job = made(app, payload=Document("a"))
    assert (job.priority, job.max_attempts, job.deadline_s) == (Priority.INTERACTIVE, 2, 30)
    assert job.concurrency_key == "user:a"
    assert made(app, payload=Document("a"), priority="critical").priority is Priority.CRITICAL


def test_a_misspelt_required_field_is_named_beside_the_missing_one():
    with pytest.raises(PayloadInvalid, match=r"title: .*; titel: there is no such field \(did you mean title\?\)$"):
        codec_of(Document).accept({"titel": "a"})


def test_a_result_that_does_not_fit_names_the_types_and_not_the_library():
    async def handler(ctx: Context) -> Document: ...

    with pytest.raises(ResultInvalid, match=r"^The result of 't' does not fit: pages: expected int, got str$"):
        codec_for("t", handler, batch=False).result_bytes(Document(title="a", pages="many"))  # type: ignore[arg-type]
