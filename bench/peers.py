"""The peers: which there are, and why one cannot be measured on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """An engine that ours is measured beside."""

    name: str
    module: str
    """What its module in `bench/subjects` imports."""
    package: str
    """The package that has this module; the requirements of `make bench` name it."""
    schema_variable: str = ""
    """The environment variable that names its schema file, for an engine whose package has none."""
    schema_file: str = ""
    """That file in the repository of the peer."""


PEERS = {
    "peer_absurd": Peer(
        name="Absurd",
        module="absurd_sdk",
        package="absurd-sdk",
        schema_variable="ABSURD_SQL",
        schema_file="sql/absurd.sql",
    ),
    "peer_dbos": Peer(name="DBOS", module="dbos", package="dbos"),
    "peer_huey": Peer(name="huey", module="huey", package="huey"),
    "peer_pgqueuer": Peer(name="PgQueuer", module="pgqueuer", package="pgqueuer"),
    "peer_procrastinate": Peer(name="Procrastinate", module="procrastinate", package="procrastinate"),
}
"""By the module of `bench/subjects` that drives the peer."""


def why_missing(subject: str) -> str | None:
    """Why a peer is not measured, with what to do about it; None if it can be measured."""
    peer = PEERS[subject]
    if find_spec(peer.module) is None:
        return f"{peer.name} is left out: its package {peer.package} is not installed; `make bench` installs it"
    if not peer.schema_variable:
        return None
    file = os.environ.get(peer.schema_variable)
    if not file:
        wanted = f"set {peer.schema_variable} to the file {peer.schema_file} of its repository"
        return f"{peer.name} is left out: its package has no schema; {wanted}"
    if not Path(file).is_file():
        return f"{peer.name} is left out: {peer.schema_variable} names {file}, which is no file"
    return None


_left_out: ContextVar[frozenset[str] | None] = ContextVar("left_out", default=None)


@contextmanager
def ours_alone(but: frozenset[str] = frozenset()) -> Iterator[None]:
    """Measure neither peers nor floors meanwhile, nor these subjects of ours."""
    token = _left_out.set(but)
    try:
        yield
    finally:
        _left_out.reset(token)


def present(*subjects: str) -> list[str]:
    """Those of these subjects that are measured here: ours, and what is beside it unless it is missing or unwanted."""
    left_out = _left_out.get()
    if left_out is not None:
        return [one for one in subjects if one not in left_out and not one.startswith(("peer_", "floor_"))]
    return [subject for subject in subjects if subject not in PEERS or why_missing(subject) is None]
