"""Arrays of numbers, as the ledger's connections send and receive them, are those of the driver and of the server."""

import struct
from typing import Any

import asyncpg
import pytest

from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, JobId, NewJob, StepApplied, Turn, TypeClaim
from trellis.ledgers.postgres.connection import NUMBER_ARRAYS, connect, set_number_arrays
from trellis.ledgers.postgres.ledger import PostgresLedger
from trellis.ledgers.postgres.number_arrays import NumberArrays
from trellis.lifecycles import Role, Trigger

TYPES = {1005: ("smallint", 2**15), 1007: ("int", 2**31), 1016: ("bigint", 2**63)}


def lists(limit: int) -> list[list[int | None]]:
    """No element, one, many, alike and not, with nulls, and the ends of the type."""
    return [
        [],
        [0],
        [-1],
        [None],
        [limit - 1],
        [-limit],
        [limit - 1, -limit],
        [None, None],
        [7, None],
        [7, None, -limit, None],
        [5] * 300,
        [-3, *[5] * 300],
        [*[5] * 300, -3],
        [n * 100 - 3 for n in range(300)],
        [256, 1, 65_535 % limit, -65_536 % limit],
    ]


async def test_numbers_arrive_as_they_were_sent(postgres_url: str):
    ours, drivers = await connect(postgres_url), await asyncpg.connect(postgres_url)
    try:
        for name, limit in TYPES.values():
            for numbers in lists(limit):
                query = f"select $1::{name}[], $1::{name}[]::text[]"
                as_text = [None if number is None else str(number) for number in numbers]
                assert list((await ours.fetch(query, numbers))[0]) == [numbers, as_text]
                assert list((await drivers.fetch(query, numbers))[0]) == [numbers, as_text]
    finally:
        await ours.close()
        await drivers.close()


async def test_the_driver_that_is_installed_lets_us_encode(postgres_url: str, monkeypatch: pytest.MonkeyPatch):
    encode, encoded = NumberArrays.encode, list[object]()

    def noted(form: NumberArrays, numbers: Any) -> bytes:
        encoded.append(numbers)
        return encode(form, numbers)

    monkeypatch.setattr(NumberArrays, "encode", noted)
    connection = await connect(postgres_url)
    try:
        assert await connection.fetchval("select $1::bigint[]", [1, 2]) == [1, 2]
    finally:
        await connection.close()
    assert encoded == [[1, 2]]


async def test_with_a_driver_that_has_changed_inside_the_ledger_works_with_its_lists(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    set_number_arrays(object())
    monkeypatch.setattr("trellis.ledgers.postgres.connection.NUMBER_ARRAYS", {})
    ledger = await PostgresLedger.open(postgres_url)
    try:
        jobs = [NewJob(job_id=JobId(f"job-{n}"), type="t") for n in range(3)]
        await ledger.submit(Actor(role=Role.SUBMITTER, name="s"), jobs)
        claim = Claim(claim_id=ClaimId("c"), types=(TypeClaim(type="t"),), start=3)
        worker = Actor(role=Role.WORKER, name="w")
        claimed = (await ledger.turn(Turn(actor=worker, claim=claim))).claimed
        done = tuple(Advance(one.lease, "running", Trigger.COMPLETE) for one in claimed)
        outcomes = (await ledger.turn(Turn(actor=worker, advances=done))).outcomes
        assert [type(outcome) for outcome in outcomes] == [StepApplied] * 3
    finally:
        await ledger.close()


async def test_the_fraction_of_a_float_is_left_out_as_by_the_driver(postgres_url: str):
    ours, drivers = await connect(postgres_url), await asyncpg.connect(postgres_url)
    try:
        for connection in (ours, drivers):
            assert await connection.fetchval("select $1::int[]", [1.5, None, -2.5, 3]) == [1, None, -2, 3]
            assert await connection.fetchval("select $1::bigint[]", [4.9]) == [4]
    finally:
        await ours.close()
        await drivers.close()


async def test_the_elements_have_the_type_that_the_server_names(postgres_url: str):
    connection = await connect(postgres_url)
    try:
        rows = await connection.fetch("select oid, typelem from pg_type where oid = any($1::oid[])", list(TYPES))
    finally:
        await connection.close()
    for row in rows:
        assert struct.unpack_from(">iiI", NUMBER_ARRAYS[row["oid"]].encode([1])) == (1, 0, row["typelem"])
    assert {row["oid"] for row in rows} == set(NUMBER_ARRAYS)


@pytest.mark.parametrize("oid", TYPES)
@pytest.mark.parametrize("beside", [[], [1, 2], [None]])
async def test_what_is_no_number_of_the_type_is_refused_as_by_the_driver(
    postgres_url: str, oid: int, beside: list[int | None]
):
    name, limit = TYPES[oid]
    ours, drivers = await connect(postgres_url), await asyncpg.connect(postgres_url)
    try:
        for wrong in (limit, -limit - 1, "1", float(limit)):
            for connection in (ours, drivers):
                with pytest.raises(asyncpg.DataError, match=r"query argument \$1"):
                    await connection.fetch(f"select $1::{name}[]", [*beside, wrong])
    finally:
        await ours.close()
        await drivers.close()


def test_an_array_of_arrays_is_no_list():
    body = struct.pack(">iiIiiii", 2, 0, 23, 1, 1, 1, 1) + struct.pack(">ii", 4, 7)
    with pytest.raises(ValueError, match="2 dimensions"):
        NumberArrays(23, "i").decode(body)
