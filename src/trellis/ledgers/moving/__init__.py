"""Moves the rows of an SQLite ledger to a new PostgreSQL ledger, for `trellis move`."""
