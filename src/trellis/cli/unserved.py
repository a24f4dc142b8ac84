"""Notes about jobs that no living worker takes: one of a mistyped type would wait for ever."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from trellis.cli import values
from trellis.cli.invocation import Cli
from trellis.engine.errors import TrellisError
from trellis.lifecycles import LIFECYCLES, Phase
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB

if TYPE_CHECKING:  # the application, HTTP and what looks at workers are imported only when they are used
    from trellis.api.local import LocalApi
    from trellis.engine.ledger import Ledger
    from trellis.http.client import GatewayClient


async def note_unserved_submit(cli: Cli, ledger: "Ledger", type_: str, lifecycle: str) -> None:
    """Note that no living worker takes the job that was submitted."""
    from trellis.operations.explain import is_alive, worker_info

    now = await ledger.now()
    _note(cli, type_, lifecycle, [worker_info(one) for one in await ledger.workers() if is_alive(one, now)])


async def note_unserved_jobs(cli: Cli, api: "GatewayClient | LocalApi", jobs: Iterable[Mapping[str, Any]]) -> None:
    """Note the first types of listed jobs that no living worker takes, if the caller may see the workers."""
    from trellis.operations.doctor import OWN_TYPES
    from trellis.operations.explain import NAMES_MAX

    waiting = [job for job in jobs if job["lifecycle"] == LEASED_JOB.name and not job["type"].startswith(OWN_TYPES)]
    states = LIFECYCLES[LEASED_JOB.name].by_name
    types = sorted({job["type"] for job in waiting if states[job["status"]].phase is Phase.WAITING})
    if types:
        with suppress(TrellisError):
            alive = [one.info for one in (await api.system.workers()).items if one.state == "alive"]
            taken = _types(alive, on_bus=False)
            for type_ in [one for one in types if one not in taken][:NAMES_MAX]:
                _note(cli, type_, LEASED_JOB.name, alive)


def _note(cli: Cli, type_: str, lifecycle: str, alive: Sequence[Any]) -> None:
    served = _types(alive, on_bus=lifecycle == BUS_JOB.name)
    if type_ in served:
        return
    hint = values.did_you_mean(type_, served) or ": the job waits until one does (`trellis worker MODULE:APP`)"
    if lifecycle != BUS_JOB.name and type_ in _types(alive, on_bus=True):
        hint += f"; on the bus one serves the topic (`trellis submit --topic {type_}`)"
    cli.out.note(f"no living worker serves {type_}{hint}")


def _types(alive: Sequence[Any], *, on_bus: bool) -> set[str]:
    """The types that workers reported, by what each said about itself: of jobs of the ledger, or topics on the bus."""
    infos = [cast("Mapping[str, Any]", info) for info in alive if isinstance(info, Mapping)]
    infos = [info for info in infos if bool(info.get("bus")) == on_bus]
    return {str(type_) for info in infos for type_ in info.get("types", ())}
