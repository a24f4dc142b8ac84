"""Commands about the ledger itself: migrate, verify, sweep, followers, doctor, version."""

import asyncio
import os
import platform
import random
import shlex
import sys
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version as installed_version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import apsw
import pydantic
import typer
from rich.text import Text

from trellis.app.settings import FILE_NAME, PREFIX, Settings, named_in, unknown_variables
from trellis.app.wiring import (
    SystemClock,
    development_key_path,
    identify,
    make_development_key,
    new_id,
    outgoing_tls,
    principal_for,
)
from trellis.cli import values
from trellis.cli.commands import LIMIT_DEFAULT, LIMIT_MAX, LimitOption, ReasonOption, command, group
from trellis.cli.invocation import Cli, make_folder, refuse_missing, sqlite_path
from trellis.cli.lost_ledger import beginning_anew, records_of_lost_ledger
from trellis.cli.output import ListingColumn, as_record, counting
from trellis.cli.problems import remedy_for, without_password
from trellis.engine.closing import closing
from trellis.engine.errors import (
    KeyUnusable,
    LedgerMissing,
    NotAllowed,
    OptionInvalid,
    Refused,
    SettingsInvalid,
    TrellisError,
)
from trellis.engine.extras import program_version
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.engine.private_files import is_open_to_others
from trellis.engine.records import Finding, FindingSeverity, JobFilter, SubscriberRecord, SweepOptions
from trellis.engine.service import Sweeper
from trellis.engine.text import counted, duration
from trellis.engine.verify import VerifyProgress, VerifyViolation, verify
from trellis.ledgers import migrate as migrate_ledger
from trellis.ledgers import open_ledger
from trellis.ledgers.moving.source import read_mark
from trellis.lifecycles import Role
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.operations.doctor import (
    FOLLOWER_BEHIND_S,
    QUEUE_STATES,
    aside_findings,
    behind_s,
    clock_finding,
    driving_findings,
    error_finding,
    follower_findings,
    has_errors,
    letters_finding,
    ok_finding,
    python_finding,
    queue_findings,
    store_finding,
    version_findings,
    warning_finding,
    work_findings,
)

if TYPE_CHECKING:  # loads HTTP, or git
    from trellis.http.client import GatewayClient
    from trellis.storage.memory.verification import MemoryVerifyReport
    from trellis.storage.objects.store import ObjectStore

SECTION = "Ledger"
LETTERS_COUNTED = 100
GATEWAY_S = 5.0
"""How long the doctor waits for a gateway."""
MEMORY_REMEDY = "look at the object store; what is lost for good comes back from a backup or an export of the memory"
STORE_S = 10.0
"""How long the doctor waits for the object store."""
NLM_DEGRADED = "degraded"
NO_NLM = "until then queue jobs are tried again, and fail when their tries are over"


def add_to(program: typer.Typer) -> None:
    command(program, "migrate", section=SECTION)(migrate)
    command(program, "verify", section=SECTION)(verify_ledger)
    command(program, "sweep", section=SECTION)(sweep)
    followers = group(
        program,
        "followers",
        section=SECTION,
        help_="Subscribers of the event feed, and how far each is behind.",
        lists=True,
    )
    command(followers, "list")(list_followers)
    command(followers, "leave-behind")(leave_behind)
    command(program, "doctor", section=SECTION)(doctor)
    command(program, "version", section="Reference")(version)


async def migrate(
    cli: Cli,
    reason: ReasonOption = None,
    plan: Annotated[  # noqa: FBT002 - a flag
        bool,
        typer.Option("--plan", help="Print what would be changed and locked, and change nothing. PostgreSQL only."),
    ] = False,
) -> None:
    """Make the ledger, or bring it to this program's schema.

    Run it before a new version starts; processes of the version before go on. On SQLite it also makes the operator's key beside the file, which requeue and
    pause ask for.
    """
    if plan:
        await _print_plan(cli)
        return
    file = sqlite_path(cli.url)
    wanted = [] if file is None else [file, development_key_path(cli.url)]
    missing = [path for path in wanted if not path.exists()]
    lost = None
    with suppress(TrellisError):  # only a note depends on it: a bucket that does not answer stops no migration
        lost = await records_of_lost_ledger(cli)
    folder = make_folder(cli.url)
    await migrate_ledger(cli.url, by=cli.person, reason=reason)
    key = make_development_key(cli.url) if file is not None else None
    created = [*([folder] if folder else []), *missing]
    address = without_password(cli.url, cli.url)
    if cli.out.as_json:
        record = {
            "ledger": address,
            "key": str(key) if key else None,
            "made": [str(path.resolve()) for path in created],
        }
        cli.out.record(record)
        return
    for path in created:
        cli.out.line(f"made {path.resolve()}")
    cli.out.line(f"{address} is ready")
    if key is not None:
        cli.out.note(f"whoever can read {key} may administer this ledger: requeue, pause, issue tokens")
    if lost is not None:
        cli.out.note(
            f"this ledger is new, and {lost} has audit records of one that was lost: run"
            f" `{cli.command('rebuild --from objects')}` before anything is submitted, or {beginning_anew(lost)}"
        )


async def _print_plan(cli: Cli) -> None:
    if sqlite_path(cli.url) is not None:
        expected = "a ledger on PostgreSQL; an SQLite file is migrated in one transaction, whenever it is opened"
        raise OptionInvalid(option="--plan", value=cli.url, expected=expected)
    from trellis.ledgers.postgres.migrate import plan_migration  # only PostgreSQL has a plan

    plan = await plan_migration(cli.url)
    if cli.out.as_json:
        cli.out.record(as_record(plan))
        return
    if not plan.pending:
        cli.out.line(f"version {plan.version}: nothing to migrate")
        return
    cli.out.line(f"version {plan.version_before} → {plan.version}")
    for one in plan.pending:
        read = ", ".join(f"{table} ({rows:,} rows)" for table, rows in one.scans.items())
        cli.out.line(f"  {one.name}" + (f": reads {read}, about {one.estimated_s:.1f} s" if read else ""))
    if plan.locks:
        cli.out.note(f"other sessions wait meanwhile for: {', '.join(plan.locks)}")


# --- verify ----------------------------------------------------------------------------------------------------------


async def verify_ledger(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> int:
    """Check every job's history against its lifecycle and its row.

    Every event is replayed; exit 1 if anything is wrong. A memory in the object store is fetched and checked too: every commit, every object.
    """
    wanted = values.limit(limit, LIMIT_MAX)
    with counting(cli.out) as count:

        def progress(far: VerifyProgress) -> None:
            count(f"jobs checked, {_counts(far.jobs, far.events, far.found).partition(', ')[2]}", far.jobs)

        async with cli.open() as ledger:
            report = await verify(ledger, on_progress=progress)
    memory = await _verified_memory(cli)
    damage = () if memory is None else memory.damage
    code = 0 if report.ok and not damage else 1
    shown = report.violations[:wanted]
    if cli.out.as_json:
        for violation in shown:
            cli.out.record(as_record(violation))
        counts: dict[str, object] = {"jobs": report.jobs, "events": report.events, "violations": report.found}
        if memory is not None:
            counts |= {"memory_commits": memory.commits, "memory_damage": list(damage)}
        cli.out.record(counts)
        return code
    if shown:
        cli.out.listing(shown, VIOLATION_COLUMNS, empty="")
    if report.found > len(shown):
        cli.out.note(f"{counted(report.found - len(shown), 'violation')} more; --limit shows more")
    cli.out.line(_counts(report.jobs, report.events, report.found), style="green" if report.ok else "bold red")
    if memory is not None:
        _show_memory(cli, memory)
    return code


async def _verified_memory(cli: Cli) -> "MemoryVerifyReport | None":
    """The check of the memory in the object store; None for one in a folder, which git itself can check."""
    from trellis.storage.memory_place import shared_prefix

    if cli.settings.memory is None or shared_prefix(str(cli.settings.memory)) is None:
        return None
    from trellis.app.memory import verify_shared_memory  # loads git

    return await verify_shared_memory(cli.settings, cli.url)


def _show_memory(cli: Cli, memory: "MemoryVerifyReport") -> None:
    for finding in memory.damage:
        cli.out.line(finding, style="red")
    if memory.unexplained_commits:
        cli.out.note(f"memory: {counted(memory.unexplained_commits, 'commit')} that no proposal explains")
    result = f"{len(memory.damage)} damaged" if memory.damage else "no damage"
    cli.out.line(
        f"memory: {counted(memory.commits, 'commit')}: {result}", style="bold red" if memory.damage else "green"
    )


def _counts(jobs: int, events: int, violations: int) -> str:
    result = counted(violations, "violation") if violations else "no violation"
    return f"{counted(jobs, 'job')}, {counted(events, 'event')}: {result}"


VIOLATION_COLUMNS = (
    ListingColumn[VerifyViolation](title="JOB", cell=lambda violation: violation.job_id or ""),
    ListingColumn[VerifyViolation](
        title="#", cell=lambda violation: "" if violation.version is None else str(violation.version)
    ),
    ListingColumn[VerifyViolation](title="RULE", cell=lambda violation: Text(violation.rule.value, style="red")),
    ListingColumn[VerifyViolation](title="WHAT", cell=lambda violation: violation.detail, wraps=True),
)


# --- sweep -----------------------------------------------------------------------------------------------------------


async def sweep(cli: Cli) -> None:
    """Run the sweeper once.

    Expired leases, due timers, deadlines and overdue soft cancels are acted on. Every worker and `trellis up` do this all the time; this is for when none of them runs.
    """
    cli.require(Role.SWEEPER, Role.CONTROL_PLANE, action="sweep")
    async with cli.open() as ledger:
        options = SweepOptions(elect=False, windows_s=cli.settings.windows_s)
        report = await Sweeper(
            ledger=ledger, actor=Actor(role=Role.SWEEPER, name=cli.person), options=options
        ).run_once()
    record = {name: value for name, value in as_record(report).items() if name not in {"elected", "next_due_s"}}
    done = ", ".join(_swept_phrase(name, count) for name, count in record.items() if count)
    cli.out.answer(record, done or "nothing was due")


SWEPT_PHRASES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "amnesty": ("lease", "extended (nobody swept for a while)"),
        "expired": ("expired lease", "ended"),
        "exhausted": ("job", "out of attempts"),
        "due": ("timer", "due"),
        "deadlines": ("deadline", "passed"),
        "cancelled": ("job", "cancelled"),
        "promoted": ("blocked job", "made ready"),
    }
)
"""What a sweep did, by the name of its count in `SweepReport`: what is counted, and what was done with it."""


def _swept_phrase(name: str, count: int) -> str:
    noun, done = SWEPT_PHRASES[name]
    return f"{counted(count, noun)} {done}"


# --- followers -------------------------------------------------------------------------------------------------------


async def list_followers(cli: Cli, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List the subscribers of the event feed, and how long the oldest unread event of each waits.

    Ended work that one of them has not read is kept for it beyond its time, for 90 days at most.
    """
    wanted = values.limit(limit, LIMIT_MAX)
    async with cli.open() as ledger:
        followers, now = await ledger.followers(), await ledger.now()
    columns = (
        ListingColumn[SubscriberRecord](title="NAME", cell=lambda seen: seen.name),
        ListingColumn[SubscriberRecord](title="BEHIND", cell=lambda seen: _behind(seen, now), right=True),
        ListingColumn[SubscriberRecord](title="KEPT FOR IT", cell=lambda seen: "yes" if seen.waits else "no"),
        ListingColumn[SubscriberRecord](title="FOLLOWED BY", cell=lambda seen: seen.actor, gives_way=True),
        ListingColumn[SubscriberRecord](title="UNTIL", cell=lambda seen: f"{seen.until:%Y-%m-%d %H:%M:%S}"),
    )
    cli.out.listing(followers[:wanted], columns, empty="Nobody has followed yet; `trellis up` does.")


def _behind(seen: SubscriberRecord, now: datetime) -> Text:
    late = behind_s(seen, now)
    style = "yellow" if late > FOLLOWER_BEHIND_S and seen.waits else "dim"
    return Text("" if seen.unread_since is None else duration(late), style=style)


async def leave_behind(
    cli: Cli,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The subscriber's name, as `trellis followers` shows it.")
    ],
    reason: ReasonOption = None,
) -> None:
    """Stop keeping events for a subscriber that is no longer run.

    What it has not read is removed when its time is over. It goes on where it stopped when it is started again, and is waited for from then on.
    """
    async with cli.connect(operator=True) as trellis:
        known = {seen.name for seen in await trellis.ledger.followers()}
        if name not in known:
            near = values.nearest(name, known)
            hint = f"did you mean {near}?" if near else "`trellis followers` lists those that are."
            raise Refused(detail=f"Nobody has followed under the name {name!r}; {hint}")
        waited = await trellis.leave_behind(name, reason=reason)
    line = f"nothing is kept for {name} {'any more' if waited else 'anyway'}"
    cli.out.answer({"follower": name, "waits": False}, line)


# --- doctor ----------------------------------------------------------------------------------------------------------


async def doctor(
    cli: Cli,
    settings_too: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--settings", help="Also print every setting in force, and where its value comes from.")
    ] = False,
) -> int:
    """Check this installation and its ledger, and print what is wrong and what to do about it.

    Exit 1 if anything is an error; warnings alone exit 0.
    """
    cli = replace(cli, warns=False)
    findings = [python_finding(sys.version_info[:3])]
    settings: Settings | None = None
    try:
        settings = cli.settings
    except TrellisError as error:
        findings.append(_failed("settings", error, None))
    remedy = "correct the variable or take it away"
    findings += [warning_finding("settings", detail=text, remedy=remedy) for text in unknown_variables(os.environ)]
    url = None
    if settings is not None or cli.ledger is not None or cli.data is not None:
        url = cli.url
        gateway = await _gateway(cli) if settings is not None else []
        findings += gateway
        findings += await _ledger_findings(url, beside_gateway=bool(gateway))
        if settings is not None:
            findings += [] if gateway else _token(url, settings)
            findings += _exposed(url, settings)
            findings += await _objects(url, settings)
            from trellis.cli.bus_checks import bus_findings  # only this check needs the bus

            findings += await bus_findings(settings, url)
            findings += await _nlm(settings)
            from trellis.cli.machine_checks import machine_findings  # only the doctor needs it

            findings += await machine_findings(settings, url)
    shown = [replace(one, detail=cli.typed(one.detail), remedy=cli.typed(one.remedy)) for one in findings]
    cli.out.listing(sorted(shown, key=lambda one: _ORDER.index(one.severity)), CHECK_COLUMNS, empty="")
    if settings_too:
        _show_settings(cli, settings)
    return 1 if has_errors(findings) else 0


def _show_settings(cli: Cli, settings: Settings | None) -> None:
    rows = _in_force(cli, settings)
    if cli.out.as_json:
        for name, value, source in rows:
            cli.out.record({"setting": name, "value": value, "source": source})
        return
    cli.out.line()
    cli.out.line("Settings", style="bold")
    cli.out.facts((name, f"{'auto' if value is None else value}  ({source})") for name, value, source in rows)


async def _gateway(cli: Cli) -> list[Finding]:
    """Whether the gateway that commands use answers, and whether it accepts the token; nothing if they use a ledger."""
    check = "gateway"
    try:
        url = cli.gateway_url
        if url is None:
            return []
        from trellis.http.calls import CallOptions  # only this check needs HTTP
        from trellis.http.client import open_client

        cli.settings.check_gateway_authority()
        async with open_client(
            url,
            token=cli.settings.shown_token,
            clock=SystemClock(),
            rng=random.Random(),  # noqa: S311 - spreads retries, nothing secret
            new_id=new_id,
            ca_file=cli.settings.gateway_ca_file,
            options=CallOptions(timeout_s=GATEWAY_S, needs_listener=True, plain_http=cli.settings.gateway_plain_http),
        ) as client:
            health = await client.health()
            token = await _token_at(client, url)
    except TrellisError as error:
        return [error_finding(check, str(error), remedy_for(error, in_doctor=True))]
    detail = f"{url} answers; its version is {health.version or 'unknown'}, this program's is {program_version()}"
    if health.status == "ok":
        return [ok_finding(check, detail), token]
    finding = warning_finding(
        check, detail=f"{detail}; it is {health.status}", remedy=f"curl {url}/system/health says which part"
    )
    return [finding, token]


async def _token_at(client: "GatewayClient", url: str) -> Finding:
    """Whether the gateway accepts the token of the settings, or asks for one. Every role may list jobs."""
    from trellis.http.errors import TokenNotTaken

    check = "token"
    try:
        await client.jobs.list(limit=1)
    except TokenNotTaken as error:
        return error_finding(check, f"{url} says: {error}", remedy_for(error, in_doctor=True))
    except TrellisError as error:
        return error_finding(check, f"{url} could not be asked about it: {error}", remedy_for(error, in_doctor=True))
    return ok_finding(check, f"{url} accepts it")


async def _ledger_findings(url: str, *, beside_gateway: bool) -> list[Finding]:
    """Findings of the ledger, or why it cannot be opened. A missing ledger is not created.

    Where a gateway is configured, no ledger is needed: its absence is no error.
    """
    try:
        refuse_missing(url)
        ledger = await open_ledger(url)
    except LedgerMissing as error:
        if not beside_gateway:
            return [_failed("ledger", error, url)]
        detail = f"there is none at {error.data['path']}: commands that go through the gateway need none"
        return [ok_finding("ledger", detail)]
    except TrellisError as error:
        return [_failed("ledger", error, url)]
    try:
        findings = [*_closed(url), *await ledger.inspect()]
        workers = await ledger.workers()
        findings += work_findings(await ledger.queues(), workers, await ledger.now())
        findings += version_findings(workers, program_version(), await ledger.now())
        letters = await ledger.dead_letters(JobFilter(), limit=LETTERS_COUNTED)
        findings.append(letters_finding(len(letters), LETTERS_COUNTED))
        findings += await _queue_jobs(ledger)
        followers, now = await ledger.followers(), await ledger.now()
        findings += follower_findings(followers, now)
        findings += driving_findings(await ledger.queues(), followers, now)
        findings.append(clock_finding(datetime.now(UTC), await ledger.now()))
        findings += _operator(url)
    except TrellisError as error:
        return [_failed("ledger", error, url)]
    finally:
        await ledger.close()
    return findings


def _closed(url: str) -> list[Finding]:
    """Whether the ledger is closed because its instance moves or has moved."""
    mark = read_mark(url)
    if mark is None:
        return []
    detail = f"this ledger is closed: its instance moves, or has moved, to {mark.ledger}"
    return [warning_finding("move", detail=detail, remedy=mark.remedy)]


async def _queue_jobs(ledger: Ledger) -> list[Finding]:
    where = {state: JobFilter(lifecycle=QUEUE_JOB.name, state=state) for state in QUEUE_STATES}
    jobs = {state: (await ledger.jobs(one, limit=LETTERS_COUNTED)).jobs for state, one in where.items()}
    return queue_findings(jobs, LETTERS_COUNTED, await ledger.now())


def _operator(url: str) -> list[Finding]:
    """Whether this user can requeue and pause, checked before it is needed."""
    if sqlite_path(url) is None:
        return []
    try:
        principal_for(url, name="doctor", operator=True)
    except NotAllowed as error:
        from trellis.cli.machine_checks import development_key_cure  # only an unusable key needs it

        remedy = development_key_cure(url)
        return [warning_finding("operator", detail=str(error), remedy=remedy)]
    detail = f"{development_key_path(url)} lets this user requeue and pause"
    return [ok_finding("operator", detail)]


def _token(url: str, settings: Settings) -> list[Finding]:
    """Whether the token in the settings is valid, and for which roles."""
    try:
        identity = identify(url, settings)
    except KeyUnusable as error:
        if sqlite_path(url) is None:
            return [_failed("token", error, url)]
        from trellis.cli.machine_checks import development_key_cure  # only an unusable key needs it

        return [error_finding("token", str(error), development_key_cure(url))]
    except TrellisError as error:
        return [_failed("token", error, url)]
    if identity is None:
        return []
    left, roles = duration(identity.expires_at - time.time()), ", ".join(sorted(identity.roles))
    return [ok_finding("token", f"{identity.name} is {roles} for {left} more")]


def _exposed(url: str, settings: Settings) -> list[Finding]:
    """Files that other users of this machine can read. Files of earlier versions keep their umask mode."""
    from trellis.app.instance import storage_locations  # imports the whole platform, only for the doctor
    from trellis.storage.objects.address import read_address

    try:
        where = storage_locations(settings, url)
        objects = read_address(where.objects)
        paths = (sqlite_path(url), sqlite_path(settings.nlm_ledger_of(url)), objects, where.memory_folder)
    except TrellisError:
        return []  # errors in them are reported by other checks
    exposed = [str(path) for path in paths if isinstance(path, Path) and is_open_to_others(path)]
    if not exposed:
        return []
    detail = f"others on this machine can read {', '.join(exposed)}"
    remedy = f"chmod -R o-rwx {shlex.join(exposed)}"
    return [warning_finding("privacy", detail=detail, remedy=remedy)]


async def _objects(url: str, settings: Settings) -> list[Finding]:
    """Whether the object store can be written and read, and documents that the projector could not publish.

    A missing store is not created.
    """
    from trellis.app.instance import storage_locations  # imports the whole platform, only for the doctor
    from trellis.cli.machine_checks import unset_model_findings
    from trellis.documents import ids
    from trellis.storage.objects.address import read_address, s3_credentials
    from trellis.storage.objects.open import open_objects
    from trellis.storage.objects.store import StoreUnavailable

    try:
        where = storage_locations(settings.model_copy(update={"memory": settings.memory or Path()}), url).objects
        address = read_address(where)
        if isinstance(address, Path) and not address.is_dir():
            return []
        objects = await open_objects(where, credentials=s3_credentials(os.environ))
    except SettingsInvalid:
        return []  # an instance without runs has no object store
    except TrellisError as error:
        return [_failed("published", error, url)]
    try:
        async with asyncio.timeout(STORE_S):
            await objects.probe()
            page = await objects.list(f"{ids.ALERT_FOLDER}/", limit=LETTERS_COUNTED)
        models = await unset_model_findings(settings, objects)
        memory = await _shared_memory(settings, url, objects)
    except TrellisError as error:
        return [store_finding(objects.url, str(error), is_away=isinstance(error, StoreUnavailable))]
    except TimeoutError:
        return [store_finding(objects.url, f"it does not answer within {STORE_S:g} s", is_away=True)]
    finally:
        await objects.close()
    names = [info.key.rpartition("/")[2].removesuffix(".json") for info in page.items]
    return [store_finding(objects.url, None), *aside_findings(names, LETTERS_COUNTED), *memory, *models]


async def _shared_memory(settings: Settings, url: str, objects: "ObjectStore") -> list[Finding]:
    """Whether a memory in the object store has every pack that its head names; nothing for one in a folder."""
    from trellis.app.instance import storage_locations
    from trellis.app.memory import check_shared_memory
    from trellis.storage.memory_place import SharedMemory

    try:
        place = storage_locations(settings, url).memory
    except SettingsInvalid:
        return []
    if not isinstance(place, SharedMemory):
        return []
    try:
        async with asyncio.timeout(STORE_S):
            there = await check_shared_memory(place, objects)
    except TimeoutError:
        return [error_finding("memory", f"{place} does not answer within {STORE_S:g} s", MEMORY_REMEDY)]
    except TrellisError as error:
        return [error_finding("memory", str(error), MEMORY_REMEDY)]
    return [ok_finding("memory", f"{place} has {there}")]


async def _nlm(settings: Settings) -> list[Finding]:
    """Whether the configured NLM backend answers. An embedded one runs only inside `trellis up` and is not checked."""
    if settings.nlm_backend is None:
        return []
    from trellis.research.backend_client import NlmBackend  # only the doctor needs it

    check, remedy = "nlm backend", f"start it there (`trellis up --roles nlm`) or correct {PREFIX}NLM_BACKEND; {NO_NLM}"
    address = without_password(settings.nlm_backend, settings.nlm_backend)
    try:
        async with closing(NlmBackend(settings.nlm_backend, lambda: "", outgoing_tls(settings))) as backend:
            health = await backend.health()
    except TrellisError as error:
        return [error_finding(check, without_password(str(error), settings.nlm_backend), remedy)]
    if health == "ok":
        return [ok_finding(check, f"{address} answers")]
    answer, remedy = "not as an NLM backend does", f"look whether {PREFIX}NLM_BACKEND is the address that is meant"
    if health == NLM_DEGRADED:
        answer, remedy = "its provider does not", "look in its log"
    return [warning_finding(check, detail=f"{address} answers, but {answer}", remedy=remedy)]


def _failed(check: str, error: TrellisError, url: str | None) -> Finding:
    return error_finding(check, without_password(str(error), url), remedy_for(error, in_doctor=True))


def _in_force(cli: Cli, settings: Settings | None) -> list[tuple[str, Any, str]]:
    """Each setting with its value and where the value comes from."""
    if settings is None:
        return []
    written: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        written = tomllib.loads((Path.cwd() / FILE_NAME).read_text(encoding="utf-8"))
    rows: list[tuple[str, Any, str]] = []
    variables = named_in(os.environ)
    for name in Settings.model_fields:
        value, source = _plain(getattr(settings, name)), "default"
        if name in variables:
            source = f"{PREFIX}{name.upper()}"
        elif name in written:
            source = FILE_NAME
        if name == "bus":
            value = settings.shown_bus
        if name == "ledger":
            given = "--ledger" if cli.ledger is not None else "--data" if cli.data is not None else None
            value, source = without_password(cli.url, cli.url), given or source
        rows.append((name, value, source))
    return rows


def _plain(value: Any) -> Any:
    """A setting in printable form; secrets are masked."""
    return str(value) if isinstance(value, Path | pydantic.SecretStr) else value


MARKS = {
    FindingSeverity.OK: ("ok", "green"),
    FindingSeverity.WARNING: ("warning", "yellow"),
    FindingSeverity.ERROR: ("error", "bold red"),
}


_ORDER = (FindingSeverity.ERROR, FindingSeverity.WARNING, FindingSeverity.OK)
"""Order of the findings: errors first."""


def _told(finding: Finding) -> Text:
    return Text.assemble(finding.detail, *([("\n→ ", "bold"), finding.remedy] if finding.remedy else []))


CHECK_COLUMNS = (
    ListingColumn[Finding](title="RESULT", cell=lambda finding: Text(*MARKS[finding.severity])),
    ListingColumn[Finding](title="CHECK", cell=lambda finding: finding.check),
    ListingColumn[Finding](title="FOUND", cell=_told, wraps=True),
)


def version(cli: Cli) -> None:
    """Print the versions of the program and of its libraries."""
    rows = {
        "trellis": program_version(),
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "apsw": apsw.apsw_version(),
    }
    with suppress(ModuleNotFoundError):
        rows["asyncpg"] = installed_version("asyncpg")
    if cli.out.as_json:
        cli.out.record(rows)
    else:
        cli.out.facts(list(rows.items()))
