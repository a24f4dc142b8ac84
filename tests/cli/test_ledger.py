"""`trellis migrate`, `verify`, `sweep`, `doctor`, `version`, and ledgers that are not there, too old, read-only or wrong."""

import asyncio
import dataclasses
import errno
import json
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.cli.conftest import Terminal
from tests.servers.postgres import PostgresServer
from trellis.cli.ledgers import SWEPT_PHRASES
from trellis.engine.extras import program_version
from trellis.engine.jobs import (
    Actor,
    Advance,
    Claim,
    ClaimId,
    JobId,
    Move,
    NewJob,
    RequestId,
    Turn,
    TypeClaim,
)
from trellis.engine.records import Job, SweepReport
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role, Trigger
from trellis.runs.projector import NO_JOB, ProjectorAlert, raise_alert
from trellis.storage.objects.open import open_objects

NOBODY = 65534
READERS = (["jobs"], ["submit", "a"], ["queues"], ["dlq"], ["events"], ["verify"], ["workers"], ["sweep"])


def test_migrate_makes_the_folder_the_ledger_and_the_operators_key(local: Terminal, tmp_path: Path):
    data = tmp_path / "new" / "data"
    made = local.bare("migrate", "--data", str(data))
    assert made.code == 0
    files = [data, data / "trellis.db", data / "trellis.db.key"]
    assert made.out.splitlines() == [*(f"made {path}" for path in files), f"sqlite:///{data / 'trellis.db'} is ready"]
    assert stat.S_IMODE((data / "trellis.db.key").stat().st_mode) == 0o600
    before = (data / "trellis.db.key").read_text()
    again = local.bare("migrate", "--data", str(data), "--json")
    assert (again.code, again.record["made"]) == (0, [])
    assert (data / "trellis.db.key").read_text() == before
    assert local.bare("jobs", "--data", str(data)).code == 0


def test_the_ledger_is_named_by_option_folder_environment_or_file(
    local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def ledger_of(*arguments: str) -> str:
        records = local.bare("doctor", "--settings", "--json", *arguments).records
        (row,) = [record for record in records if record.get("setting") == "ledger"]
        return f"{row['value']} by {row['source']}"

    assert ledger_of() == "sqlite:///trellis.db by default"
    (tmp_path / "trellis.toml").write_text('ledger = "sqlite:///from-file.db"\n')
    assert ledger_of() == "sqlite:///from-file.db by trellis.toml"
    monkeypatch.setenv("TRELLIS_LEDGER", "sqlite:///from-env.db")
    assert ledger_of() == "sqlite:///from-env.db by TRELLIS_LEDGER"
    assert ledger_of("--data", "d") == "sqlite:///d/trellis.db by --data"
    assert ledger_of("--ledger", "sqlite:///x.db", "--data", "d") == "sqlite:///x.db by --ledger"
    assert local.bare("--ledger", local.url, "jobs").code == 0


@pytest.mark.parametrize("arguments", READERS, ids=lambda arguments: arguments[0])
def test_a_ledger_that_is_not_there_is_not_made_by_looking_or_submitting(local: Terminal, tmp_path: Path, arguments):
    answer = local(*arguments, ledger=f"sqlite:///{tmp_path / 'typo.db'}")
    assert answer.code == 1
    assert "no such file" in answer.err
    assert "schema version" not in answer.err
    assert f"trellis migrate --ledger sqlite:///{tmp_path / 'typo.db'}" in answer.err
    assert not (tmp_path / "typo.db").exists()


def test_an_error_of_a_setting_names_where_its_value_comes_from(
    local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, elsewhere = tmp_path / "trellis.toml", "postgresql://db.example.test/x"

    def refusal(*arguments: str) -> str:
        return local.bare(*arguments).err.splitlines()[0]

    assert refusal("init", "--ledger", elsewhere).startswith("error: --ledger: init makes")
    file.write_text(f'ledger = "{elsewhere}"\n')
    assert refusal("init").startswith(f"error: {file}, ledger: init makes")
    monkeypatch.setenv("TRELLIS_LEDGER", elsewhere)
    assert refusal("init").startswith("error: TRELLIS_LEDGER: init makes")
    monkeypatch.delenv("TRELLIS_LEDGER")
    file.write_text('token_file = "none"\n')
    assert refusal("jobs", "--ledger", local.url).startswith(f"error: {file}, token_file: none cannot be read")
    file.write_text('tls_cert_file = "c"\n')
    assert f"{file}, tls_cert_file: TRELLIS_TLS_CERT_FILE and TRELLIS_TLS_KEY_FILE belong together" in refusal("jobs")


@pytest.mark.parametrize(
    "address, says",
    [
        ("mysql://localhost/db", "Use sqlite:///path/to/file.db or postgresql://"),
        ("ledger.db", "Use sqlite:///path/to/file.db or postgresql://"),
        ("sqlite://", "in memory"),
        ("sqlite:///", "names no file"),
        ("sqlite://relative.db", "three slashes"),
        ("postgresql://localhost:port/db", "Port could not be cast"),
    ],
)
@pytest.mark.parametrize("arguments", [["jobs"], ["migrate"]], ids=["jobs", "migrate"])
def test_an_address_that_is_none_is_a_mistake_of_the_caller(local: Terminal, address, says, arguments):
    answer = local(*arguments, ledger=address)
    assert answer.code == 2
    assert says in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("password", ["ge@heim", "ge/heim", "ge#heim", "ge?heim", "ge[heim", "12/geheim"])
@pytest.mark.parametrize("arguments", [["jobs"], ["migrate"], ["doctor", "--json"], ["doctor", "--settings"]])
def test_a_password_that_must_be_encoded_is_named_as_the_mistake_and_not_printed(
    local: Terminal, password: str, arguments: list[str]
):
    answer = local(*arguments, ledger=f"postgresql://ada:{password}@127.0.0.1:1/db")
    assert "heim" not in answer.out + answer.err
    assert "Traceback" not in answer.err
    if "--settings" not in arguments:
        assert "write @ as %40, : as %3A, / as %2F" in answer.out + answer.err


def test_a_file_that_is_no_database_is_left_as_it_is(local: Terminal, tmp_path: Path):
    note = tmp_path / "note.txt"
    note.write_text("a shopping list, and not a short one either\n" * 40)
    answer = local("migrate", ledger=f"sqlite:///{note}")
    assert (answer.code, "not an SQLite database" in answer.err) == (2, True)
    assert note.read_text().startswith("a shopping list")
    assert not (tmp_path / "note.txt.key").exists()


def test_a_server_that_does_not_answer_is_named_without_its_password(local: Terminal):
    answer = local("jobs", ledger="postgresql://ada:geheim@127.0.0.1:1/db")
    assert answer.code == 1
    assert "does not answer" in answer.err
    told = local("doctor", "--settings", ledger="postgresql://ada:geheim@127.0.0.1:1/db")
    assert told.code == 1
    assert "postgresql://ada:***@127.0.0.1:1/db" in told.out
    assert "geheim" not in answer.err + answer.out + told.out + told.err


def test_an_unreachable_database_server_is_reported_with_host_and_port(local: Terminal):
    refused = local("jobs", ledger="postgresql://127.0.0.1:1/db")
    assert "nothing listens at 127.0.0.1, port 1" in refused.err
    unknown = local("jobs", ledger="postgresql://no-such-host.invalid/db")
    assert unknown.code == 1
    assert "there is no host named 'no-such-host.invalid'" in unknown.err
    assert "gaierror" not in unknown.err


def test_an_error_names_the_role_that_a_database_login_lacks(
    local: Terminal, postgres_server: PostgresServer, new_postgres_database: Callable[..., str], postgres_template: str
):
    """The ledger is current: `trellis migrate` would not help."""
    postgres_server.sql("DROP ROLE IF EXISTS stranger; CREATE ROLE stranger LOGIN")
    database = new_postgres_database(template=postgres_template).rpartition("/")[2]
    answer = local("jobs", ledger=postgres_server.url(database, "stranger"))
    assert answer.code == 1
    assert "permission denied" in answer.err
    assert "GRANT trellis_app TO the login" in answer.err
    assert "run `trellis migrate" not in answer.err
    assert "makes the operator's key" not in answer.err


def test_the_doctor_does_not_send_to_the_doctor(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    address = "postgresql://127.0.0.1:1/db"
    assert "trellis doctor" in local("jobs", ledger=address).err
    assert "trellis doctor" not in local("doctor", ledger=address).out
    monkeypatch.setenv("TRELLIS_CONCURENCY", "4")
    assert "trellis doctor" not in local.bare("doctor").out


def test_a_database_without_the_schema_says_how_to_make_it(
    local: Terminal, new_postgres_database: Callable[..., str], postgres_server: PostgresServer
):
    address = new_postgres_database()
    answer = local("jobs", ledger=address)
    assert answer.code == 1
    assert f"trellis migrate --ledger {address}" in answer.err
    assert local("migrate", ledger=address).code == 0
    assert local("jobs", ledger=address).code == 0


def test_software_that_is_too_old_is_refused(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trellis.ledgers.sqlite.connection.SQLITE_NEEDED", (99, 0, 0))
    answer = local("jobs")
    assert answer.code == 1
    assert "is too old: 99.0.0 or newer is needed" in answer.err
    assert "Install the newer version" in answer.err


@pytest.fixture
def readable_ledger(local: Terminal) -> Iterator[str]:
    """A ledger that this process may read and not write."""
    folder = Path(tempfile.mkdtemp(prefix="trellis-ro-"))
    address = f"sqlite:///{folder / 'ledger.db'}"
    assert local("migrate", ledger=address).code == 0
    (folder / "ledger.db").chmod(0o444)
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    yield address
    if root:
        os.seteuid(0)
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("arguments", [["submit", "a"], ["migrate"], ["jobs"]], ids=lambda arguments: arguments[0])
def test_a_ledger_that_may_only_be_read_is_refused(local: Terminal, readable_ledger: str, arguments):
    answer = local(*arguments, ledger=readable_ledger)
    assert answer.code == 1
    assert "The ledger cannot be written" in answer.err
    assert "owner and mode" in answer.err


def test_verify_is_clean_after_work_of_every_fate(trellis: Terminal, work):
    for type_ in ("refuse", "break"):
        trellis.submit(type_)
    trellis.submit("double", "1")
    work(trellis.url)
    answer = trellis("verify")
    assert (answer.code, answer.out) == (0, "3 jobs, 12 events: no violation\n")
    assert trellis("verify", "--json").record == {"jobs": 3, "events": 12, "violations": 0}


@pytest.mark.requirement("DJ-3")
def test_verify_finds_a_row_that_was_changed_behind_its_events(local: Terminal, work, tmp_path: Path):
    job_id = local.submit("double", "1")
    work(local.url)
    raw = apsw.Connection(str(tmp_path / "ledger.db"))
    for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        raw.execute(f'DROP TRIGGER "{name}"')
    raw.execute("UPDATE trellis_job SET attempt = attempt + 1")
    raw.close()
    answer = local("verify")
    assert answer.code == 1
    assert job_id in answer.out
    assert "1 job, 4 events: 1 violation\n" in answer.out
    *violations, summary = local("verify", "--json").records
    assert summary["violations"] == len(violations) > 0


def test_sweep_says_what_it_did(trellis: Terminal):
    assert trellis("sweep").out == "nothing was due\n"
    record = trellis("sweep", "--json").record
    assert set(record.values()) == {0}


def test_sweep_says_and_logs_that_leases_were_extended(
    local: Terminal, held, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    local.submit("double", "1")
    held(local.url)
    local("sweep")
    raw = apsw.Connection(str(tmp_path / "ledger.db"))
    for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        raw.execute(f'DROP TRIGGER "{name}"')
    raw.execute("UPDATE trellis_job SET until = until - 60000000")
    raw.execute("UPDATE trellis_meta SET value = value - 60000000 WHERE key = 'sweep_tick'")
    raw.close()
    assert local("sweep").out == "1 lease extended (nobody swept for a while)\n"
    assert "leases_extended jobs=1 reason='no sweep had run for more than half a lease'" in caplog.text


def test_every_count_of_a_sweep_has_words():
    counts = {field.name for field in dataclasses.fields(SweepReport)} - {"elected", "next_due_s"}
    assert set(SWEPT_PHRASES) == counts


@pytest.mark.requirement("D8")
def test_a_sweep_opens_the_operator_window_that_is_set(trellis: Terminal, monkeypatch: pytest.MonkeyPatch):
    job_id = asyncio.run(_out_of_attempts(trellis.url))
    monkeypatch.setenv("TRELLIS_OPERATOR_WINDOW_S", "7")
    assert trellis("sweep").code == 0
    job = asyncio.run(_job(trellis.url, job_id))
    assert job.state == "FAILED"
    assert job.due_at is not None
    assert (job.due_at - job.updated_at).total_seconds() == 7.0


async def _out_of_attempts(url: str) -> JobId:
    """A queue job whose only attempt is over: the next sweep fails it."""
    by, job_id, work = Actor(role=Role.ORCHESTRATOR, name="o"), JobId("tired"), TypeClaim(type="BRIEF")
    ledger = await open_ledger(url)
    try:
        await ledger.submit(by, [NewJob(job_id=job_id, type="BRIEF", lifecycle="queue-job", max_attempts=1)])
        await ledger.move(by, Move(job_id=job_id, target="QUEUED", request_id=RequestId("q")))
        claim = Claim(claim_id=ClaimId("c"), types=(work,), start=1, prefetch=0, lifecycle="queue-job")
        (held,) = (await ledger.turn(Turn(actor=by, claim=claim))).claimed
        step = Advance(lease=held.lease, source="CONTEXT_ASSEMBLY", trigger=Trigger.RETRY)
        await ledger.turn(Turn(actor=by, advances=(step,)))
    finally:
        await ledger.close()
    return job_id


async def _job(url: str, job_id: JobId) -> Job:
    ledger = await open_ledger(url)
    try:
        job = await ledger.job(job_id)
    finally:
        await ledger.close()
    assert job is not None
    return job


def test_doctor_says_what_is_wrong_and_what_to_do(trellis: Terminal, work):
    trellis.submit("refuse")
    work(trellis.url)
    trellis.submit("double", "1")
    answer = trellis("doctor")
    assert answer.code == 0, answer.out
    whole = trellis("doctor", "--settings").out
    assert "concurrency" not in answer.out, "settings are printed when they are asked for"
    assert whole.index("no living worker") < whole.index("Settings") < whole.index("concurrency")
    ranks = [line.split()[0] for line in answer.out.splitlines()[1:] if line[0] != " "]
    assert ranks == sorted(ranks, key=["error", "warning", "ok"].index), "what is wrong comes first"
    for text in (
        "Python 3.",
        "no living worker serves the type",
        "1 waits for a decision",
        "1 job is ready",
        "trellis dlq",
    ):
        assert text in answer.out
    findings = [record for record in trellis("doctor", "--json").records if "check" in record]
    assert {"python", "workers", "dead letters", "type double"} <= {finding["check"] for finding in findings}


def test_command_with_a_ledger_option_notes_that_the_gateway_is_not_used(
    local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRELLIS_GATEWAY", "http://127.0.0.1:1")
    monkeypatch.setenv("TRELLIS_LEDGER", f"sqlite:///{tmp_path / 'typo.db'}")
    answer = local.bare("followers")
    assert answer.code == 1
    assert "does not go through the gateway http://127.0.0.1:1" in answer.err


def test_doctor_reports_a_missing_ledger_without_making_it(local: Terminal, tmp_path: Path):
    answer = local("doctor", ledger=f"sqlite:///{tmp_path / 'typo.db'}")
    assert answer.code == 1
    assert "no such file" in answer.out
    assert not (tmp_path / "typo.db").exists()


def test_doctor_reports_settings_that_do_not_exist(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRELLIS_CONCURENCY", "4")
    answer = local("doctor")
    assert answer.code == 0
    assert "did you mean TRELLIS_CONCURRENCY" in answer.out
    other = local("jobs", "--json")
    assert (other.code, "TRELLIS_CONCURRENCY" in other.err) == (0, True)


def test_version_names_trellis_python_and_sqlite(local: Terminal):
    assert set(local("version", "--json").record) >= {"trellis", "python", "sqlite"}
    assert local.bare("--version").out.startswith("trellis ")


def test_a_traceback_is_shown_only_when_asked_for(local: Terminal):
    assert "Traceback" not in local("job", "show", "x").err
    assert "Traceback" in local("job", "show", "x", "--debug").err


async def _followed(url: str, name: str, *, reads: bool) -> None:
    ledger = await open_ledger(url)
    try:
        assert await ledger.subscribe(Actor(role=Role.PROJECTOR, name="up@there"), name, lease_s=0.0, reads=reads)
        await ledger.feed_end()
    finally:
        await ledger.close()


@pytest.mark.requirement("D61")
def test_operator_lists_subscribers_and_releases_an_abandoned_one(trellis: Terminal):
    assert "Nobody has followed yet" in trellis("followers").err + trellis("followers").out
    trellis.submit("double", "1")
    asyncio.run(_followed(trellis.url, "bus-publisher", reads=True))
    asyncio.run(_followed(trellis.url, "bus-collector", reads=False))
    elected, seen = trellis("followers", "--json").records
    assert (elected["name"], elected["waits"], elected["unread_since"]) == ("bus-collector", False, None)
    assert (seen["name"], seen["waits"], seen["actor"]) == ("bus-publisher", True, "up@there")
    assert seen["unread_since"] is not None
    shown = trellis("followers").out
    assert "bus-publisher" in shown
    assert "yes" in shown
    refused = trellis("followers", "leave-behind", "bus-publsher")
    assert (refused.code, "did you mean bus-publisher?" in refused.err) == (1, True)
    assert "nothing is kept for bus-publisher any more" in trellis("followers", "leave-behind", "bus-publisher").out
    assert not trellis("followers", "--json").records[1]["waits"]
    assert "nothing is kept for bus-collector anyway" in trellis("followers", "leave-behind", "bus-collector").out
    checks = {record["check"]: record for record in trellis("doctor", "--json").records if "check" in record}
    assert checks["followers"]["severity"] == "ok"


def _nlm_check(local: Terminal) -> dict[str, str]:
    return next((one for one in local("doctor", "--json").records if one.get("check") == "nlm backend"), {})


def test_doctor_says_whether_the_nlm_backend_answers(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    assert _nlm_check(local) == {}, "one in `trellis up` comes and goes with it"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("TRELLIS_NLM_BACKEND", f"http://127.0.0.1:{port}")
    told = _nlm_check(local)
    assert (told["severity"], "did not answer" in told["detail"]) == ("error", True)
    assert "trellis up --roles nlm" in told["remedy"]
    assert "TRELLIS_NLM_BACKEND" in told["remedy"]
    assert local("doctor").code == 1
    monkeypatch.setenv("TRELLIS_NLM_BACKEND", "http://ada:geheim@127.0.0.1:1")
    told = _nlm_check(local)
    assert (told["severity"], "geheim" in str(told)) == ("error", False)


@pytest.mark.parametrize(
    "answer,severity",
    [
        (b'200 OK\r\n\r\n{"status": "ok"}', "ok"),
        (b'200 OK\r\n\r\n{"status": "degraded"}', "warning"),
        (b"200 OK\r\n\r\nwelcome", "warning"),
        (b'404 Not Found\r\n\r\n[{"status": "ok"}]', "warning"),
        (b"302 Found\r\nlocation: http://127.0.0.1:1/\r\n\r\n", "warning"),
        (b"502 Bad Gateway\r\n\r\n", "error"),
        (b"200 OK\r\n\r\n" + b" " * 100_000, "error"),
        (b"", "error"),
    ],
    ids=["ok", "degraded", "another program", "not found", "redirect", "gateway", "too much", "nothing"],
)
def test_doctor_says_what_is_at_the_address_of_the_nlm_backend(
    local: Terminal, monkeypatch: pytest.MonkeyPatch, answer: bytes, severity: str
):
    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            assert connection.recv(65_536).startswith(b"GET /health HTTP/1.1\r\n")
            connection.sendall(b"HTTP/1.1 " + answer if answer else b"")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("TRELLIS_NLM_BACKEND", f"http://127.0.0.1:{listening.getsockname()[1]}/")
        serving = threading.Thread(target=serve, args=(listening,))
        serving.start()
        told = _nlm_check(local)
        serving.join()
    assert told["severity"] == severity, told


def test_doctor_looks_at_clock_disk_keys_and_provider(local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    local("migrate")
    key = tmp_path / "callback.key"
    key.write_text("0" * 64)
    key.chmod(0o644)
    monkeypatch.setenv("TRELLIS_CALLBACK_KEY_FILE", str(key))
    monkeypatch.setenv("TRELLIS_ALERT_KEY_FILE", str(tmp_path / "alert.key"))
    monkeypatch.setenv("TRELLIS_NLM", "openai")
    answer = local("doctor", "--json")
    found = {one["check"]: one for one in answer.records}
    assert (found["clock"]["severity"], answer.code) == ("ok", 1)
    assert "GiB free" in found["disk"]["detail"]
    assert found["key callback.key"]["severity"] == "error"
    assert f"others can read {key}" in found["key callback.key"]["detail"]
    assert "TRELLIS_CALLBACK_KEY_FILE" in found["key callback.key"]["remedy"]
    assert "TRELLIS_ALERT_KEY_FILE" in found["key alert.key"]["remedy"]
    assert (found["nlm provider"]["severity"], "TRELLIS_NLM" in found["nlm provider"]["remedy"]) == ("error", True)
    key.chmod(0o600)
    monkeypatch.delenv("TRELLIS_NLM")
    again = {one["check"]: one["severity"] for one in local("doctor", "--json").records}
    assert (again["key callback.key"], "nlm provider" in again) == ("ok", False)


def test_doctor_names_jobs_that_the_projector_set_aside(local: Terminal, tmp_path: Path):
    def published() -> dict[str, str]:
        records = local.bare("doctor", "--json", "--data", str(tmp_path)).records
        return next((record for record in records if record.get("check") == "published"), {})

    async def put(*keys: str) -> None:
        objects = await open_objects(f"file://{tmp_path / 'objects'}")
        for key in keys:
            await objects.put(key, b"{}")
        await objects.close()

    assert local.bare("migrate", "--data", str(tmp_path)).code == 0
    assert published() == {}
    assert not (tmp_path / "objects").exists()
    asyncio.run(put())
    assert published()["severity"] == "ok"
    asyncio.run(put("alerts/projector/run_1.json"))
    told = published()
    assert (told["severity"], "run_1" in told["detail"], "rebuild" in told["remedy"]) == ("warning", True, True)


def _check(local: Terminal, name: str) -> dict[str, str]:
    return next((one for one in local("doctor", "--json").records if one.get("check") == name), {})


def test_doctor_names_the_cure_of_a_key_that_migrate_does_not_change(
    local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    key, migrate = tmp_path / "ledger.db.key", f"`trellis migrate --ledger {local.url}`"
    monkeypatch.setenv("TRELLIS_TOKEN", local("token", "issue", "--role", "submitter").out.strip())
    key.chmod(0o444)
    for check in ("operator", "token"):
        assert _check(local, check)["remedy"] == f"chmod 600 {key}"
    key.chmod(0o600)
    with monkeypatch.context() as patch:
        opened = os.open

        def denied(path: Any, *arguments: Any, **options: Any) -> int:
            if Path(os.fsdecode(path)) == key:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(key))
            return opened(path, *arguments, **options)

        patch.setattr(os, "open", denied)  # root may open a file of mode 000
        unreadable = _check(local, "operator")
    assert "cannot be read: Permission denied" in unreadable["detail"]
    assert unreadable["remedy"] == f"chmod 600 {key}"
    if os.geteuid() == 0:
        os.chown(key, NOBODY, -1)
        assert _check(local, "operator")["remedy"] == f"chown 0 {key} && chmod 600 {key}, as root"
        os.chown(key, 0, -1)
    key.write_text("none")
    assert _check(local, "operator")["remedy"] == f"move {key} away and run {migrate}, which makes a new one"
    key.unlink()
    assert _check(local, "operator")["remedy"] == migrate


def test_doctor_does_not_call_a_store_dead_whose_agents_take_long_to_read(
    local: Terminal, monkeypatch: pytest.MonkeyPatch
):
    assert local("agents", "create", "reader", "--purpose", "p", "--model", "openai:mine").code == 0
    monkeypatch.setattr("trellis.cli.machine_checks.AGENTS_S", 0.0)
    records = {one["check"]: one for one in local("doctor", "--json").records if "check" in one}
    assert records["object store"]["severity"] == "ok"
    models = records["agents' models"]
    assert (models["severity"], "models not checked: the files" in models["detail"]) == ("warning", True), models


@pytest.mark.parametrize("answer,severity", [(b'200 OK\r\n\r\n{"data": []}', "ok"), (b"401 No\r\n\r\n{}", "error")])
def test_doctor_says_whether_the_server_of_agents_models_accepts_the_key(
    local: Terminal, monkeypatch: pytest.MonkeyPatch, answer: bytes, severity: str
):
    assert _check(local, "agents' models") == {}, "offline models need no server"
    assert local("agents", "create", "reader", "--purpose", "p", "--model", "openai:mine").code == 0
    unset = _check(local, "agents' models")
    assert (unset["severity"], "MODEL_BASE_URL is not set here" in unset["detail"]) == ("warning", True), unset
    assert "(reader)" in unset["detail"]
    heard: list[bytes] = []

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            heard.append(connection.recv(65_536))
            connection.sendall(b"HTTP/1.1 " + answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("TRELLIS_MODEL_BASE_URL", f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
        monkeypatch.setenv("TRELLIS_MODEL_KEY", "geheim")
        serving = threading.Thread(target=serve, args=(listening,))
        serving.start()
        told = _check(local, "agents' models")
        serving.join()
    assert told["severity"] == severity, told
    assert (heard[0].partition(b" HTTP")[0], b"Bearer geheim" in heard[0]) == (b"GET /v1/models", True), "no tokens"
    assert ("TRELLIS_MODEL_KEY" in told["remedy"], "geheim" in str(told)) == (severity == "error", False)
    assert "NLM provider" not in told["detail"], "agents' models are no NLM provider"


def test_doctor_does_not_blame_credentials_for_a_store_that_is_away(local: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRELLIS_OBJECTS", "s3://bucket/here?endpoint=http://127.0.0.1:1&region=us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (told,) = [one for one in local("doctor", "--json").records if one.get("check") == "object store"]
    assert told["severity"] == "error"
    assert told["remedy"].startswith("see that the store runs, and that TRELLIS_OBJECTS has its address")


def test_doctor_says_that_nothing_is_sealed_while_a_block_is_in_the_way(local: Terminal, tmp_path: Path):
    async def put() -> None:
        objects = await open_objects(f"file://{tmp_path / 'objects'}")
        await raise_alert(objects, ProjectorAlert(job_id=NO_JOB, version=0, key="audit/chain/000000000002.json"))
        await objects.close()

    asyncio.run(put())
    found = {one["check"]: one for one in local("doctor", "--json").records if "check" in one}
    assert found["published"]["detail"] == "no job is set aside"
    assert found["audit chain"]["severity"] == "warning"
    assert "trellis audit verify" in found["audit chain"]["remedy"]


def test_doctor_writes_reads_and_removes_an_object_and_names_a_store_that_cannot(local: Terminal, tmp_path: Path):
    objects = tmp_path / "objects"
    assert _check(local, "object store") == {}, "a missing store is not created"
    objects.mkdir(mode=0o700)
    told = _check(local, "object store")
    assert (told["severity"], "written, read and removed" in told["detail"]) == ("ok", True)
    assert [path for path in objects.glob("[!.]*/**/*") if path.is_file()] == [], "only the store's own locks stay"
    shutil.rmtree(objects / "trellis-probe", ignore_errors=True)
    (objects / "trellis-probe").write_text("a file where the folder of probes would be")
    told = _check(local, "object store")
    assert (told["severity"], "TRELLIS_OBJECTS" in told["remedy"]) == ("error", True)
    assert local("doctor").code == 1


def test_doctor_names_living_processes_of_another_version(trellis: Terminal):
    async def beat(name: str, info: bytes | None) -> None:
        ledger = await open_ledger(trellis.url)
        await ledger.heartbeat_worker(Actor(role=Role.WORKER, name=name), info)
        await ledger.close()

    asyncio.run(beat("old program", b'{"types": []}'))
    asyncio.run(beat("same", json.dumps({"version": program_version()}).encode()))
    asyncio.run(beat("gone", b'{"version": "0.0.2", "drained": true}'))
    assert _check(trellis, "versions")["severity"] == "ok"
    asyncio.run(beat("other", b'{"version": "0.0.1"}'))
    told = _check(trellis, "versions")
    assert (told["severity"], "one living process is not: other (0.0.1)" in told["detail"]) == ("warning", True)
    assert "SIGTERM" in told["remedy"]
