"""Builds run ids (D12), proposal ids (D21) and the keys of everything a run publishes (D11).

No other module builds them.
"""

import hashlib
import re
from datetime import UTC, datetime
from functools import lru_cache

from trellis.agents.definition import checked_slug
from trellis.documents.errors import RunIdInvalid
from trellis.engine.jobs import JobId

RUN_ID = re.compile(r"run_(\d{4}-\d{2}-\d{2})_(?:\d{6}_)?([a-z0-9]{6})")
RANDOM_CHARS = 6
AUDIT_FOLDER = "audit"
CHAIN_FOLDER = f"{AUDIT_FOLDER}/chain"
ALERT_FOLDER = "alerts/projector"
RUN_FOLDERS_KEPT = 2_048
"""Folders of runs that are polled again and again are not put together each time."""
STEPS = ("load-context", "execute-agent", "persist-results", "finalize")


def make_run_id(at: datetime, random_text: str) -> JobId:
    """`run_YYYY-MM-DD_HHMMSS_xxxxxx`; the last part is taken from random hexadecimal text."""
    return JobId(f"run_{at.astimezone(UTC):%Y-%m-%d_%H%M%S}_{random_text[:RANDOM_CHARS]}")


def run_date(run_id: str) -> str:
    """The day in a long or short run id; raises RunIdInvalid."""
    matched = RUN_ID.fullmatch(run_id)
    if matched is None:
        raise RunIdInvalid(run_id=run_id)
    return matched.group(1)


def short_form(run_id: str) -> str | None:
    """A run id without its time of day; None if it is no run id."""
    matched = RUN_ID.fullmatch(run_id)
    return None if matched is None else f"run_{matched.group(1)}_{matched.group(2)}"


def proposal_id(run_id: str, ordinal: int, action: str, target: str, content: bytes) -> JobId:
    """A deterministic proposal id.

    The same proposal of the same run gets the same id, so a repeated step creates no second one.
    """
    parts = (run_id.encode(), str(ordinal).encode(), action.encode(), target.encode(), content)
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()
    return JobId(f"prop_{run_date(run_id)}_{digest[:12]}")


def make_proposal_id(at: datetime, random_text: str) -> JobId:
    """A random id for a proposal outside a run: `prop_YYYY-MM-DD_xxxxxxxxxxxx`, from random hexadecimal text."""
    return JobId(f"prop_{at.astimezone(UTC):%Y-%m-%d}_{random_text.replace('-', '')[:12]}")


def entry_proposal_id(entry: str, at: datetime) -> JobId:
    """The id of the one proposal that an inbox entry creates; `at` is the entry's timestamp."""
    return make_proposal_id(at, hashlib.sha256(entry.encode()).hexdigest())


def make_entry_id(at: datetime, random_text: str) -> JobId:
    """`inbox_YYYY-MM-DD_xxxxxxxxxxxx`, from random hexadecimal text (D51)."""
    return JobId(f"inbox_{at.astimezone(UTC):%Y-%m-%d}_{random_text.replace('-', '')[:12]}")


@lru_cache(RUN_FOLDERS_KEPT)
def run_folder(slug: str, run_id: str) -> str:
    run_date(run_id)
    return f"agents/{checked_slug(slug)}/runs/{run_id}"


def status_key(slug: str, run_id: str) -> str:
    return f"{run_folder(slug, run_id)}/status.json"


def manifest_key(slug: str, run_id: str) -> str:
    return f"{run_folder(slug, run_id)}/manifest.json"


def output_key(slug: str, run_id: str) -> str:
    """The run's proposals, in order: output/proposal.json."""
    return f"{run_folder(slug, run_id)}/output/proposal.json"


def step_file(number: int) -> str:
    """The path of a step's file inside the run folder. Steps count from 1."""
    return f"steps/{number:02}-{STEPS[number - 1]}.json"


def step_key(slug: str, run_id: str, number: int) -> str:
    return f"{run_folder(slug, run_id)}/{step_file(number)}"


def proposal_key(slug: str, proposal: str) -> str:
    return f"agents/{checked_slug(slug)}/proposals/{proposal}.json"


def audit_folder(at: datetime) -> str:
    return f"{AUDIT_FOLDER}/{at.astimezone(UTC):%Y%m%d}"


def audit_key(at: datetime, event_id: str) -> str:
    """The key of the audit record of one event (OBS-1)."""
    return f"{audit_folder(at)}/{event_id}.json"


def alert_key(job_id: JobId) -> str:
    return f"{ALERT_FOLDER}/{job_id}.json"


def segment_folder(at: datetime) -> str:
    """The folder of a day's segments, without the trailing `/`."""
    return f"{audit_folder(at)}/segments"


def segment_key(at: datetime, event_id: str) -> str:
    """The key of the segment that begins with this event.

    The segments of a day sort by the time of that event (D35).
    """
    return f"{segment_folder(at)}/{at.astimezone(UTC):%H%M%S%f}-{event_id}.jsonl"


def chain_folder(chain: str) -> str:
    """The folder of the blocks of a chain, without the trailing `/`. The chain without a name is the instance's."""
    return f"{CHAIN_FOLDER}/{chain}" if chain else CHAIN_FOLDER


def block_key(chain: str, number: int) -> str:
    """The key of one block of an audit chain. The keys of a chain sort by the number."""
    return f"{chain_folder(chain)}/{number:012}.json"
