"""What the ledger decided, as documents in the object store: names, shapes, publishing, audit records."""
