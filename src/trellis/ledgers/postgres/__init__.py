"""The ledger for fleets: PostgreSQL through asyncpg. Only the database's functions write."""
