"""Settings are read once, and what does not exist is refused."""

from pathlib import Path

import pytest

from tests.deploy.cluster import SERVICES, service_variables
from trellis.app.settings import Settings, read_settings
from trellis.cli.bus_worker import checked_url
from trellis.engine.errors import OptionInvalid, SettingsInvalid
from trellis.worker.options import SWEEP_OF_WORKERS


def test_the_environment_wins_over_the_file(tmp_path: Path):
    (tmp_path / "trellis.toml").write_text('ledger = "sqlite:///file.db"\nconcurrency = 3\n')
    settings = read_settings({"TRELLIS_CONCURRENCY": "9", "HOME": "x"}, tmp_path)
    assert (settings.ledger, settings.concurrency) == ("sqlite:///file.db", 9)


def test_without_either_the_defaults_hold(tmp_path: Path):
    settings = read_settings({"TRELLIS_TEST_POSTGRES": "15", "TRELLIS_ORCHESTRATOR": "builtin"}, tmp_path)
    assert (settings.ledger, settings.concurrency, settings.hints) == ("sqlite:///trellis.db", 64, True)


@pytest.mark.requirement("D25")
def test_the_limits_that_the_documents_leave_open_have_their_defaults_and_are_settings(tmp_path: Path):
    names = ("runs", "runs_waiting", "body_bytes", "large_body_bytes")
    defaults = read_settings({}, tmp_path)
    assert [getattr(defaults, name) for name in names] == [10, 100, 1024 * 1024, 10 * 1024 * 1024]
    environment = {f"TRELLIS_{name.upper()}": str(2_000 + number) for number, name in enumerate(names[1:], 1)}
    chosen = read_settings({"TRELLIS_RUNS": "3", **environment}, tmp_path)
    assert [getattr(chosen, name) for name in names] == [3, 2_001, 2_002, 2_003]


@pytest.mark.parametrize(
    "environment,file,says",
    [
        pytest.param(
            {},
            "concurency = 3",
            "there is no setting concurency; did you mean concurrency?",
            marks=pytest.mark.requirement("D64"),
        ),
        ({"TRELLIS_CONCURRENCY": "many"}, "", "TRELLIS_CONCURRENCY"),
        ({"TRELLIS_ORCHESTRATOR": "temporal://host/x"}, "", "say builtin or temporal://host:port/namespace"),
        ({}, 'orchestrator = "cron"', "say builtin or temporal://host:port/namespace"),
        ({"TRELLIS_ORCHESTRATOR": "temporal://host:70000/x"}, "", "say builtin or temporal://host:port/namespace"),
        ({"TRELLIS_TEMPORAL_CERT_FILE": "c.pem"}, "", "CERT_FILE and TRELLIS_TEMPORAL_KEY_FILE belong together"),
        (
            {"TRELLIS_TEMPORAL_TLS": "false", "TRELLIS_TEMPORAL_API_KEY": "k"},
            "",
            "TRELLIS_TEMPORAL_API_KEY is used with TLS only",
        ),
        ({"TRELLIS_CANCEL_GRACE_S": "-1"}, "", "TRELLIS_CANCEL_GRACE_S"),
        ({"TRELLIS_RUNS_WAITING": "0"}, "", "TRELLIS_RUNS_WAITING"),
        ({"TRELLIS_BODY_BYTES": "100"}, "", "TRELLIS_BODY_BYTES"),
        (
            {"TRELLIS_BODY_BYTES": "4096"},
            "large_body_bytes = 2048",
            "TRELLIS_LARGE_BODY_BYTES is less than TRELLIS_BODY_BYTES",
        ),
        ({"TRELLIS_TOKENIZER": "no such"}, "", "TRELLIS_TOKENIZER"),
        ({"TRELLIS_CONCURRENCY": "0"}, "", "TRELLIS_CONCURRENCY"),
        ({}, "ledger = ", "trellis.toml"),
    ],
)
def test_contradictory_or_unknown_settings_are_refused(
    environment: dict[str, str], file: str, says: str, tmp_path: Path
):
    if file:
        (tmp_path / "trellis.toml").write_text(file)
    with pytest.raises(SettingsInvalid, match=says.replace("?", r"\?")):
        read_settings(environment, tmp_path)


@pytest.mark.parametrize("value", ["\x00 no such", "-1", "999999999999999999999", "nan", "", "x" * 5_000])
def test_a_wrong_value_of_any_setting_raises_our_own_error(value: str, tmp_path: Path):
    told = dict[str, str]()
    for name in Settings.model_fields:
        try:
            read_settings({f"TRELLIS_{name.upper()}": value}, tmp_path)
        except SettingsInvalid as refused:
            told[name] = str(refused)
    foreign = ("Input should", "should have", "should match", "Value error", "valid boolean", "validation error")
    assert {name: text for name, text in told.items() if any(one in text for one in foreign)} == {}
    assert {name: text for name, text in told.items() if "it is not valid" in text} == {}
    if value == "-1":
        assert told["log_level"] == "TRELLIS_LOG_LEVEL: it must be one of debug, info, warning, error, not '-1'"


def test_an_empty_setting_is_refused_whichever_it_is_and_wherever_it_is_written(tmp_path: Path):
    for name in Settings.model_fields:
        for empty in ("", " "):
            with pytest.raises(
                SettingsInvalid, match=f"^TRELLIS_{name.upper()}: it is set but empty; give it a value,"
            ):
                read_settings({f"TRELLIS_{name.upper()}": empty}, tmp_path)
    (tmp_path / "trellis.toml").write_text('gateway = ""\n')
    with pytest.raises(SettingsInvalid, match=r"trellis\.toml, gateway: it is set but empty"):
        read_settings({}, tmp_path)
    address = "http://127.0.0.1:8420"
    assert read_settings({"TRELLIS_GATEWAY": address}, tmp_path).gateway == address, "the environment wins"


@pytest.mark.requirement("D64")
def test_a_variable_that_names_no_setting_is_a_warning_that_names_the_nearest_one(tmp_path: Path):
    warnings: list[str] = []
    settings = read_settings({"TRELLIS_LEGDER": "x", "TRELLIS_CONCURRENCY": "9"}, tmp_path, warn=warnings.append)
    assert settings.model_dump() == Settings.model_validate({"concurrency": 9}).model_dump()
    assert warnings == ["there is no setting TRELLIS_LEGDER; did you mean TRELLIS_LEDGER? It is ignored."]
    read_settings({"TRELLIS_XYZZY": "x"}, tmp_path, warn=warnings.append)
    listed = "`trellis doctor --settings` lists those there are."
    assert warnings[1] == f"there is no setting TRELLIS_XYZZY; {listed} It is ignored.", "not the names of all settings"


@pytest.mark.requirement("D64")
def test_a_program_that_connects_reads_that_warning_in_its_log(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    read_settings({"TRELLIS_LEGDER": "x"}, tmp_path)
    assert "did you mean TRELLIS_LEDGER?" in caplog.text


@pytest.mark.requirement("D64")
@pytest.mark.parametrize("address", ["10.0.0.7", "fd00::7"])
@pytest.mark.parametrize("service", SERVICES)
def test_variables_injected_by_a_cluster_are_ignored(service: str, address: str, tmp_path: Path):
    injected = service_variables(service, address=address)
    warnings: list[str] = []
    settings = read_settings(injected, tmp_path, warn=warnings.append)
    assert settings.model_dump() == Settings.model_validate({}).model_dump()
    assert warnings == []


@pytest.mark.requirement("D64")
def test_a_port_that_an_operator_sets_counts_beside_what_a_cluster_injects(tmp_path: Path):
    assert read_settings({"TRELLIS_PORT": "9000", "TRELLIS_SERVICE_PORT": "8420"}, tmp_path).port == 9000


@pytest.mark.requirement("D8")
def test_a_workers_sweeps_open_the_operator_window_that_is_set(tmp_path: Path):
    settings = read_settings({"TRELLIS_OPERATOR_WINDOW_S": "7"}, tmp_path)
    options = settings.worker_options("w").sweep
    assert options is not None
    assert options.windows_s == {("queue-job", "FAILED"): 7.0}
    assert options.interval_s == SWEEP_OF_WORKERS.interval_s


@pytest.mark.parametrize(
    "bus, shown",
    [
        ("local", "local"),
        ("nats://a:4222,nats://b:4222", "nats://a:4222,nats://b:4222"),
        ("nats://me:hunter@a,tls://hunter@b", "nats://***@a,tls://***@b"),
        ("nats://me:hun/ter@a:4222", "nats://***@a:4222"),
    ],
)
def test_the_address_of_the_bus_is_shown_without_what_is_secret_in_it(bus: str, shown: str):
    assert Settings.model_validate({"bus": bus}).shown_bus == shown


@pytest.mark.parametrize("url", ["me:hunter@host:4222", "me:hunter@host,nats://b", "nats:/me:hunter@host"])
def test_an_address_that_is_none_is_refused_by_a_worker_without_its_password(url: str):
    with pytest.raises(OptionInvalid) as refused:
        checked_url(url)
    assert "hunter" not in str(refused.value)
