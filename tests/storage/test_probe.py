"""The probe finds the stores that only look as if they kept conditions."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from trellis.storage.objects.local import LocalObjects
from trellis.storage.objects.open import random_name
from trellis.storage.objects.store import (
    CREATE,
    OVERWRITE,
    IfMatch,
    PutCondition,
    PutRefused,
    PutStored,
    StoreUnavailable,
    StoreUnfit,
)


class IgnoresCreate(LocalObjects):
    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        return await super().put(key, body, when=OVERWRITE if when == CREATE else when)


class IgnoresIfMatch(LocalObjects):
    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        return await super().put(key, body, when=OVERWRITE if isinstance(when, IfMatch) else when)


class ChecksAndThenWrites(LocalObjects):
    """Right for one writer at a time, wrong for two: the first looks and waits until the second has looked, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._creators = 0
        self._second_looked = asyncio.Event()

    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        if when != CREATE:
            return await super().put(key, body, when=when)
        self._creators += 1
        if info := await self.head(key):
            return PutRefused(info.etag)
        if self._creators > 1:
            self._second_looked.set()
        await self._second_looked.wait()
        return await super().put(key, body)


class ResurrectsWhatIsGone(LocalObjects):
    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        if isinstance(when, IfMatch) and await self.head(key) is None:
            when = OVERWRITE
        return await super().put(key, body, when=when)


class RefusesEverything(LocalObjects):
    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        return PutRefused(None)


class Forgets(LocalObjects):
    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        answer = await super().put(key, body, when=when)
        if isinstance(answer, PutStored) and (b"left" in body or b"right" in body):
            await super().put(key, b"something else")
        return answer


class BreaksDown(LocalObjects):
    async def put(self, key: str, body: bytes, *, when: PutCondition = OVERWRITE) -> PutStored | PutRefused:
        await super().put(key, body, when=when)
        raise StoreUnavailable(verb="put", key=key, reason="503")


@pytest.mark.requirement("D14")
@pytest.mark.parametrize(
    "broken,reason",
    [
        (IgnoresCreate, "two writers both won"),
        (IgnoresIfMatch, "two writers both won"),
        (ChecksAndThenWrites, "two writers both won"),
        (ResurrectsWhatIsGone, "names an object that is gone"),
        (RefusesEverything, "no writer ever wins"),
        (Forgets, "is not what is read"),
    ],
)
async def test_store_without_conditional_writes_is_refused_and_left_clean(
    tmp_path: Path, broken: type[LocalObjects], reason: str
):
    store = broken(tmp_path, new_name=random_name, now_ns=lambda: 0)
    with pytest.raises(StoreUnfit, match=re.escape(reason)) as unfit:
        await store.probe()
    assert store.url in str(unfit.value)
    assert not (await store.list("")).items
    await store.close()


async def test_a_store_that_breaks_down_is_unavailable_and_not_called_unfit(tmp_path: Path):
    store = BreaksDown(tmp_path, new_name=random_name, now_ns=lambda: 0)
    with pytest.raises(StoreUnavailable):
        await store.probe()
    assert not (await store.list("")).items
    await store.close()
