"""`trellis up` with a gateway: which roles run, who is let in, and how it stops."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx2
import pytest

from tests.cli.conftest import Terminal
from tests.net.listening import make_certificates
from tests.servers.ready_python import ready_python
from trellis.cli import main
from trellis.engine.jobs import Actor
from trellis.engine.subscription import PROJECTOR
from trellis.lifecycles import Role

PATIENCE_S = 60.0
LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


@dataclass
class Up:
    """The program as a process, up and reachable."""

    process: "subprocess.Popen[str]"
    said: str

    @property
    def address(self) -> str:
        found = re.search(r'(?:^|")gateway +([^\s"]+)', self.said, re.MULTILINE)
        assert found is not None, self.said
        return found[1]


@contextmanager
def up(folder: Path, *arguments: str, **environment: str) -> Iterator[Up]:
    process = subprocess.Popen(
        [ready_python(), "-m", "trellis", "up", *arguments],
        cwd=folder,
        env={**os.environ, "TRELLIS_PORT": "0", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        as_json = environment.get("TRELLIS_LOG_FORMAT") == "json"
        spoken = process.stderr if as_json else process.stdout
        assert spoken is not None
        said = ""
        while "Ctrl-C" not in said:
            line = spoken.readline()
            assert line, said + (process.stderr.read() if process.stderr else "")
            said += line
        yield Up(process, said)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.requirement("RUN-10")
def test_a_gateway_alone_answers_without_an_orchestrator_and_stops_on_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with up(tmp_path, "--roles", "gateway", "--demo") as running:
        assert "services  none in this process" in running.said
        assert main(["wait", "--data", str(tmp_path), "--for", "30s"]) == 0
        assert capsys.readouterr().out.strip() == running.address
        assert "token issue --role owner --ledger sqlite:///trellis.db" in running.said
        address, _, code = running.said.partition("console   ")[2].partition("\n")[0].partition("/#code=")
        assert address == running.address
        signed_in = httpx2.post(f"{address}/sign-in", json={"code": code})
        assert signed_in.status_code == 200, "the link in the terminal signs in"
        capsys.readouterr()
        assert main(["token", "issue", "--role", "owner", "--data", str(tmp_path)]) == 0
        headers = {"Authorization": f"Bearer {capsys.readouterr().out.strip()}"}
        with httpx2.Client(base_url=running.address, headers=headers) as client:
            begun = client.post("/agents/run", json={"agent_slug": "archivist-violin"})
            assert begun.status_code == 202
            assert client.get(begun.headers["location"]).json()["status"] in {"requested", "queued"}
            with client.stream("GET", "/events/stream") as events:
                assert events.status_code == 200
                running.process.send_signal(signal.SIGTERM)
                assert "the server stops" in "".join(events.iter_text())
        assert running.process.wait(PATIENCE_S) == 0
        assert running.process.stdout is not None
        assert running.process.stdout.read() == "stopped\n"
    assert main(["wait", "--data", str(tmp_path), "--for", "0s"]) == 1
    assert f"`trellis up --data {tmp_path}` starts one" in capsys.readouterr().err


def listening() -> set[str]:
    """The TCP addresses on which this process listens."""
    own = {str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in own}


@pytest.mark.requirement("RUN-10")
@pytest.mark.parametrize("role, doors", [("orchestrator", 0), ("gateway", 1)])
async def test_an_orchestrator_alone_listens_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], role: str, doors: int
):
    """Neither an owner nor a frontend can ask it anything; what they see of runs comes from the gateway."""
    from trellis.app.wiring import make_development_key
    from trellis.cli.invocation import Cli
    from trellis.cli.output import Output
    from trellis.cli.up_gateway import serve_all
    from trellis.cli.up_process import UpOptions
    from trellis.http_server.health import ProcessHealth
    from trellis.ledgers import open_ledger

    monkeypatch.chdir(tmp_path)
    cli = Cli(ledger=f"sqlite:///{tmp_path / 't.db'}", data=None, out=Output(as_json=False))
    await (await open_ledger(cli.url)).close()
    make_development_key(cli.url)
    ledger = await open_ledger(cli.url)
    await ledger.subscribe(Actor(role=Role.PROJECTOR, name="up@other:7"), PROJECTOR, lease_s=60.0)
    await ledger.close()
    before, stop, said = listening(), asyncio.Event(), ""
    choices = UpOptions(host=None, port=0, demo=False, app=None)
    serving = asyncio.create_task(serve_all(cli, frozenset({role}), stop, choices, ProcessHealth()))
    async with asyncio.timeout(PATIENCE_S):
        while "Ctrl-C" not in said:
            assert not serving.done(), serving
            await asyncio.sleep(0)
            said += "".join(capsys.readouterr())
    assert len(listening() - before) == doors
    assert "this ledger is served already, by up@other:7 (reported within the last 5 s): the processes share" in said
    stop.set()
    await serving


async def test_a_killed_process_of_this_machine_is_not_said_to_serve_the_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Its subscription has its name until the lease ends, also under the id of this process after a restart."""
    from trellis.cli.invocation import Cli
    from trellis.cli.output import Output
    from trellis.cli.up_process import print_others
    from trellis.ledgers import open_ledger

    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    cli = Cli(ledger=f"sqlite:///{tmp_path / 't.db'}", data=None, out=Output(as_json=False))
    ledger = await open_ledger(cli.url)
    try:
        for subscriber, pid in (("gone", ended.pid), ("this", os.getpid()), ("alive", os.getppid())):
            actor = Actor(role=Role.PROJECTOR, name=f"up@{socket.gethostname()}:{pid}")
            assert await ledger.subscribe(actor, subscriber, lease_s=60.0) is not None
        await print_others(cli, ledger)
    finally:
        await ledger.close()
    printed = "".join("".join(capsys.readouterr()).split())
    assert f"servedalready,byup@{socket.gethostname()}:{os.getppid()}(reported" in printed


def test_address_file_of_a_killed_process_is_ignored(local: Terminal, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        left = {"gateway": f"http://127.0.0.1:{taken.getsockname()[1]}", "pid": os.getpid(), "instance": "1"}
        (tmp_path / "ledger.db.up").write_text(json.dumps(left))
        answer = local("wait", "--for", "0s")
    assert (answer.code, left["gateway"] in answer.err) == (1, True)


class _Impostor(BaseHTTPRequestHandler):
    """Another program on the port that a gateway had: it says that it is ready, as some instance or as none."""

    instance: str | None = None

    def do_GET(self) -> None:
        self.send_response(200)
        if self.instance is not None:
            self.send_header("X-Trellis-Instance", self.instance)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class names it
        """Nothing."""


def test_foreign_program_on_the_gateway_port_is_not_mistaken_for_the_gateway(
    local: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended = subprocess.Popen(["true"])
    ended.wait()
    with HTTPServer(("127.0.0.1", 0), _Impostor) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        hint = {"gateway": f"http://127.0.0.1:{server.server_port}", "pid": os.getpid(), "instance": "mine"}
        for answers_as, pid, code in ((None, os.getpid(), 1), ("other", os.getpid(), 1), ("mine", ended.pid, 1)):
            monkeypatch.setattr(_Impostor, "instance", answers_as)
            (tmp_path / "ledger.db.up").write_text(json.dumps({**hint, "pid": pid}))
            assert local("wait", "--for", "0s").code == code, (answers_as, pid)
        (tmp_path / "ledger.db.up").write_text(json.dumps(hint))
        assert local("wait", "--for", "0s").code == 0  # it names itself rightly, and the process of the file is alive
        server.shutdown()


@pytest.mark.requirement("AUTH-5")
def test_with_tls_and_a_key_set_only_tokens_of_its_issuer_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    certificates = make_certificates(tmp_path, "localhost", "127.0.0.1")
    private, jwks = tmp_path / "private.jwk", tmp_path / "keys.json"
    assert main(["token", "key", "2026-02", "--out", str(private)]) == 0
    jwks.write_text(json.dumps({"keys": [json.loads(capsys.readouterr().out)]}))
    jwks.chmod(0o644)
    environment = {
        "TRELLIS_TOKEN_JWKS_FILE": str(jwks),
        "TRELLIS_TOKEN_ISSUER": "https://issuer.example.test",
        "TRELLIS_TLS_CERT_FILE": str(certificates.chain),
        "TRELLIS_TLS_KEY_FILE": str(certificates.key),
    }
    with up(tmp_path, "--roles", "gateway", "--host", "0.0.0.0", **environment) as running:
        assert "tokens    of https://issuer.example.test" in running.said
        port = running.address.rpartition(":")[2]
        tokens: list[str] = []
        signing = {**environment, "TRELLIS_TOKEN_SIGNING_KEY_FILE": str(private)}
        for chosen in (signing, {}):
            with monkeypatch.context() as patch:
                for name, value in chosen.items():
                    patch.setenv(name, value)
                assert main(["token", "issue", "--role", "owner", "--data", str(tmp_path)]) == 0
            tokens.append(capsys.readouterr().out.strip())
        with httpx2.Client(base_url=f"https://127.0.0.1:{port}", verify=certificates.client()) as client:
            answers = [client.get("/agents", headers={"Authorization": f"Bearer {token}"}) for token in tokens]
        assert [answer.status_code for answer in answers] == [200, 401]


@pytest.mark.requirement("AUTH-5")
def test_gateway_serves_no_other_host_without_a_configured_key(local: Terminal):
    answer = local("up", "--host", "0.0.0.0", "--port", "0")
    assert answer.code == 1
    assert "TRELLIS_TOKEN_JWKS_FILE" in answer.err
    assert "Ctrl-C" not in answer.out


def test_up_without_a_gateway_says_what_is_wrong_with_the_key(local: Terminal, tmp_path: Path):
    key = tmp_path / "ledger.db.key"
    key.chmod(0o444)
    with up(tmp_path, "--ledger", local.url) as running:
        assert f"gateway   none: others can read {key}; run: chmod 600 {key}\n" in running.said
        assert "set TRELLIS_TOKEN" not in running.said
    key.chmod(0o600)
    key.write_text("none")
    with up(tmp_path, "--ledger", local.url) as running:
        line = next(line for line in running.said.splitlines() if line.startswith("gateway"))
        assert f"{key} holds no key" in line
        assert f"to mend it: move {key} away and run `trellis migrate --ledger {local.url}`" in line


def test_a_port_in_use_is_one_clear_error(local: Terminal):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = local("up", "--port", str(port))
    assert answer.code == 1
    assert f"127.0.0.1:{port}: another process listens there" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("roles", ["", "gateways", "gateway,", "gateway,worker"])
def test_a_role_that_there_is_not_is_refused(local: Terminal, roles: str):
    answer = local("up", "--roles", roles)
    assert (answer.code, "choose of gateway, orchestrator" in answer.err) == (2, True)
    assert ("you mean gateway" in " ".join(answer.err.split())) == (roles == "gateways")


@pytest.mark.requirement("D33")
def test_every_service_belongs_to_a_role_that_can_be_chosen(tmp_path: Path):
    from trellis.app.instance import open_instance, role_of
    from trellis.app.settings import Settings
    from trellis.bus.services import BusRole
    from trellis.cli.up_process import ROLES, SAFETY_KERNEL

    async def names() -> set[str]:
        async with open_instance(Settings.model_validate({}), f"sqlite:///{tmp_path}/t.db") as instance:
            return {role_of(service.name) for service in instance.services()}

    beside = {"gateway", "nlm", SAFETY_KERNEL, *(role.value for role in BusRole)}
    assert asyncio.run(names()) | beside == set(ROLES)


@pytest.mark.requirement("D14")
@pytest.mark.parametrize("said, waits_s", [({}, 24 * 3600.0), ({"TRELLIS_UPSTREAM_WAIT_S": "7"}, 7.0)])
def test_a_run_waits_a_day_for_what_is_upstream_or_as_long_as_is_set(
    tmp_path: Path, said: dict[str, str], waits_s: float
):
    from trellis.app.instance import open_instance
    from trellis.app.settings import read_settings
    from trellis.runs.orchestrator import Orchestrator

    async def orchestrators() -> list[Orchestrator]:
        async with open_instance(read_settings(said, tmp_path), f"sqlite:///{tmp_path}/t.db") as instance:
            return [one for one in instance.services() if isinstance(one, Orchestrator)]

    (orchestrator,) = asyncio.run(orchestrators())
    assert orchestrator.driver.options.upstream_wait_s == waits_s


@pytest.mark.requirement("D61")
def test_retention_also_removes_what_is_kept_behind_pointers_as_late_as_is_set(tmp_path: Path):
    from trellis.app.instance import open_instance, role_of
    from trellis.app.settings import read_settings
    from trellis.bus.collector import BusCollector

    settings = read_settings({"TRELLIS_BUS_OBJECT_DAYS": "3"}, tmp_path)

    async def collectors() -> list[BusCollector]:
        async with open_instance(settings, f"sqlite:///{tmp_path}/t.db") as instance:
            return [one for one in instance.services() if isinstance(one, BusCollector)]

    (collector,) = asyncio.run(collectors())
    assert (role_of(collector.name), collector.options.keep_s) == ("retention", 3 * 86_400)
