"""The ledger on one SQLite file: the embedded default."""
