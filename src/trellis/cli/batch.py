"""`trellis batch`: submits the jobs of a file, and the job that starts when all of them have ended."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from trellis.cli import values
from trellis.cli.applications import load_app
from trellis.cli.commands import command
from trellis.cli.invocation import Cli
from trellis.cli.job_end import GatewayWatch, JobWatch, LedgerWatch, SubmittedJob, finish
from trellis.cli.submit import AppOption, KeyOfRequestOption, PayloadArgument, WaitOption
from trellis.engine.errors import InputError, OptionInvalid
from trellis.engine.job_batches import BATCH_BYTES_MAX, BATCH_MAX
from trellis.engine.text import counted
from trellis.lifecycles.leased_job import LEASED_JOB, SUSPENDED_STATE
from trellis.worker.kinds import batch_job_from_json
from trellis.worker.requests import BatchJob, SubmitSettings

FILE_BYTES_MAX = 2 * BATCH_BYTES_MAX

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="A job in each line, as POST /jobs takes it; - for standard input.")
]
TypeArgument = Annotated[str, typer.Argument(metavar="TYPE", help="The type of the job that completes the batch.")]
AbandonOption = Annotated[
    bool, typer.Option("--abandon", help="The jobs go on when the job that completes them is cancelled.")
]


def add_to(program: typer.Typer) -> None:
    command(program, "batch", section="Jobs", gateway=True)(batch)


async def batch(
    cli: Cli,
    file: FileArgument,
    type_: TypeArgument,
    payload: PayloadArgument = None,
    *,
    key: KeyOfRequestOption = None,
    abandon: AbandonOption = False,
    app: AppOption = None,
    wait: WaitOption = None,
) -> int:
    """Submit the jobs of a file, and one that starts when all have ended.

    Each line of the file is a JSON object such as {"type": "page.fetch", "payload": "a.html"}. All are submitted in one transaction, or
    none. Prints the id of the job that completes them; `trellis jobs --parent ID` lists them. docs/how-to/batches.md has more.
    """
    cli.refuse_at_gateway(app=app)
    wait_s, body = values.seconds("--wait", wait), values.payload(type_, payload)
    lines = _lines(file)
    if cli.gateway_url is not None:
        async with cli.client() as client:
            last = {"type": type_, "payload": body}
            submitted = await client.jobs.submit_batch(lines, on_complete=last, abandon=abandon, idempotency_key=key)
            return await _finish(
                cli, GatewayWatch(client), submitted.job_id, len(submitted.jobs), wait_s, created=submitted.created
            )
    jobs = [_job(number, line) for number, line in enumerate(lines, start=1)]
    settings = SubmitSettings() if key is None else SubmitSettings(idempotency_key=key)
    async with cli.connect(app=load_app(app) if app else None) as trellis:
        handle = await trellis.submit_batch(
            jobs, on_complete=BatchJob(type_, body, **settings), returns=Any, abandon=abandon
        )
        watch, job_id = LedgerWatch(cli, trellis), handle.completion.id
        return await _finish(cli, watch, job_id, len(handle.jobs), wait_s, created=handle.created)


async def _finish(cli: Cli, watch: JobWatch, job_id: str, count: int, wait_s: float | None, *, created: bool) -> int:
    status = SUSPENDED_STATE if created and count else await watch.state(job_id)
    job = SubmittedJob(job_id=job_id, lifecycle=LEASED_JOB.name, status=status, created=created)
    if created and cli.out.console.is_terminal:
        cli.out.note(f"it starts when {counted(count, 'job')} ended")
    return await finish(cli, watch, job, wait_s)


def _lines(file: str) -> list[dict[str, Any]]:
    """The objects in the lines of a file. Empty lines are skipped. Raises OptionInvalid."""
    try:
        stream = sys.stdin.buffer if file == "-" else Path(file).open("rb")  # noqa: SIM115 - closed below
        with stream:
            body = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise OptionInvalid(option="FILE", value=file, expected=f"it cannot be read ({error.strerror})") from error
    if len(body) > FILE_BYTES_MAX:
        raise OptionInvalid(option="FILE", value=file, expected=f"at most {FILE_BYTES_MAX} bytes")
    texts = [(number, line) for number, line in enumerate(body.splitlines(), start=1) if line.strip()]
    if len(texts) > BATCH_MAX:
        raise OptionInvalid(option="FILE", value=f"{len(texts)} jobs", expected=f"at most {BATCH_MAX} in one batch")
    return [_object(number, line) for number, line in texts]


def _object(number: int, line: bytes) -> dict[str, Any]:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OptionInvalid(option=f"line {number}", value=_shown(line), expected=f"JSON ({error})") from None
    if not isinstance(value, dict):
        raise OptionInvalid(option=f"line {number}", value=_shown(line), expected="an object with a type and a payload")
    return cast("dict[str, Any]", value)


def _job(number: int, value: dict[str, Any]) -> BatchJob:
    try:
        return batch_job_from_json(value)
    except InputError as error:
        shown = _shown(json.dumps(value).encode())
        raise OptionInvalid(option=f"job {number}", value=shown, expected=str(error)) from None


def _shown(line: bytes) -> str:
    return line[:60].decode("utf-8", "replace")
