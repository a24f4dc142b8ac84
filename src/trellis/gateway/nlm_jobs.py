"""Jobs of the NLM backend, for operators: they lie in its own ledger (D42), and the gateway asks it for them.

Nothing here is kept, and nothing but these reads depends on the backend: while it is away they are answered with 502.
"""

import re
from typing import Any
from urllib.parse import quote, urlencode

from trellis.gateway.callers import Caller
from trellis.instance import Instance
from trellis.queue.errors import StageError, StageHopeless
from trellis.web.problems import Problem

RULE = "nlm.read"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*@[0-9]+")
CURSOR = "nlm:"
"""How the cursor of a listing begins that the backend goes on with."""


async def list_nlm_jobs(
    instance: Instance, caller: Caller, *, limit: int, cursor: str | None, **where: str | None
) -> dict[str, Any]:
    """A page of NLM jobs, newest first; raises Problem, NotAllowed."""
    caller.permit(RULE)
    asked = {**where, "limit": str(limit), "cursor": None if cursor is None else cursor.removeprefix(CURSOR)}
    given = {name: value for name, value in asked.items() if value is not None}
    page: Any = await _read(instance, caller, f"/jobs?{urlencode(given)}") or {"items": [], "next_cursor": None}
    following: str | None = page["next_cursor"]
    return {"items": page["items"], "next_cursor": None if following is None else f"{CURSOR}{following}"}


async def show_nlm_job(instance: Instance, caller: Caller, job_id: str) -> dict[str, Any] | None:
    """One NLM job; None when the backend knows none of that id. Raises Problem."""
    return await _read(instance, caller, f"/jobs/{quote(job_id, safe='')}") if _may_be(caller, job_id) else None


async def nlm_job_events(
    instance: Instance, caller: Caller, job_id: str, *, limit: int, cursor: int | None
) -> dict[str, Any] | None:
    """A page of its events, oldest first; None when the backend knows none of that id. Raises Problem."""
    if not _may_be(caller, job_id):
        return None
    given = {"limit": str(limit), **({} if cursor is None else {"cursor": str(cursor)})}
    return await _read(instance, caller, f"/jobs/{quote(job_id, safe='')}/events?{urlencode(given)}")


def _may_be(caller: Caller, job_id: str) -> bool:
    """Whether the backend is asked at all: its ids are `<job>@<epoch>`, and only operators see them."""
    return _ID.fullmatch(job_id) is not None and caller.may(RULE)


async def _read(instance: Instance, caller: Caller, path: str) -> Any:
    try:
        return await instance.nlm_reader.read(path, correlation_id=caller.correlation_id)
    except StageHopeless as error:
        raise Problem("VALIDATION_FAILED", str(error)) from error
    except StageError as error:
        raise Problem("NLM_UNAVAILABLE", f"The NLM backend has these jobs and was asked: {error}") from error
