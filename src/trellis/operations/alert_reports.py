"""Reports of alerts to people: a signed webhook, and any service that Apprise knows (mail, Slack and others).

Each change of an alert is one job of the ledger for each channel. The ledger submits it in the transaction of the
change, and retries it like any job. Invariants:
- The job only names the alert. What is sent is read from the ledger, so nobody who may submit jobs can have another
  text sent or signed.
- The report that an alert is resolved is sent after the one that it was raised has ended.
- A report has the same id in every try, so that a receiver recognises a repetition.
"""

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from trellis.engine.alerts import APPRISE, WEBHOOK, Alert, AlertChangeKind, report_job_id
from trellis.engine.clock import within
from trellis.engine.errors import JobError, LedgerError, PermanentError, SettingsInvalid, TransientError
from trellis.engine.extras import Extra, extra_needed
from trellis.engine.jobs import Claimed, JobId
from trellis.engine.lease_runner import LeaseRunner, LeaseRunnerOptions
from trellis.engine.logs import log_of
from trellis.engine.retry_policy import AttemptFacts, ErrorPolicy, Fail, OnExhausted, Retry, RetryPolicy, on_error
from trellis.engine.step_runner import DriveStopped, JobDrive, StepRunner
from trellis.lifecycles import LIFECYCLES, Phase, Trigger
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.net.guard import GuardedClient, OutgoingPolicy
from trellis.net.signatures import signed_headers
from trellis.net.targets import (
    AddressRefused,
    AnswerRefused,
    OutgoingError,
    OutgoingUnavailable,
    UrlRefused,
    read_target,
)
from trellis.operations.alerts import ALERTS
from trellis.operations.runbooks import runbook_address
from trellis.storage.objects.canonical_json import timestamp

ERRORS = ErrorPolicy(retry=RetryPolicy(base_s=5.0, factor=2.0, max_s=900.0, jitter=0.2), on_exhausted=OnExhausted.FAIL)
"""30 attempts (`REPORT_ATTEMPTS_MAX`) take about six hours. Then the report has failed. It is no dead letter, which would
count among those of users."""
SEND_S = 20.0
"""How long one try may take. It is shorter than the lease, so that no other process sends meanwhile."""
EARLY_S = 5.0
"""When a report that has to wait for the one before it looks again."""
CAUSE_CHARS_MAX = 200
GIVEN_BACK = "the process shuts down"
OPTIONS = LeaseRunnerOptions(concurrency=4, lease_s=60.0, heartbeat_s=20.0, poll_s=5.0)

_NOT_SENT: Mapping[type[OutgoingError], str] = {
    OutgoingUnavailable: "did not answer",
    AnswerRefused: "gave an answer that is too large or compressed",
    AddressRefused: "has an address that is never allowed",
    UrlRefused: "is refused: TRELLIS_ALERT_WEBHOOK is no URL that may be called",
}
"""What went wrong, without the URL."""

_log = log_of("trellis.alerts")


class ReportEarly(JobError):
    """The report before this one is not sent yet."""


class ReportChannel(Protocol):
    """One way to reach people."""

    @property
    def type(self) -> str:
        """The job type of its reports."""
        ...

    async def send(self, id_: str, document: Mapping[str, Any]) -> None:
        """Send a report. Raises TransientError."""
        ...


@dataclass(frozen=True, kw_only=True)
class WebhookChannel:
    """Posts reports to a URL, signed as Standard Webhooks describe, through the outgoing guard."""

    url: str
    key: bytes
    policy: OutgoingPolicy
    tls: ssl.SSLContext | None = None
    now: Callable[[], float]
    """Returns seconds since 1970, for the signature."""
    type: str = WEBHOOK

    async def send(self, id_: str, document: Mapping[str, Any]) -> None:
        """Send a report. Any answer but 2xx is retried: an operator may mend the receiver. Raises TransientError."""
        body = json.dumps(document, ensure_ascii=False, sort_keys=True).encode()
        signed = signed_headers(self.key, id_=id_, timestamp=int(self.now()), body=body)
        try:
            async with GuardedClient(self.policy, tls=self.tls) as client:
                headers = {**signed, "content-type": "application/json"}
                answer = await client.send("POST", self.url, headers=headers, content=body)
        except OutgoingError as error:
            # The path of the URL may be the secret that lets its holder post, so neither message nor cause names it.
            kind = _NOT_SENT.get(type(error), "could not be reached")
            raise TransientError(f"{read_target(self.url).origin} {kind}") from None
        if not 200 <= answer.status < 300:
            raise TransientError(f"the webhook answered {answer.status}")


@dataclass(frozen=True, kw_only=True)
class AppriseChannel:
    """Sends reports to one URL of Apprise, an optional library that knows mail, chat and paging services.

    Each URL has reports of its own, so that one which fails repeats none to the others.
    """

    url: str
    number: int = 1
    """Its place among the URLs of the setting, from 1."""

    @property
    def type(self) -> str:
        """The job type of its reports: the channel of the second URL is `trellis.alert.apprise-2`."""
        return APPRISE if self.number == 1 else f"{APPRISE}-{self.number}"

    def __post_init__(self) -> None:
        """Raises ExtraMissing, and SettingsInvalid for a URL that no service fits."""
        self._sender()

    def _sender(self) -> Any:
        with extra_needed(Extra.APPRISE, "Alerts through Apprise"):
            import apprise
        sender: Any = cast("Any", apprise).Apprise()
        if not sender.add(self.url):
            # The URL itself has a password or a token in it.
            raise SettingsInvalid(
                source="TRELLIS_ALERT_APPRISE", detail=f"entry {self.number} is no URL that Apprise knows"
            )
        return sender

    async def send(self, id_: str, document: Mapping[str, Any]) -> None:  # noqa: ARG002 - the shape of a channel
        """Send a report. Raises TransientError if the service did not take it."""
        title = f"[{document['change']}] {document['name']} {document['subject']}".strip()
        body = f"{document['text']}\n\n{document['action']} Runbook: {document['runbook']}"
        if not await asyncio.to_thread(self._sender().notify, body=body, title=title):
            raise TransientError(f"the service of entry {self.number} of TRELLIS_ALERT_APPRISE did not take the report")


def report_document(alert: Alert, kind: AlertChangeKind, gateway: str | None = None) -> dict[str, Any]:
    """What is sent about a change. `sequence` rises with each change of an alert.

    `runbook` is an address at the gateway of this URL; without one, the command that prints the page.
    """
    declared, resolved = ALERTS.get(alert.name), kind is AlertChangeKind.RESOLVED
    action = "" if declared is None else declared.action
    return {
        "id": alert.id,
        "change": kind.value,
        "sequence": 1 + list(AlertChangeKind).index(kind),
        "name": alert.name,
        "subject": alert.subject,
        "value": alert.value,
        "text": f"Resolved. It was: {alert.text}" if resolved else alert.text,
        "raised_at": timestamp(alert.raised_at),
        "resolved_at": None
        if kind is AlertChangeKind.RAISED or alert.resolved_at is None
        else timestamp(alert.resolved_at),
        "action": "Nothing: it is resolved." if resolved else action,
        "runbook": "" if declared is None else runbook_address(declared.page, gateway),
    }


@dataclass(kw_only=True)
class ReportDriver(StepRunner):
    """Sends claimed reports. `draw` returns numbers in [0, 1) for the jitter."""

    channels: Mapping[str, ReportChannel]
    draw: Callable[[], float]
    gateway: str | None = None
    """The URL of the gateway whose runbooks the reports name."""
    span = "alert.report"

    def begin(self, claimed: Claimed) -> "_ReportDrive":
        return _ReportDrive(self, claimed)


class _ReportDrive(JobDrive[None, JobError]):
    """One report, held by this process."""

    failures = JobError
    left = "report_left"

    def __init__(self, driver: ReportDriver, claimed: Claimed) -> None:
        super().__init__(driver, claimed, _log.bind(job_id=claimed.lease.job_id))
        self._driver = driver

    async def work(self) -> None:
        """Send the report. Raises TransientError, PermanentError, ReportEarly."""
        type_ = self._claimed.type
        kind, alert_id = self._named()
        alert = await self._driver.ledger.alert(alert_id)
        if alert is None or report_job_id(alert_id, kind, type_) != self._job_id:
            raise PermanentError("there is no such alert, or this job is not the one that reports it")
        if kind is AlertChangeKind.RESOLVED:
            await self._check_raised_is_over(report_job_id(alert_id, AlertChangeKind.RAISED, type_))
        document = report_document(alert, kind, self._driver.gateway)
        sending = self._driver.channels[type_].send(self._job_id, document)
        try:
            await within(self._driver.clock, SEND_S, sending)
        except TimeoutError:
            raise TransientError(f"no answer within {SEND_S:g} s") from None

    def _named(self) -> tuple[AlertChangeKind, str]:
        try:
            read = json.loads(self._claimed.payload)
            return AlertChangeKind(read["change"]), str(read["alert_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise PermanentError("the payload names no change of an alert") from error

    async def _check_raised_is_over(self, job_id: JobId) -> None:
        before = await self._driver.ledger.job(job_id)
        if before is not None and LIFECYCLES[before.lifecycle].by_name[before.state].phase is not Phase.ENDED:
            raise ReportEarly

    async def complete(self, result: None) -> str | None:  # noqa: ARG002 - the shape of a drive
        await self.advance(Trigger.COMPLETE, None)
        return "succeeded"

    async def stop(self) -> str | None:
        await self.advance("stop", None, cause="stopped on request")
        return "cancelled"

    async def fail(self, error: JobError) -> str | None:
        """Try again later, or end the job."""
        if isinstance(error, ReportEarly):
            await self.advance(Trigger.SNOOZE, None, delay_s=EARLY_S, spare_attempt=True)
            return None
        facts = AttemptFacts(self._claimed.attempts_spent, self._claimed.attempts_allowed)
        verdict = on_error(facts, error, ERRORS, self._driver.draw)
        about = {"error": {"message": verdict.error}}
        cause = verdict.error[:CAUSE_CHARS_MAX]
        if isinstance(verdict, Retry):
            _log.warning("report_not_sent", job_id=self._job_id, error=cause, again_in_s=round(verdict.delay_s, 1))
            await self.advance(Trigger.RETRY, about, cause=cause, delay_s=verdict.delay_s)
            return None
        _log.error("report_given_up", job_id=self._job_id, error=cause)
        if isinstance(verdict, Fail):
            await self.advance(Trigger.FAIL, about, cause=cause, death=verdict.death)
            return "failed"
        await self.advance("reject", about, cause=cause, death=verdict.death)
        return "dead_lettered"

    async def interrupted(self) -> None:
        """Give the report back, so that another process sends it soon. The attempt does not count."""
        with suppress(DriveStopped, LedgerError):  # the lease is lost already, or it expires
            await self.advance(Trigger.RELEASE, None, cause=GIVEN_BACK, spare_attempt=True)


@dataclass(kw_only=True)
class AlertReporter(LeaseRunner[ReportDriver]):
    """The service that sends reports. Several processes may run it: the lease says which one sends."""

    options: LeaseRunnerOptions = OPTIONS
    lifecycle: str = LEASED_JOB.name
    name: str = "alert-reports"
