"""The object store: documents by key, in a local folder or an S3-compatible bucket."""
