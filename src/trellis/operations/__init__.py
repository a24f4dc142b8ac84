"""What people ask a running ledger: why is this job here, what is wrong. Pure functions over what the ledger says."""
