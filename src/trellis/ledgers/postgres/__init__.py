"""The fleet's ledger: PostgreSQL through asyncpg. Tables move rows, functions are the only writers."""
