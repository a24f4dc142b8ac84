"""Documents that the ledger's events are published as: ids and keys, contents, publishing, audit records."""
