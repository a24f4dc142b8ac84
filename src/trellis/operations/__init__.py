"""Diagnosis of a running ledger: explains jobs and finds problems. Pure functions over what the ledger returns."""
