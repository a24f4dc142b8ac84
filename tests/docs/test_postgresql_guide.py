"""The SQL of docs/how-to/use-postgresql.md does what the page says."""

import re
from pathlib import Path

import asyncpg

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "use-postgresql.md"


async def test_the_job_exists_if_and_only_if_the_transaction_commits(postgres_url: str):
    (block,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    connection = await asyncpg.connect(postgres_url)
    try:
        await connection.execute("create table orders (id text primary key)")
        await connection.execute("select trellis.type_id('order.ship')")
        await connection.execute(block.replace("commit;", "rollback;"))
        assert await connection.fetchval("select count(*) from trellis.job") == 0
        await connection.execute(block)
        rows = await connection.fetch(
            "select s.place, convert_from(j.payload, 'utf8') from trellis.job_status s join trellis.job j using (id)"
        )
        assert [tuple(row) for row in rows] == [("ready", '{"order": "order-7"}')]
    finally:
        await connection.close()


async def test_every_named_argument_exists(postgres_url: str):
    named = set(re.findall(r"`(p_[a-z_]+)`", PAGE.read_text(encoding="utf-8")))
    connection = await asyncpg.connect(postgres_url)
    try:
        taken = await connection.fetchval("select proargnames from pg_proc where proname = 'submit_job'")
    finally:
        await connection.close()
    assert named <= set(taken)
    assert len(named) >= 10
