"""`trellis health`: asks a process of this machine whether it is ready, as supervisors without HTTP probes need it."""

import http.client
import json
from typing import Annotated, Any, cast

import typer

from trellis.cli.commands import command
from trellis.cli.invocation import Cli
from trellis.engine.errors import OptionInvalid, SettingsInvalid, TrellisError

ANSWER_S = 2.0
"""How long the process may take to answer. It answers in under a second, whatever is down behind it."""
ANSWER_BYTES_MAX = 64 * 1024
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here; a listener there is asked on loopback


class ProcessNotReady(TrellisError):
    """The process at {address} is not ready: {reason}."""

    code = "UPSTREAM_UNAVAILABLE"


def add_to(program: typer.Typer) -> None:
    command(program, "health", section="Workers")(health)


def health(
    cli: Cli,
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST:PORT", help="Where it listens; default: TRELLIS_HEALTH_ADDRESS."),
    ] = None,
    live: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--live", help="Only ask whether it runs, not whether it is ready.")
    ] = False,
) -> None:
    """Ask a process of this machine whether it is ready; exit 1 if not.

    For supervisors that run a command instead of sending a request, such as the health check of a container. It needs no ledger and no token.
    """
    host, port = _place(cli, address)
    path = "/system/live" if live else "/system/ready"
    shown = f"{f'[{host}]' if ':' in host else host}:{port}"
    status, answer = _asked(host, port, path, shown)
    if status != http.HTTPStatus.OK:
        checks: dict[str, Any] = answer.get("checks") or {}
        down = [f"{name} is {result}" for name, result in checks.items() if result != "ok"]
        raise ProcessNotReady(address=shown, reason=", ".join(down) or f"it is {answer.get('status', status)}")
    cli.out.answer({"address": shown, **answer}, f"{shown} is {'alive' if live else 'ready'}")


def _place(cli: Cli, address: str | None) -> tuple[str, int]:
    """The host and port to ask; a process that listens on every address is asked on the loopback one."""
    given = cli.settings.health_address if address is None else address
    if given is None:
        detail = "it is not set, so no process here has a health address; set it for the process and for this command"
        raise SettingsInvalid(source="TRELLIS_HEALTH_ADDRESS", detail=detail)
    host, _, port = given.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        expected = "HOST:PORT with the port on which the process listens"
        raise OptionInvalid(
            option="TRELLIS_HEALTH_ADDRESS" if address is None else "--address", value=given, expected=expected
        )
    return EVERY_ADDRESS.get(host, host), int(port)


def _asked(host: str, port: int, path: str, shown: str) -> tuple[int, dict[str, Any]]:
    """The status and the document of the answer; raises ProcessNotReady."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        document: Any = json.loads(response.read(ANSWER_BYTES_MAX))
    except (OSError, http.client.HTTPException) as error:
        raise ProcessNotReady(address=shown, reason=f"it does not answer ({error})") from error
    except ValueError as error:
        raise ProcessNotReady(address=shown, reason="what answers there is no process of Trellis") from error
    finally:
        connection.close()
    if not isinstance(document, dict):
        raise ProcessNotReady(address=shown, reason="what answers there is no process of Trellis")
    return response.status, cast("dict[str, Any]", document)
