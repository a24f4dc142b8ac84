"""Opens the store at an address. The random names and the clock are parameters, with the real ones as defaults."""

import asyncio
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trellis.engine.extras import Extra, extra_needed
from trellis.storage.objects.address import S3Credentials, read_address
from trellis.storage.objects.local import LocalObjects
from trellis.storage.objects.store import (
    OBJECT_BYTES_MAX,
    ObjectStore,
    StoreRefused,
    StoreUnavailable,
)

TIMEOUT_S_DEFAULT = 10.0


def random_name() -> str:
    return secrets.token_hex(16)


async def open_objects(
    url: str,
    *,
    credentials: S3Credentials | None = None,
    object_bytes_max: int = OBJECT_BYTES_MAX,
    timeout_s: float = TIMEOUT_S_DEFAULT,
    new_name: Callable[[], str] = random_name,
    now_ns: Callable[[], int] = time.time_ns,
) -> ObjectStore:
    """Open the store at `file:///folder` (created if absent) or `s3://bucket/prefix?endpoint=…&region=…`.

    Without `credentials` an S3 store takes them from the machine (environment, container, instance). Opening sends no
    request to an S3 store; `probe` does. Raises StoreUrlInvalid, StoreRefused and StoreUnavailable.
    """
    address = read_address(url)
    if not isinstance(address, Path):
        with extra_needed(Extra.S3, "An object store on S3"):
            from trellis.storage.objects.s3 import S3Objects
        return S3Objects(
            address, credentials=credentials, new_name=new_name, timeout_s=timeout_s, object_bytes_max=object_bytes_max
        )
    make = partial(LocalObjects, address, new_name=new_name, now_ns=now_ns, object_bytes_max=object_bytes_max)
    try:
        return await asyncio.to_thread(make)
    except OSError as error:
        kind = (
            StoreRefused
            if isinstance(error, PermissionError | FileExistsError | NotADirectoryError)
            else StoreUnavailable
        )
        raise kind(verb="open", key=str(address), reason=error.strerror or str(error)) from error
