"""Checks on the configured store that conditional writes work. Trellis relies on them alone to select one winner.

Some S3-compatible stores accept the condition of a write and ignore it, some only if the object is missing. The probe
races and misuses a key of its own and then deletes it.
"""

import asyncio

from trellis.storage.objects.keys import object_key
from trellis.storage.objects.store import CREATE, ObjectStore, PutCondition, PutStored, StoreUnfit, if_match

PROBE_FOLDER = "trellis-probe"
RACE_TRIES = 3


async def prove_conditional_writes(store: ObjectStore, name: str) -> None:
    """Raise StoreUnfit if the store accepts a write that it must refuse, or refuses one that it must accept."""
    key = object_key(PROBE_FOLDER, name)
    try:
        first = await _race(store, key, "first", CREATE)
        if isinstance(await store.put(key, b"late", when=CREATE), PutStored):
            raise StoreUnfit(url=store.url, reason="it overwrites an object that was only to be created")
        second = await _race(store, key, "second", if_match(first))
        if isinstance(await store.put(key, b"stale", when=if_match(first)), PutStored):
            raise StoreUnfit(url=store.url, reason="it takes a write whose If-Match names an old version")
        there = await store.get(key)
        if there is None or there.etag != second:
            raise StoreUnfit(url=store.url, reason="what was just written is not what is read")
        await store.delete(key)
        if isinstance(await store.put(key, b"ghost", when=if_match(second)), PutStored):
            raise StoreUnfit(url=store.url, reason="it takes a write whose If-Match names an object that is gone")
    finally:
        await store.delete(key)


async def _race(store: ObjectStore, key: str, label: str, when: PutCondition) -> str:
    """Two different writes under one condition. Returns the etag of the one that won."""
    for number in range(RACE_TRIES):
        bodies = [f"{label} {number} {side}".encode() for side in ("left", "right")]
        answers = await asyncio.gather(*(store.put(key, body, when=when) for body in bodies), return_exceptions=True)
        for answer in answers:  # raised after both have ended, so that nothing is written after the probe
            if isinstance(answer, BaseException):
                raise answer
        won = [
            (answer.etag, body) for answer, body in zip(answers, bodies, strict=True) if isinstance(answer, PutStored)
        ]
        if len(won) > 1:
            raise StoreUnfit(
                url=store.url, reason=f"two writers both won the same conditional write ({_condition_name(when)})"
            )
        if won:
            etag, body = won[0]
            there = await store.get(key)
            if there is None or there.body != body:
                raise StoreUnfit(
                    url=store.url,
                    reason=f"the winner of a conditional write ({_condition_name(when)}) is not what is read",
                )
            return etag
    raise StoreUnfit(url=store.url, reason=f"no writer ever wins a conditional write ({_condition_name(when)})")


def _condition_name(when: PutCondition) -> str:
    return "create only" if when == CREATE else "If-Match"
