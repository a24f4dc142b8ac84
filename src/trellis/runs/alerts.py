"""Jobs that the projector has set aside, because the object store holds something else where they publish.

One object for each, `alerts/projector/<job>.json`, made when it happens and taken away when the job could be published after all. So
the next projector, and `doctor`, know of it too.
"""

import json
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass

from trellis.engine.jobs import JobId
from trellis.runs import ids
from trellis.runs.documents import encode
from trellis.storage.objects import ObjectStore


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectorAlert:
    """The first event of a job that could not be published whole, and the object that was in the way."""

    job_id: JobId
    version: int
    key: str

    def to_bytes(self) -> bytes:
        """As an object."""
        return encode(asdict(self))


async def read_alerts(objects: ObjectStore) -> AsyncGenerator[ProjectorAlert]:
    """Every alert there is; what cannot be read is none."""
    after: str | None = None
    while True:
        page = await objects.list(f"{ids.ALERT_FOLDER}/", after=after)
        for info in page.items:
            found = await objects.get(info.key)
            alert = None if found is None else _read(found.body)
            if alert is not None:
                yield alert
        if not page.more:
            return
        after = page.items[-1].key


async def raise_alert(objects: ObjectStore, alert: ProjectorAlert) -> None:
    """Make it known; one job has one alert, the newest."""
    await objects.put(ids.alert_key(alert.job_id), alert.to_bytes())


async def withdraw_alert(objects: ObjectStore, job_id: JobId) -> None:
    """The job is published after all."""
    await objects.delete(ids.alert_key(job_id))


def _read(body: bytes) -> ProjectorAlert | None:
    try:
        told = json.loads(body)
        return ProjectorAlert(job_id=JobId(told["job_id"]), version=int(told["version"]), key=told["key"])
    except (ValueError, KeyError, TypeError):
        return None
