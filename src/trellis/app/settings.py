"""Settings: `TRELLIS_*` environment variables or keys of `trellis.toml`, read once at startup into a frozen object.

The environment overrides the file. An unknown key in the file is refused, with the nearest known name. An unknown
variable only causes a warning, because other programs set variables too. A setting that is empty is refused in both.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

import pydantic

from trellis.engine.errors import SettingsInvalid
from trellis.engine.jobs import CANCEL_GRACE_S_DEFAULT, TYPE_PATTERN
from trellis.engine.logs import log_of
from trellis.engine.records import DAY_S, RetentionOptions, keep_fault
from trellis.engine.service import RETENTION_DEFAULT
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.worker.options import (
    CONCURRENCY_DEFAULT,
    CONCURRENCY_MAX,
    DRAIN_S_DEFAULT,
    PROCESSES_MAX,
    SWEEP_OF_WORKERS,
    WorkerOptions,
)

if TYPE_CHECKING:
    from trellis.runs.temporal.options import TemporalOptions

PREFIX = "TRELLIS_"
TESTS_PREFIX = "TRELLIS_TEST_"
FILE_NAME = "trellis.toml"
LEDGER_DEFAULT = "sqlite:///trellis.db"
HOST_DEFAULT = "127.0.0.1"
PORT_DEFAULT = 8420
NLM_PORT_DEFAULT = 8421
SAFETY_PORT_DEFAULT = 8422
LOCAL_BUS = "local"
BUILTIN = "builtin"
TEMPORAL_QUEUE_DEFAULT = "trellis-runs"
BUS_SCHEMES = ("nats://", "tls://", "ws://", "wss://")
PROJECT_DEFAULT = "trellis"
OUTGOING_MAX = 50
_SERVICE_NAMES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")

_SECRETS = ("key", "token", "ledger", "url", "bus", "redis", "webhook", "apprise")
"""Suffixes of settings whose value may be or contain a secret."""

_ENVIRONMENT_ONLY = {
    "token": "a token does not belong in this file; set TRELLIS_TOKEN, or TRELLIS_TOKEN_FILE to a private file that holds it",
    "gateway_plain_http": "this file does not decide whether a token goes unencrypted; set TRELLIS_GATEWAY_PLAIN_HTTP",
}
"""Settings that the file must not contain, with what to do instead."""
AUDIT_OBJECTS_MAX = 50


def _as_list(value: Any) -> Any:
    """Parses a list: comma-separated text from the environment, or a list from the file."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _off_as_none(value: Any) -> Any:
    """Parses a time that may be `off`."""
    return None if value == "off" else value


_KEPT_STATE = re.compile(r"[a-z-]{1,30}\.[A-Za-z_]{1,30}=(off|-?[0-9]{1,5}(\.[0-9]{1,9})?)")
RETENTION_STATES_MAX = 50

NLM_LEDGER_FILE = "nlm.db"
NEEDS_TLS = ("temporal_ca_file", "temporal_cert_file", "temporal_key_file", "temporal_api_key")
"""Settings of a Temporal server that mean nothing, or would leak, on a connection that is not encrypted."""
KEYS_OF = {"model_base_url": "model_key", "nlm_base_url": "nlm_key", "orchestrator": "temporal_api_key"}
"""Which key is sent to the server that a setting names."""


def _check_days(days: float | None) -> None:
    """Raise ValueError if this is no time after which ended jobs may be removed. None keeps them for ever."""
    fault = None if days is None else keep_fault(days)
    if fault is not None:
        raise ValueError(f"{fault} (off keeps jobs for ever)")


AT_GATEWAY = "gateway"
"""The value of TRELLIS_MEMORY in a process that reads memory through the gateway. A folder of that name is set with its absolute path."""


class Settings(pydantic.BaseModel):
    """All settings."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    ledger: str = LEDGER_DEFAULT
    """`sqlite:///path` or `postgresql://…`."""
    concurrency: int = pydantic.Field(CONCURRENCY_DEFAULT, ge=1, le=CONCURRENCY_MAX)
    """Handlers that run at the same time in one worker."""
    prefetch: int | None = pydantic.Field(None, ge=0)
    """Jobs a worker holds beyond those running; by default chosen by concurrency."""
    threads: int | None = pydantic.Field(None, ge=1)
    """Threads for sync handlers."""
    processes: int | None = pydantic.Field(None, ge=1, le=PROCESSES_MAX)
    """Processes for handlers with `runner="process"`; by default one per core."""
    hints: bool = True
    """Whether workers listen for hints or only poll."""
    drain_s: float = pydantic.Field(DRAIN_S_DEFAULT, ge=0)
    """How long running handlers may go on after the first signal."""
    objects: str | None = None
    """`file:///path` or `s3://bucket/prefix?endpoint=…`; by default a folder beside an SQLite ledger."""
    memory: Path | None = None
    """The git repository of agents' memory: a folder, by default beside an SQLite ledger, or `objects` (`objects:PREFIX`) for
    one in the object store that any host can serve. `gateway`: this process has none and reads memory through the gateway
    at TRELLIS_GATEWAY, which only the role orchestrator can do."""
    memory_cache: Path | None = None
    """For `TRELLIS_MEMORY=objects`: the folder of this host's replica, which may be lost; by default beside an SQLite ledger, else in the user's cache folder."""
    nlm: str = "extractive"
    """The provider that answers grounded questions: `extractive`, `openai`, `backend`, which asks the NLM backend at
    TRELLIS_NLM_BACKEND, or the name of a plug-in."""
    nlm_base_url: str | None = None
    """For `TRELLIS_NLM=openai`: the address of a server with the chat completions API, such as `https://host/v1`."""
    nlm_model: str | None = None
    """For `TRELLIS_NLM=openai`: the model's name at that server."""
    nlm_key: pydantic.SecretStr | None = None
    """For `TRELLIS_NLM=openai`: the key that is sent to that server."""
    nlm_backend: str | None = None
    """`http://host:port` of the NLM backend that queue jobs are given to; by default the one in the same process."""
    nlm_host: str = pydantic.Field(HOST_DEFAULT, min_length=1, max_length=253)
    """Where the NLM backend listens. Any address other than this machine requires a configured key."""
    nlm_port: int = pydantic.Field(NLM_PORT_DEFAULT, ge=0, le=65_535)
    """Port 0 chooses a free port."""
    nlm_ledger: str | None = None
    """The NLM backend's own ledger, shared by the backends behind one address.

    Default: `nlm.db` beside an SQLite ledger, else in the working folder.
    """
    nlm_concurrency: int = pydantic.Field(4, ge=1, le=100)
    """Jobs that the NLM backend works on at the same time."""
    nlm_per_second: float | None = pydantic.Field(None, gt=0, le=1_000)
    """Maximum number of questions per second that the NLM backend asks its provider; None for no limit."""
    project: str = pydantic.Field(PROJECT_DEFAULT, min_length=1, max_length=200)
    """The project that owns the artifacts. Their keys contain the first 16 hexadecimal digits of its SHA-256."""
    artifact_days: int = pydantic.Field(90, ge=1, le=36_500)
    """Minimum age of a finalized artifact before cleanup may remove it."""
    job_timeout_s: float = pydantic.Field(600.0, gt=0, le=86_400)
    """How long one execution of a queue job may take."""
    operator_window_s: float = pydantic.Field(900.0, ge=0, le=30 * 86_400)
    """How long a failed queue job waits for an operator before it is dead-lettered."""
    outgoing: Annotated[
        tuple[Annotated[str, pydantic.Field(max_length=300)], ...], pydantic.BeforeValidator(_as_list)
    ] = pydantic.Field((), max_length=OUTGOING_MAX)
    """Origins (`https://host`, `http://host:port`) that snapshots may come from although they are not public.

    Comma-separated. They get no token.
    """
    bus: str = pydantic.Field(LOCAL_BUS, min_length=1, max_length=2_000)
    """`local` for workers inside `trellis up`, or `nats://host:4222` for a fleet.

    Several addresses of one cluster are comma-separated.
    """
    bus_config: Path | None = None
    """Topics, pools and tenants; by default `bus.toml` in the working folder, if there is one."""
    bus_object_days: int = pydantic.Field(30, ge=1, le=36_500)
    """How long a stored payload or result stays after its last write, once no job in the ledger refers to it."""
    bus_sender: str = pydantic.Field("trellis", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")
    """The control plane's sender id in packets. All its processes use the same one."""
    bus_key_file: Path | None = None
    """The private key (ECDSA P-256, PEM) that signs our packets. Without one they are unsigned."""
    bus_keys_dir: Path | None = None
    """Public keys of packet senders, `<sender id>.pem` each."""
    bus_require_signatures: bool = False
    """Whether packets without a valid signature are refused. Requires `bus_keys_dir`."""
    bus_signature_window_s: float = pydantic.Field(300.0, ge=1.0, le=3600.0)
    """Maximum difference between the time in a signed packet and the time the bus received it."""
    bus_creds_file: Path | None = None
    """A NATS credentials file, or a file with only the nkey seed of a user."""
    bus_ca_file: Path | None = None
    """The CA that signed the certificate of the NATS server. Default: the system's CAs."""
    policy: str | None = pydantic.Field(None, min_length=1, max_length=2_000)
    """The safety policy: the path of a file, or `grpc://host:port` of a kernel.

    Without one, everything on `job.>` is allowed on a local bus with SQLite, and nothing elsewhere.
    """
    safety_host: str = pydantic.Field(HOST_DEFAULT, min_length=1, max_length=253)
    """Where `trellis up --roles safety-kernel` listens."""
    safety_port: int = pydantic.Field(SAFETY_PORT_DEFAULT, ge=0, le=65_535)
    """Port 0 chooses a free port."""
    redis: pydantic.SecretStr | None = None
    """`redis://host:6379/0`: the server behind `redis://` pointers, for agents of the CAP SDK."""
    model_base_url: str | None = None
    """The server behind agents' `openai:` models."""
    model_key: pydantic.SecretStr | None = None
    """The key that is sent to that server."""
    runs: int = pydantic.Field(10, ge=1, le=1_000)
    """Runs that may be running at the same time, over all processes."""
    upstream_wait_s: float = pydantic.Field(86_400.0, gt=0, le=30 * 86_400)
    """Total time a run may wait for an unavailable projector or object store before it fails."""
    audit_objects: Annotated[
        tuple[Annotated[str, pydantic.Field(pattern=TYPE_PATTERN)], ...], pydantic.BeforeValidator(_as_list)
    ] = pydantic.Field((), max_length=AUDIT_OBJECTS_MAX)
    """Job types whose every event gets its own audit record instead of a line in a segment. Comma-separated."""
    retention_days: Annotated[float | None, pydantic.BeforeValidator(_off_as_none)] = 30.0
    """How many days ended jobs, and published administrative acts, stay in the ledger. `off` keeps them for ever.

    At least 0.05, which is 72 minutes, so that whoever waits for a job can read its result; at most 36,500.
    Dead letters and DEAD jobs stay until `retention_states` names their state. Documents and audit records in the object
    store stay in any case.
    """
    retention_states: Annotated[tuple[str, ...], pydantic.BeforeValidator(_as_list)] = pydantic.Field(
        (), max_length=RETENTION_STATES_MAX
    )
    """Days for single states instead, such as `leased-job.dead_lettered=365,run.failed=off`. Comma-separated."""
    gateway: str | None = None
    """`http://host:port` of a gateway. Commands about runs, agents, proposals and jobs then use it, not the ledger."""
    gateway_ca_file: Path | None = None
    """The CA that signed the certificates of the gateway and the NLM backend. Default: the system's CAs."""
    gateway_plain_http: bool = False
    """Whether a token may be sent unencrypted (`http://`) to a gateway on another machine, or with `TRELLIS_NLM=backend` to
    the NLM backend there. Environment only."""
    token: pydantic.SecretStr | None = None
    """The token to act with, as text. Environment only."""
    token_file: Path | None = None
    """A file that holds the token instead."""
    token_key_file: Path | None = None
    """The secret that signs and verifies tokens (HS256); by default the development key beside an SQLite ledger."""
    token_jwks_file: Path | None = None
    """Instead of a secret: the public keys (a JWK set, Ed25519 or ES256) that verify tokens of `token_issuer`."""
    token_issuer: str | None = pydantic.Field(None, min_length=1, max_length=500)
    """The issuer of the tokens that the key set verifies, exactly as in their `iss`."""
    token_signing_key_file: Path | None = None
    """The private JWK with which `trellis token issue` signs. Needed only where tokens are issued."""
    callback_key_file: Path | None = None
    """The secret that signs callbacks. Default: derived from the development key of an SQLite ledger."""
    host: str = pydantic.Field(HOST_DEFAULT, min_length=1, max_length=253)
    """The address on which the gateway listens. Any address other than this machine requires a configured key."""
    port: int = pydantic.Field(PORT_DEFAULT, ge=0, le=65_535)
    """Port 0 chooses a free port."""
    tls_cert_file: Path | None = None
    """The certificate chain of the gateway, PEM."""
    tls_key_file: Path | None = None
    """The private key of that certificate, PEM."""
    health_address: str | None = pydantic.Field(
        None, pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$", max_length=260
    )
    """`host:port` where every role and worker serves `/system/live`, `/system/ready` and `/metrics`. Port 0 chooses a
    free port."""
    metrics: bool = True
    """Whether this process counts what it does. If not, `/metrics` shows only what the ledger knows."""
    alert_interval_s: float = pydantic.Field(15.0, ge=1, le=3_600)
    """How often a process with the role `alerts` reads the conditions of alerts."""
    alert_days: float = pydantic.Field(30.0, ge=1, le=3_650)
    """How long a resolved alert is kept."""
    alert_webhook: pydantic.SecretStr | None = pydantic.Field(None, min_length=1, max_length=2_000)
    """The URL that gets a signed POST for each alert that is raised or resolved. Requires `alert_key_file`."""
    alert_key_file: Path | None = None
    """The secret that signs those POSTs: 64 hexadecimal digits or more, in a private file."""
    alert_apprise: pydantic.SecretStr | None = pydantic.Field(None, min_length=1, max_length=10_000)
    """Apprise URLs (mail, Slack and others) that get the same reports, separated by spaces. Needs the extra `apprise`."""
    alert_queued_s: float = pydantic.Field(300.0, gt=0, le=30 * 86_400)
    """A job that waits to be claimed for longer raises the alert `jobs-wait`."""
    alert_dead_percent: float = pydantic.Field(1.0, gt=0, le=100)
    """A larger share of dead jobs raises the alerts `dead-jobs` and `dead-letters`."""
    alert_proposal_hours: float = pydantic.Field(48.0, gt=0, le=72)
    """A proposal that waits for longer raises the alert `proposal-waits`. Proposals expire after 72 hours."""
    alert_lag_s: float = pydantic.Field(60.0, gt=0, le=86_400)
    """A projector that is further behind raises the alert `projector-lag`."""
    alert_disk_percent: float = pydantic.Field(10.0, ge=0, le=100)
    """A disk with a smaller share of free space raises the alert `disk-low`."""
    alert_expiry_days: float = pydantic.Field(14.0, ge=0, le=3_650)
    """A certificate or token that ends sooner raises the alert `expiry`."""
    log_level: str = pydantic.Field("info", pattern="^(debug|info|warning|error)$")
    """What services and workers log: `debug`, `info`, `warning` or `error`, and everything above it."""
    log_format: str = pydantic.Field("text", pattern="^(text|json)$")
    """`text` for people, or `json` for one JSON object a line."""

    orchestrator: str = pydantic.Field(BUILTIN, min_length=1, max_length=2_000)
    """What drives runs: `builtin`, the orchestrators of this instance, or `temporal://host:port/namespace`, a Temporal
    server. `temporal` alone is `temporal://127.0.0.1:7233/default`. Processes that drive runs need the extra
    `temporal`."""
    temporal_queue: str = pydantic.Field(TEMPORAL_QUEUE_DEFAULT, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """The task queue of runs at the Temporal server. Instances that share a namespace need different ones."""
    temporal_tls: bool | None = None
    """Whether the connection to the Temporal server is encrypted. Default: if one of the four settings below is set."""
    temporal_ca_file: Path | None = None
    """The CA that signed the certificate of the Temporal server, PEM. Default: the system's CAs."""
    temporal_cert_file: Path | None = None
    """The client certificate that is shown to the Temporal server, PEM."""
    temporal_key_file: Path | None = None
    """The private key of that certificate, PEM."""
    temporal_api_key: pydantic.SecretStr | None = pydantic.Field(None, min_length=1, max_length=10_000)
    """The API key that is sent to the Temporal server, over TLS only."""
    cancel_grace_s: float = pydantic.Field(CANCEL_GRACE_S_DEFAULT, ge=0, le=3_600)
    """How long a job or run may continue after a soft cancel before it is ended. A request may set another value."""
    runs_waiting: int = pydantic.Field(100, ge=1, le=100_000)
    """Runs of one agent that may wait. One more is refused with status 429."""
    body_bytes: int = pydantic.Field(1024 * 1024, ge=1024, le=16 * 1024 * 1024)
    """Maximum size of a request body at the gateway."""
    large_body_bytes: int = pydantic.Field(10 * 1024 * 1024, ge=1024, le=64 * 1024 * 1024)
    """Maximum body size for artifacts and for proposals about memory and logic. At least `body_bytes`."""
    tokenizer: str = pydantic.Field("bytes", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """What counts the tokens of memory and sources: `bytes`, an upper estimate, or the name of a plug-in."""

    _file: Path | None = pydantic.PrivateAttr(None)
    """The `trellis.toml` that was read."""
    _from_file: frozenset[str] = pydantic.PrivateAttr(frozenset())
    """The settings whose value comes from that file."""
    _is_gateway_own: bool = pydantic.PrivateAttr(default=False)
    """Whether `gateway` is the address where this process itself listens, because nobody set one."""

    @pydantic.field_validator("bus")
    @classmethod
    def _known_bus(cls, value: str) -> str:
        """Refuses an unsupported address at startup; otherwise it would be noticed only while jobs wait."""
        if value != LOCAL_BUS and not all(part.strip().startswith(BUS_SCHEMES) for part in value.split(",")):
            raise ValueError(f"say {LOCAL_BUS} or an address such as nats://127.0.0.1:4222")
        return value

    @pydantic.field_validator("orchestrator")
    @classmethod
    def _known_orchestrator(cls, value: str) -> str:
        """Refuses an unknown orchestrator, which would leave every run waiting."""
        if value != BUILTIN:
            from trellis.runs.temporal.options import EXPECTED, read_orchestrator  # only few instances need it

            if read_orchestrator(value, TEMPORAL_QUEUE_DEFAULT) is None:
                raise ValueError(f"say {BUILTIN} or {EXPECTED}")
        return value

    @pydantic.field_validator("retention_days")
    @classmethod
    def _days_in_bounds(cls, value: float | None) -> float | None:
        """Refuses a time after which nobody could have read a result, and one that is no time."""
        _check_days(value)
        return value

    @property
    def temporal(self) -> "TemporalOptions | None":
        """The Temporal server that drives runs; None if the built-in orchestrators do.

        Raises SettingsInvalid if the API key may not be sent there.
        """
        if self.orchestrator == BUILTIN:
            return None
        from trellis.runs.temporal.options import TemporalTls, read_orchestrator

        server, key = read_orchestrator(self.orchestrator, self.temporal_queue), self.key_for("orchestrator")
        if not self._secret_may_go_to("temporal_ca_file", given=("temporal_api_key",)):
            raise self._would_leak(f"the authority {self.temporal_ca_file}", "temporal_ca_file", "key")
        if server is None or not self._temporal_is_encrypted:
            return server
        files = {"ca_file": self.temporal_ca_file, "cert_file": self.temporal_cert_file}
        tls = TemporalTls(**files, key_file=self.temporal_key_file)
        return replace(server, tls=tls, api_key=None if key is None else key.get_secret_value())

    @property
    def _temporal_is_encrypted(self) -> bool:
        return (
            any(getattr(self, name) is not None for name in NEEDS_TLS)
            if self.temporal_tls is None
            else self.temporal_tls
        )

    @pydantic.field_validator("retention_states")
    @classmethod
    def _known_states(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Refuses a state in which no job ends, which would keep what the setting means to remove."""
        known = [f"{lifecycle}.{state}" for lifecycle, state in RetentionOptions().ages()]
        for one in value:
            if _KEPT_STATE.fullmatch(one) is None:
                raise ValueError("write LIFECYCLE.STATUS=DAYS or LIFECYCLE.STATUS=off, such as run.failed=365")
            name, _, days = one.partition("=")
            _check_days(None if days == "off" else float(days))
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
                raise ValueError(f"no job ends in the state {name}; {hint}")
        return value

    @pydantic.field_validator("nlm_base_url", "model_base_url")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        """Refuses a password in an address, because addresses are shown."""
        if value is not None and "@" in value.partition("//")[2].partition("/")[0]:
            raise ValueError("credentials do not belong in it; set the key instead")
        return value

    @pydantic.field_validator("nlm_base_url", "model_base_url")
    @classmethod
    def _web_address(cls, value: str | None) -> str | None:
        """Refuses what is no address of a server, because runs would retry it as if the server were away."""
        if value is not None and not _is_server_url(value):
            raise ValueError("it must look like http://host:port/v1 or https://host/v1, without `#`")
        return value

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> "Settings":
        """Checks that settings which belong together are both set, and that exclusive ones are not."""
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("TRELLIS_TLS_CERT_FILE and TRELLIS_TLS_KEY_FILE belong together; set both or neither")
        if (self.temporal_cert_file is None) != (self.temporal_key_file is None):
            names = "TRELLIS_TEMPORAL_CERT_FILE and TRELLIS_TEMPORAL_KEY_FILE"
            raise ValueError(f"{names} belong together; set both or neither")
        if self.temporal_tls is False and (unused := [name for name in NEEDS_TLS if getattr(self, name) is not None]):
            named = f"{PREFIX}{unused[0].upper()}"
            raise ValueError(f"{named} is used with TLS only; remove it, or remove TRELLIS_TEMPORAL_TLS=false")
        if self.token_jwks_file is not None and self.token_key_file is not None:
            raise ValueError("TRELLIS_TOKEN_JWKS_FILE and TRELLIS_TOKEN_KEY_FILE exclude each other; set one")
        if (self.token_jwks_file or self.token_signing_key_file) and self.token_issuer is None:
            raise ValueError("set TRELLIS_TOKEN_ISSUER too: the `iss` of the tokens")
        if self.large_body_bytes < self.body_bytes:
            raise ValueError("TRELLIS_LARGE_BODY_BYTES is less than TRELLIS_BODY_BYTES; raise it, or lower the other")
        if self.alert_webhook is not None and self.alert_key_file is None:
            raise ValueError(
                "TRELLIS_ALERT_WEBHOOK needs TRELLIS_ALERT_KEY_FILE: the secret that signs what is sent there"
            )
        if self.bus_require_signatures and self.bus_keys_dir is None:
            raise ValueError(
                "TRELLIS_BUS_REQUIRE_SIGNATURES needs TRELLIS_BUS_KEYS_DIR: the keys that the signatures are held against"
            )
        return self

    @property
    def retention(self) -> RetentionOptions:
        """How long ended jobs are kept."""
        named = (one.partition("=") for one in self.retention_states)
        return replace(
            RETENTION_DEFAULT,
            ended_s=None if self.retention_days is None else self.retention_days * DAY_S,
            states_s={
                (name.partition(".")[0], name.partition(".")[2]): None if days == "off" else float(days) * DAY_S
                for name, _, days in named
            },
        )

    @property
    def shown_bus(self) -> str:
        """The bus address without its credentials."""
        return ",".join(re.sub(r"//.*@", "//***@", part) for part in self.bus.split(","))

    @property
    def redis_url(self) -> str | None:
        """The URL of the Redis server, with its password."""
        return None if self.redis is None else self.redis.get_secret_value()

    def shown_token(self) -> str | None:
        """Returns the token this process acts with, if any. Raises SettingsInvalid."""
        if self.token is not None or self.token_file is None:
            return None if self.token is None else self.token.get_secret_value().strip()
        try:
            return self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            detail = f"{self.token_file} cannot be read: {error}"
            raise SettingsInvalid(source=self.source_of("token_file"), detail=detail) from error

    def noting(self, file: Path, keys: frozenset[str]) -> Self:
        """Records which settings come from this file. Returns the same settings."""
        self._file, self._from_file = file, keys
        return self

    def source_of(self, setting: str) -> str:
        """Returns where the value of this setting comes from, for messages: the file and its key, or the variable."""
        return _source(setting, self._file if setting in self._from_file else None)

    def with_own_addresses(self, *, gateway: str | None, nlm_backend: str | None) -> Self:
        """Returns the settings with this process's own addresses where none are set."""
        filled = self.model_copy(
            update={"gateway": self.gateway or gateway, "nlm_backend": self.nlm_backend or nlm_backend}
        )
        filled._is_gateway_own = self.gateway is None  # noqa: SLF001 - of its own class
        return filled

    @property
    def named_gateway(self) -> str | None:
        """The gateway that an operator set. None for an own address, which may mean nothing on another machine."""
        return None if self._is_gateway_own else self.gateway

    @property
    def reads_memory_at_gateway(self) -> bool:
        """Whether this process has no repository of agents' memory and reads it through the gateway."""
        return self.memory == Path(AT_GATEWAY)

    def token_may_go_to(self, setting: str) -> bool:
        """Whether the token may be sent to the address in this setting (`gateway`, `nlm_backend`).

        For `gateway_ca_file`: whether it may be sent to a server that this CA vouches for.
        """
        return self._secret_may_go_to(setting, given=("token",), in_file="token_file")

    def _secret_may_go_to(self, setting: str, *, given: tuple[str, ...], in_file: str | None = None) -> bool:
        """Whether a secret (one of `given`, or the file `in_file`) may be sent to where this setting points.

        `trellis.toml` is in the working folder, which may belong to an untrusted party. An address in it gets no secret
        from the environment. It gets only a secret in the same file, or in a file that it names and that is in the same
        folder.
        """
        inline = [name for name in given if getattr(self, name) is not None]
        path: Path | None = None if in_file is None else getattr(self, in_file)
        if setting not in self._from_file or (not inline and path is None):
            return True
        if any(name not in self._from_file for name in inline):
            return False
        if path is None:
            return True
        if self._file is None or in_file not in self._from_file:
            return False
        folder = self._file.parent.resolve()
        return (folder / path).resolve().is_relative_to(folder)

    def check_gateway(self) -> None:
        """Raises SettingsInvalid if the token may not be sent to the configured gateway."""
        if not self.token_may_go_to("gateway"):
            raise self._would_leak(f"the gateway {self.gateway}", "gateway", "token", " or give --gateway")

    def check_gateway_authority(self) -> None:
        """Raises SettingsInvalid if the token may not be sent to servers that the configured CA vouches for."""
        if not self.token_may_go_to("gateway_ca_file"):
            raise self._would_leak(f"the authority {self.gateway_ca_file}", "gateway_ca_file", "token")

    def check_signed_tokens(self, setting: str) -> None:
        """Raises SettingsInvalid if tokens that this process signs may not be sent to the address in this setting.

        The key that signs must be in the folder of the file that names the address: its own file, or the development
        key beside a ledger that the file, or nobody, names.
        """
        if setting not in self._from_file:
            return
        keys = [name for name in ("token_signing_key_file", "token_key_file") if getattr(self, name) is not None]
        if keys:
            may_go = self._secret_may_go_to(setting, given=(), in_file=keys[0])
        else:
            may_go = "ledger" in self._from_file or "ledger" not in self.model_fields_set
        if not may_go:
            raise self._would_leak(f"the address {getattr(self, setting)}", setting, "key")

    def check_alert_webhook(self) -> None:
        """Raises SettingsInvalid if the key of alert reports may not sign what goes to the configured webhook."""
        if not self._secret_may_go_to("alert_webhook", given=(), in_file="alert_key_file"):
            raise self._would_leak("a webhook for alerts", "alert_webhook", "key")  # its URL may be a secret

    def key_for(self, address: str) -> pydantic.SecretStr | None:
        """Returns the key for the server in this setting (`model_base_url`, `nlm_base_url`).

        Raises SettingsInvalid if the key may not be sent there.
        """
        name = KEYS_OF[address]
        if not self._secret_may_go_to(address, given=(name,)):
            raise self._would_leak(f"the server {getattr(self, address)}", address, "key")
        return getattr(self, name)

    def _would_leak(self, named: str, setting: str, secret: str, otherwise: str = "") -> SettingsInvalid:
        detail = (
            f"it names {named}, and the {secret} does not lie in that folder: a file in the "
            f"working folder does not decide where a {secret} goes. If you mean it, "
            f"set {PREFIX}{setting.upper()}{otherwise}"
        )
        return SettingsInvalid(source=str(self._file), detail=detail)

    def nlm_ledger_of(self, ledger_url: str) -> str:
        """Returns the NLM backend's ledger URL: as set, else beside an SQLite ledger, else in the working folder."""
        if self.nlm_ledger is not None:
            return self.nlm_ledger
        if ledger_url.startswith("sqlite:///"):
            return f"sqlite:///{Path(ledger_url.removeprefix('sqlite:///')).parent / NLM_LEDGER_FILE}"
        return f"sqlite:///{NLM_LEDGER_FILE}"

    def worker_options(self, name: str) -> WorkerOptions:
        """Returns the worker options from the settings."""
        return WorkerOptions(
            name=name,
            concurrency=self.concurrency,
            prefetch=self.prefetch,
            threads=self.threads,
            processes=self.processes,
            hints=self.hints,
            drain_s=self.drain_s,
            sweep=replace(SWEEP_OF_WORKERS, windows_s=self.windows_s),
            retention=self.retention,
        )

    @property
    def windows_s(self) -> dict[tuple[str, str], float]:
        """How long jobs rest in states that a sweep moves them to.

        The sweep opens the operator window of a failed queue job when no orchestrator is left to do it (D8).
        """
        return {(QUEUE_JOB.name, "FAILED"): self.operator_window_s}


def _is_server_url(url: str) -> bool:
    """Whether a URL is that of a server: http or https, a host, perhaps a port, a path and a query, and no more."""
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_server and not parts.fragment


def read_settings(
    environment: Mapping[str, str], folder: Path, *, warn: Callable[[str], None] | None = None
) -> Settings:
    """Reads the settings. Raises SettingsInvalid.

    A variable that names no setting is only warned about, because other programs set variables too. An unknown key of
    the file is an error.
    """
    file = folder / FILE_NAME
    values: dict[str, Any] = {}
    if _exists(file):
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise SettingsInvalid(source=str(file), detail=str(error)) from error
        _refuse_unknown(values, source=str(file), written=str)
        for key, detail in _ENVIRONMENT_ONLY.items():
            if key in values:
                raise SettingsInvalid(source=str(file), detail=detail)
    named = _from_environment(environment, warn or _log_warning)
    _refuse_empty({f"{file}, {key}": value for key, value in values.items() if key not in named})
    _refuse_empty({f"{PREFIX}{key.upper()}": value for key, value in named.items()})
    try:
        settings = Settings.model_validate({**values, **named})
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        # `from None`: pydantic's own message contains the values, and some are secrets.
        sentence = _sentence(problem["type"], problem["msg"], problem.get("ctx", {}))
        files = {key: None if key in named else file for key in {**values, **named}}
        raise SettingsInvalid(**_problem_of(problem["loc"], sentence, problem["input"], files)) from None
    return settings.noting(file, frozenset(values) - frozenset(named))


def _source(setting: str, file: Path | None) -> str:
    """Where the value of a setting comes from: this file, or without one the environment."""
    return f"{PREFIX}{setting.upper()}" if file is None else f"{file}, {setting}"


def _problem_of(
    at: tuple[int | str, ...], message: str, value: Any, files: Mapping[str, Path | None]
) -> dict[str, str]:
    """Returns the source and description of a problem, without values that may be secrets.

    `files` has each setting that is set, with the file that it is from. A problem of several settings names them in its
    message; its source are those of them that are set.
    """
    if not at:
        names = [name.lower() for name in re.findall(rf"{PREFIX}([A-Z_]+)", message)]
        sources = dict.fromkeys(_source(name, files[name]) for name in names if name in files)
        return {"source": " and ".join(sources) or "settings", "detail": message}
    key = str(at[0])
    is_complete = key.endswith(_SECRETS) or message.endswith("?")  # a question names what it is about
    detail = message if is_complete else f"{message}, not {value!r}"
    return {"source": _source(key, files[key]), "detail": detail}


_SENTENCES = {
    "int": "it must be a whole number",
    "float": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool": "it must be true or false",
    "string_type": "it must be text",
    "string_too_short": "it must have at least {min_length} characters",
    "string_too_long": "it must have at most {max_length} characters",
    "path_type": "it must be a path",
    "tuple_type": "it must be a list",
    "too_short": "it must have a length of at least {min_length}",
    "too_long": "it must have a length of at most {max_length}",
    "greater_than_equal": "it must be at least {ge}",
    "greater_than": "it must be more than {gt}",
    "less_than_equal": "it must be at most {le}",
    "less_than": "it must be less than {lt}",
}
"""What a value must be, by the beginning of the name that pydantic gives to the problem."""
_CHOICE = re.compile(r"\^\((\w+(?:\|\w+)+)\)\$")


def _sentence(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """Returns what the value of a setting must be."""
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        choice = _CHOICE.fullmatch(context["pattern"])
        return f"it must be one of {choice[1].replace('|', ', ')}" if choice else f"it must match {context['pattern']}"
    known = max((name for name in _SENTENCES if kind.startswith(name)), key=len, default=None)
    return "it is not valid" if known is None else _SENTENCES[known].format(**context)


def _exists(file: Path) -> bool:
    try:
        return file.is_file()
    except PermissionError:
        return False  # a folder without read permission


def _refuse_unknown(values: Mapping[str, Any], *, source: str, written: Callable[[str], str]) -> None:
    for key in values:
        if key not in Settings.model_fields:
            raise SettingsInvalid(source=source, detail=_unknown(key, written))


def _refuse_empty(values: Mapping[str, Any]) -> None:
    """Refuses empty text, by where it is written.

    It is no default: an empty token or gateway would let a command act with other rights, or on another ledger, than
    whoever set the variable expects.
    """
    for source, value in values.items():
        if isinstance(value, str) and not value.strip():
            raise SettingsInvalid(source=source, detail="it is set but empty; give it a value, or unset it")


def _unknown(key: str, written: Callable[[str], str]) -> str:
    """Says that no setting has this name, and suggests the nearest."""
    known = list(Settings.model_fields)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {written(near[0])}?" if near else "`trellis doctor --settings` lists those there are."
    return f"there is no setting {written(key)}; {hint}"


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns a message for each variable that looks like a setting but is none."""
    unknown: list[str] = []
    _from_environment(environment, unknown.append)
    return unknown


def named_in(environment: Mapping[str, str]) -> frozenset[str]:
    """Returns the settings whose value comes from this environment."""
    return frozenset(_from_environment(environment, lambda _: None))


def _from_environment(environment: Mapping[str, str], warn: Callable[[str], None]) -> dict[str, str]:
    """Collects settings from the environment. Variables that Kubernetes injects for a Service are skipped silently."""
    named: dict[str, str] = {}
    for name, value in environment.items():
        if not name.startswith(PREFIX) or name.startswith(TESTS_PREFIX) or _is_of_a_service(name, value):
            continue
        key = name.removeprefix(PREFIX).lower()
        if key in Settings.model_fields:
            named[key] = value
        else:
            warn(_unknown(key, lambda known: PREFIX + known.upper()) + " It is ignored.")
    return named


def _is_of_a_service(name: str, value: str) -> bool:
    """Whether Kubernetes set this variable, for a Service whose name starts with `trellis`."""
    return _SERVICE_NAMES.search(name) is not None or (
        name.endswith("_PORT") and _SERVICE_ADDRESS.match(value) is not None
    )


def _log_warning(text: str) -> None:
    log_of("trellis.app.settings").warning("unknown_variable", problem=text)
