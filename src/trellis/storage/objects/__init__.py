"""The object store: documents by key, in a folder or in a bucket that speaks S3."""
