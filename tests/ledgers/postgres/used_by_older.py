"""What programs use of a PostgreSQL ledger: the functions that they may call and the columns that they may read.

`used_by_older.json` lists what the oldest supported version and those after it use. `python -m
tests.ledgers.postgres.used_by_older URL` adds what the ledger at this URL has, and begins anew with a new oldest version.
"""

import asyncio
import json
import sys
from pathlib import Path

import asyncpg

from trellis.ledgers.postgres.migrate import APP_ROLE, OLDEST_PROGRAM

USED_BY_OLDER = Path(__file__).with_name("used_by_older.json")
FUNCTIONS = """
select p.proname as name, array(select format_type(t, null) from unnest(p.proargtypes) with ordinality x(t, n) order by n) as args,
  p.pronargdefaults as defaults, pg_get_function_result(p.oid) as result
from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname = 'trellis' and p.prokind = 'f' and has_function_privilege($1, p.oid, 'execute')
"""
COLUMNS = """
select c.relname || '.' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
from pg_class c join pg_namespace n on n.oid = c.relnamespace join pg_attribute a on a.attrelid = c.oid
where n.nspname = 'trellis' and c.relkind in ('r', 'p', 'v') and not c.relispartition and a.attnum > 0
  and not a.attisdropped and has_column_privilege($1, c.oid, a.attnum, 'select')
"""


async def surface(url: str) -> dict[str, list[str]]:
    """Every way to call a function, with the types of its arguments and answer, and every column with its type.

    Arguments with a default may be left out, so a function that got one more can still be called as before.
    """
    connection = await asyncpg.connect(url)
    try:
        functions = await connection.fetch(FUNCTIONS, APP_ROLE)
        columns = await connection.fetch(COLUMNS, APP_ROLE)
    finally:
        await connection.close()
    calls = {
        f"{row['name']}({', '.join(row['args'][:given])}) -> {row['result']}"
        for row in functions
        for given in range(len(row["args"]) - row["defaults"], len(row["args"]) + 1)
    }
    return {"functions": sorted(calls), "columns": sorted(row[0] for row in columns)}


if __name__ == "__main__":
    recorded = json.loads(USED_BY_OLDER.read_text())
    used = asyncio.run(surface(sys.argv[1]))
    if recorded["version"] == OLDEST_PROGRAM:
        used = {kind: sorted({*recorded[kind], *entries}) for kind, entries in used.items()}
    USED_BY_OLDER.write_text(json.dumps({"version": OLDEST_PROGRAM, **used}, indent=1) + "\n")
