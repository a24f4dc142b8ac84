"""Checks of `trellis doctor` for the bus: configuration, safety policy, servers. None if nothing about it is set."""

from pathlib import Path
from typing import Any

from trellis.app.fleet import bus_connection, config_file, is_embedded, kernel_of, topics_of
from trellis.app.settings import LOCAL_BUS, Settings
from trellis.app.system import elapsed_s
from trellis.bus.errors import BusUnavailable, KernelUnavailable, PointerGone
from trellis.bus.messages import RESULT
from trellis.bus.pointers import REDIS, make_pointers
from trellis.bus.safety.kernel import is_kernel_address
from trellis.bus.safety.policy import read_policy_file
from trellis.cli.problems import without_password
from trellis.engine.closing import closing
from trellis.engine.errors import TrellisError
from trellis.engine.records import Finding
from trellis.engine.text import counted
from trellis.operations.doctor import error_finding, ok_finding, warning_finding

NOT_THERE = f"{REDIS}://trellis:doctor"


async def bus_findings(settings: Settings, url: str) -> list[Finding]:
    """Findings about the bus; only what is configured is checked."""
    file = config_file(settings)
    findings = [] if file is None else [_config(settings, file)]
    if settings.bus != LOCAL_BUS:
        findings.append(await _server(settings))
        findings += _keys(settings)
    if settings.policy is not None or settings.bus != LOCAL_BUS:
        findings.append(await _policy(settings, url))
    if settings.redis is not None:
        findings.append(await _redis(settings))
    return findings


def _config(settings: Settings, file: Path) -> Finding:
    try:
        topics = topics_of(settings)
    except TrellisError as error:
        return error_finding("bus config", str(error), "correct the file; nothing that uses it starts before")
    detail = f"{file}: {counted(len(topics.topics), 'topic pattern')}, {counted(len(topics.pools), 'pool')}"
    return ok_finding("bus config", detail)


async def _policy(settings: Settings, url: str) -> Finding:
    if settings.policy is None:
        if is_embedded(settings, url):
            return ok_finding("policy", "none: every job of job.> may go")
        remedy = "set TRELLIS_POLICY; docs/how-to/safety-policy.md has an example"
        return warning_finding("policy", detail="none: every job is denied", remedy=remedy)
    if not is_kernel_address(settings.policy):
        try:
            policy = read_policy_file(Path(settings.policy))
        except TrellisError as error:
            return error_finding("policy", str(error), "correct it: until then no job is handed out")
        detail = f"{settings.policy}: {counted(len(policy.rules), 'rule')}, hash {policy.hash[:12]}"
        return ok_finding("policy", detail)
    async with closing(kernel_of(settings, url, monotonic=elapsed_s)) as kernel:
        try:
            detail = f"{settings.policy} answers, policy {(await kernel.snapshot())[:12]}"
        except KernelUnavailable as error:
            remedy = "start it: `trellis up --roles safety-kernel`; until then jobs wait"
            return error_finding("policy", str(error), remedy)
    return ok_finding("policy", detail)


async def _server(settings: Settings) -> Finding:
    try:
        async with bus_connection(settings, name="trellis-doctor") as connection:
            client = connection.up().client
            kept = await _keeps(client)
            has_stream = kept and await _has_stream(client)
    except BusUnavailable as error:
        refused = "correct the credentials in TRELLIS_BUS or TRELLIS_BUS_CREDS_FILE"
        first = refused if "authorization" in str(error).lower() else "start the server"
        return error_finding("bus", str(error), f"{first}; until then jobs wait, and none is lost")
    except TrellisError as error:
        return error_finding("bus", str(error), "correct the setting")
    detail = f"{connection.options.shown} answers, " + ("with JetStream" if kept else "without JetStream")
    if has_stream:
        return ok_finding("bus", detail)
    lost = "without it a packet that comes while no scheduler listens is lost"
    remedy = f"start nats-server with -js: {lost}"
    if kept:
        detail += f", but no stream keeps {RESULT}"
        remedy = f"a scheduler makes it when it starts; if one runs, `stream_unusable` in its log says why not: {lost}"
    return warning_finding("bus", detail=detail, remedy=remedy)


def _keys(settings: Settings) -> list[Finding]:
    """Findings about signing keys and known signers; none if no keys are set."""
    if settings.bus_key_file is None and settings.bus_keys_dir is None:
        return []
    try:
        from trellis.bus.wire.signatures import read_keys

        keys = read_keys(
            sender_id=settings.bus_sender,
            key_file=settings.bus_key_file,
            keys_dir=settings.bus_keys_dir,
            required=settings.bus_require_signatures,
        )
    except ImportError:
        return []  # already reported by the server check
    except TrellisError as error:
        return [error_finding("bus keys", str(error), "correct the setting; nothing that uses the bus starts before")]
    others = counted(keys.known, "key") + " of others"
    if settings.bus_require_signatures and not keys.known:
        remedy = f"put the public key of each worker and client there as <sender id>.pem; for workers {settings.bus_sender}.pem"
        return [error_finding("bus keys", f"{others} in {settings.bus_keys_dir}: every packet is dropped", remedy)]
    signs = "packets are signed" if settings.bus_key_file else "packets are not signed"
    return [ok_finding("bus keys", f"{signs}, {others}")]


async def _keeps(client: Any) -> bool:
    """Whether JetStream is enabled for this account."""
    from nats.errors import Error as NatsError

    try:
        await client.jetstream(timeout=2).account_info()
    except NatsError:
        return False
    return True


async def _has_stream(client: Any) -> bool:
    """Whether a stream keeps what arrives while nobody listens."""
    from nats.errors import Error as NatsError

    try:
        await client.jetstream(timeout=2).find_stream_name_by_subject(RESULT)
    except NatsError:
        return False
    return True


async def _redis(settings: Settings) -> Finding:
    try:
        pointers = make_pointers(None, settings.redis_url)
    except TrellisError as error:
        return error_finding("redis", str(error), "correct the setting")
    try:
        await pointers.read(NOT_THERE)
    except PointerGone:
        pass
    except TrellisError as error:
        return error_finding("redis", without_password(str(error), settings.redis_url), "start the server")
    finally:
        await pointers.close()
    return ok_finding("redis", "it answers")
