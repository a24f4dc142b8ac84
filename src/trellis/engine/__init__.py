"""The durable job engine: the ledger port, claiming, retries, sweep, feed, verify. Imports lifecycles only."""
