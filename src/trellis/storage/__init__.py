"""Storage of documents and memory: the object store (`objects`, local or S3) and agent memory in git (`memory`)."""
