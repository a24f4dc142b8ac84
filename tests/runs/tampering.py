"""Random changes of the audit records: of objects in the object store, and of rows in the ledger."""

import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw

from trellis.documents import ids
from trellis.storage.objects.canonical_json import encode
from trellis.storage.objects.store import ObjectStore

Tampering = Callable[[random.Random], Awaitable[str]]
"""Makes one change and returns what it was."""


async def keys(objects: ObjectStore, prefix: str = "audit/") -> list[str]:
    found: list[str] = []
    while True:
        page = await objects.list(prefix, after=found[-1] if found else None)
        found += [info.key for info in page.items]
        if not page.more:
            return found


class ObjectTampering:
    """Changes of the object store. `before` has the bytes of every object that was changed or removed."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self.before: dict[str, bytes | None] = {}

    def kinds(self) -> dict[str, Tampering]:
        return {
            "flip a byte": self.flip,
            "rewrite a field": self.rewrite,
            "delete an object": self.delete,
            "insert a record": self.insert,
            "copy an object": self.copy,
            "swap two objects": self.swap,
            "swap two lines": self.swap_lines,
            "delete a line": self.delete_line,
            "repeat a line": self.repeat_line,
            "move a line": self.move_line,
            "reseal a block": self.reseal,
        }

    async def undo(self) -> None:
        for key, body in self.before.items():
            if body is None:
                await self.objects.delete(key)
            else:
                await self.objects.put(key, body)
        self.before.clear()

    async def _read(self, key: str) -> bytes:
        found = await self.objects.get(key)
        assert found is not None
        return found.body

    async def _put(self, key: str, body: bytes | None) -> None:
        if key not in self.before:
            there = await self.objects.get(key)
            self.before[key] = None if there is None else there.body
        if body is None:
            await self.objects.delete(key)
        else:
            await self.objects.put(key, body)

    async def _one(self, rng: random.Random, wanted: Callable[[str], bool] = lambda key: True) -> str:
        return rng.choice([key for key in await keys(self.objects) if wanted(key)])

    async def flip(self, rng: random.Random) -> str:
        key = await self._one(rng)
        body = bytearray(await self._read(key))
        at = rng.randrange(len(body))
        body[at] ^= 1 << rng.randrange(8)
        await self._put(key, bytes(body))
        return f"byte {at} of {key}"

    async def rewrite(self, rng: random.Random) -> str:
        """A change that keeps the form of records: somebody else did it, or for another reason."""
        key = await self._one(rng, lambda key: not key.startswith(ids.CHAIN_FOLDER))
        body = await self._read(key)
        single = not key.endswith(".jsonl")
        lines = [body] if single else body.splitlines()
        number, field = rng.randrange(len(lines)), rng.choice(["actor_name", "cause", "correlation_id", "node", "ts"])
        made = json.loads(lines[number])
        made[field] = "2001-01-01T00:00:00.000000Z" if field == "ts" else "somebody else"
        text = json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode()
        lines[number] = encode(made) if single else text
        await self._put(key, lines[0] if single else b"\n".join(lines) + b"\n")
        return f"{field} in {key}"

    async def delete(self, rng: random.Random) -> str:
        key = await self._one(rng)
        await self._put(key, None)
        return key

    async def insert(self, rng: random.Random) -> str:
        key = await self._one(rng, lambda key: not key.startswith(ids.CHAIN_FOLDER) and not key.endswith(".jsonl"))
        made = json.loads(await self._read(key))
        made["event_id"] = f"forged-{rng.randrange(1000)}-1"
        forged = f"{key.rpartition('/')[0]}/{made['event_id']}.json"
        await self._put(forged, encode(made))
        return forged

    async def copy(self, rng: random.Random) -> str:
        key = await self._one(rng)
        copied = f"{key.rpartition('/')[0]}/copy-{rng.randrange(1000)}.json{'l' if key.endswith('l') else ''}"
        await self._put(copied, await self._read(key))
        return f"{key} as {copied}"

    async def swap(self, rng: random.Random) -> str:
        one = await self._one(rng)
        folder = one.rpartition("/")[0]
        other = await self._one(
            rng, lambda key: key != one and (key.rpartition("/")[0] == folder or "chain" not in key)
        )
        first, second = await self._read(one), await self._read(other)
        await self._put(one, second)
        await self._put(other, first)
        return f"{one} and {other}"

    async def _lines(self, rng: random.Random, least: int) -> tuple[str, list[bytes]]:
        found = [key for key in await keys(self.objects) if key.endswith(".jsonl")]
        long = [(key, lines) for key in found if len(lines := (await self._read(key)).splitlines()) >= least]
        return rng.choice(long)

    async def swap_lines(self, rng: random.Random) -> str:
        key, lines = await self._lines(rng, 2)
        one, other = rng.sample(range(len(lines)), 2)
        lines[one], lines[other] = lines[other], lines[one]
        await self._put(key, b"\n".join(lines) + b"\n")
        return f"lines {one} and {other} of {key}"

    async def delete_line(self, rng: random.Random) -> str:
        key, lines = await self._lines(rng, 2)
        at = rng.randrange(len(lines))
        del lines[at]
        await self._put(key, b"\n".join(lines) + b"\n")
        return f"line {at} of {key}"

    async def repeat_line(self, rng: random.Random) -> str:
        key, lines = await self._lines(rng, 1)
        at = rng.randrange(len(lines))
        lines.insert(at, lines[at])
        await self._put(key, b"\n".join(lines) + b"\n")
        return f"line {at} of {key}"

    async def move_line(self, rng: random.Random) -> str:
        """A line of one segment is put at the end of another one."""
        key, lines = await self._lines(rng, 2)
        other = await self._one(rng, lambda one: one.endswith(".jsonl") and one != key)
        at = rng.randrange(len(lines))
        line = lines.pop(at)
        await self._put(key, b"\n".join(lines) + b"\n")
        await self._put(other, await self._read(other) + line + b"\n")
        return f"line {at} of {key} to {other}"

    async def reseal(self, rng: random.Random) -> str:
        """A record and its block are changed together, so that they fit; the next block, or the ledger, does not."""
        key = await self._one(rng, lambda key: key.startswith(ids.CHAIN_FOLDER))
        block = json.loads(await self._read(key))
        records = block["records"]
        if not records:
            return await self.delete(rng)
        del records[rng.randrange(len(records))]
        block["count"] = len(records)
        await self._put(key, json.dumps(block, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        return f"a record less in {key}"


class SqliteTampering:
    """Changes of rows in an SQLite ledger, by somebody who can write its file and has removed the triggers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def kinds(self) -> dict[str, Tampering]:
        return {
            "edit an event": self.edit,
            "delete an event": self.delete,
            "delete a job": self.delete_job,
            "swap two positions": self.swap,
            "insert an event": self.insert,
            "edit a payload": self.payload,
            "edit an act": self.act,
            "delete an act": self.delete_act,
            "edit the head": self.head,
        }

    def _run(self, *statements: tuple[str, tuple[Any, ...]]) -> list[Any]:
        connection = apsw.Connection(str(self.path))
        try:
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
                connection.execute(f"DROP TRIGGER {name}")
            return [connection.execute(text, values).fetchall() for text, values in statements]
        finally:
            connection.close()

    def _pick(self, rng: random.Random, query: str) -> Any:
        ((found,),) = (self._run((query, ())),)
        return rng.choice(found)[0]

    async def edit(self, rng: random.Random) -> str:
        seq = self._pick(rng, "SELECT seq FROM trellis_event ORDER BY seq")
        column, value = rng.choice([("at", "at + 1"), ("cause", "'x' || coalesce(cause, '')"), ("actor", "actor + 1")])
        self._run((f"UPDATE trellis_event SET {column} = {value} WHERE seq = ?", (seq,)))
        return f"{column} of event {seq}"

    async def delete(self, rng: random.Random) -> str:
        seq = self._pick(rng, "SELECT seq FROM trellis_event ORDER BY seq")
        self._run(("DELETE FROM trellis_event WHERE seq = ?", (seq,)))
        return f"event {seq}"

    async def delete_job(self, rng: random.Random) -> str:
        job = self._pick(rng, "SELECT id FROM trellis_job ORDER BY id")
        tables = [("job", "id"), ("submission", "id"), ("event", "job"), ("idempotency", "job"), ("dead_letter", "job")]
        self._run(*((f"DELETE FROM trellis_{table} WHERE {column} = ?", (job,)) for table, column in tables))
        return f"job {job}"

    async def swap(self, rng: random.Random) -> str:
        found = self._run(("SELECT seq FROM trellis_event ORDER BY seq", ()))[0]
        one, other = (row[0] for row in rng.sample(found, 2))
        text = "UPDATE trellis_event SET seq = ? WHERE seq = ?"
        self._run((text, (-1, one)), (text, (one, other)), (text, (other, -1)))
        return f"events {one} and {other}"

    async def insert(self, rng: random.Random) -> str:
        seq = self._pick(rng, "SELECT seq FROM trellis_event ORDER BY seq")
        columns = [row[1] for row in self._run(("PRAGMA table_info(trellis_event)", ()))[0] if row[1] != "seq"]
        values = ", ".join("version + 1000" if name == "version" else name for name in columns)
        text = f"INSERT INTO trellis_event ({', '.join(columns)}) SELECT {values} FROM trellis_event WHERE seq = ?"
        self._run((text, (seq,)))
        return f"like event {seq}"

    async def payload(self, rng: random.Random) -> str:
        job = self._pick(rng, "SELECT id FROM trellis_submission ORDER BY id")
        self._run(("UPDATE trellis_submission SET payload = ? WHERE id = ?", (b'{"forged":true}', job)))
        return f"of job {job}"

    async def act(self, rng: random.Random) -> str:
        no = self._pick(rng, "SELECT no FROM trellis_act ORDER BY no")
        self._run(("UPDATE trellis_act SET cause = 'another reason' WHERE no = ?", (no,)))
        return f"act {no}"

    async def delete_act(self, rng: random.Random) -> str:
        no = self._pick(rng, "SELECT no FROM trellis_act ORDER BY no")
        self._run(("DELETE FROM trellis_act WHERE no = ?", (no,)))
        return f"act {no}"

    async def head(self, rng: random.Random) -> str:
        change = rng.choice(["number = number + 1", "number = number - 1", "sha256 = printf('%064d', 7)"])
        self._run((f"UPDATE trellis_audit_head SET {change}", ()))
        return change
